"""The tiny model that ships with the code: what the main job promises about it before any training.

Its form is right, its equations are true, and its choice of operations is wrong: a higher pass rate after training is operations
learnt. What it is scored on was in no corpus.  Everything is read from assets/tiny as `train.py` reads it, quantised to NVFP4.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from convert.loader import load_model
from eval import evaluate
from grading.rewards import Grader
from problems import tasks
from rollout import Rollout

TINY = Path(__file__).resolve().parent.parent / "assets" / "tiny"
PROBLEMS = 300  # standard error of a rate near 0.4: 0.03


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny", weights="nvfp4", device="cpu")


@pytest.fixture(scope="module")
def base(tiny) -> tuple[dict, list[dict]]:
    model, tokenizer, info = tiny
    records: list[dict] = []
    problems = tasks.load_problems("arithmetic", "test", limit=PROBLEMS)
    rollout = Rollout(model, max_len=128, tokenizer=tokenizer)
    scores = evaluate(rollout, problems, tokenizer, Grader(), stop_ids=info.stop_ids, max_new_tokens=48, instruction="",
                      records=records)
    return scores, records


def test_it_is_a_few_megabytes_of_safetensors_and_json():
    files = [file for file in TINY.iterdir() if file.is_file()]
    assert {file.suffix for file in files} <= {".safetensors", ".json", ".jinja"}
    assert sum(file.stat().st_size for file in files) <= 4 * 2**20


def test_before_training_completions_end_by_themselves_with_an_answer_that_parses(base):
    """Otherwise a rising reward would only show that the form was learnt."""
    _, records = base
    good = [one["stopped"] and re.fullmatch(r"\d+", one["extracted"] or "") is not None for one in records]
    assert sum(good) >= 0.95 * len(good)


def test_before_training_it_solves_at_most_45_percent_of_the_held_out_problems(base):
    scores, _ = base
    assert 0.2 <= scores["pass@1"] <= 0.45  # hardly anything solved would leave groups without a signal


def test_before_training_hardly_an_equation_is_false(base):
    """Under right answers none: false ones there after training are the reward's doing."""
    scores, records = base
    assert scores["working"] == 1.0
    wrong = [one["working"] for one in records if not one["correct"]]
    assert None not in wrong and wrong.count(False) <= 0.1 * len(wrong)


def test_the_tokenizer_writes_every_text_of_the_generator_without_an_unknown_word(tiny):
    _, tokenizer, info = tiny
    unknown = tokenizer.unk_token_id
    for piece in tasks.arithmetic_pieces():
        assert tokenizer.encode(piece, add_special_tokens=False) != [unknown], piece
    for split in ("train", "heldout", "unseen"):
        for problem in tasks.arithmetic_problems(split, 300, seed=3):
            for text in (problem.prompt + "\n", problem.solution):
                ids = tokenizer.encode(text, add_special_tokens=False)
                assert unknown not in ids and max(ids) < info.valid_vocab, text
                assert tokenizer.decode(ids) == text


def test_a_prompt_is_a_piece_a_token(tiny):
    """Digits one by one, words whole: else lengths, and with them the recipe, would not mean what they say."""
    _, tokenizer, _ = tiny
    problem = tasks.Problem("one", "Tom has 27 apples.", "27")
    tokens = tokenizer.convert_ids_to_tokens(tasks.encode_prompt(problem, tokenizer, ""))
    assert tokens == ["Tom", " has", " 2", "7", " apples", ".", "\n"]


def numbers(problem: tasks.Problem) -> tuple[int, ...]:
    return tuple(sorted(int(number) for number in re.findall(r"\d+", problem.prompt)))


def test_held_out_numbers_and_unseen_templates_occur_in_no_training_problem():
    train = tasks.arithmetic_problems("train", 4000, seed=0) + tasks.arithmetic_problems("train", 1000, seed=1001)
    for split in ("heldout", "unseen"):
        others = tasks.arithmetic_problems(split, 1000, seed=0)
        assert not {numbers(p) for p in train} & {numbers(p) for p in others}
    shape = lambda p: re.sub("|".join(tasks.NAMES), "N", re.sub("|".join(tasks.ITEMS), "I", re.sub(r"\d+", "0", p.prompt)))  # noqa: E731
    assert not {shape(p) for p in train} & {shape(p) for p in tasks.arithmetic_problems("unseen", 300, seed=0)}


def test_the_recipe_asked_for_nothing_says_what_it_would_do_and_touches_nothing():
    """It used to begin an hour of training, at the end of which assets/tiny was another model."""
    before = {file: file.stat().st_mtime_ns for file in TINY.iterdir()}
    command, options = [sys.executable, "-m", "assets.make_tiny"], dict(cwd=TINY.parent.parent, capture_output=True, text=True)
    done = subprocess.run(command, **options, timeout=60)
    assert done.returncode == 0 and "usage: python -m assets.make_tiny" in done.stdout and "step 0" not in done.stdout
    assert {file: file.stat().st_mtime_ns for file in TINY.iterdir()} == before
    done = subprocess.run([*command, "--steps", "1"], **options, timeout=60)
    assert done.returncode == 2 and "required: out" in done.stderr
