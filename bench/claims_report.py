"""Every table and curve of bench/results/claims, drawn again from the kept files; fails if one is missing.

    python bench/claims_report.py                  checks each model's manifest, draws, rewrites README.md there
                                                   and the table of final evaluations in the README.md of the repository
    python bench/claims_report.py --collect        first puts the files that are there into the manifest

manifest.json of a model lists its kept runs, evaluations and measurements. What the matrix of claims.py has and the manifest
has not is named in README.md as not run. Above its marker README.md is written by hand and stays as it is.

    area          mean held-out pass@1 over the run: the trapezium under the curve divided by its width. It tells arms apart where
                  the end does not, because a task that is nearly solved ends alike for all
    steps to 0.85 first evaluation at 0.85 or above; - where none is
    mismatch      |log p rollout - log p train|: mean over the run, the worst step's mean, the largest of any token, and the steps
                  in which a token is more than BAR apart
    interval      arms are compared seed by seed (same problems, same order, same first adapter); 95%, Student's t over the seeds,
                  which is wide with three of them: 4.3 standard errors
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

import claims_finals
from claims import RESULTS, ROOT
from claims_matrix import ARMS, Arm
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

MARK = "<!-- below this line: python bench/claims_report.py -->"
TABLE = ("<!-- drawn by bench/claims_report.py -->", "<!-- end of what it draws -->")  # in README.md
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57}  # Student's t, two-sided, by number of seeds
MISMATCH, LARGEST = (f"sampling/sampling_logp_difference/{name}" for name in ("mean", "max"))
LEVEL = 0.85
BAR = 0.3  # nats that sampler and trainer may be apart at one token, without noise
PANELS = (("held-out pass@1, greedy", "eval/pass@1"), ("reward of the step", "reward"),
          ("entropy of the sampler, nats", "entropy"), ("KL to the base, nats a token", "kl"),
          ("completion tokens, mean", "completions/mean_length"), ("|log p rollout - log p train|", MISMATCH))
PAIRS = (  # the claim, the arm that should be above, the arm below
    ("noise helps NVFP4", "nvfp4-aqn", "nvfp4"),
    ("noise helps 16 bits", "bf16-aqn", "bf16"),
    ("noise helps NF4", "nf4-aqn", "nf4"),
    ("NVFP4 is above 16-bit LoRA", "nvfp4", "bf16"),
    ("NVFP4 with noise is above 16-bit LoRA", "nvfp4-aqn", "bf16"),
    ("NVFP4 with noise is above 16 bits with noise", "nvfp4-aqn", "bf16-aqn"),
    ("NVFP4 is above QLoRA", "nvfp4", "nf4"),
    ("NVFP4 with noise is above QLoRA", "nvfp4-aqn", "nf4"),
    ("stronger noise (5e-2) helps NVFP4", "nvfp4-aqn5e-2", "nvfp4"),
    ("stronger noise (5e-2) helps 16 bits", "bf16-aqn5e-2", "bf16"),
    ("importance sampling helps under noise", "nvfp4-aqn", "nvfp4-aqn-notis"),
    ("importance sampling helps under noise of 5e-2", "nvfp4-aqn5e-2", "nvfp4-aqn5e-2-notis"),
)


class Run:
    """One kept run: its head and its rows."""

    def __init__(self, path: Path):
        self.head, *self.rows = map(json.loads, path.read_text().splitlines())

    def series(self, name: str) -> list[tuple[int, float]]:
        return [(row["step"], row[name]) for row in self.rows if row.get(name) is not None]

    def mean(self, name: str, until: float = math.inf) -> float:
        values = [value for step, value in self.series(name) if step <= until]
        return statistics.fmean(values) if values else math.nan

    @property
    def area(self) -> float:
        points = self.series("eval/pass@1")
        total = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in zip(points, points[1:]))
        return total / (points[-1][0] - points[0][0])

    @property
    def final(self) -> float:
        return self.series("eval/pass@1")[-1][1]

    def steps_to(self, level: float) -> int | None:
        return next((step for step, value in self.series("eval/pass@1") if value >= level), None)


def load(folder: Path) -> dict[str, dict[int, Run]]:
    """arm -> seed -> run, of the manifest.  Ends the program with the names of missing files."""
    names = json.loads((folder / "manifest.json").read_text())
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        sys.exit(f"{folder}: {', '.join(missing)} of the manifest missing; run bench/claims.py again, or restore them")
    runs: dict[str, dict[int, Run]] = {}
    for arm in ARMS:
        for seed in range(arm.seeds):
            if f"{arm.name}-seed{seed}.jsonl" in names:
                runs.setdefault(arm.name, {})[seed] = Run(folder / f"{arm.name}-seed{seed}.jsonl")
    return runs


def collect(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".jsonl", ".json") and path.name != "manifest.json")
    (folder / "manifest.json").write_text(json.dumps(names, indent=1) + "\n")


# ------------------------------------------------------------------------------------------------------------------ tables


def spread(values: list[float], form: str = ".3f") -> str:
    """Mean and standard deviation over seeds."""
    values = [value for value in values if value is not None and not math.isnan(value)]
    if not values:
        return "-"
    return format(statistics.fmean(values), form) + (f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else "")


def halves(run: Run, name: str) -> tuple[float, float]:
    """Mean over the first half of the steps, and over the second."""
    middle = run.rows[-1]["step"] / 2
    parts = ([v for step, v in run.series(name) if (step > middle) == late] for late in (False, True))
    return tuple(statistics.fmean(part) if part else math.nan for part in parts)


def largest(run: Run, name: str) -> float:
    return max((value for _, value in run.series(name)), default=math.nan)


def reached(runs: list[Run]) -> str:
    steps = [run.steps_to(LEVEL) for run in runs]
    return ", ".join("-" if step is None else str(step) for step in steps) if any(steps) else "-"


def over(runs: list[Run]) -> str:
    steps = [sum(value > BAR for _, value in run.series(LARGEST)) for run in runs]
    return ", ".join(map(str, steps)) if any(steps) else "0"


COLUMNS = {  # title -> text of the runs of an arm
    "seeds": lambda runs: str(len(runs)),
    "pass@1 before": lambda runs: spread([run.series("eval/pass@1")[0][1] for run in runs]),
    "area": lambda runs: spread([run.area for run in runs]),
    "at the end": lambda runs: spread([run.final for run in runs]),
    f"steps to {LEVEL}": reached,
    "entropy, first half": lambda runs: spread([halves(run, "entropy")[0] for run in runs]),
    "second half": lambda runs: spread([halves(run, "entropy")[1] for run in runs]),
    "KL, second half": lambda runs: spread([halves(run, "kl")[1] for run in runs]),
    "mismatch": lambda runs: spread([run.mean(MISMATCH) for run in runs], ".1e"),
    "worst step": lambda runs: spread([largest(run, MISMATCH) for run in runs], ".1e"),
    "largest token": lambda runs: spread([largest(run, LARGEST) for run in runs], ".1e"),
    f"steps over {BAR}": over,
    "seconds in steps": lambda runs: spread([run.head["seconds"] for run in runs], ".0f"),
    "peak GiB": lambda runs: spread([largest(run, "memory/peak_gib") for run in runs], ".1f"),
}


def arms_table(runs: dict[str, dict[int, Run]], arms: list[Arm]) -> list[str]:
    """A row an arm; a column in which no arm has anything is left out."""
    found = [arm.name for arm in arms if arm.name in runs]
    columns = {title: [text(list(runs[name].values())) for name in found] for title, text in COLUMNS.items()}
    columns = {"arm": found} | {title: cells for title, cells in columns.items() if set(cells) != {"-"}}
    rows = [f"| {' | '.join(cells)} |" for cells in zip(*columns.values())]
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *rows]


def interval(differences: list[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95% interval."""
    n = len(differences)
    return statistics.fmean(differences), T95.get(n, 2.5) * statistics.stdev(differences) / math.sqrt(n) if n > 1 else math.inf


