"""kill -9 at random moments of many short runs, and disks that are really full: is the resumed run the one left alone?

    python bench/faults.py [--runs 30] [--seed 0] [--model tiny]        minutes on two cores; Linux

Each run is a process of its own, killed once to three times at a moment drawn from its life (one in five while it starts,
the others in rollouts, updates, evaluations, saving), each time resumed, and at last let finish. Then its adapter, its
optimiser's state, its samples and every number in its log but the timings must equal those of the same run that was left
alone, bit for bit. Four kinds of run take turns, so that the loss with several mini-batches, dynamic sampling, a
reference and evaluations are all met. The second part is tests/full_disk.py at all of its moments, on a tmpfs.
"""
from __future__ import annotations

import argparse
import json
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from convert.loader import resolve_model  # noqa: E402
from files import checkpoint  # noqa: E402

COMMON = shlex.split(
    "--steps 24 --prompts 4 --group 4 --max-new-tokens 24 --lr 0.003 --warmup 0 --rank 8 --stages 4 --checkpoint-every 3 "
    "--eval-every 5 --eval-data arithmetic --eval-limit 16 --data arithmetic --instruction '' --device cpu --no-mask-truncated")
KINDS = {
    "grpo": [], "grpo, two updates a step, KL": ["--updates", "2", "--beta", "0.05"],
    "dapo": ["--algo", "dapo", "--resample", "2", "--group", "4"], "dr_grpo, bf16": ["--algo", "dr_grpo", "--weights", "bf16"],
}
TIMINGS = ("step_time", "/seconds", "tok_per_s", "peak_gib")


def start(out: Path, model: str, kind: str) -> subprocess.Popen:
    is_begun = (out / "config.json").exists()
    flags = ["--resume", "--out", str(out)] if is_begun else ["--model", model, "--out", str(out), *COMMON, *KINDS[kind]]
    command = [sys.executable, "-u", "train.py", *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> str:
    said, _ = process.communicate(timeout=600)
    if process.returncode:
        raise SystemExit(f"a run ended with code {process.returncode}:\n{said}")
    return said


def life(out: Path) -> dict:
    """Everything that must not depend on how often the run was killed."""
    tensors, numbers = checkpoint.load_latest(out)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {"adapter": (out / "adapter/adapter_model.safetensors").read_bytes(), "samples": (out / "samples.jsonl").read_bytes(),
            "numbers": numbers, "tensors": {name: t.numpy().tobytes() for name, t in tensors.items()},
            "metrics": [{k: v for k, v in row.items() if not any(t in k for t in TIMINGS)} for row in rows]}


def first_words(process: subprocess.Popen) -> None:
    """Waits for the first line of an evaluation or a step: from here on the process is at work."""
    for line in process.stdout:
        if line.startswith(("step", "  eval")):
            return


def killed_run(out: Path, model: str, kind: str, draw: random.Random, work_s: float) -> list[dict]:
    """Kills a new run once to three times at moments of its life; returns when, and what had been reached."""
    kills = []
    for _ in range(draw.randint(1, 3)):
        process, in_start = start(out, model, kind), draw.random() < 0.2
        if not in_start:
            first_words(process)
        patience_s = draw.uniform(0, 8 if in_start else work_s)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
        folders, log = checkpoint.step_folders(out), out / "metrics.jsonl"
        kills.append({"during": "start" if in_start else "work", "after_s": round(patience_s, 2), "exit": process.returncode,
                      "checkpoint": int(folders[-1].name[5:]) if folders else None,
                      "logged": len(log.read_text(errors="replace").splitlines()) if log.exists() else 0})
    finish(start(out, model, kind))
    return kills


def kills(runs: int, seed: int, model: str, scratch: Path) -> list[dict]:
    wholes, seconds, found = {}, {}, []
    for number, kind in enumerate(KINDS):
        process = start(scratch / f"whole{number}", model, kind)
        first_words(process)
        began = time.monotonic()
        finish(process)
        wholes[kind], seconds[kind] = life(scratch / f"whole{number}"), time.monotonic() - began
    for number in range(runs):
        kind, out = list(KINDS)[number % len(KINDS)], scratch / f"run{number}"
        moments = killed_run(out, model, kind, random.Random(f"{seed}/{number}"), seconds[kind])
        mine = life(out)
        same = {name: mine[name] == wholes[kind][name] for name in mine}
        found.append({"run": number, "kind": kind, "kills": moments, **same})
        when = ", ".join(f"{moment['during']} + {moment['after_s']} s" for moment in moments)
        verdict = "the same bit for bit" if all(same.values()) else f"DIFFERS: {same}"
        print(f"run {number:2d} {kind:30} killed at {when:50} {verdict}", flush=True)
        shutil.rmtree(out)
    return found


def full_disk(model: str, scratch: Path) -> list[dict]:
    disk = scratch / "disk"
    disk.mkdir()
    program = shlex.join([sys.executable, str(ROOT / "tests/full_disk.py"), str(disk), str(resolve_model(model))])
    done = subprocess.run(["unshare", "-rm", "sh", "-c", f"mount -t tmpfs -o size=48m tmpfs {disk} && exec {program}"],
                          capture_output=True, text=True, timeout=900)
    if done.returncode:
        print(f"the full disk could not be tried: {done.stderr.strip().splitlines()[-1]}")
        return []
    rows = [json.loads(line.replace(str(scratch), "...")) for line in done.stdout.splitlines()]
    for row in rows:
        good = row["code"] == 2 and len(row["said"]) == 1 and row.get("resumed", 0) == 0 and row.get("same", True)
        print(f"disk full at {row['full']:20} {'one line, exit code 2, nothing lost' if good else f'WRONG: {row}'}")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="tiny")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        killed = kills(options.runs, options.seed, options.model, Path(scratch))
        disks = full_disk(options.model, Path(scratch))
    keys = ("adapter", "samples", "numbers", "tensors", "metrics")
    same = sum(all(run[key] for key in keys) for run in killed)
    summary = {"runs": len(killed), "same_bit_for_bit": same, "kills": sum(len(run["kills"]) for run in killed),
               "killed_before_first_checkpoint": sum(k["checkpoint"] is None for run in killed for k in run["kills"]),
               "full_disks": len(disks), "minutes": round((time.monotonic() - began) / 60, 1)}
    results = ROOT / "bench/results/faults.json"
    lines = ",\n  ".join(json.dumps(row) for row in killed), ",\n  ".join(json.dumps(row) for row in disks)
    results.write_text(f'{{"summary": {json.dumps(summary)},\n "kills": [\n  {lines[0]}],\n "full_disk": [\n  {lines[1]}]}}\n')
    print(summary)
    return 0 if same == len(killed) else 1


if __name__ == "__main__":
    sys.exit(main())
