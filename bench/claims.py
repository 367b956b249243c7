"""The paper's claims as a matrix of runs: one command trains every arm over its seeds and goes on where it stopped.

    python bench/claims.py                                  the embedded model on a CPU, every arm; half a minute of a core a run
    python bench/claims.py --only main,lr --seeds 1         some questions, fewer seeds
    python bench/claims.py --list                           the command of every run, and which are done
    python bench/claims_report.py                           tables and curves from what is kept

    python bench/claims.py --model models/qwen-1.5b --data gsm8k/train.jsonl.gz --eval-data gsm8k/test.jsonl.gz \\
        --name qwen-1.5b --seconds 560                      the same arms for a real model on a GPU, in pieces of 560 s
        --gpus 0,1,2,3                                      a run on each of four cards; 0,0: two runs share one
    python bench/claims.py --model Qwen/Qwen2.5-7B-Instruct --data gsm8k --eval-data gsm8k --name qwen-7b
    python bench/claims.py --model models/smollm2 --data data/times-train.jsonl --eval-data data/times-test.jsonl

An arm is a list of train.py's flags; a run is an arm with a seed (claims_matrix.py has them all). Runs of one seed see the same
problems in the same order, with the same adapter to start from, and all runs of a model have the same budget.

    run folder      runs/claims/<model>/<arm>-seed<k>/       train.py's own; a half-finished one goes on with --resume
    what is kept    bench/results/claims/<model>/<arm>-seed<k>.jsonl     line 1: command, versions, seconds; then a line a step
                                                 <arm>-seed<k>.final.json    where a model has final budgets: pass@1 at each
                                                 base-<weights>.final.json   the untrained base at the same budgets

A run whose file is kept is skipped; a kept file that another command made stops everything: its arm would not be comparable.
Flags that only measure, such as --log-kl-every, do not count: they leave the run as it is.
A run that fails is named at the end and does not stop the others.

Cost, one run: tiny 20 to 35 s of one CPU core; Qwen2.5-Coder-1.5B, 40 steps of 128 completions of at most 256 tokens, 141 to
153 s while two runs share an H200, and 51 to 87 s for the final evaluations on 660 problems (measured:
results/claims/qwen-1.5b/terminal.txt). Expected from that: its 44 runs take 1.5 hours of one card. Expected from
bench/rollout.py and bench/step.py: 7B with the same flags 10 to 15 minutes a run, 9 hours in all; 7B with the paper's
4096 tokens and 200 steps 4 hours a run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import queue
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from claims_matrix import ARMS, BUDGETS, Arm, Budget

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results" / "claims"

KEPT = ("step", "reward", "pass_rate", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio", "entropy",
        "train/entropy", "kl", "ratio/mean", "clip_ratio/region_mean", "sampling/sampling_logp_difference/mean",
        "sampling/sampling_logp_difference/max", "sampling/importance_sampling_ratio/min",
        "sampling/importance_sampling_ratio/mean", "sampling/importance_sampling_ratio/max", "noise/sigma", "noise/applied_rms",
        "loss", "grad_norm", "learning_rate", "train/skipped_total", "step_time", "rollout/tok_per_s", "train/tok_per_s",
        "memory/peak_gib", "eval/pass@1", "eval/pass@1_stderr", "eval/mean_length", "eval/truncated", "working", "eval/working")


def trains(command: str) -> str:
    """A command without what only measures: with it or without, the run is the same."""
    return re.sub(r" --log-kl-every \S+", "", command)


@dataclass(frozen=True)
class Plan:
    """Where and on what: the command line of this script, resolved."""

    model: str
    name: str
    data: str | None
    eval_data: str | None
    budget: Budget
    results: Path
    runs: Path
    final_limit: int | None = None  # problems of a final evaluation

    def command(self, arm: Arm, seed: int) -> list[str]:
        """train.py's flags of one run, without the folder."""
        measures = [] if "--full" in arm.flags else shlex.split(self.budget.measures)  # no adapter, no KL to "adapter off"
        given = {"--model": self.model, "--data": self.data, "--eval-data": self.eval_data}
        return [*(word for flag, value in given.items() if value for word in (flag, value)), *shlex.split(self.budget.flags),
                "--lr", f"{self.budget.lr * arm.rate:g}", *arm.flags, "--seed", str(seed), *measures]

    def folder(self, arm: Arm, seed: int) -> Path:
        return self.runs / f"{arm.name}-seed{seed}"

    def kept(self, arm: Arm, seed: int) -> Path:
        return self.results / f"{arm.name}-seed{seed}.jsonl"

    def is_done(self, arm: Arm, seed: int) -> bool:
        """Whether this run is kept.  ValueError if what is kept was made by another command."""
        path = self.kept(arm, seed)
        if not path.exists():
            return False
        made_by, wanted = json.loads(path.read_text().split("\n", 1)[0])["command"], shlex.join(self.command(arm, seed))
        if trains(made_by) != trains(wanted):
            raise ValueError(f"{path} was made by `{made_by}`, now it would be `{wanted}`; move it away, or restore the budget")
        return True


