"""Weight-only 4-bit GEMMs side by side on one GPU: ours, ours with LoRA rank 32, cuBLAS bf16, humming NVFP4, bnb NF4.

Every layer of Qwen2.5 7B, 14B and 32B, from one row to 16,384. A cell is the median time of one call inside a CUDA graph
that walks through enough copies of the weights to exceed the L2 cache several times, so that weights come from memory,
as they do when a model decodes. All contenders get the same treatment: same inputs, same graph, same rotation, each with
its default settings. Ours may fetch its first weights while the previous launch finishes (programmatic dependent
launch), as it does in a model.

    floor = max(packed bytes / 4.3 TB/s, flops / 790 TFLOP/s): what an H200 can do at best, measured with copies and cuBLAS

Peers are optional: one that cannot be imported, or fails, leaves its column empty and says why.

    python bench/gemm.py --out bench/results/gemm.json                 the whole table
    python bench/gemm.py --layers "7B down" --rows 1,16                a part of it
    python bench/gemm.py --tables                                      what is kept in results/gemm.json, for bench/gemm.md
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import multiprocessing
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import marlin_kernel
import nvfp4
from bench.machine import commit, machine

# layer: out-features of each part, in-features
LAYERS = {  # 14B's qkv and o have the shapes of 32B's
    "7B qkv": ((3584, 512, 512), 3584), "7B o": ((3584,), 3584),
    "7B gate_up": ((18944, 18944), 3584), "7B down": ((3584,), 18944),
    "14B qkv": ((5120, 1024, 1024), 5120), "14B o": ((5120,), 5120),
    "14B gate_up": ((13824, 13824), 5120), "14B down": ((5120,), 13824),
    "32B qkv": ((5120, 1024, 1024), 5120), "32B o": ((5120,), 5120),
    "32B gate_up": ((27648, 27648), 5120), "32B down": ((5120,), 27648),
}  # fmt: skip
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
BACKWARD_ROWS = (4096, 16384)
RANK = 32
RESULTS = Path(__file__).resolve().parent / "results" / "gemm.json"
FLOOR_BYTES_PER_S, FLOOR_FLOPS = 4.3e12, 790e12
NAMES = ("ours", "ours_lora32", "bf16", "humming", "bnb_nf4")
COLD_BYTES = 200e6  # the weights of one rotation; an H200's L2 holds 60 MB


def floor_us(m: int, n: int, k: int) -> float:
    return max(n * k * 9 / 16 / FLOOR_BYTES_PER_S, 2 * m * n * k / FLOOR_FLOPS) * 1e6


def copies(nbytes: float) -> int:
    return max(2, min(24, -(-int(COLD_BYTES) // int(nbytes))))


def time_calls(calls: list, repeats: int = 7) -> float:
    """Median microseconds of one call, from replays of a CUDA graph that makes all of them in turn."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # compile, create handles, allocate workspaces
            call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    slow = time.perf_counter() - started > 2e-3
    sequence = calls[:2] if slow else list(itertools.islice(itertools.cycle(calls), max(len(calls), 8)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in sequence:
            call()
    graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(3 if slow else repeats)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in events)
    return times[len(times) // 2] * 1e3 / len(sequence)


# --------------------------------------------------------------------------------------------------- contenders
# Each is built once a layer and returns, for an input, the calls of one rotation.


def random_parts(sizes: tuple[int, ...], k: int, device: str = "cuda") -> list[nvfp4.NVFP4Tensor]:
    """Random codes and scales of the usual size: every code is drawn, so nothing is as easy as zeros."""
    parts = []
    for n in sizes:
        packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
        scale = torch.randint(80, 120, (n, k // 16), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        parts.append(nvfp4.NVFP4Tensor(packed, scale, torch.full((1,), 2.0**14, device=device)))
    return parts


def random_lora(sizes: tuple[int, ...], k: int) -> marlin_kernel.LoraOperands:
    a, b = (torch.randn(shape, device="cuda").bfloat16() for shape in ((len(sizes) * RANK, k), (sum(sizes), RANK)))
    return marlin_kernel.LoraOperands(a, b, sizes, 1.0)


def ours(parts, k):
    w = marlin_kernel.pack(parts)
    n = w.n
    many = [
        marlin_kernel.MarlinWeight(**{**w.__dict__, "words": w.words.clone(), "scales": w.scales.clone()})
        for _ in range(copies(n * k * 9 / 16))
    ]
    loras = [random_lora(w.parts, k) for _ in many]

    def plain(x):
        y = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)
        return [lambda w=w: marlin_kernel.linear(x, w, out=y) for w in many]

    def with_lora(x):
        y = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)
        return [lambda w=w, a=a: marlin_kernel.linear(x, w, lora=a, out=y) for w, a in zip(many, loras)]

    def backward(dy):
        return [lambda w=w: marlin_kernel.grad_input(dy, w) for w in many]

    return {"ours": plain, "ours_lora32": with_lora, "ours_dx": backward}


def bf16(parts, k):
    n = sum(part.shape[0] for part in parts)
    many = [torch.randn(n, k, dtype=torch.bfloat16, device="cuda") for _ in range(copies(n * k * 2))]
    return {"bf16": lambda x: [lambda w=w: F.linear(x, w) for w in many],
            "bf16_dx": lambda dy: [lambda w=w: dy @ w for w in many]}  # fmt: skip


def humming(parts, k):
    from humming.layer import HummingLayer

    n, g = sum(part.shape[0] for part in parts), parts[0].global_scale
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "type": "float", "num_bits": 4,
              "strategy": "tensor_group", "symmetric": True, "group_size": 16}  # fmt: skip
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=torch.bfloat16).cuda()
    layer.load_from_tensors({"weight_packed": torch.cat([part.packed for part in parts]),
                             "weight_scale": torch.cat([part.scale.view(torch.uint8) for part in parts]
                                 ).view(torch.float8_e4m3fn),
                             "weight_global_scale": g})  # fmt: skip
    layer.transform()
    many = [layer] + [copy.deepcopy(layer) for _ in range(copies(n * k * 9 / 16) - 1)]
    return {"humming": lambda x: [lambda layer=layer: layer(x) for layer in many]}


