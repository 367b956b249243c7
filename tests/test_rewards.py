"""Grading as a whole: our case file, adversaries, hangs, an outside oracle, and rewards of one's own.

Policies. grader_cases.jsonl holds judgement calls under `policy:` kinds; we agree with all of them as they stand:
  runaway_generation     text after the first "####" counts: a model that goes on to the next question has not answered
  unreduced_fraction     2/4 is 1/2: GSM8K and MATH do not ask for lowest terms unless the problem does
  equation_vs_expr       y = 2x + 1 for 2x + 1, but x = 5 is not y = 5
  expanded_form          x^2 + 2x + 1 is (x + 1)^2: equal as functions
  unevaluated_expression 60 \\times 24 is the question, not the answer 1440; \\boxed{60 \\times 24 = 1440} is right
  power                  2^3 for 8 and \\log_2 8 for 3 are right: what is left to do is notation, not arithmetic
  plain_space_thousands  12 000 with a plain space may be two numbers; 12\\,000 is one
  base_missing           506 is not 506_7: they are different numbers
"""

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grading import rewards
from grading.rewards import CustomReward, Grader, algebraically_equal, grade

CASES = [json.loads(line) for line in (Path(__file__).parent / "data" / "grader_cases.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def grader():
    with Grader(workers=1, log=lambda line: None) as grader:
        yield grader


@pytest.mark.parametrize("case", CASES, ids=[f"{number}-{case['kind']}" for number, case in enumerate(CASES, 1)])
def test_every_case_is_graded_right(grader, case):
    """Format graders lose answers, and lenient ones pay for wrong ones (pitfalls 39 and 41)."""
    assert grader.grade(case["pred"], case["gold"]) is case["correct"]


# ----------------------------------------------------------------------------------------------------------------------
# Adversaries
# ----------------------------------------------------------------------------------------------------------------------
WRAPS = ("{}", r"\boxed{{{}}}", "#### {}", "<answer>{}</answer>", "The answer is {}.", "Answer: {}", "so x = {}",
         r"\boxed{{x = {}}}", r"\boxed{{\text{{{}}}}}", "${}$")
SEPARATORS = (", ", " or ", " and ", "; ", " / ", " | ", r" \text{ or } ", r"\\ ", "~", r"\quad ", " & ", " - ", " vs ",
              " -> ", " = ", r" \to ", r" \mid ", r" \lor ", r" \vee ", ":", "  ", "\t", r" \cdot ", r" \approx ",
              r" \neq ", " < ", r"\pm ")


def test_a_list_of_candidates_earns_nothing(grader):
    """In any dress, with the gold answer first, in the middle or last (Visual-RFT's and others' reward hole)."""
    paid = [text for wrap in WRAPS for separator in SEPARATORS
            for numbers in (("5", "7"), ("7", "5"), ("5", "7", "9"), ("7", "8"))
            if grader.grade(text := wrap.format(separator.join(numbers)), "7")]
    assert paid == []


def test_marked_candidates_side_by_side_earn_nothing(grader):
    for mark in (r"\boxed{{{}}}", "#### {}\n", "<answer>{}</answer>"):
        for glue in ("", " ", ", ", " or ", " and "):
            text = glue.join(mark.format(number) for number in (5, 6, 7))
            assert not grader.grade(text, "7") and not grader.grade(text, "5"), text


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.text(max_size=80), st.lists(st.sampled_from(
    ["\\boxed{", "}", "#### ", "\n", "or ", "8", "9", " ", ",", "\\frac{", "^", "-", "=", "x", "$", "!", "(", ")",
     "\\text{"]), max_size=15).map("".join)))
def test_no_text_without_the_answers_digits_earns_it(text):
    """The gold answer 3 is in none of them: not as a digit, not by arithmetic that a reader would call evaluated."""
    if "3" not in text and "³" not in text and not any(char.isdigit() and char not in "0123456789" for char in text):
        with Grader(workers=1, log=lambda line: None) as fast:
            fast._pool = NoPool()
            assert fast.grade(text, "3") is False


class NoPool:
    """In place of the worker: an answer that needs algebra is left wrong, so that fuzzing costs no processes."""

    def map(self, calls):
        return [False for _ in calls]

    def close(self):
        pass


# ----------------------------------------------------------------------------------------------------------------------
# Time
# ----------------------------------------------------------------------------------------------------------------------
def test_gsm8k_grades_in_milliseconds_and_without_a_process():
    completions = [(f"She had {i} + {i} = {2 * i} pens.\n#### {2 * i:,}", str(2 * i)) for i in range(1000, 1128)]
    with Grader() as fast:
        started = time.process_time()
        assert all(fast.grade_many(completions)) and not any(fast.grade_many([(c, g + "1") for c, g in completions]))
        assert time.process_time() - started < 0.5      # 256 of them; about 0.02 s on an idle core
        assert all(worker._process is None for worker in fast._pool._workers)


