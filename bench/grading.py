"""Grade the reference solutions of GSM8K and MATH: each against its own answer, a changed one and another problem's.

    python bench/grading.py DATA_FOLDER        holding gsm8k/test.jsonl.gz, math500/test.jsonl.gz, math/*.jsonl.gz

A grader that is right accepts every solution with its own answer and no solution with a wrong one. What is printed
below the counts are the exceptions, each with the reason that was found by reading it; one without is new. Everything
goes into results/grading.json.
"""
from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from grading.equality import exact_value, normalise  # noqa: E402
from grading.rewards import Grader  # noqa: E402
from problems.tasks import Problem, load_problems  # noqa: E402

SETS = {"GSM8K test": ("gsm8k/test.jsonl.gz",),
        "MATH test": ("math500/test.jsonl.gz", "math/test_minus_math500.jsonl.gz")}


def changed_by_one(answer: str) -> str:
    """A wrong answer that looks like the right one: 7 -> 8, \\frac{1}{2} -> 3/2, (C) -> (D), x^2 -> x^2 + 1."""
    value = exact_value(normalise(answer))
    if choice := re.fullmatch(r"\W*(?:\\\w+\W+)?([A-Z])\W*", answer):
        return chr(ord(choice[1]) + 1)
    return f"{answer} + 1" if value is None else str(value + 1)


# By what stands in the solution's end. Boxes side by side are one answer with two members (grading/answers.py): a model
# that offers two candidates earns nothing, and neither does a solution that does so.
REASONS = {
    "own": "the solution boxes two answers side by side, and the data set kept the last alone",
    "swapped": "0 earns the answer b=0 of another problem: they are the same value",
}


def report(name: str, grader: Grader, problems: list[Problem], golds: list[str], expected: bool) -> dict:
    started = time.perf_counter()
    verdicts = grader.grade_many([(problem.solution, gold) for problem, gold in zip(problems, golds)])
    milliseconds = 1e3 * (time.perf_counter() - started) / len(verdicts)
    wrong = [index for index, verdict in enumerate(verdicts) if verdict != expected]
    wanted = "right" if expected else "wrong"
    print(f"{name}: {len(verdicts) - len(wrong)} of {len(verdicts)} {wanted}, {milliseconds:.2f} ms each", flush=True)
    exceptions = []
    for index in wrong:
        one, gold = problems[index], golds[index]
        reason = "none yet"
        if expected and len(re.findall(r"\\boxed", one.solution)) == 2:
            reason = REASONS["own"]
        elif not expected and (one.answer, gold) == ("0", "b=0"):
            reason = REASONS["swapped"]
        exceptions.append({"problem": one.id, "own": one.answer, "graded_against": gold, "ends": one.solution[-60:],
                           "reason": reason})
        print(f"    not {wanted}: own {one.answer!r}, graded against {gold!r}, solution ends {one.solution[-60:]!r}: {reason}")
    return {"what": name, "graded": len(verdicts), wanted: len(verdicts) - len(wrong), "ms_each": round(milliseconds, 2),
            "exceptions": exceptions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder with the data sets")
    folder, rows = parser.parse_args().data, []
    with Grader() as grader:
        for name, files in SETS.items():
            problems = [problem for file in files for problem in load_problems(str(folder / file))]
            answers = [problem.answer for problem in problems]
            rows.append(report(f"{name}, own answers", grader, problems, answers, True))
            rows.append(report(f"{name}, answers changed by one", grader, problems, list(map(changed_by_one, answers)), False))
            shuffled = random.Random(0).sample(problems, len(problems))
            pairs = [(one, other) for one, other in zip(problems, shuffled)
                     if normalise(one.answer) != normalise(other.answer)]
            rows.append(report(f"{name}, another problem's answers", grader, [one for one, _ in pairs],
                               [other.answer for _, other in pairs], False))
        rows.append({"what": "answers that could not be compared in time", "count": grader.failures})
        print(f"answers that could not be compared in time: {grader.failures}")
    results = Path(__file__).parent / "results/grading.json"
    results.write_text("[\n " + ",\n ".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