def verdict(mean: float, half: float) -> str:
    if math.isinf(half):
        return "one seed: no verdict"
    return "not shown: the interval holds 0" if abs(mean) <= half else "holds here" if mean > 0 else "**the opposite holds here**"


def pairs_table(runs: dict[str, dict[int, Run]]) -> list[str]:
    """Differences of arms, a seed an observation: where several formats answer one question, a seed's is the mean of theirs,
    because they share problems, order and first adapter."""
    lines = ["| claim | arms | seeds | area, difference | at the end, difference | verdict on the area |",
             "|---|---|---|---|---|---|"]
    noise = [(f"{weights}-aqn", weights) for weights in ("nvfp4", "bf16", "nf4")]
    claims = [*((claim, [(above, below)]) for claim, above, below in PAIRS)]
    if all(runs.get(name) for pair in noise for name in pair):
        claims.append(("noise helps, the three formats together", noise))
    for claim, arms in claims:
        arms = [(a, b) for a, b in arms if runs.get(a) and runs.get(b)]
        seeds = sorted(set.intersection(*(set(runs[name]) for pair in arms for name in pair))) if arms else []
        if not seeds:
            continue
        area, final = (interval([statistics.fmean(getattr(runs[a][s], name) - getattr(runs[b][s], name) for a, b in arms)
                                 for s in seeds]) for name in ("area", "final"))
        shown = [f"{mean:+.3f}" + ("" if math.isinf(half) else f" ± {half:.3f}") for mean, half in (area, final)]
        title = " - ".join(arms[0]) if len(arms) == 1 else f"x-aqn - x, mean of {len(arms)} formats"
        lines.append(f"| {claim} | {title} | {len(seeds)} | {shown[0]} | {shown[1]} | {verdict(*area)} |")
    return lines


