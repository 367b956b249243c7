"""How the tiles in marlin_kernel.PLANS were found: every candidate on layers of each kind, timed as in bench/gemm.py.

    python bench/tune_gemm.py                                  some minutes of a GPU; prints the best of each bucket and kind
    python bench/tune_gemm.py --rows 16,32 --processes 8       some buckets; so many processes compile
    python bench/tune_gemm.py --choose                         only reads what is kept and prints the choice again
    python bench/tune_gemm.py --apply                          and writes the choice into marlin_kernel.py

A candidate is a tile (rows, outputs, k-step), its warps, pipeline stages and programs an SM; registers follow from the programs.
Each result is compared with fp32; a wrong one is out. Kinds are those of marlin_kernel.plan: wide, deep, other. The score is the
mean of the logarithms, so that each layer counts alike; on the 7B layers also of the times with LoRA rank 32 in the launch,
because rollouts have it. Compiling, which takes longer than measuring, is spread over processes.
One sum for all (`shared`) needs every program resident at the same time: candidates that do not fit that often are skipped there.
What is measured goes to bench/results/gemm_tune.json with the versions.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent))
import gemm

import marlin_kernel
from bench.machine import machine
from marlin_kernel import LoraOperands, MarlinWeight, Plan

RESULTS = Path(__file__).resolve().parent / "results" / "gemm_tune.json"
KINDS = {"wide": ("32B gate_up", "7B gate_up"), "deep": ("32B down", "7B down"), "other": ("32B qkv", "7B qkv", "7B o")}
SHARED_MEMORY = 227 * 1024  # of an SM that a program may use
REGISTERS = 65536  # of an SM
# rows: (outputs, k-step, warps, stages, programs an SM)
CANDIDATES = {
    16: ((128, 128, 4, 4, 3), (128, 256, 4, 3, 3), (128, 256, 8, 3, 2), (64, 128, 4, 5, 2), (64, 128, 4, 4, 4),
         (64, 256, 4, 4, 3), (64, 256, 4, 3, 4)),
    32: ((128, 128, 4, 4, 3), (128, 256, 4, 3, 2), (128, 256, 4, 2, 3), (64, 128, 4, 4, 2), (64, 128, 4, 3, 4),
         (64, 256, 4, 3, 3), (64, 256, 4, 3, 2), (128, 128, 8, 4, 2)),
    64: ((64, 128, 4, 4, 2), (64, 128, 4, 3, 3), (128, 128, 4, 3, 2), (128, 64, 4, 4, 3), (128, 64, 4, 5, 2),
         (128, 256, 4, 2, 2), (256, 128, 8, 3, 1), (256, 64, 8, 5, 1)),
    128: ((64, 128, 4, 3, 2), (128, 64, 8, 5, 2), (128, 64, 8, 5, 1), (128, 128, 8, 3, 1), (256, 64, 8, 5, 1),
          (128, 64, 4, 5, 2)),
    256: ((128, 64, 8, 4, 1),),
    512: ((128, 64, 8, 4, 1),),
}  # fmt: skip
HALVES = {  # the same, the tile in two halves: products of one run while the other is decoded
    16: ((128, 128, 4, 4, 3), (128, 128, 4, 3, 3), (128, 256, 4, 3, 3), (128, 64, 4, 5, 4), (256, 128, 8, 3, 2)),
    32: ((128, 128, 4, 4, 3), (128, 128, 4, 3, 3), (128, 64, 4, 4, 4), (128, 256, 4, 3, 2)),
    64: ((128, 128, 4, 3, 2), (128, 64, 4, 4, 3), (256, 64, 8, 5, 1), (256, 128, 8, 3, 1), (256, 64, 8, 4, 2)),
    128: ((128, 64, 4, 4, 2), (256, 64, 8, 4, 1), (256, 64, 8, 5, 1)),
}  # fmt: skip
TILES_OF_128 = ((128, 64, 8, 5, 2), (128, 64, 8, 5, 1), (128, 128, 8, 3, 1), (256, 64, 8, 5, 1))  # for 256 and 512 rows


def bytes_of(plan: Plan) -> int:
    """Shared memory of a program: codes and scales in all stages but one, x in all; or x and A of a LoRA job of rank 32."""
    x = 2 * plan.bm * plan.bk * plan.stages
    return max(plan.bn * plan.bk * 9 // 16 * (plan.stages - 1) + x, 2 * 32 * plan.bk * plan.stages + x)


def candidates(rows: int) -> list[Plan]:
    """Every plan of a rows bucket, each also with shared sums where all programs fit and a tile is often split."""
    tiles = [(min(rows, 256), *tile, False) for tile in CANDIDATES.get(rows, ())]
    tiles += [(128, *tile, False) for tile in TILES_OF_128 if rows > 128]
    tiles += [(min(rows, 128), *tile, True) for tile in HALVES[min(rows, 128)]]
    plans = []
    for bm, bn, bk, warps, stages, programs, halves in tiles:
        registers = min(255, REGISTERS // (programs * warps * 32) // 8 * 8)
        plan = Plan(bm, bn, bk, warps, stages, programs, registers, halves=halves)
        plans.append(plan)
        if rows >= 64 and bytes_of(plan) * programs <= SHARED_MEMORY:
            plans.append(replace(plan, shared=True))
    return plans


def launch(x: torch.Tensor, w: MarlinWeight, plan: Plan, lora: LoraOperands | None = None) -> torch.Tensor:
    y = torch.empty(x.shape[0], w.n, dtype=x.dtype, device=x.device)
    marlin_kernel._launch(x, w, None, lora, y, plan, marlin_kernel._workspace(x.device))
    return y


def compile_plan(job: tuple[Plan, int]) -> str:
    """For a number of parts with LoRA, 0: without. In a process of its own; the kernel is found again in Triton's cache."""
    plan, parts = job
    try:
        sizes = (2 * plan.bn,) * max(parts, 1)
        w, lora = marlin_kernel.pack(gemm.random_parts(sizes, 512)), gemm.random_lora(sizes, 512) if parts else None
        launch(torch.randn(plan.bm, 512, dtype=torch.bfloat16, device="cuda"), w, plan, lora)
        torch.cuda.synchronize()
        return ""
    except Exception as error:  # too many registers or too much memory: not a candidate on this GPU
        return f"{plan}: {type(error).__name__} {str(error)[:100]}"


