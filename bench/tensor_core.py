"""The least time of one tensor-core product whose A operand lies in registers, by its rows of x (wgmma's N).

    python bench/tensor_core.py        ten seconds on a GPU

The GEMM multiplies decoded weights (A, 64 x 16, in registers) by rows of x (B, 16 x N, in shared memory). Here nothing is
loaded or decoded in the loop: one exclusive or a register keeps A in registers. What is left is the tensor core's own time,
by N, and by the programs that share an SM. Four warps take wgmma, two take mma.sync (Triton's choice by the warps).

    us of a layer (N_out, K) at least = N_out / 64 * K / 16 / SMs * (time of one product)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import triton
import triton.language as tl
from machine import machine

RESULTS = Path(__file__).resolve().parent / "results" / "tensor_core.json"
STEPS, BK = 2000, 64


@triton.jit
def spin_kernel(x_ptr, a_ptr, y_ptr, n, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    offs_n, offs_m, offs_k = tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BK)
    x = tl.load(x_ptr + offs_m[:, None] * BK + offs_k[None, :])
    a = tl.load(a_ptr + offs_n[:, None] * BK + offs_k[None, :])
    acc = tl.zeros((BN, BM), tl.float32)
    for _ in range(n):
        a = (a.to(tl.int16, bitcast=True) ^ 1).to(tl.bfloat16, bitcast=True)
        acc = tl.dot(a, x.T, acc)
    tl.store(y_ptr + tl.program_id(0) * BN * BM + offs_n[:, None] * BM + offs_m[None, :], acc)


def nanoseconds(bm: int, warps: int, programs: int) -> float:
    """Of one 64 x bm x 16 product on an SM that `programs` share."""
    sms, bn = torch.cuda.get_device_properties(0).multi_processor_count, 64 if bm > 64 else 128
    x, a = (torch.randn(rows, BK, device="cuda", dtype=torch.bfloat16) for rows in (bm, bn))
    y = torch.empty(sms * programs, bn, bm, device="cuda")
    times = []
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        spin_kernel[(sms * programs,)](x, a, y, STEPS, bm, bn, BK, num_warps=warps)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return min(times) * 1e6 / (STEPS * (bn // 64) * (BK // 16) * programs)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: this measures a GPU's tensor cores, and torch sees no GPU here")
    rows = []
    for bm in (8, 16, 32, 64, 128):
        for warps in (4, 2):
            for programs in (1, 2, 3, 4):
                ns = nanoseconds(bm, warps, programs)
                rows.append({"N": bm, "warps": warps, "programs": programs, "ns": round(ns, 2)})
                kind = "wgmma" if warps == 4 else "mma.sync"
                print(f"N={bm:3} {kind:8} {programs} programs an SM: {ns:6.2f} ns a product", flush=True)
    RESULTS.write_text(json.dumps({"versions": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