def cell(value, form: str) -> str:
    return "-" if value is None else format(value, form)


def before_tables(found: dict) -> list[str]:
    lines = [f"Before training, on {found['tokens']} tokens that the 16-bit model sampled for {found['prompts']} prompts "
             f"(`{found['command']}`):", "",
             "| weights | entropy | change from 16-bit | KL | logits, error | weights, error | LoRA gradient, cosine | error "
             "| nats | pass@1 |", "|---|---|---|---|---|---|---|---|---|---|"]
    for row in found["weights"]:
        lines.append(
            f"| {row['weights']} | {row['entropy']:.4f} | {row['entropy_change']:+.4f} ± {row['entropy_change_stderr']:.4f} "
            f"| {row['kl']:.5f} | {row['logits_error']:.4f} | {cell(row['weight_error'], '.4f')} "
            f"| {cell(row['gradient_cosine'], '.3f')} | {cell(row['gradient_error'], '.3f')} | {cell(row['nats'], '.4f')} "
            f"| {cell(row.get('pass@1'), '.3f')} |")
    norms = found["norms"]
    lines += ["", f"The median |weight| of a norm that takes noise is {norms['smallest']:.3g} .. {norms['largest']:.3g} "
              f"(over layers), {norms['median']:.3g} in the middle: sigma is absolute and stands next to that.",
              "", f"Noise on the norms, mean of {found['draws']} draws; change of entropy and mismatch against the same weights "
              "without noise (± standard deviation over draws):", "",
              "| weights | sigma | entropy | change from clean | KL to 16-bit | mismatch | pi_clean / pi_noisy |",
              "|---|---|---|---|---|---|---|"]
    for row in found["noise"]:
        lines.append(f"| {row['weights']} | {row['sigma']:g} | {row['entropy']:.4f} | {row['change_from_clean']:+.5f} "
                     f"± {cell(row['change_from_clean_sd'], '.5f')} | {row['kl']:.5f} | {row['mismatch']:.1e} "
                     f"| {row['tis_min']:.2f} .. {row['tis_max']:.2f} |")
    return lines


# ------------------------------------------------------------------------------------------------------------------ curves


def draw(runs: dict[str, dict[int, Run]], names: list[str], panels, path: Path) -> None:
    """Mean over seeds, and a band from the lowest to the highest."""
    panels = [panel for panel in panels if any(run.series(panel[1]) for name in names for run in runs.get(name, {}).values())]
    lines, columns = math.ceil(len(panels) / 3), min(3, len(panels))
    figure = Figure(figsize=(4 * columns, 3 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis in axes[len(panels):]:
        axis.remove()
    for axis, (title, key) in zip(axes, panels):
        for index, name in enumerate(name for name in names if name in runs):
            series = [points for run in runs[name].values() if (points := run.series(key))]
            if not series:
                continue
            steps = [step for step, _ in series[0]]
            values = list(zip(*[[value for _, value in one] for one in series]))
            style = "--" if "aqn" in name else "-"
            axis.plot(steps, [statistics.fmean(v) for v in values], style, color=f"C{index}", lw=1.3,
                      label=f"{name} ({len(series)})")
            axis.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color=f"C{index}", alpha=0.12, lw=0)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.3)
        if key == MISMATCH:
            axis.set_yscale("log")
    figure.axes[0].legend(fontsize=6)
    figure.savefig(path, dpi=90, metadata={"Software": None})


