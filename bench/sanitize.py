"""The 4-bit GEMM under NVIDIA's compute-sanitizer: accesses out of bounds (memcheck), races in shared memory (racecheck).

    python bench/sanitize.py              both tools; some minutes of a GPU, because every access is watched
    python bench/sanitize.py --launch     the launches alone, which the tools are given

Every plan of marlin_kernel.PLANS and PORTABLE: rows that fill no tile, out-features that end inside one, K not a multiple of the
k-step, LoRA of rank 24 over two parts with the seam inside a tile, bias; in a launch after another one, as in decoding.
Exit code 1 if a tool finds anything; what it says is printed. bench/results/sanitize.json keeps the outcome.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import marlin_kernel
import nvfp4
from bench.machine import machine
from marlin_kernel import PLANS, PORTABLE, LoraOperands

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck")
SIZES, K, RANK = (208, 48), 1040, 24


def launch_all() -> int:
    """Two launches of every plan; returns how many plans."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, K, generator=generator) for n in SIZES]
    w = marlin_kernel.pack([nvfp4.quantize(weight, nvfp4.global_scale(*weights)).to("cuda") for weight in weights])
    a, b = torch.randn(2 * RANK, K, generator=generator), torch.randn(sum(SIZES), RANK, generator=generator)
    lora = LoraOperands(a.to("cuda", torch.bfloat16), b.to("cuda", torch.bfloat16), SIZES, 1.0)
    bias, device = torch.randn(sum(SIZES)).to("cuda", torch.bfloat16), marlin_kernel._workspace(torch.device("cuda", 0))
    plans = {plan for row in PLANS.values() for plan in row} | set(PORTABLE.values())
    for plan in sorted(plans, key=str):
        for m in (plan.bm - 3, 2 * plan.bm + 1):
            x = torch.randn(m, K).to("cuda", torch.bfloat16)
            y = torch.empty(m, sum(SIZES), dtype=x.dtype, device="cuda")
            for adapter in (None, lora):
                marlin_kernel._launch(x, w, bias, adapter, y, plan, device)
    torch.cuda.synchronize()
    return len(plans)


def main() -> int:
    if "--launch" in sys.argv:
        print(f"{launch_all()} plans launched")
        return 0
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        print("error: compute-sanitizer is not on the path; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    launch_all()  # compiled once, found again in Triton's cache
    found = {}
    for tool in TOOLS:
        command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "--launch"]
        result = subprocess.run(command, capture_output=True, text=True)
        last = (result.stdout.strip().splitlines() or ["no output"])[-1].lstrip("= ")
        found[tool] = {"exit_code": result.returncode, "says": last}
        print(f"{tool}: {last} (exit code {result.returncode})", flush=True)
        if result.returncode:
            print(result.stdout[-4000:], result.stderr[-2000:])
    (ROOT / "bench" / "results" / "sanitize.json").write_text(json.dumps(machine() | found) + "\n")
    return int(any(one["exit_code"] for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
