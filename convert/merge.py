"""An adapter merged into a bf16 model that other programs load, with the logits that were trained.

The idea: what was trained is the adapter beside the *quantised* weights. So that is what is exported:

    W_merged = bf16( dequantise(quantise(W)) + alpha/R * B A )          not  W + alpha/R * B A

    python lora.py merge MODEL ADAPTER OUT [--weights nvfp4]

The original 16-bit W differs from its 4-bit form by about 10% of its norm, and the adapter has learnt to work with those
errors: beside W it is another model. Rounding W_merged to 4 bits again loses a B A that is small beside the steps between
4-bit levels: all of one of 0.8% of |W|, but a sixth of one of 10% (run this file). The tiny model's, of 10%, survives (0.960
after it, 0.968 before, of 1,000 problems: bench/requantised.py); another one may not. To serve in 4 bits, serve the
NVFP4 checkpoint (nvfp4.py quantize) with the adapter beside it.

    layer 0  read 4 matrices -> quantise as in training -> dequantise, fp32 -> + B A -> bf16 -> shard on disk
    layer 1  ...                                            one layer in memory at a time
    embeddings, norms, biases, head: as they are, in bf16; tokenizer, chat template, generation config: copied

save_model does the same with a model in memory; after full-parameter training (--full) it is the export.

Where we differ: peft's merge_and_unload adds to whatever base it was loaded on, and leaves this choice to its caller.
Cost: one pass over the checkpoint; a 32B model needs 62 GiB of disk and the memory of one layer.
Limits: the sum is rounded to bf16 once: logits move by bf16's 2^-9. --dtype float32 keeps them to fp32 rounding.
Copy along: nvfp4.py, lora.py, model.py, layers/weights.py, files/hub.py, files/shards.py, files/peft_files.py, convert/loader.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from convert.loader import CheckpointSource, model_config
from files.hub import quantised_layout, read_config, resolve_model
from files.peft_files import Adapter, read_adapter
from files.shards import SHARD_BYTES, ShardReader, copy_side_files, whole_folder, write_shards
from layers.weights import KINDS
from lora import adapter_pairs, check_fit, lora_layers
from model import Builder, Layer, ModelConfig, Transformer

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@torch.no_grad()
def layer_tensors(layer: Layer, adapter: Adapter | None, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """One layer under its Hugging Face names: weights as the model computes with them, plus the adapter."""
    path = f"model.layers.{layer.index}"
    norms = {"input_layernorm": layer.input_norm, "post_attention_layernorm": layer.post_norm}
    if layer.config.qk_norm:
        norms |= {"self_attn.q_norm": layer.q_norm, "self_attn.k_norm": layer.k_norm}
    for name, norm in norms.items():
        yield f"{path}.{name}.weight", norm.detach().to(dtype)
    for linear in lora_layers(layer):
        rows = list(linear.parts.values())
        matrices = linear.weight.dequantize(torch.float32).split(rows)
        biases = [None] * len(rows) if linear.bias is None else linear.bias.detach().split(rows)
        for name, w, bias in zip(linear.parts, matrices, biases):
            name = f"{linear.path}.{name}"
            if adapter is not None and name in adapter.pairs:
                a, b = (master.detach().to(w.device) for master in adapter.pairs[name])
                w = torch.addmm(w, b, a, alpha=adapter.alpha / adapter.rank)
            yield f"{name}.weight", w.to(dtype)
            if bias is not None:
                yield f"{name}.bias", bias.to(dtype)


def merged_tensors(
    config: ModelConfig, source: CheckpointSource, adapter: Adapter, weights: str, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a checkpoint with the adapter merged in: quantised as in training, a layer at a time."""
    device = torch.device(source.device)
    make = Builder(source, weights, device, torch.bfloat16 if device.type == "cuda" else torch.float32, full=False)
    table = (config.vocab, config.hidden)
    yield "model.embed_tokens.weight", source("model.embed_tokens.weight", table).to(dtype)
    for i in range(config.layers):
        yield from layer_tensors(Layer(config, i, make), adapter, dtype)
    yield "model.norm.weight", source("model.norm.weight", table[1:]).to(dtype)
    if not config.tied:
        yield "lm_head.weight", source("lm_head.weight", table).to(dtype)


