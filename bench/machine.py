"""What a measurement was made on: stands in every file of results.

    python bench/machine.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from training.report import environment  # noqa: E402


def commit() -> str:
    """Of the code that is measured; "unknown" where there is no git."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return head.stdout.strip() or "unknown"


def machine(device: str | None = None) -> dict[str, str | None]:
    """device: "cuda" or "cpu", where a script was told which; None = a GPU where there is one."""
    found = environment(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    versions = {name: found["versions"][name] for name in ("torch", "triton")}
    return {"gpu": found["gpu"] or "cpu", **versions, "commit": commit()}


if __name__ == "__main__":
    print(machine())
