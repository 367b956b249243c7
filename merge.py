"""An adapter merged into a bf16 model that other programs load, with the logits that were trained.

The idea: what was trained is the adapter beside the *quantised* weights. So that is what is exported:

    W_merged = bf16( dequantise(quantise(W)) + alpha/R * B A )          not  W + alpha/R * B A

    python lora.py merge MODEL ADAPTER OUT [--weights nvfp4]

The original 16-bit W differs from its 4-bit form by about 10% of its norm, and the adapter has learnt to work with those
errors: beside W it is another model. Rounding W_merged to 4 bits again loses the adapter, B A being far smaller than the
steps between 4-bit levels (run this file). To serve in 4 bits, serve the NVFP4 checkpoint (nvfp4.py quantize) with the
adapter beside it.

    layer 0  read 4 matrices -> quantise as in training -> dequantise, fp32 -> + B A -> bf16 -> shard on disk
    layer 1  ...                                            one layer in memory at a time
    embeddings, norms, biases, head: as they are, in bf16; tokenizer, chat template, generation config: copied

Where we differ: peft's merge_and_unload adds to whatever base it was loaded on, and leaves this choice to its caller.
Cost: one pass over the checkpoint; a 32B model needs 62 GiB of disk and the memory of one layer.
Limits: the sum is rounded to bf16 once: logits move by bf16's 2^-9. --dtype float32 keeps them to fp32 rounding.
Copy along: lora.py, model.py and what they need, hub.py, shards.py, loader.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from hub import quantised_layout, read_config, resolve_model
from loader import CheckpointSource, model_config
from lora import check_fit, lora_layers
from model import Builder, Layer, ModelConfig
from peft_files import Adapter, read_adapter
from shards import SHARD_BYTES, ShardReader, copy_side_files, whole_folder, write_shards
from weights import KINDS

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@torch.no_grad()
def merged_tensors(
    config: ModelConfig, source: CheckpointSource, adapter: Adapter, weights: str, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the merged model, a layer in memory at a time."""
    device = torch.device(source.device)
    make = Builder(source, weights, device, torch.bfloat16 if device.type == "cuda" else torch.float32, full=False)
    for i in range(config.layers):
        for linear in lora_layers(Layer(config, i, make)):  # quantised exactly as for training
            matrix = linear.weight.dequantize(torch.float32)
            for name, w in zip(linear.parts, matrix.split(list(linear.parts.values()))):
                path = f"{linear.path}.{name}"
                if path in adapter.pairs:
                    a, b = (tensor.to(device) for tensor in adapter.pairs[path])
                    w = torch.addmm(w, b, a, alpha=adapter.alpha / adapter.rank)
                yield f"{path}.weight", w.to(dtype)
    for name in source.reader.names():
        if name.startswith("lm_head.") or ("_proj." in name and not name.endswith(".bias")):
            continue
        yield name, source(name, source.reader.infos[name].shape).to(dtype)
    if any(name.startswith("lm_head.") for name in source.reader.names()):  # in whatever form: the source decodes it
        yield "lm_head.weight", source("lm_head.weight", (config.vocab, config.hidden)).to(dtype)


def merge(
    model: str,
    adapter_folder: str,
    out: str,
    weights: str = "nvfp4",
    dtype: str = "bfloat16",
    device: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes `model` with the adapter merged in to the folder `out`, new or empty.

    weights: how the base was held in training. ValueError (one line) for whatever does not fit together.
    """
    folder, adapter = resolve_model(model), read_adapter(adapter_folder)
    raw = read_config(folder)
    config = model_config(folder, raw, weights)
    check_fit(adapter, config.projections(), adapter_folder)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    source = CheckpointSource(ShardReader(folder), quantised_layout(folder, raw), device)
    with whole_folder(Path(out)) as partial:
        write_shards(merged_tensors(config, source, adapter, weights, DTYPES[dtype]), partial, shard_bytes)
        copy_side_files(folder, partial)
        (partial / "hf_quant_config.json").unlink(missing_ok=True)
        left = {key: value for key, value in raw.items() if key not in ("quantization_config", "torch_dtype")}
        (partial / "config.json").write_text(json.dumps({**left, "dtype": dtype, "torch_dtype": dtype}, indent=1))


def demo() -> None:
    """Why the sum is not rounded to 4 bits again, on one matrix and an adapter of a typical size."""
    import nvfp4

    generator = torch.Generator().manual_seed(0)
    w = nvfp4.dequantize(nvfp4.quantize(torch.randn(256, 256, generator=generator)), torch.float32)
    delta = torch.randn(256, 8, generator=generator) @ torch.randn(8, 256, generator=generator) * 0.003
    print(f"|W| = {w.norm():.1f}, |BA| = {delta.norm():.2f}; how far is what is left of BA from BA, relatively?")
    print(f"  merged in bf16        {((w + delta).bfloat16().float() - w - delta).norm() / delta.norm():.3f}")
    back = nvfp4.dequantize(nvfp4.quantize(w + delta), torch.float32)
    print(f"  merged in NVFP4       {(back - w - delta).norm() / delta.norm():.3f}      (1 = as if there were no adapter)")


def main(arguments: list[str]) -> int:
    if not arguments:
        demo()
        return 0
    parser = argparse.ArgumentParser(prog="lora.py merge", description="a merged 16-bit model that transformers loads")
    parser.add_argument("model", help="hub name or folder of the base model")
    parser.add_argument("adapter", help="folder of the PEFT adapter")
    parser.add_argument("out", help="folder to write; must not exist or be empty")
    parser.add_argument("--weights", choices=KINDS, default="nvfp4", help="how the base was held in training [nvfp4]")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the tensors written [bfloat16]")
    options = parser.parse_args(arguments)
    try:
        merge(options.model, options.adapter, options.out, options.weights, options.dtype)
    except (ValueError, OSError) as error:
        print(f"lora.py merge: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
