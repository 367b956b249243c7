"""What a run tells: one line a step, every number in metrics.jsonl, samples to read, curves to look at.

The names in metrics.jsonl are TRL's where TRL has one (`reward`, `frac_reward_zero_std`, `completions/mean_length`,
`sampling/sampling_logp_difference/mean`, ...), so that existing plots read them; README.md has the glossary.  Evaluations
stand in the line of the step after which they were made, as `eval/pass@1`; the first is step 0, before any update.

    step  12/60  reward 0.48  pass 48%  flat 25%  len 21  cut 0%  H 0.41  kl 0  ratio 1.000  mis 1e-6  clip 0%  g 0.31 ...
                                        │         │       │      │                    │          │
    groups whose rewards are all equal ─┘         │       │      │       rollout-trainer gap     └─ share of clipped tokens
                       completion tokens, mean ───┘       │      └─ entropy of the next token, nats
                          completions cut at the limit ───┘

Source: TRL's names of metrics. Cost: the picture is drawn anew every 20 s at most.
Limits: the curves are those of CURVES.
Copy along: files/checkpoint.py. Packages: matplotlib for the curves, tqdm for the bar.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch
from tqdm import tqdm

from files.checkpoint import write_atomic

CURVES = (  # panel title, metrics drawn in it
    ("reward", ("reward", "pass_rate")),
    ("held-out pass@1", ("eval/*",)),
    ("entropy, nats", ("entropy",)),
    ("completion length", ("completions/mean_length",)),
    ("sigma of the noise", ("noise/sigma",)),
    ("|logp rollout - logp train|", ("sampling/sampling_logp_difference/mean",)),
)


def duration(seconds: float) -> str:
    """3725 -> '1h02m', 125 -> '2m05s', 7 -> '7s'."""
    seconds = int(max(0, seconds))
    if seconds >= 3600:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 60}m{seconds % 60:02d}s" if seconds >= 60 else f"{seconds}s"


def step_line(m: dict, total_steps: int, seconds_left: float) -> str:
    """One step's metrics as the line that the terminal shows.

    >>> step_line({"step": 3, "reward": 0.5, "pass_rate": 0.5}, 60, 125).split("  ")[:3]
    ['step 3/60', 'reward 0.500', 'pass 50%']
    """
    def show(name: str, form: str) -> str:
        value = m.get(name)
        return "-" if value is None or math.isnan(value) else format(value, form)

    parts = [
        f"step {m['step']}/{total_steps}", f"reward {show('reward', '.3f')}", f"pass {show('pass_rate', '.0%')}",
        f"flat {show('frac_reward_zero_std', '.0%')}", f"len {show('completions/mean_length', '.0f')}",
        f"cut {show('completions/clipped_ratio', '.0%')}", f"H {show('entropy', '.3f')}", f"kl {show('kl', '.4f')}",
        f"ratio {show('ratio/mean', '.4f')}", f"mis {show('sampling/sampling_logp_difference/mean', '.1e')}",
        f"clip {show('clip_ratio/region_mean', '.1%')}", f"grad {show('grad_norm', '.3f')}",
        f"sigma {show('noise/sigma', '.1e')} (rms {show('noise/applied_rms', '.1e')}, {show('noise/norms', '.0f')} norms)",
        f"roll {show('rollout/tok_per_s', ',.0f')} tok/s", f"train {show('train/tok_per_s', ',.0f')} tok/s",
        f"peak {show('memory/peak_gib', '.1f')} GiB", f"left {duration(seconds_left)}",
    ]
    return "  ".join(parts)


def flat_floats(metrics: dict) -> dict:
    """Numbers as JSON holds them: NaN and infinities become null, because JSON has neither."""
    return {k: (None if isinstance(v, float) and not math.isfinite(v) else v) for k, v in metrics.items()}


def one_line(error: BaseException) -> str:
    """The first line of what an error says; its kind where it says nothing."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:  # without its [Errno 28]
        text = ": ".join(filter(None, (error.filename and str(error.filename), error.strerror)))
        text += ", free some first" * (error.errno == errno.ENOSPC)
    lines = text.strip().splitlines()
    return printable(lines[0][:500].removesuffix(".")) if lines else type(error).__name__


def printable(text: str) -> str:
    """Without what a terminal would obey: what a model or a stranger's file says goes there as text.

    >>> printable("done\\x1b[2J")
    'done\ufffd[2J'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def draw_curves(rows: list[dict], path: Path, title: str) -> None:
    """Draws the run's metrics as one picture; written beside the target and renamed, so a viewer never sees half."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (name, wanted) in zip(figure.subplots(2, 3).flat, CURVES):
        keys = [k for w in wanted for k in sorted({k for row in rows for k in row})
                if k == w or (w.endswith("*") and k.startswith(w[:-1]) and "pass@1" in k and "stderr" not in k)]
        for key in keys:
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            axis.plot(*zip(*points), marker="o" if len(points) < 12 else None, markersize=3, label=key)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.3)
        if keys:
            axis.legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    temporary = path.with_name(".curves.tmp.png")
    try:
        figure.savefig(temporary, dpi=90)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # half a picture, where the disk is full


def environment(device: str) -> dict:
    """Versions and hardware, for config.json: what another machine needs to repeat the run."""
    names = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "math-verify", "bitsandbytes")
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return {"versions": {"python": platform.python_version(), **versions}, "gpu": gpu, "host_cpu": platform.machine(),
            "threads": torch.get_num_threads()}


