"""Extraction: where an answer is found, where none is, and that no text makes it slow or makes it fail."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grading.answers import demo, extract_answer


@pytest.mark.parametrize("text, answer", [
    (r"\boxed{\frac{1}{2}} and then 7", r"\frac{1}{2}"),
    (r"\boxed{\{1, \{2\}\}}", r"\{1, \{2\}\}"),
    (r"{\boxed{3}} stray } brace \boxed{5", "3"),
    (r"\boxed{3} \boxed{3}", "3"),
    (r"\boxed{1}. No: \boxed{2}, or \boxed{3}", "2, 3"),
    ("#### 12\nsome more text with 13", "12"),
    ("<answer>\n x + 1 \n</answer>", "x + 1"),
    ("The answer is:\n\n 5 apples. Then 7.", "5 apples"),
    ("She has 3 pens and 4 cups, in all 7.", "7"),
    (r"<think>\boxed{1}</think>so it is 2", "2"),
    (r"\boxed{}", None), (r"\boxed{1", None), ("#### \n", None), ("<answer></answer> 7", None), ("", None),
    ("no number", None), ("<think> it is 7", None), ("5 or 7", None), ("1, 2, 3", None), ("Is it 7?", None),
])  # fmt: skip
def test_the_answer_is_taken_from_one_place(text, answer):
    assert extract_answer(text) == answer


PIECES = st.sampled_from(
    ["\\boxed{", "}", "{", "\\{", "\\", "#### ", "\n", "<answer>", "</answer>", "<think>", "</think>", "answer is ",
     "Answer: ", "or ", "and ", ", ", "5", "7", "-", "=", "?", ".", " ", "$", "**", "\\text{ or }", "x", "%", "\u0663",
     "\ud800", "<|im_end|>"])


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(PIECES, max_size=25).map("".join)))
def test_any_text_gives_an_answer_or_none(text):
    """An answer, if any, is text that is not blank and comes from the completion."""
    answer = extract_answer(text)
    assert answer is None or answer.strip() and set(answer) <= set(text) | set(", ")


HUGE = {
    "boxes opened": "\\boxed{" * 14_000, "boxes": "\\boxed{5} " * 10_000, "markers": "#### 5\n" * 14_000,
    "tags opened": "<answer>" * 12_000, "tags": "<answer>" * 6_000 + "</answer>" * 6_000,
    "phrases": "answer is " * 10_000, "or": "5 or " * 20_000 + ".", "or between": "5 " + "or " * 33_000 + ". 7",
    "spaces": " " * 100_000,
    "commas": "1," * 50_000, "digits": "7" * 100_000, "letters": "a" * 100_000, "dollars": "$" * 100_000,
    "backslashes": "\\" * 100_000, "hashes": "#" * 100_000, "thoughts": "<think>" * 14_000, "questions": "5?" * 50_000,
}  # fmt: skip


@pytest.mark.parametrize("name", HUGE)
def test_a_hundred_thousand_characters_take_no_time(name):
    """Every pattern is linear: a quadratic one would take minutes on some of these."""
    started = time.process_time()
    extract_answer(HUGE[name])
    assert time.process_time() - started < 1.0


def test_demo(capsys):
    demo()
    assert "5, 7" in capsys.readouterr().out
