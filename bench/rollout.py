"""Rollout speed: tokens a second beside the engine that trainers use today, and beside the memory's own limit.

    python bench/rollout.py --model Qwen2.5-7B --sequences 1,8,32,64,128,256
    python bench/rollout.py --model Qwen2.5-32B --sequences 1,8,32,64,128
    python bench/rollout.py --model Qwen2.5-7B --weights bf16 --sequences 8
    python bench/rollout.py --model Qwen2.5-7B --sequences 8,64 --no-lora
    python bench/rollout.py --model Qwen2.5-7B --grpo           32 prompts x 8 on 64 slots, lengths 64-1024
    python bench/rollout.py --model Qwen2.5-7B --sequences 8 --profile table.txt
    python bench/rollout.py --gap path/to/pretrained            what an FP8 cache and an NVFP4 head cost in log-probs
    python bench/rollout.py --table                             the kept rows beside their peer, for README.md

The work: random weights of the published shape, LoRA rank 32 on all seven projections, distinct 256-token prompts, 512
forced tokens, temperature 1, sampled-token log-probs on. tok_per_s is new tokens over the wall time of the whole call,
prefill included, warm. ms_step is (wall - prefill) / steps. floor_ms is the least time for the bytes that a step must
read (packed weights, adapters, lm_head, keys and values at the mean context) at BANDWIDTH, or for its flops at FLOPS.
Rows go to bench/results/rollout.json; a row with the same settings is replaced.
Peers: vLLM 0.24.0, Marlin NVFP4 or bf16 + LoRA, FlashAttention 3, CUDA graphs, on an H200 with the same work.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rollout as rollout_module
from bench.machine import machine
from layers.shapes import SHAPES
from lora import add_adapters, lora_layers
from model import random_model
from rollout import Rollout, Sampling

BANDWIDTH = 4.3e12  # bytes/s read, measured on an H200
FLOPS = 790e12  # bf16 FLOP/s, measured on an H200
RESULTS = Path(__file__).resolve().parent / "results" / "rollout.json"
VLLM = {  # tokens/s with LoRA rank 32 on all projections
    ("Qwen2.5-7B", "bf16"): {1: 158, 8: 1280, 32: 4664, 64: 7424, 128: 11014, 256: 15200},
    ("Qwen2.5-7B", "nvfp4"): {1: 198, 8: 1596, 32: 5089, 64: 7048, 128: 7898, 256: 9957},
    ("Qwen2.5-32B", "nvfp4"): {1: 65, 8: 515, 32: 1466, 64: 1937, 128: 2172},
}


def build(options):
    model = random_model(SHAPES[options.model], options.weights, options.device)
    if options.lora:
        add_adapters(model, 32, 32.0, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            for layer in lora_layers(model):
                for b in layer.lora_B.values():
                    b.normal_(0, 0.01)
                layer.operands()
    return model


def floor_ms(model, sequences: int, context: float, kv_bytes: int) -> float:
    """The least time of one decode step: bytes over bandwidth, or flops over peak."""
    config, layers = model.config, lora_layers(model)
    weights = sum(layer.weight.nbytes for layer in layers) + model.head.nbytes
    adapters = sum(o.a.nbytes + o.b.nbytes for layer in layers if (o := layer.operands()) is not None)
    cache = 2 * config.layers * config.kv_heads * config.head_dim * kv_bytes * context * sequences
    linears = sum(layer.weight.shape[0] * layer.weight.shape[1] for layer in layers) + model.head.numel()
    return 1e3 * max((weights + adapters + cache) / BANDWIDTH, 2 * linears * sequences / FLOPS)


def make_prompts(model, count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(model.config.vocab, (count, length), generator=generator).tolist()


def make_rollout(model, options, max_len: int, slots: int) -> Rollout:
    kv_dtype = {"bf16": None, "fp8": torch.float8_e4m3fn}[options.kv]
    return Rollout(model, max_len=max_len, slots=slots, kv_dtype=kv_dtype, head=options.head)


def forced(model, sequences: int, options) -> dict:
    """One row of the table."""
    rollout = make_rollout(model, options, options.prompt + options.new, sequences)
    prompts = make_prompts(model, sequences, options.prompt)
    rollout.generate(prompts, 1, Sampling(4))  # warm: kernels compiled, the graph recorded
    rollout.generate(prompts, 1, Sampling(options.new))
    stats = rollout.stats
    floor = floor_ms(model, sequences, options.prompt + options.new / 2, rollout.kv_dtype.itemsize)
    ms_step = 1e3 * (stats["seconds"] - stats["prefill_seconds"]) / stats["decode_steps"]
    row = row_of(options, sequences, "forced") | {
        "tok_per_s": round(stats["tok_per_s"]), "ms_step": round(ms_step, 3), "floor_ms": round(floor, 3),
        "floor_share": round(floor / ms_step, 3), "prefill_ms": round(1e3 * stats["prefill_seconds"], 1),
    }  # fmt: skip
    if options.profile:
        with open(options.profile, "a") as file:
            file.write(profile(rollout, sequences))
    rollout.free()
    return row


def grpo_shaped(model, options) -> dict:
    """32 prompts x group 8 on 64 slots, lengths from 64 to 1024: the host learns of a stop only by looking."""
    lengths = np.random.default_rng(0).integers(64, 1025, 256)

    def ends_at_length(key, size):
        """The stream that draws id 0, the stop id, as the sample's last token: u = 0 is the first token's."""
        u = np.maximum(real(key, size), 1e-3)
        u[lengths[key[2] * 8 + key[3]] - 1] = 0.0
        return u

    real, rollout_module.uniforms = rollout_module.uniforms, ends_at_length
    try:
        rollout = make_rollout(model, options, options.prompt + 1024, 64)
        prompts = make_prompts(model, 32, options.prompt)
        rollout.generate(prompts[:8], 8, Sampling(1024, stop_ids=(0,)))  # warm: every batch size is met in the tail
        completions = rollout.generate(prompts, 8, Sampling(1024, stop_ids=(0,)))
    finally:
        rollout_module.uniforms = real
    useful = sum(len(c.tokens) for group in completions for c in group)
    return row_of(options, 64, "grpo") | {
        "tok_per_s": round(rollout.stats["tok_per_s"]), "lengths_exact": bool(useful == lengths.sum()),
        "prefill_ms": round(1e3 * rollout.stats["prefill_seconds"], 1), "decode_steps": rollout.stats["decode_steps"],
    }  # fmt: skip


def row_of(options, sequences: int, work: str) -> dict:
    return {"model": options.model, "weights": options.weights, "lora": 32 if options.lora else 0,
            "sequences": sequences, "work": work, "kv": options.kv, "head": options.head}  # fmt: skip


TEXTS = (
    "The three laws of motion say that",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many",
    "def quicksort(values):",
    "In the year 1453, the city of",
)


@torch.no_grad()
def gap(name: str, device: str) -> None:
    """|sampler's log-prob - the trainer's| on a pretrained model, for the rollout's cheaper options."""
    from convert.loader import load_model

    model, tokenizer, info = load_model(name, weights="nvfp4", device=device)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    for kv, head in (("bf16", "16bit"), ("fp8", "16bit"), ("bf16", "nvfp4")):
        kv_dtype = torch.float8_e4m3fn if kv == "fp8" else None
        groups = Rollout(model, max_len=128, kv_dtype=kv_dtype, head=head).generate(prompts, 2, Sampling(64))
        gaps = []
        for prompt, group in zip(prompts, groups):
            for c in group:
                tokens = torch.tensor(prompt + c.tokens, device=device)
                logp = model.logits(model(tokens, model.packed([len(tokens)])))[len(prompt) - 1 : -1].log_softmax(-1)
                taken = logp.cpu().gather(1, torch.tensor(c.tokens)[:, None])[:, 0]
                gaps.append(taken - torch.tensor(c.logps))
        found = torch.cat(gaps)
        row = {"model": Path(name).name, "weights": "nvfp4", "lora": 0, "sequences": 8, "work": "gap", "kv": kv, "head": head,
               "device": device, "mean_abs_gap": round(found.abs().mean().item(), 5),
               "max_abs_gap": round(found.abs().max().item(), 4), "mean_gap": round(found.mean().item(), 5)}  # fmt: skip
        save(row)
        print(row)


