"""The small kernels of a decode step, one by one: microseconds, and the time that their bytes need.

    python bench/small_kernels.py                     Qwen2.5-7B's shapes
    python bench/small_kernels.py --sweep             tiles of the attention kernel as well

Each is timed as a CUDA graph of one launch a layer (28 caches and activations, far more than the L2), so that launches cost
what they cost inside a decode step. Context 512, bf16. Rows go to bench/results/kernels.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.machine import machine
from decoding.attention import KVCache
from decoding.decode import DONE, Decoder
from gpu import decode_attention
from gpu.decode_attention import FusedDecodeAttention
from gpu.fused_ops import add_rms_norm, swiglu
from gpu.fused_sampling import FusedSampler
from layers.shapes import SHAPES
from sampling import Sampling

BANDWIDTH = 4.3e12  # bytes/s, measured on an H200
RESULTS = Path(__file__).resolve().parent / "results" / "kernels.json"


def graph_us(launch_all, launches: int, repeats: int = 10) -> float:
    """Median microseconds of one launch, from replays of a graph that makes `launches` of them."""
    launch_all()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        launch_all()
        graph.capture_end()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 1e3 * sorted(times)[repeats // 2] / launches


def attention_case(config, batch: int, context: int, max_len: int):
    cache = KVCache(config, batch, max_len, torch.bfloat16, "cuda")
    cache.kv.normal_()
    angle = torch.rand(max_len, config.head_dim // 2, device="cuda")
    qkv = torch.randn(batch, config.heads + 2 * config.kv_heads, config.head_dim, device="cuda", dtype=torch.bfloat16)
    fused = FusedDecodeAttention(cache, config.heads, angle.cos(), angle.sin())
    position = torch.full((batch,), context, device="cuda")
    return fused.at(position), qkv.split((config.heads, config.kv_heads, config.kv_heads), dim=1)


def attention_us(config, batch: int, context: int = 512) -> float:
    attend, qkv = attention_case(config, batch, context, 768)
    return graph_us(lambda: [attend(layer, *qkv) for layer in range(config.layers)], config.layers)


def sampler_us(config, batch: int) -> float:
    cache = KVCache(SHAPES["Qwen2.5-0.5B"], batch, 8, torch.bfloat16, "cuda")
    decoder = Decoder(None, cache, torch.zeros(8, 32), torch.zeros(8, 32))
    import numpy as np

    decoder.begin(np.full((batch, 8), 0.5, dtype=np.float32), Sampling(8), None)
    decoder.state[DONE] = 0
    sampler = FusedSampler(batch, config.vocab, config.vocab, "cuda")
    logits = torch.randn(batch, config.vocab, device="cuda")
    return graph_us(lambda: [sampler(decoder, logits, False) for _ in range(4)], 4)


def table(config) -> list[dict]:
    rows = []
    for batch in (1, 8, 32, 64, 128, 256):
        x = torch.randn(config.layers, batch, config.hidden, device="cuda", dtype=torch.bfloat16)
        gate_up = torch.randn(config.layers, batch, 2 * config.ffn, device="cuda", dtype=torch.bfloat16)
        weight = torch.ones(config.hidden, device="cuda")
        kv_bytes = 2 * batch * 512 * config.kv_heads * config.head_dim * 2
        measured = {
            "attention": (attention_us(config, batch), kv_bytes),
            "add_rms_norm": (
                graph_us(lambda x=x, w=weight: [add_rms_norm(r, r, w, 1e-6) for r in x], config.layers),
                8 * batch * config.hidden,
            ),
            "swiglu": (graph_us(lambda g=gate_up: [swiglu(r) for r in g], config.layers), 6 * batch * config.ffn),
            "sampler": (sampler_us(config, batch), 4 * batch * config.vocab),
        }
        for name, (us, size) in measured.items():
            rows.append({"kernel": name, "batch": batch, "us": round(us, 2), "floor_us": round(1e6 * size / BANDWIDTH, 2)})
        print(f"batch {batch:3d}: " + "  ".join(f"{r['kernel']} {r['us']} ({r['floor_us']})" for r in rows[-4:]), flush=True)
    return rows


def sweep(config) -> None:
    tiles = ((64, 4, 3), (128, 4, 2), (64, 2, 3), (32, 2, 4), (32, 1, 4), (64, 1, 2))
    for batch in (8, 64):
        found = []
        for decode_attention.TILE in tiles:
            for decode_attention.PROGRAMS in (264, 528):
                us = attention_us(config, batch)
                found.append((round(us, 2), *decode_attention.TILE, decode_attention.PROGRAMS))
        print(f"attention batch {batch} (us, block, warps, stages, programs):", sorted(found)[:6], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    config = SHAPES["Qwen2.5-7B"]
    rows = table(config)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("[\n" + ",\n".join("  " + json.dumps(r | machine()) for r in rows) + "\n]\n")
    if options.sweep:
        sweep(config)


if __name__ == "__main__":
    main()