def chosen(only: str | None) -> list[Arm]:
    """Arms whose question or name is listed; all by default.  ValueError for an unknown one."""
    wanted = set(only.split(",")) if only else {arm.question for arm in ARMS}
    unknown = wanted - {arm.question for arm in ARMS} - {arm.name for arm in ARMS}
    if unknown:
        raise ValueError(f"--only {sorted(unknown)[0]}: no such question or arm; --list shows them")
    return [arm for arm in ARMS if {arm.question, arm.name} & wanted]


def todo(plan: Plan, arms: list[Arm], seeds: int) -> list[tuple[Arm, int]]:
    """Runs that are not kept yet, question by question, the first seed of all its arms before the second."""
    order = [(arm, seed) for question in dict.fromkeys(arm.question for arm in arms) for seed in range(seeds)
             for arm in arms if arm.question == question and seed < arm.seeds]
    return [(arm, seed) for arm, seed in order if not plan.is_done(arm, seed)]


# ------------------------------------------------------------------------------------------------------ one run at a time


class Deadline:
    """Seconds that are left to this call; None = no limit."""

    def __init__(self, seconds: float | None):
        self.end = math.inf if seconds is None else time.monotonic() + seconds

    def left(self) -> float:
        return self.end - time.monotonic()


def execute(argv: list[str], log: Path, deadline: Deadline, gpu: str | None) -> int | None:
    """Runs a program into a log; its exit code, or None when time was up: it then gets one Ctrl-C, and saves."""
    if deadline.left() < 1:
        return None
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
    with open(log, "a") as file:
        process = subprocess.Popen([sys.executable, *argv], stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            return process.wait(None if deadline.left() == math.inf else max(0.1, deadline.left()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.send_signal(signal.SIGINT)
            process.wait(60)
            return None


def train(plan: Plan, arm: Arm, seed: int, program: str, deadline: Deadline, gpu: str | None) -> int | None:
    """The run, started or continued; kept when it is complete."""
    folder = plan.folder(arm, seed)
    flags = ["--resume"] if (folder / "config.json").exists() else plan.command(arm, seed)
    code = execute([program, *flags, "--out", str(folder)], folder.with_name(folder.name + ".log"), deadline, gpu)
    if code == 0:
        keep(plan, arm, seed)
    return code


def trimmed(row: dict) -> dict:
    """The kept fields to five digits."""
    return {name: float(f"{row[name]:.5g}") if isinstance(row[name], float) else row[name]
            for name in KEPT if row.get(name) is not None}


def keep(plan: Plan, arm: Arm, seed: int) -> None:
    """metrics.jsonl of a finished run -> its file among the results, written whole or not at all."""
    folder, path = plan.folder(arm, seed), plan.kept(arm, seed)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    record = json.loads((folder / "config.json").read_text())
    head = {"command": shlex.join(plan.command(arm, seed)), "versions": record.get("versions"), "gpu": record.get("gpu"),
            "seconds": round(sum(row.get("step_time", 0) for row in rows), 1)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in [head, *map(trimmed, rows)]))
    os.replace(temporary, path)


# --------------------------------------------------------------------------------- final evaluations, where the budget has any


def final_jobs(plan: Plan, arms: list[Arm], seeds: int) -> Iterator[tuple[Path, list[str]]]:
    """(file of the result, eval.py's flags without budget) of bases and of finished runs."""
    if plan.budget.finals:
        data = ["--data", plan.eval_data] if plan.eval_data else []
        for weights in dict.fromkeys(arm.flags[arm.flags.index("--weights") + 1] for arm in arms):
            yield plan.results / f"base-{weights}.final.json", ["--model", plan.model, "--weights", weights, *data]
        for arm in arms:
            for seed in filter(lambda seed: plan.is_done(arm, seed), range(min(arm.seeds, seeds))):
                folder, weights = plan.folder(arm, seed), arm.flags[arm.flags.index("--weights") + 1]
                model = (["--model", str(folder / "model")] if "--full" in arm.flags else
                         ["--model", plan.model, "--adapter", str(folder / "adapter"), "--no-base"])
                yield plan.kept(arm, seed).with_suffix(".final.json"), [*model, "--weights", weights, *data]


def summarise(records: list[dict]) -> dict:
    """eval.py's records -> scores; `right` holds one 0 or 1 a problem, so that two models can be compared problem by problem."""
    right = [int(record["correct"]) for record in records]
    share = statistics.fmean(right)
    return {"pass@1": round(share, 5), "stderr": round(math.sqrt(share * (1 - share) / max(1, len(right) - 1)), 5),
            "mean_length": round(statistics.fmean(record["tokens"] for record in records), 2),
            "truncated": round(statistics.fmean(not record["stopped"] for record in records), 5), "problems": len(right),
            "right": "".join(map(str, right))}


def evaluate(plan: Plan, path: Path, flags: list[str], deadline: Deadline, gpu: str | None) -> int | None:
    """pass@1 at every final budget, greedy, on the whole held-out set, or the same --final-limit problems of it."""
    found, records, budget = {}, plan.runs / (path.stem + ".records.jsonl"), shlex.split(plan.budget.flags)
    shared = [word for flag, value in zip(budget, budget[1:]) if flag in ("--instruction", "--max-prompt-tokens")
              for word in (flag, value)]
    shared += ["--limit", str(plan.final_limit)] if plan.final_limit else []
    for tokens in plan.budget.finals:
        code = execute(["eval.py", *flags, *shared, "--max-new-tokens", str(tokens), "--out", str(records)],
                       records.with_suffix(".log"), deadline, gpu)
        if code != 0:
            return code
        found[str(tokens)] = summarise([json.loads(line) for line in records.read_text().splitlines()])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"command": shlex.join([*flags, *shared]), **found}) + "\n")
    return 0