def time_candidates(layer: str, m: int, exact_w: torch.Tensor, many: list, dense: list) -> list[dict]:
    """Every candidate of a bucket on one layer, and cuBLAS beside them. many, dense: copies of its weights."""
    (sizes, k), found = gemm.LAYERS[layer], []
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    exact, lora = x.float() @ exact_w.T, gemm.random_lora(sizes, k) if layer.startswith("7B") else None
    bf16 = gemm.time_calls([partial(F.linear, x, weight) for weight in dense])
    for plan in candidates(m):
        try:
            error = float((launch(x, many[0], plan).float() - exact).norm() / exact.norm())
            us = gemm.time_calls([partial(launch, x, w, plan) for w in many])
            us_lora = None if lora is None else round(gemm.time_calls([partial(launch, x, w, plan, lora) for w in many]), 2)
        except Exception as failure:
            print(f"{m} {plan}: {str(failure)[:100]}", flush=True)
            continue
        found.append({"layer": layer, "M": m, "plan": asdict(plan), "us": round(us, 2), "us_lora": us_lora,
                      "bf16_us": round(bf16, 2), "error": float(f"{error:.2g}")})  # fmt: skip
    return found


def measure(layer: str, rows: list[int]) -> list[dict]:
    """Every candidate of every bucket on one layer, weights rotated past the L2 cache."""
    sizes, k = gemm.LAYERS[layer]
    w, n = marlin_kernel.pack(gemm.random_parts(sizes, k)), sum(sizes)
    many = [w] + [copy.deepcopy(w) for _ in range(gemm.copies(n * k * 9 / 16) - 1)]
    dense = [torch.randn(n, k, dtype=torch.bfloat16, device="cuda") for _ in range(gemm.copies(2 * n * k))]
    exact_w, results = marlin_kernel.dequantize(w).float(), []
    for m in rows:
        results += time_candidates(layer, m, exact_w, many, dense)
        best = min((row for row in results if row["M"] == m), key=lambda row: row["us"])
        print(f"{layer:12} M={m:4} bf16 {best['bf16_us']:7.1f} best {best['us']:7.1f} us  {best['plan']}", flush=True)
    return results


