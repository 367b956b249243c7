"""A 32B NVFP4 checkpoint made on the spot, and train.py on it, inside an 80 GB card and without memory flags.

    python bench/big_checkpoint.py runs/big                           Qwen2.5-32B's shape, some 20 GB; 3 steps within 79 GiB
    python bench/big_checkpoint.py runs/big --layers 2 --shape Qwen2.5-0.5B --flags "--steps 1 --max-new-tokens 8"
                                                                      a small one, on a CPU as well

Codes and scales are random, of the size that real ones have; the tokenizer is the embedded model's, so only its tokens are drawn.
Nothing can be learnt, so the reward is a coin thrown with the completion's text: groups differ, and every step trains. The
checkpoint stays in FOLDER/model and is used again. What train.py plans and says of memory is printed as it says it; the last
line names the peak of the process against the cap. bench/results/big_checkpoint.json keeps it.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train
from bench.machine import machine
from bench.step import cap_memory
from files.layouts import quantization_config, to_layout
from files.shards import copy_side_files, whole_folder, write_shards
from layers.shapes import SHAPES, ModelConfig
from nvfp4 import NVFP4Tensor

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "big_checkpoint.json"
LAYOUT = "compressed-tensors"


def coin(prompt: str, completion: str, answer: str) -> float:
    """0 or 1, by the text alone."""
    return float(hashlib.sha256(completion.encode()).digest()[0] % 2)


def random_nvfp4(n: int, k: int, device: str) -> NVFP4Tensor:
    """Weights of about N(0, 1/K): random codes, block scales from 64 to 240, and the g that brings them there."""
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    scale = torch.randint(0x68, 0x77, (n, k // 16), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return NVFP4Tensor(packed, scale, torch.full((1,), 400.0 * math.sqrt(k), device=device))


def tensors(shape: ModelConfig, device: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint, one after the other."""
    def bf16(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.bfloat16, device=device) * 0.02

    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    linears = {"self_attn.q_proj": (q, shape.hidden), "self_attn.k_proj": (kv, shape.hidden),
               "self_attn.v_proj": (kv, shape.hidden), "self_attn.o_proj": (shape.hidden, q),
               "mlp.gate_proj": (shape.ffn, shape.hidden), "mlp.up_proj": (shape.ffn, shape.hidden),
               "mlp.down_proj": (shape.hidden, shape.ffn)}  # fmt: skip
    yield "model.embed_tokens.weight", bf16(shape.vocab, shape.hidden)
    for i in range(shape.layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{i}.{norm}.weight", torch.ones(shape.hidden, dtype=torch.bfloat16)
        for name, (n, k) in linears.items():
            for part, tensor in to_layout(random_nvfp4(n, k, device), LAYOUT).items():
                yield f"model.layers.{i}.{name}.{part}", tensor
            if shape.qkv_bias and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                yield f"model.layers.{i}.{name}.bias", bf16(n)
    yield "model.norm.weight", torch.ones(shape.hidden, dtype=torch.bfloat16)
    if not shape.tied:
        yield "lm_head.weight", bf16(shape.vocab, shape.hidden)


def make(shape: ModelConfig, folder: Path, device: str) -> None:
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": shape.model_type, "hidden_size": shape.hidden,
              "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
              "intermediate_size": shape.ffn, "vocab_size": shape.vocab, "rms_norm_eps": shape.eps,
              "rope_theta": shape.rope_theta, "tie_word_embeddings": shape.tied, "hidden_act": "silu",
              "max_position_embeddings": 32768, "dtype": "bfloat16",
              "quantization_config": quantization_config(LAYOUT, ["lm_head"])}  # fmt: skip
    with whole_folder(folder) as partial:
        write_shards(tensors(shape, device), partial)
        copy_side_files(ROOT / "assets" / "tiny", partial)
        (partial / "config.json").write_text(json.dumps(config, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="Qwen2.5-32B", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--cap-gib", type=float, default=79, help="memory that the whole process may use, on a GPU [79]")
    parser.add_argument("--flags", default="--steps 3 --prompts 8 --max-new-tokens 1024",
                        help="of train.py, besides model, data, reward and folder [--steps 3 --prompts 8 --max-new-tokens 1024]")
    options = parser.parse_args()
    shape, device = SHAPES[options.shape], "cuda" if torch.cuda.is_available() else "cpu"
    shape = dataclasses.replace(shape, layers=options.layers or shape.layers)
    model, started = options.folder / "model", time.monotonic()
    if not model.exists():
        make(shape, model, device)
        size = sum(path.stat().st_size for path in model.iterdir()) / 1e9
        print(f"{model}: {size:.1f} GB made in {time.monotonic() - started:.0f} s", flush=True)
        torch.cuda.empty_cache()
    context = cap_memory(options.cap_gib) if device == "cuda" else 0
    out, started = options.folder / time.strftime("run-%m%d-%H%M%S"), time.monotonic()
    flags = ["--model", str(model), "--data", "arithmetic", "--reward", f"{__file__}:coin", "--out", str(out)]
    flags += ["--eval-every", "0", *shlex.split(options.flags)]
    code = train.main(flags)
    peak = (context + (torch.cuda.max_memory_reserved() if device == "cuda" else 0)) / 2**30
    steps = [row for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "reward" in row]
    print(f"{len(steps)} steps, exit code {code}, {time.monotonic() - started:.0f} s; peak {peak:.1f} GiB of {options.cap_gib:g}")
    row = {"shape": options.shape, "layers": shape.layers, "flags": options.flags, "cap_gib": options.cap_gib, "exit_code": code,
           "steps": len(steps), "peak_gib": round(peak, 2), "step_time": [row["step_time"] for row in steps]}  # fmt: skip
    if device == "cuda":
        RESULTS.write_text(json.dumps(machine() | row) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