def live_tensors(model: Transformer, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The same of a model in memory, with its present adapter or its fully trained weights."""
    adapted = [layer for layer in lora_layers(model) if len(layer.lora_A)]
    adapter = Adapter(adapted[0].rank, adapted[0].alpha, adapter_pairs(model)) if adapted else None
    yield "model.embed_tokens.weight", model.embed.detach().to(dtype)
    for layer in model.layers:
        yield from layer_tensors(layer, adapter, dtype)
    yield "model.norm.weight", model.final_norm.detach().to(dtype)
    if not model.config.tied:
        yield "lm_head.weight", model.head.detach().to(dtype)


def _write(tensors: Iterator[tuple[str, Tensor]], base: Path, out: Path, dtype: str, shard_bytes: int) -> None:
    """Shards, and what transformers needs beside them; config.json without what it said about quantised weights."""
    with whole_folder(out) as partial:
        write_shards(tensors, partial, shard_bytes)
        copy_side_files(base, partial)
        (partial / "hf_quant_config.json").unlink(missing_ok=True)
        raw = {key: value for key, value in read_config(base).items() if key != "quantization_config"}
        (partial / "config.json").write_text(json.dumps({**raw, "dtype": dtype, "torch_dtype": dtype}, indent=1))


def save_model(
    model: Transformer, base: str, out: Path | str, dtype: str = "bfloat16", shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes a model in memory (after --full, or with its adapter merged in) as a folder that transformers loads.

    base: the model it was loaded from, for tokenizer and config. An older export in `out` is replaced, after the new
    one is whole. ValueError or OSError when it cannot be written.
    """
    out = Path(out)
    new = out.with_name(f"{out.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    _write(live_tensors(model, DTYPES[dtype]), resolve_model(base), new, dtype, shard_bytes)
    shutil.rmtree(out, ignore_errors=True)
    new.rename(out)


def merge(
    model: str,
    adapter_folder: str,
    out: str,
    weights: str = "nvfp4",
    dtype: str = "bfloat16",
    device: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Writes `model` with the adapter merged in to the folder `out`, new or empty; returns how many matrices it changed.

    weights: how the base was held in training. ValueError (one line) for whatever does not fit together.
    """
    folder, adapter = resolve_model(model), read_adapter(adapter_folder)
    raw = read_config(folder)
    config = model_config(folder, raw, weights)
    check_fit(adapter, config.projections(), adapter_folder)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    source = CheckpointSource(ShardReader(folder), quantised_layout(folder, raw), device)
    _write(merged_tensors(config, source, adapter, weights, DTYPES[dtype]), folder, Path(out), dtype, shard_bytes)
    return len(adapter.pairs)


def demo() -> None:
    """What is left of an adapter when the sum is rounded, to 16 bits and to 4 again, by its size."""
    import nvfp4

    generator = torch.Generator().manual_seed(0)
    w = nvfp4.dequantize(nvfp4.quantize(torch.randn(256, 256, generator=generator)), torch.float32)
    direction = torch.randn(256, 8, generator=generator) @ torch.randn(8, 256, generator=generator)
    print("left of BA: the share of it that is still there (1 is all of it), and the error beside it, relative to |BA|")
    for scale in (0.003, 0.035):
        delta = direction * scale
        print(f"|BA| = {delta.norm() / w.norm():.1%} of |W|")
        for name, merged in (("bf16 ", (w + delta).bfloat16().float()),
                             ("NVFP4", nvfp4.dequantize(nvfp4.quantize(w + delta), torch.float32))):
            share = ((merged - w) * delta).sum() / delta.square().sum()
            error = (merged - w - share * delta).norm() / delta.norm()
            print(f"  merged in {name}   {share:.2f} left, error {error:.2f}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="lora.py merge", description="a merged 16-bit model that transformers loads")
    parser.add_argument("model", help="hub name or folder of the base model")
    parser.add_argument("adapter", help="folder of the PEFT adapter")
    parser.add_argument("out", help="folder to write; must not exist or be empty")
    parser.add_argument("--weights", choices=KINDS, default="nvfp4", help="how the base was held in training [nvfp4]")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the tensors written [bfloat16]")
    options = parser.parse_args(arguments)
    try:
        merged = merge(options.model, options.adapter, options.out, options.weights, options.dtype)
    except (ValueError, OSError) as error:
        print(f"lora.py merge: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {options.model} in {options.dtype}, {merged} weights with their adapter merged in")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) if len(sys.argv) > 1 else demo())
