"""The times table from 2 to 12 as problems, for models that know it and do not say it: SmolLM2 above all.

    python bench/times_table.py FOLDER      writes FOLDER/times-train.jsonl and FOLDER/times-test.jsonl

7 x 8 and 8 x 7 are one pair: both are in the same file, so that nothing of the test pairs is seen in training.
"""

import json
import random
import sys
from pathlib import Path


def pairs() -> tuple[list, list]:
    """Unordered pairs of training (three in four) and of the test; always the same."""
    every = [(a, b) for a in range(2, 13) for b in range(a, 13)]
    random.Random(0).shuffle(every)
    return every[len(every) // 4 :], every[: len(every) // 4]


def problems(chosen: list) -> list[dict]:
    both = sorted({pair for a, b in chosen for pair in ((a, b), (b, a))})
    return [{"prompt": f"What is {a} times {b}?", "answer": str(a * b)} for a, b in both]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, chosen in zip(("train", "test"), pairs()):
        (folder / f"times-{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in problems(chosen)))