def test_nothing_that_is_answered_hangs_the_grader():
    """9^9^9^9, a tower, factorials and 100,000 characters: wrong, counted, and the next one is graded (pitfall 38)."""
    lines = []
    with Grader(workers=1, log=lines.append, cpu_s=1.0) as busy:
        hangs = [r"\boxed{9!!!!!!}", r"\boxed{10^{10^{10}}}", r"\boxed{" + "9^" * 300 + "9}",
                 r"\boxed{\sum_{k=1}^{10^{12}} \frac{1}{k}}", "#### " + "9" * 100_000, r"\boxed{" + "(" * 50_000,
                 r"\boxed{" + "x" * 100_000 + "}"]
        verdicts = busy.grade_many([(text, r"x + 1") for text in hangs] + [(r"\boxed{1 + x}", r"x + 1")])
        assert verdicts == [False] * len(hangs) + [True]
        assert busy.failures >= 1 and len(lines) == 1 and "could not be compared" in lines[0]
        assert busy.grade(r"\boxed{9^{9^{9^{9}}}}", r"9^{9^{9^{9}}}")      # equal letter by letter


def test_grading_works_off_the_main_thread():
    """A timeout by signal would fail here, and every reward be 0 (Math-Verify's and others' bug)."""
    found = []
    thread = threading.Thread(target=lambda: found.append(grade(r"\boxed{2\sqrt{3}}", r"\sqrt{12}")))
    thread.start()
    thread.join(60)
    assert found == [True]


# ----------------------------------------------------------------------------------------------------------------------
# Algebra against math-verify
# ----------------------------------------------------------------------------------------------------------------------
EXPRESSIONS = [r"\sqrt{12}", r"2\sqrt{3}", r"\frac{6}{\sqrt{3}}", r"\frac{\pi}{4}", r"0.25\pi", r"x^2-1",
               r"(x-1)(x+1)", r"\sin{x}", r"2^{10}", "1024", r"1+2i", r"2i+1", r"\frac{a}{b}", r"\log_{2}{8}",
               r"x^{-1}", r"\frac{1}{x}"]


@pytest.mark.filterwarnings("ignore")
def test_algebra_agrees_with_math_verify_on_every_pair():
    """The peer is right on these; where it is not (1/2^98 = 1/2^99) the case file has the verdict."""
    from math_verify import LatexExtractionConfig, parse, verify
    parsed = [parse(f"${text}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=None)
              for text in EXPRESSIONS]
    differ = [(one, other) for i, one in enumerate(EXPRESSIONS) for j, other in enumerate(EXPRESSIONS) if i < j
              and algebraically_equal(one, other) != verify(parsed[i], parsed[j], timeout_seconds=None)]
    assert differ == []


# ----------------------------------------------------------------------------------------------------------------------
# A reward of one's own
# ----------------------------------------------------------------------------------------------------------------------
REWARD = """
import os, time
def reward(prompt, completion, answer):
    print("chatter on stdout must not disturb the protocol")
    if completion == "raise": return 1 / 0
    if completion == "hang": time.sleep(60)
    if completion == "die": os._exit(1)
    if completion == "nan": return float("nan")
    if completion == "inf": return float("inf")
    if completion == "none": return None
    if completion == "text": return "0.5"
    if completion == "numpy":
        import numpy
        return numpy.float32(0.25)
    return 0.5 * (answer in completion) + 0.1 * len(prompt)
"""


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("reward") / "mine.py"
    file.write_text(REWARD)
    return file


def test_a_reward_that_fails_costs_its_completion_and_one_line(reward_file):
    lines = []
    reward = CustomReward(f"{reward_file}:reward", timeout_s=1.0, workers=2, log=lines.append)
    completions = ["it is 7", "raise", "hang", "die", "nan", "inf", "none", "text", "numpy", "it is 8"]
    scores = reward.score([dict(prompt="ab", completion=completion, answer="7") for completion in completions])
    assert scores == [0.7, 0, 0, 0, 0, 0, 0, 0, 0.25, 0.2]
    assert reward.failures == 7 and len(lines) == 1 and "7 of 10" in lines[0]
    for kind in ("1 raised", "1 timeout", "1 died", "4 not a finite number"):
        assert kind in lines[0]
    reward.close()


@pytest.mark.parametrize("target", ["FILE:absent", "nowhere.py:reward", "FILE", "reward"])
def test_a_reward_that_cannot_be_loaded_is_refused_at_once(reward_file, target):
    with pytest.raises(ValueError, match="reward=") as error:
        CustomReward(target.replace("FILE", str(reward_file)))
    assert "\n" not in str(error.value)


def test_demo(capsys):
    rewards.demo()
    assert "False" in capsys.readouterr().out
