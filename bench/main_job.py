"""The embedded main job over three seeds: held-out pass rate and workings before and after, with and without noise.

    for s in 0 1 2; do bash run.sh train.py --seed $s --out runs/main-$s                          under a minute each
                       bash run.sh train.py --seed $s --noise none --out runs/quiet-$s; done      on one CPU core
    python bench/main_job.py --collect runs/main-* runs/quiet-*     keeps their metrics in bench/results/main_job
    python bench/main_job.py                                        draws curves.png there, prints the table,
                                                                    and rewrites it in README.md

`working` is the share of right answers whose every equation holds (grading/working.py). Fails when the metrics of a seed are
missing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

README = Path(__file__).resolve().parent.parent / "README.md"
RESULTS = Path(__file__).resolve().parent / "results" / "main_job"
SEEDS = (0, 1, 2)
KINDS = {"": "yes", "-quiet": "none"}  # in the name of a kept file -> noise
MARKS = ("<!-- drawn by bench/main_job.py -->", "<!-- end of what bench/main_job.py draws -->")
PANELS = (
    ("held-out pass@1, greedy", (("eval/arithmetic/pass@1", "new numbers", "-"),
                                 ("eval/arithmetic-unseen/pass@1", "templates never seen", ":"))),
    ("right answers whose equations all hold", (("eval/arithmetic/working", "held out", "-"),)),
    ("reward of the step", (("reward", "reward", "-"),)),
    ("entropy of the sampler, nats", (("entropy", "entropy", "-"),)),
)


def read(seed: int, kind: str = "") -> list[dict]:
    """Metrics of the main job (kind "") or of the same without noise ("-quiet")."""
    path = RESULTS / f"seed{seed}{kind}.jsonl"
    if not path.exists():
        sys.exit(f"{path} is missing; run the main job with --seed {seed} and --collect its folder")
    return [json.loads(line) for line in path.read_text().splitlines()]


def collect(folders: list[Path]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        record = json.loads((folder / "config.json").read_text())
        name = f"seed{record['config']['seed']}" + "-quiet" * (record["config"]["noise"] == "none")
        shutil.copy(folder / "metrics.jsonl", RESULTS / f"{name}.jsonl")
        record["config"]["out"] = ""
        (RESULTS / f"{name}.config.json").write_text(json.dumps(record, indent=1) + "\n")


def draw(runs: dict[int, list[dict]]) -> None:
    figure = Figure(figsize=(14, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (title, curves) in zip(figure.subplots(1, len(PANELS)), PANELS):
        for seed, rows in runs.items():
            for name, label, style in curves:
                points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
                axis.plot(*zip(*points), style, color=f"C{seed}", label=f"{label}, seed {seed}")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.savefig(RESULTS / "curves.png", dpi=100)


def table(runs: dict[str, dict[int, list[dict]]]) -> str:
    """A row a run, those with noise first."""
    lines = ["| seed | noise | pass@1 before | after | working before | after | working, last 10 steps of training "
             "| never-seen templates before | after | steps | seconds in steps |", "|" + "---|" * 11]
    for kind, seed, rows in ((kind, seed, rows) for kind, found in runs.items() for seed, rows in found.items()):
        scores = [[row[name] for row in rows if row.get(name) is not None] for name in
                  ("eval/arithmetic/pass@1", "eval/arithmetic/working", "eval/arithmetic-unseen/pass@1")]
        right, working, unseen = (f"{values[0]:.3f} | {values[-1]:.3f}" for values in scores)
        late = [row for row in rows[-10:] if row.get("working") is not None]  # of right samples, so a step weighs by them
        sampled = sum(row["working"] * row["pass_rate"] for row in late) / sum(row["pass_rate"] for row in late)
        seconds = sum(row.get("step_time", 0) for row in rows)
        lines.append(f"| {seed} | {KINDS[kind]} | {right} | {working} | {sampled:.3f} | {unseen} "
                     f"| {rows[-1]['step']} | {seconds:.0f} |")
    return "\n".join(lines)


def load() -> dict[str, dict[int, list[dict]]]:
    return {kind: {seed: read(seed, kind) for seed in SEEDS} for kind in KINDS}


def in_readme(drawn: str) -> str:
    """README.md with this table between its marks."""
    before, rest = README.read_text().split(MARKS[0])
    return f"{before}{MARKS[0]}\n{drawn}\n{MARKS[1]}{rest.split(MARKS[1])[1]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--collect", nargs="+", type=Path, default=[], help="run folders whose metrics are to be kept")
    collect(parser.parse_args().collect)
    runs = load()
    draw(runs[""])
    README.write_text(in_readme(table(runs)))
    print(table(runs))