def peak_gib(device: str) -> float:
    """Most memory held so far: of the GPU since the last reset, or of this process on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / 2**20 if sys.platform != "darwin" else kilobytes / 2**30  # macOS counts bytes


def open_trackers(folder: Path, config) -> list[Callable[[int, dict], None]]:
    """Functions (step, numbers) for TensorBoard and W&B, when asked for.  ValueError when the package is missing."""
    trackers = []
    if config.tensorboard:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("--tensorboard needs the package tensorboard; pip install tensorboard, or drop it") from None
        writer = SummaryWriter(str(folder))
        trackers.append(lambda step, numbers: [writer.add_scalar(k, v, step) for k, v in numbers.items()])
    if config.wandb:
        try:
            import wandb
        except ImportError:
            raise ValueError("--wandb needs the package wandb; pip install wandb, or drop it") from None
        tracked = wandb.init(project=config.wandb, name=folder.name, config=dataclasses.asdict(config), dir=str(folder))
        trackers.append(lambda step, numbers: tracked.log(numbers, step=step))
    return trackers


class Report:
    """Everything that a run writes for people: the terminal, metrics.jsonl, samples.jsonl, curves.png, trackers."""

    def __init__(self, folder: Path, config):
        self.folder, self.total_steps = folder, config.steps
        method = "full" if config.full else config.weights
        self.title = f"{config.model}  {config.data}  {config.algo}  {method}  seed {config.seed}"
        self.rows = read_jsonl(folder / "metrics.jsonl")
        self.started = self.drawn = time.monotonic()
        self.first_step: int | None = None
        self.trackers = open_trackers(folder, config)

    def say(self, text: str) -> None:
        tqdm.write(printable(text), file=sys.stdout)
        sys.stdout.flush()

    def bar(self, total: int, label: str) -> tqdm:
        """A progress bar for a long rollout or evaluation; it shows itself only on a terminal and only after 2 s."""
        return tqdm(total=total, desc=label, unit="seq", leave=False, delay=2, disable=not sys.stderr.isatty(), file=sys.stderr)

    def step(self, metrics: dict) -> None:
        """Appends the step's metrics to metrics.jsonl and prints its line."""
        metrics = flat_floats(metrics)
        self.rows.append(metrics)
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(metrics) + "\n")
        if "reward" in metrics:
            now = time.monotonic()
            if self.first_step is None:
                self.first_step, self.started = metrics["step"] - 1, now - metrics.get("step_time", 0)
            done = metrics["step"] - self.first_step
            left = (now - self.started) / done * (self.total_steps - metrics["step"])
            self.say(step_line(metrics, self.total_steps, left))
        self._after(metrics)

    def complete(self, metrics: dict) -> None:
        """Adds an evaluation to the last step's line, after a stop came in the middle of it."""
        self.rows[-1] |= flat_floats(metrics)
        write_atomic(self.folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in self.rows).encode())
        self._after(self.rows[-1])

    def _after(self, metrics: dict) -> None:
        """Evaluations for the terminal, all numbers for the trackers, the picture from time to time."""
        scores = [k for k in metrics if k.endswith("pass@1")]
        for name in [k for k in scores if k != "eval/pass@1" or len(scores) == 1]:
            error = metrics.get(name + "_stderr")
            working = metrics.get(name.replace("pass@1", "working"))
            self.say(f"  {name} {metrics[name]:.3f}" + (f" +- {error:.3f}" if error is not None else "")
                     + (f"  working {working:.3f}" if working is not None else "") + f"  (step {metrics['step']})")
        for track in self.trackers:
            numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float) and not isinstance(v, bool)}
            track(metrics["step"], numbers)
        if time.monotonic() - self.drawn > 20:
            self.draw()

    def samples(self, step: int, prompts: list[str], completions: list[list[str]], rewards: list[list[float]],
                show: bool) -> None:
        """Appends every prompt of the step with its completions and rewards; prints the best one of the first when `show`."""
        with open(self.folder / "samples.jsonl", "a") as file:
            for prompt, texts, values in zip(prompts, completions, rewards):
                file.write(json.dumps(dict(step=step, prompt=prompt, completions=texts, rewards=values)) + "\n")
        if show and prompts:
            best = max(range(len(rewards[0])), key=rewards[0].__getitem__)
            text = completions[0][best].strip()
            text = text if len(text) <= 1200 else text[:800] + "\n  [...]\n" + text[-300:]
            self.say("  ┌ " + prompts[0].strip()[-600:].replace("\n", "\n  │ "))
            self.say("  ├ " + text.replace("\n", "\n  │ ") + f"\n  └ reward {rewards[0][best]:g}")

    def draw(self) -> None:
        if self.rows:
            draw_curves(self.rows, self.folder / "curves.png", self.title)
        self.drawn = time.monotonic()


class Silence(Report):
    """The report of a rank other than 0: nothing is written and nothing is shown."""

    def __init__(self):
        self.rows = []

    def say(self, text: str) -> None:
        pass

    def bar(self, total: int, label: str) -> tqdm:
        return tqdm(disable=True)

    def step(self, metrics: dict) -> None:
        pass

    def complete(self, metrics: dict) -> None:
        pass

    def samples(self, *args, **kwargs) -> None:
        pass

    def draw(self) -> None:
        pass


def demo() -> None:
    row = {"step": 12, "reward": 0.48, "pass_rate": 0.48, "frac_reward_zero_std": 0.25, "completions/mean_length": 21.4,
           "completions/clipped_ratio": 0.0, "entropy": 0.41, "kl": 0.0, "ratio/mean": 1.0, "grad_norm": 0.31,
           "sampling/sampling_logp_difference/mean": 1e-6, "clip_ratio/region_mean": 0.0, "noise/sigma": 5.6e-3,
           "noise/applied_rms": 5.6e-3, "noise/norms": 8, "rollout/tok_per_s": 9100.0, "train/tok_per_s": 7300.0,
           "memory/peak_gib": 0.6}
    print(step_line(row, 60, 95))


if __name__ == "__main__":
    demo()