# ------------------------------------------------------------------------------------------------------------ command line


def together(jobs: list[tuple[str, Callable]], gpus: list[str | None], deadline: Deadline) -> dict[str, int | None]:
    """Every job, one at a time on each of the cards; name -> exit code, None where time was up."""
    free, done = queue.SimpleQueue(), itertools.count(1)
    for gpu in gpus:
        free.put(gpu)

    def one(name: str, job: Callable) -> int | None:
        gpu, started = free.get(), time.monotonic()
        try:
            code = job(deadline, gpu)
        finally:
            free.put(gpu)
        if code is not None:
            print(f"{next(done)}/{len(jobs)}  {name}: {f'exit code {code}' if code else 'ok'}, "
                  f"{time.monotonic() - started:.0f} s", flush=True)
        return code

    with ThreadPoolExecutor(len(gpus)) as pool:
        return dict(zip([name for name, _ in jobs], pool.map(one, *zip(*jobs)) if jobs else []))


def parse(argv: list[str] | None = None) -> tuple[Plan, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--name", help="of the results folder [the model's last name]")
    parser.add_argument("--data")
    parser.add_argument("--eval-data")
    parser.add_argument("--only", help="questions or arms, with commas [all]")
    parser.add_argument("--seeds", type=int, default=3, help="at most so many seeds an arm [3]")
    parser.add_argument("--seconds", type=float, help="stop after so long; the same command goes on [no limit]")
    parser.add_argument("--gpus", help="cards, with commas; one run at a time on each [as CUDA chooses, one run at a time]")
    parser.add_argument("--lr", type=float, help="base learning rate of every arm [the budget's]")
    parser.add_argument("--flags", help="more flags for every run, such as '--steps 100' (the last one wins)")
    parser.add_argument("--train-only", action="store_true", help="leave final evaluations to a later call")
    parser.add_argument("--final-limit", type=int, help="problems of each final evaluation [all]")
    parser.add_argument("--list", action="store_true", help="print the commands and what is done; run nothing")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "claims")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--program", default="train.py", help=argparse.SUPPRESS)  # tests put a quick one in its place
    options = parser.parse_args(argv)
    budget = BUDGETS.get(options.model.rstrip("/").split("/")[-1], BUDGETS["other"])
    budget = replace(budget, lr=options.lr or budget.lr, flags=f"{budget.flags} {options.flags or ''}".strip())
    name = options.name or options.model.rstrip("/").split("/")[-1]
    plan = Plan(options.model, name, options.data, options.eval_data, budget, options.results / name, options.runs / name,
                options.final_limit)
    return plan, options


def main(argv: list[str] | None = None) -> int:
    plan, options = parse(argv)
    arms, deadline = chosen(options.only), Deadline(options.seconds)
    missing = todo(plan, arms, options.seeds)
    if options.list:
        for arm in arms:
            for seed in range(min(arm.seeds, options.seeds)):
                print(f"{'    ' if (arm, seed) in missing else 'done'}  python train.py {shlex.join(plan.command(arm, seed))}")
        return 0
    cards = options.gpus.split(",") if options.gpus else [None]
    jobs = [(f"{arm.name} seed {seed}", partial(train, plan, arm, seed, options.program)) for arm, seed in missing]
    found = together(jobs, cards, deadline)
    if None not in found.values() and not options.train_only:
        jobs = [(path.name, partial(evaluate, plan, path, flags)) for path, flags in final_jobs(plan, arms, options.seeds)
                if not path.exists()]
        found |= together(jobs, cards, deadline)
    if None in found.values():
        print(f"time is up, {list(found.values()).count(None)} are left; the same command goes on")
        return 3
    failed = [name for name, code in found.items() if code]
    for name in failed:
        print(f"failed: {name}; its log is in {plan.runs}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    os.chdir(ROOT)
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