def profile(rollout: Rollout, batch: int) -> str:
    """Where the time of one decode step goes, kernel by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    rollout.decoder.step(batch)
    torch.cuda.synchronize()
    with torch_profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            rollout.decoder.step(batch)
        torch.cuda.synchronize()
    table = profiler.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=60)
    return f"five steps at {batch} sequences\n{table}\n"


def save(row: dict) -> None:
    keys = ("model", "weights", "lora", "sequences", "work", "kv", "head")
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    rows = [old for old in rows if any(old[k] != row[k] for k in keys)] + [row | machine()]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("[\n" + ",\n".join("  " + json.dumps(r) for r in rows) + "\n]\n")


def table() -> str:
    """The kept NVFP4 rows with LoRA beside vLLM's, and the share of the floor of a decode step."""
    kind = {"work": "forced", "weights": "nvfp4", "lora": 32, "kv": "bf16", "head": "16bit"}
    rows = {(row["model"], row["sequences"]): row for row in json.loads(RESULTS.read_text())
            if all(row[name] == value for name, value in kind.items())}
    counts = sorted({n for _, n in rows})
    lines = [["tok/s", *(f"{n} sequences" if n > 1 else "1 sequence" for n in counts)], ["---"] * (len(counts) + 1)]
    for model in dict.fromkeys(model for model, _ in rows):
        peers = VLLM[model, "nvfp4"]
        found = [(rows.get((model, n)), peers.get(n)) for n in counts]
        cells = (f"{row['tok_per_s']:,} ({row['tok_per_s'] / peer:.2f}x)" if row else "-" for row, peer in found)
        lines.append([model, *cells])
        lines.append(["vLLM", *(f"{peer:,}" if peer else "-" for _, peer in found)])
        lines.append(["share of the floor, a decode step", *(f"{row['floor_share']:.0%}" if row else "-" for row, _ in found)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="Qwen2.5-7B", choices=SHAPES)
    parser.add_argument("--weights", default="nvfp4", choices=("nvfp4", "nf4", "bf16"))
    parser.add_argument("--sequences", default="", help="comma separated")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--no-lora", dest="lora", action="store_false")
    parser.add_argument("--kv", default="bf16", choices=("bf16", "fp8"))
    parser.add_argument("--head", default="16bit", choices=("16bit", "nvfp4"))
    parser.add_argument("--grpo", action="store_true", help="GRPO-shaped work")
    parser.add_argument("--profile", default="", help="file to append kernel tables to")
    parser.add_argument("--gap", default="", help="folder of a pretrained model")
    parser.add_argument("--table", action="store_true", help="measure nothing: print the kept rows")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.table:
        return print(table())
    if options.gap:
        return gap(options.gap, options.device)
    started = time.perf_counter()
    model = build(options)
    print(f"{options.model} {options.weights} lora={options.lora} built in {time.perf_counter() - started:.1f} s", flush=True)
    rows = [("forced", int(n)) for n in options.sequences.split(",") if n] + [("grpo", 64)] * options.grpo
    for work, sequences in rows:
        row = forced(model, sequences, options) if work == "forced" else grpo_shaped(model, options)
        save(row)
        peer = VLLM.get((options.model, options.weights), {}).get(sequences) if work == "forced" and options.lora else None
        beside = f"   vLLM {peer}: {row['tok_per_s'] / peer:.2f}x" if peer else ""
        print(" ".join(f"{k}={v}" for k, v in row.items() if k not in ("model", "weights")) + beside, flush=True)


if __name__ == "__main__":
    main()