def bnb_nf4(parts, k):
    import bitsandbytes as bnb

    n = sum(part.shape[0] for part in parts)
    matrix = torch.randn(n, k, dtype=torch.bfloat16, device="cuda")
    packed, state = bnb.functional.quantize_4bit(matrix, blocksize=64, quant_type="nf4")
    many = []
    for _ in range(copies(n * k * 9 / 16)):
        other = copy.copy(state)
        other.absmax = state.absmax.clone()
        many.append((packed.clone(), other))

    def calls(x):
        return [lambda p=p, s=s: bnb.matmul_4bit(x, p.t(), s) for p, s in many]

    return {"bnb_nf4": calls}


CONTENDERS = (ours, bf16, humming, bnb_nf4)


def _compile_humming(job: tuple[str, tuple[int, ...]]) -> str:
    """In a process of its own: humming compiles a kernel for each shape and range of rows with nvcc, one at a time."""
    try:
        sizes, k = LAYERS[job[0]]
        call = humming(random_parts(sizes, k), k)["humming"]
        for m in job[1]:
            call(torch.randn(m, k, dtype=torch.bfloat16, device="cuda"))[0]()
        torch.cuda.synchronize()
        return ""
    except Exception as error:  # a peer that does not work must not stop the table
        return f"{type(error).__name__}: {error}"


# -------------------------------------------------------------------------------------------------------- the table


def check(calls: dict, parts, k: int) -> dict[str, float]:
    """Relative error of each NVFP4 contender against fp32 on 16 rows: a fast wrong answer is worth nothing."""
    x = torch.randn(16, k, dtype=torch.bfloat16, device="cuda")
    exact = x.float() @ torch.cat([nvfp4.dequantize(part, torch.float32) for part in parts]).T
    names = [name for name in ("ours", "humming") if name in calls]
    results = {name: calls[name](x)[0]().float() for name in names}
    return {name: float((y - exact).norm() / exact.norm()) for name, y in results.items()}


def measure_layer(layer: str, rows: tuple[int, ...], contenders) -> tuple[list[dict], list[dict], dict]:
    sizes, k = LAYERS[layer]
    n, parts, calls, notes = sum(sizes), random_parts(sizes, k), {}, {}
    for contender in contenders:
        try:
            calls |= contender(parts, k)
        except Exception as error:  # noqa: BLE001 - an absent or broken peer is reported, not fatal
            notes[contender.__name__] = f"{type(error).__name__}: {error}"[:300]
    notes["relative error"] = check(calls, parts, k)
    table, backward = [], []
    for m in rows:
        x, us = torch.randn(m, k, dtype=torch.bfloat16, device="cuda"), {}
        for name in NAMES:
            if name in calls and not (name == "ours_lora32" and m > marlin_kernel.FUSED_ROWS):
                try:
                    us[name] = round(time_calls(calls[name](x)), 2)
                except Exception as error:  # noqa: BLE001
                    notes[f"{name} M={m}"] = f"{type(error).__name__}: {error}"[:300]
        table.append({"layer": layer, "N": n, "K": k, "M": m, "us": us, "floor_us": round(floor_us(m, n, k), 2)})
        if m in BACKWARD_ROWS:
            dy = torch.randn(m, n, dtype=torch.bfloat16, device="cuda")
            us = {name: round(time_calls(calls[f"{name}_dx"](dy)), 2) for name in ("ours", "bf16")}
            backward.append({"layer": layer, "N": n, "K": k, "M": m, "us": us, "floor_us": table[-1]["floor_us"]})
    return table, backward, notes


def print_table(rows: list[dict]) -> None:
    print(f"{'layer':12} {'M':>6} {'floor':>8} " + " ".join(f"{name:>11}" for name in NAMES) + "  floor%  x bf16")
    for row in rows:
        us = row["us"]
        cells = " ".join(f"{us[name]:11.1f}" if name in us else f"{'-':>11}" for name in NAMES)
        share, ratio = 100 * row["floor_us"] / us["ours"], us.get("bf16", float("nan")) / us["ours"]
        print(f"{row['layer']:12} {row['M']:6} {row['floor_us']:8.1f} {cells} {share:6.0f}% {ratio:7.2f}", flush=True)