QUESTIONS = {"main": "Weights and noise", "sigma": "Stronger noise", "tis": "Without importance sampling", "lr": "Learning rates",
             "full": "Full fine-tuning", "schedule": "Schedules of the noise", "rank": "Adapter ranks"}
BESIDE = {"main": [], "sigma": ["nvfp4", "nvfp4-aqn", "bf16"], "tis": ["nvfp4-aqn", "nvfp4-aqn5e-2"],  # drawn for comparison
          "lr": ["bf16", "nvfp4", "nf4"], "full": ["bf16"], "schedule": ["nvfp4", "nvfp4-aqn"], "rank": ["nvfp4-aqn"]}


def model_section(folder: Path) -> list[str]:
    runs = load(folder)
    lines = [f"## {folder.name}", ""]
    before = folder / "before.json"
    if before.exists():
        lines += [*before_tables(json.loads(before.read_text())), ""]
    lines += [*claims_finals.gains_table(folder), *claims_finals.arms_table(folder, PAIRS)]
    if len(pairs := pairs_table(runs)) > 2:
        lines += ["Claims, arm against arm, seed by seed (± half of the 95% interval):", "", *pairs, ""]
    for question, title in QUESTIONS.items():
        own = [arm for arm in ARMS if arm.question == question]
        if not any(arm.name in runs for arm in own):
            continue
        shown = [arm for arm in ARMS if arm in own or arm.name in BESIDE[question]]
        draw(runs, [arm.name for arm in shown], PANELS if question in ("main", "sigma", "tis") else PANELS[:3],
             folder / f"{question}.png")
        lines += [f"### {title}", "", *arms_table(runs, shown), "", f"![{title}]({folder.name}/{question}.png)", ""]
    if runs:
        commands = [f"python train.py {next(iter(arm.values())).head['command']}" for arm in runs.values()]
        lines += ["Commands, the first seed of each arm (`--seed` for the others):", "", "```bash", *commands, "```", ""]
    return lines + not_run(runs)


def not_run(runs: dict[str, dict[int, Run]]) -> list[str]:
    """What the matrix has and the manifest has not: single seeds by number, whole arms by name."""
    absent = {arm: [seed for seed in range(arm.seeds) if seed not in runs.get(arm.name, {})] for arm in ARMS}
    some = [f"{arm.name} seed {seed}" for arm, seeds in absent.items() if arm.name in runs for seed in seeds]
    arms = [arm.name for arm in ARMS if arm.name not in runs]
    parts = [", ".join(some)] if some else []
    parts += ["in no seed " + ", ".join(arms)] if arms else []
    return [f"Not run: {'; '.join(parts) if runs else 'the whole matrix of training runs'}.", ""] if parts else []


def readme_lines(folders: list[Path]) -> str:
    """What README.md shows of the final evaluations."""
    tables = [claims_finals.readme_table(folder, load(folder)) for folder in folders]
    return "\n\n".join("\n".join(table) for table in tables if table)


def rewrite_readme(folders: list[Path]) -> None:
    text = (ROOT / "README.md").read_text()
    before, rest = text.split(TABLE[0])
    after = rest.split(TABLE[1])[1]
    (ROOT / "README.md").write_text(f"{before}{TABLE[0]}\n{readme_lines(folders)}\n{TABLE[1]}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--collect", action="store_true", help="put the files that are there into the manifests")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    folders = sorted(path for path in options.results.iterdir() if path.is_dir())
    for folder in folders if options.collect else []:
        collect(folder)
    lines = [line for folder in folders for line in model_section(folder)]
    path = options.results / "README.md"
    by_hand = path.read_text().split(MARK)[0] if path.exists() else "# The paper's claims, measured\n\n"
    path.write_text(by_hand + MARK + "\n\n" + "\n".join(lines))
    if options.results == RESULTS:
        rewrite_readme(folders)
    print(f"{path} and the curves of {len(folders)} models")


if __name__ == "__main__":
    main()