def ranking(rows: list[dict], m: int, layers: tuple[str, ...]) -> list[tuple[Plan, dict]]:
    """Plans of a bucket and kind, the best first, each with its times."""
    times = defaultdict(dict)
    for row in rows:
        if row["M"] == m and row["layer"] in layers and row["error"] < 3e-3:
            times[Plan(**row["plan"])] |= {row["layer"]: row["us"]}
            if row.get("us_lora"):
                times[Plan(**row["plan"])] |= {row["layer"] + " LoRA": row["us_lora"]}
    most = max(map(len, times.values()), default=0)
    full = [(plan, us) for plan, us in times.items() if len(us) == most]
    return sorted(full, key=lambda item: sum(map(math.log, item[1].values())))


def written(plan: Plan) -> str:
    """As in the table: the numbers, then what is true."""
    flags = [f"{name}=True" for name in ("shared", "halves") if getattr(plan, name)]
    return f"Plan({', '.join([*map(str, list(asdict(plan).values())[:7]), *flags])})"


def chosen(rows: list[dict]) -> dict[int, tuple[Plan, ...]]:
    """The best plan of each bucket and kind, as in marlin_kernel.PLANS."""
    return {m: tuple(ranking(rows, m, layers)[0][0] for layers in KINDS.values()) for m in sorted({row["M"] for row in rows})}


def choose(rows: list[dict], apply: bool) -> None:
    """Prints the three best plans of each bucket and kind; with apply, the best become marlin_kernel.PLANS."""
    lines = []
    for m, plans in chosen(rows).items():
        for kind, layers in KINDS.items():
            for plan, us in ranking(rows, m, layers)[:3]:
                print(f"{m:4} {kind:6} {written(plan)}  {us}")
        best = list(map(written, plans))
        line = f"    {m}: ({', '.join(best)}),"
        lines.append(line if len(line) <= 130 else f"    {m}: (" + ",\n         ".join(best) + "),")
    if apply:
        if missing := set(marlin_kernel.PLANS) - {row["M"] for row in rows}:
            raise SystemExit(f"--apply wants every bucket measured; {sorted(missing)} are missing: leave out --rows")
        path = Path(marlin_kernel.__file__)
        text = path.read_text()
        start = text.index("PLANS = {\n") + len("PLANS = {\n")
        end = text.index("}\nPORTABLE", start)
        path.write_text(text[:start] + "\n".join(lines) + "\n" + text[end:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(map(str, CANDIDATES)))
    parser.add_argument("--processes", type=int, default=min(12, multiprocessing.cpu_count()))
    parser.add_argument("--choose", action="store_true", help="measure nothing")
    parser.add_argument("--apply", action="store_true", help="write the choice into marlin_kernel.py")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not options.choose:
        rows = [int(m) for m in options.rows.split(",")]
        with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
            jobs = {(plan, parts): 0 for m in rows for plan in candidates(m) for parts in (0, 1, 2, 3)}
            for problem in filter(None, pool.map(compile_plan, jobs)):
                print(problem, flush=True)
        found = [row for layers in KINDS.values() for layer in layers for row in measure(layer, rows)]
        text = json.dumps({"versions": machine(), "rows": found}, separators=(",", ":"))
        options.out.write_text(text.replace("},{", "},\n{") + "\n")
    choose(json.loads(options.out.read_text())["rows"], options.apply)


if __name__ == "__main__":
    main()
