r"""Data sets as problems with a checkable answer: local JSON lines, or the hub's by a short name.

Idea. Reinforcement learning needs two things from a data set: a text to put before the model, and an answer that a
program can check. Everything else is left at the door. One rule reads GSM8K, MATH and a file of one's own:

    prompt    the first of the fields  prompt, problem, question
    answer    the field  answer    ("... #### 72" gives 72, as in GSM8K), else the last \boxed{} of  solution  (MATH),
              else  solution  as it is (Big-Math)

    {"question": "Natalia sold ...", "answer": "48/2 = <<48/2=24>>24 ...\n#### 72"}             GSM8K
    {"problem": "What is ...", "solution": "... is $\\boxed{\\frac{1}{2}}$.", "answer": "..."}   MATH, answer optional
    {"prompt": "2 + 2 =", "answer": 4}                                                         one's own

A line that is not like that ends the run at once with its number. Two kinds of good lines are left out, and counted: an
answer that is empty (MATH has two), because nothing could earn it, and a prompt that comes again, because repeats leak
from one split into another.

Source: the fields of GSM8K (arXiv 2110.14168), MATH (2103.03874) and Big-Math (2502.17387).
Cost: a file is read whole. Limits: field names are fixed; rename yours. The hub needs the package `datasets`.
Copy along: grading/answers.py.
"""
from __future__ import annotations

import gzip
import hashlib
import json
import logging
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from grading.answers import extract_answer


@dataclass(frozen=True)
class Problem:
    """One problem; `solution` is the data set's worked answer where it has one (pretraining, benches), else empty."""
    id: str
    prompt: str
    answer: str
    solution: str = ""


@dataclass(frozen=True)
class HubSet:
    """Where a data set lives on the hub; `splits` maps train and test to its own names."""
    repo: str
    splits: dict[str, str]
    config: str | None = None


HUB_SETS = {
    "gsm8k": HubSet("openai/gsm8k", {"train": "train", "test": "test"}, "main"),
    "math": HubSet("DigitalLearningGmbH/MATH-lighteval", {"train": "train", "test": "test"}),
    "bigmath": HubSet("open-r1/Big-Math-RL-Verified-Processed", {"train": "train"}, "level_{level}"),
    "math500": HubSet("HuggingFaceH4/MATH-500", {"test": "test"}),
    "aime24": HubSet("HuggingFaceH4/aime_2024", {"test": "train"}),
    "aime25": HubSet("math-ai/aime25", {"test": "test"}),
    "amc23": HubSet("math-ai/amc23", {"test": "test"}),
}
BIGMATH_LEVELS = "3-5"      # the paper's choice for 7B and 14B; 4-5 for 32B


# ----------------------------------------------------------------------------------------------------------------------
# One row
# ----------------------------------------------------------------------------------------------------------------------
def problem_from(row: object, id: str) -> Problem:
    """The problem of one row; ValueError saying what is wrong with it. The answer may be empty.

    >>> problem_from({"question": "2 + 2?", "answer": "2 + 2 = 4\\n#### 4"}, "one").answer
    '4'
    """
    if not isinstance(row, dict):
        raise ValueError(f"a row is an object such as {{\"prompt\": ..., \"answer\": ...}}, not {type(row).__name__}")
    prompt = next((row[name] for name in ("prompt", "problem", "question") if row.get(name) is not None), None)
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"no text in the fields prompt, problem, question; it has {', '.join(map(repr, row))[:80]}")
    solution = row.get("solution") or ""
    answer = row.get("answer")
    if isinstance(answer, str) and "####" in answer:
        solution, answer = answer, answer.rpartition("####")[2]
    elif answer is None and isinstance(solution, str) and solution:
        answer = (extract_answer(solution) or "") if "\\boxed" in solution else solution
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"no text or number in the field answer, nor boxed in solution; it is {answer!r}"[:160])
    if isinstance(answer, float) and not math.isfinite(answer):
        raise ValueError(f"the answer is {answer}, which nothing equals")
    answer, solution = str(answer).strip(), solution if isinstance(solution, str) else ""
    try:
        (prompt + answer + solution).encode()
    except UnicodeEncodeError:
        raise ValueError("the text holds half a character (a lone surrogate)") from None
    return Problem(id, prompt, answer, solution)


