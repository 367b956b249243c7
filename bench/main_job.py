"""The embedded main job over three seeds: held-out pass rate before and after, and its curves.

    for s in 0 1 2; do bash run.sh train.py --seed $s --out runs/main-$s; done       about a minute each on two CPU cores
    python bench/main_job.py --collect runs/main-0 runs/main-1 runs/main-2     keeps their metrics in bench/results/main_job
    python bench/main_job.py                                                   draws curves.png there, prints the table

Fails when the metrics of a seed are missing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parent / "results" / "main_job"
SEEDS = (0, 1, 2)
PANELS = (
    ("held-out pass@1, greedy", (("eval/arithmetic/pass@1", "new numbers", "-"),
                                 ("eval/arithmetic-unseen/pass@1", "templates never seen", ":"))),
    ("reward of the step", (("reward", "reward", "-"),)),
    ("entropy of the sampler, nats", (("entropy", "entropy", "-"),)),
)


def read(seed: int) -> list[dict]:
    path = RESULTS / f"seed{seed}.jsonl"
    if not path.exists():
        sys.exit(f"{path} is missing; run the main job with --seed {seed} and --collect its folder")
    return [json.loads(line) for line in path.read_text().splitlines()]


def collect(folders: list[Path]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        record = json.loads((folder / "config.json").read_text())
        seed = record["config"]["seed"]
        shutil.copy(folder / "metrics.jsonl", RESULTS / f"seed{seed}.jsonl")
        record["config"]["out"] = ""
        (RESULTS / f"seed{seed}.config.json").write_text(json.dumps(record, indent=1) + "\n")


def draw(runs: dict[int, list[dict]]) -> None:
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (title, curves) in zip(figure.subplots(1, 3), PANELS):
        for seed, rows in runs.items():
            for name, label, style in curves:
                points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
                axis.plot(*zip(*points), style, color=f"C{seed}", label=f"{label}, seed {seed}")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.savefig(RESULTS / "curves.png", dpi=100)


def table(runs: dict[int, list[dict]]) -> str:
    lines = ["| seed | before | after | never-seen templates, before | after | steps | seconds in steps |",
             "|---|---|---|---|---|---|---|"]
    for seed, rows in runs.items():
        scores = [[row[name] for row in rows if name in row] for name in
                  ("eval/arithmetic/pass@1", "eval/arithmetic-unseen/pass@1")]
        seconds = sum(row.get("step_time", 0) for row in rows)
        lines.append(f"| {seed} | {scores[0][0]:.3f} | {scores[0][-1]:.3f} | {scores[1][0]:.3f} | {scores[1][-1]:.3f} "
                     f"| {rows[-1]['step']} | {seconds:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--collect", nargs="+", type=Path, default=[], help="run folders whose metrics are to be kept")
    collect(parser.parse_args().collect)
    runs = {seed: read(seed) for seed in SEEDS}
    draw(runs)
    print(table(runs))
