"""grading/working.py: false equations under right answers are counted, and nothing true is taken for false."""

import importlib.util
import json
from pathlib import Path

import pytest
from test_eval import run

from grading.working import equations, share_that_holds, working_holds
from problems.tasks import arithmetic_problems
from training.groups import Groups, describe

ROOT = Path(__file__).resolve().parent.parent
HOLDS, DOES_NOT = "82 - 30 = 52. 82 + 52 = 134\n#### 134", "42 - 30 = 52. 82 + 52 = 134\n#### 134"


@pytest.mark.parametrize("split", ["train", "heldout", "unseen"])
def test_every_worked_solution_of_the_task_holds(split):
    solutions = [problem.solution for problem in arithmetic_problems(split, 300, 0)]
    assert share_that_holds(solutions) == 1.0
    assert all(len(equations(solution)) == solution.count("=") for solution in solutions)  # none is overlooked


@pytest.mark.parametrize("split", ["heldout", "unseen"])
def test_one_wrong_digit_in_a_solution_is_seen(split):
    """Whichever digit of the working it is, first operand included: that is where the drift was."""
    for problem in arithmetic_problems(split, 30, 1):
        working, answer = problem.solution.split("\n")
        for place, digit in enumerate(working):
            if digit.isdigit():
                wrong = f"{working[:place]}{(int(digit) + 1) % 10}{working[place + 1:]}\n{answer}"
                assert working_holds(wrong) is False or "0 * " in wrong or "* 0 " in wrong, wrong


@pytest.mark.parametrize("text", [
    "2 + 3 + 4 = 9", "10 - 3 - 2 = 5", "1.5 + 2 = 3.5", "2 * 3.5 = 7", "5 + 2 = 3 + 4", "1,000 + 5 = 1,005", "(4 + 2) * 3 = 18",
    "1/2 + 3 = 7/2", "$5 * 3 = $15", "2x + 3 = 7", "x^2 + 3 = 7", "3 * 4 = 12.5", "50 - 20 = 30%", "2 + 2 = 4 = 2 * 2",
    "12:30 + 1 = 2", r"\frac{1}{2} + 3 = 3", r"2 + 3 = \boxed{5}", "#### 12", "",
])  # fmt: skip
def test_what_is_part_of_something_longer_is_not_judged(text):
    assert working_holds(text) is None


def test_spaces_line_breaks_and_the_end_of_a_sentence_do_not_matter():
    assert equations("So 2+3=5, then 5 * 2 = 11.\n7 - 9 = -2") == [("2+3=5", True), ("5 * 2 = 11", False), ("7 - 9 = -2", True)]


def test_an_evaluation_counts_right_answers_alone():
    """Wrong answers have wrong workings as a rule; they would hide what the reward pays for."""
    scores, records, _ = run([[HOLDS], [DOES_NOT], ["9 - 1 = 9 #### 9"], ["#### 5"]], ["134", "134", "8", "5"])
    assert scores["pass@1"] == 0.75 and scores["working"] == 0.5
    assert [row["working"] for row in records] == [True, False, False, None]
    assert run([["#### 5"]], ["5"])[0]["working"] is None


def test_a_step_counts_its_right_answers():
    class Completion:
        tokens, entropies, stopped = [1], [0.0], True

    groups = Groups([None], [[1]], [[Completion] * 4], [[HOLDS, DOES_NOT, DOES_NOT, HOLDS]], [[1.0, 1.0, 1.0, 0.0]],
                    [[True, True, True, False]])
    assert describe(groups)["working"] == pytest.approx(1 / 3)
    groups.correct = [[False] * 4]
    assert describe(groups)["working"] is None


def test_the_readmes_table_of_the_main_job_is_what_the_kept_metrics_give():
    spec = importlib.util.spec_from_file_location("main_job", ROOT / "bench" / "main_job.py")
    main_job = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main_job)
    assert main_job.in_readme(main_job.table(main_job.load())) == (ROOT / "README.md").read_text()


def test_the_kept_metrics_of_the_main_job_show_the_workings():
    """The quantity that the README tells the truth about must be in the file it comes from."""
    for path in sorted((ROOT / "bench/results/main_job").glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert rows[-1]["step"] == 60, path
        assert all("eval/arithmetic/working" in row for row in rows if "eval/arithmetic/pass@1" in row)
        assert all("working" in row for row in rows if "reward" in row)