def usable(problems: Iterable[Problem], name: str) -> list[Problem]:
    """The problems with an answer and a prompt that did not come before (white space aside); says what was left out."""
    kept: dict[str, Problem] = {}
    repeats, empty = 0, []
    for problem in problems:
        key = " ".join(problem.prompt.split())
        if not problem.answer:
            empty.append(problem.id)
        elif key in kept:
            repeats += 1
        else:
            kept[key] = problem
    if empty:
        print(f"{name}: {len(empty)} problems have an empty answer and are left out, the first is {empty[0]}")
    if repeats:
        print(f"{name}: {repeats} problems repeat an earlier prompt and are left out")
    if not kept:
        raise ValueError(f"{name} holds no problem; a line is such as {{\"prompt\": ..., \"answer\": ...}}")
    return list(kept.values())


# ----------------------------------------------------------------------------------------------------------------------
# Local files
# ----------------------------------------------------------------------------------------------------------------------
def read_file(path: Path | str) -> list[Problem]:
    """The problems of a .jsonl or .jsonl.gz file; ValueError with the line number where one cannot be read."""
    path = Path(path)
    problems = []
    for number, line in _lines(path):
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"), parse_constant=_refuse_constant)
            problems.append(problem_from(row, f"{path.name}:{number}"))
        except (ValueError, RecursionError) as error:      # JSONDecodeError and UnicodeDecodeError are ValueErrors
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
            raise ValueError(f"{path}, line {number}: {reason}") from None
    return usable(problems, str(path))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank."""
    number = 0
    try:
        _check_regular(path)
        with path.open("rb") as plain:
            is_gzip = plain.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_gzip else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}, after line {number}: damaged gzip file ({error}); fetch it again") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None


def _check_regular(path: Path) -> None:
    """OSError for a folder, a pipe or a device: it would hang, or be used up by the first of two readers."""
    if path.exists() and not path.is_file():
        raise OSError("it is not a regular file")


def _refuse_constant(name: str):
    raise ValueError(f"{name} is not a number")


def data_sha256(name: str) -> str:
    """Of a local file's bytes, or of the name of other data. A resumed run must find the same."""
    digest = hashlib.sha256()
    if is_file_name(name):
        try:
            _check_regular(Path(name))
            with open(name, "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except OSError as error:
            raise ValueError(f"{name} cannot be read: {error.strerror or error}") from None
    else:
        digest.update(name.encode())
    return digest.hexdigest()


def is_file_name(name: str) -> bool:
    return name.endswith((".jsonl", ".jsonl.gz")) or Path(name).is_file()


# ----------------------------------------------------------------------------------------------------------------------
# The hub
# ----------------------------------------------------------------------------------------------------------------------
def read_hub(name: str, split: str, levels: str | None = None) -> list[Problem]:
    """The problems of a named set; `levels` ("3-5", "4") are Big-Math's. ValueError in one line if out of reach."""
    hub_set = HUB_SETS[name]
    if split not in hub_set.splits:
        raise ValueError(f"data={name} has no {split} split, only {' and '.join(hub_set.splits)}; choose another set")
    configs = [hub_set.config]
    if name == "bigmath":
        first, _, last = (levels or BIGMATH_LEVELS).partition("-")
        configs = [hub_set.config.format(level=level) for level in range(int(first), int(last or first) + 1)]
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(f"data={name} needs `datasets`; pip install datasets, or give a .jsonl file") from None
    hub_log = logging.getLogger("huggingface_hub")
    level = hub_log.level
    hub_log.setLevel(logging.ERROR)      # its retries are a page of warnings; ours is one line
    try:
        tables = [load_dataset(hub_set.repo, config, split=hub_set.splits[split]) for config in configs]
    except Exception as error:      # datasets and its layers raise a zoo of types when a host is out of reach
        reason = str(error).strip().splitlines()[0][:120] if str(error).strip() else "no reason given"
        raise ValueError(f"data={name}: {hub_set.repo} cannot be had from the hub ({type(error).__name__}: {reason}); "
                         f"connect, or give a local .jsonl file") from None
    finally:
        hub_log.setLevel(level)
    rows = (row for table in tables for row in table)
    return usable((problem_from(row, f"{name}-{split}-{index}") for index, row in enumerate(rows)), name)


def demo() -> None:
    import tempfile
    rows = ('{"question": "Tom has 2 pens and buys 3. How many?", "answer": "2 + 3 = 5\\n#### 5"}',
            '{"problem": "Half of 1?", "solution": "It is $\\\\boxed{\\\\frac{1}{2}}$."}',
            '{"prompt": "2 + 2 =", "answer": NaN}')
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data.jsonl"
        for count in (2, 3):
            file.write_text("\n".join(rows[:count]))
            try:
                print("\n".join(map(repr, read_file(file))))
            except ValueError as error:
                print("refused:", str(error).replace(folder, "..."))


if __name__ == "__main__":
    demo()
