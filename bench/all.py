"""Every measurement of speed behind the README, on one GPU, the most important first; the same command goes on where it stopped.

    python bench/all.py --list                      what there is, and what is done
    python bench/all.py --seconds 540               as much as fits; --only tests,gemm: some of it; --log FOLDER: their output
    python bench/all.py --only tune                 the search for tiles; only when named, because it changes marlin_kernel.py

An item is done when its command has ended with exit code 0 at this commit (runs/bench/done.json). An item that would not
fit into the time that is left, by its expected seconds on an H200, is left for the next call. Results go where each script
writes them, bench/results/.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.machine import commit  # noqa: E402

ITEMS = {  # name: (expected seconds, command after `python`)
    "tests": (100, "-m pytest -m gpu -q -n 4 tests"),
    "sanitizer": (120, "bench/sanitize.py"),
    "rollout 7B": (50, "bench/rollout.py --model Qwen2.5-7B --sequences 8,64,1,32,128,256"),
    "rollout 32B": (80, "bench/rollout.py --model Qwen2.5-32B --sequences 8,64,32,1,128"),
    "gemm": (240, "bench/gemm.py --out bench/results/gemm.json --commit {commit}"),
    "step 7B": (120, "bench/step.py --models 7B --weights nvfp4,bf16,nf4 --steps 1"),
    "step 7B x64": (150, "bench/step.py --models 7B --weights nvfp4,bf16 --prompts 8 --steps 1"),
    "rollout 7B bf16": (30, "bench/rollout.py --model Qwen2.5-7B --weights bf16 --sequences 8,64"),
    "rollout 14B nf4": (60, "bench/rollout.py --model Qwen2.5-14B --weights nf4 --sequences 8,32"),
    "rollout 14B": (40, "bench/rollout.py --model Qwen2.5-14B --sequences 8,32"),
    "rollout 32B nf4": (100, "bench/rollout.py --model Qwen2.5-32B --weights nf4 --sequences 8,32"),
    "rollout 7B shaped": (50, "bench/rollout.py --model Qwen2.5-7B --grpo"),
    "rollout 7B no lora": (30, "bench/rollout.py --model Qwen2.5-7B --sequences 8,64 --no-lora"),
    "step 12 GiB": (40, "bench/step.py --models 7B --weights nvfp4 --completion-tokens 512 --cap-gib 12 --steps 1"),
    "step 38.5 GiB": (100, "bench/step.py --models 32B --weights nvfp4 --prompts 4 --completion-tokens 512 --cap-gib 38.5 "
                           "--steps 1"),
    "step 79 GiB": (180, "bench/step.py --models 32B --weights nvfp4 --prompts 8 --cap-gib 79 --steps 1"),
    "step 14B": (150, "bench/step.py --models 14B --weights nvfp4,bf16,nf4 --steps 1"),
    "step 32B": (200, "bench/step.py --models 32B --weights nvfp4,nf4 --cap-gib 79 --steps 1"),
    "train 32B": (200, "bench/big_checkpoint.py runs/big"),
    "small kernels": (30, "bench/small_kernels.py"),
    "tensor core": (15, "bench/tensor_core.py"),
    "tune": (150, "bench/tune_gemm.py --apply"),
}
ALONE = ("tune",)  # only when it is named


def run(name: str, log: Path, limit: float) -> bool:
    """One item, its output into a file of its own; whether it ended well."""
    started, seconds = time.monotonic(), ITEMS[name][0]
    command = [sys.executable, *shlex.split(ITEMS[name][1].format(commit=commit()))]
    path = log / f"{name.replace(' ', '-')}.log"
    with open(path, "w") as file:
        try:
            code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            code = None
    outcome = "time was up" if code is None else "ok" if code == 0 else f"exit code {code}"
    print(f"{name}: {outcome}, {time.monotonic() - started:.0f} s (expected {seconds}); {path}", flush=True)
    return code == 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of this call [no limit]")
    parser.add_argument("--only", help="items, with commas: the beginning of a name is enough")
    parser.add_argument("--log", type=Path, default=ROOT / "runs" / "bench")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(argv)
    wanted = options.only.split(",") if options.only else []
    if unknown := [word for word in wanted if not any(name.startswith(word) for name in ITEMS)]:
        parser.error(f"--only {unknown[0]}: no such item; --list shows them")
    names = [name for name in ITEMS if (any(name.startswith(word) for word in wanted) if wanted else name not in ALONE)]
    options.log.mkdir(parents=True, exist_ok=True)
    state = options.log / "done.json"
    done = json.loads(state.read_text()) if state.exists() else {}
    started, failed = time.monotonic(), []
    for name in names:
        seconds, left = ITEMS[name][0], options.seconds - (time.monotonic() - started)
        if options.list or done.get(name) == commit():
            print(f"{'done' if done.get(name) == commit() else '    '}  {name}: {seconds} s  python {ITEMS[name][1]}")
        elif seconds > left:
            print(f"left for the next call: {name} ({seconds} s)")
        elif run(name, options.log, min(left, 3 * seconds)):
            done[name] = commit()
            state.write_text(json.dumps(done))
        else:
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