def markdown(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])


def tables(result: dict) -> str:
    """What bench/gemm.md shows: ours beside cuBLAS and the floor, beside the faster peer, with LoRA, and backward."""
    cells = {(row["layer"], row["M"]): row for row in result["rows"]}
    ms = [m for m in ROWS if m not in (4, 8)]  # within 3% of M = 1 and 16
    layers = [name for name in LAYERS if name not in ("14B qkv", "14B o")]  # of the same shape as 32B's

    def line(layer: str, cell, rows=ms) -> list[str]:
        sizes, k = LAYERS[layer]
        return [f"{layer} {sum(sizes)} x {k}", *(cell(cells[layer, m]) for m in rows)]

    def ours(row: dict) -> str:
        us = row["us"]
        time = f"{us['ours']:.{0 if us['ours'] > 100 else 1}f}"
        return f"{time} ({us['bf16'] / us['ours']:.2f}, {row['floor_us'] / us['ours']:.0%})"

    def peers(row: dict) -> str:
        return f"{min(row['us'][name] for name in ('humming', 'bnb_nf4')) / row['us']['ours']:.2f}"

    def lora(size: str, m: int) -> str:
        sums = [sum(cells[f"{size} {layer}", m]["us"][name] for layer in ("qkv", "o", "gate_up", "down"))
                for name in ("ours", "ours_lora32")]  # fmt: skip
        return f"{sums[0]:.0f} + {sums[1] / sums[0] - 1:.0%}"

    head = [f"M = {m}" for m in ms]
    with_lora = [m for m in ms if "ours_lora32" in cells["7B o", m]["us"]]
    ratios = {(row["layer"], row["M"]): row["us"]["bf16"] / row["us"]["ours"] for row in result["dx"]}
    return "\n\n".join([
        markdown(["us (x bf16, share of the floor)", *head], [line(layer, ours) for layer in layers]),
        markdown(["faster peer's time / ours", *head], [line(layer, peers) for layer in layers]),
        markdown(["a layer's GEMMs, us + LoRA", *(f"M = {m}" for m in with_lora)],
                 [[size, *(lora(size, m) for m in with_lora)] for size in ("7B", "14B", "32B")]),
        markdown(["dX, x bf16", *layers],
                 [[f"M = {m}", *(f"{ratios[layer, m]:.2f}" for layer in layers)] for m in BACKWARD_ROWS]),
    ])  # fmt: skip


def this_gpu() -> dict:
    """What the numbers hold for, and the memory bandwidth of this very GPU."""
    big = torch.randn(1 << 29, device="cuda")
    read = big.nbytes / time_calls([lambda: big.sum()]) / 1e6
    other = torch.empty_like(big)
    both = 2 * big.nbytes / time_calls([lambda: other.copy_(big)]) / 1e6
    versions = {}
    for name in ("bitsandbytes", "humming"):
        try:
            versions[name] = __import__(name).__version__
        except Exception as error:  # noqa: BLE001
            versions[name] = f"absent ({type(error).__name__})"
    return machine() | {"read_TB_per_s": round(read, 3), "copy_TB_per_s": round(both, 3)} | versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of the code that is measured; default: git's HEAD")
    parser.add_argument("--without", default="", help="contenders to leave out, comma-separated")
    parser.add_argument("--tables", action="store_true", help="measure nothing: print the kept results")
    args = parser.parse_args()
    if args.tables:
        print(tables(json.loads(RESULTS.read_text())))
        return
    layers, rows = args.layers.split(","), tuple(map(int, args.rows.split(",")))
    contenders = [c for c in CONTENDERS if c.__name__ not in args.without.split(",")]
    if humming in contenders:
        shapes = {LAYERS[layer]: layer for layer in layers}
        jobs = [(layer, rows[i::2]) for layer in shapes.values() for i in range(2)]
        with multiprocessing.get_context("spawn").Pool(min(len(jobs), 16)) as pool:
            print("humming:", "; ".join({e for e in pool.map(_compile_humming, jobs) if e}) or "compiled", flush=True)
    result = {"commit": args.commit or commit(), "machine": this_gpu(), "rows": [], "dx": [], "notes": {}}
    print(json.dumps(result["machine"]))
    measured = {}
    for layer in layers:
        if LAYERS[layer] not in measured:  # 14B and 32B share qkv and o
            measured[LAYERS[layer]] = measure_layer(layer, rows, contenders)
        table, backward, notes = measured[LAYERS[layer]]
        result["rows"] += [{**row, "layer": layer} for row in table]
        result["dx"] += [{**row, "layer": layer} for row in backward]
        result["notes"][layer] = notes
        print_table([{**row, "layer": layer} for row in table])
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1))
    print("backward to the input (us): " + "; ".join(
        f"{r['layer']} M={r['M']} ours {r['us']['ours']:.0f} bf16 {r['us']['bf16']:.0f}" for r in result["dx"]))  # fmt: skip
    print("notes:", json.dumps(result["notes"]))


if __name__ == "__main__":
    main()
