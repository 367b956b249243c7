"""Models in: model, tokenizer and generation info from a name, one projection of the checkpoint in memory at a time.

The idea: model.Transformer builds itself layer by layer and asks for each tensor by name. The answer is read from its
shard at that moment, moved to the GPU, quantised there and forgotten here. A 62 GiB checkpoint passes through a few
hundred MiB and leaves 18 GiB on the card.

    resolve_model ──> folder ──> ShardReader ──> CheckpointSource(name, shape) ──> Transformer ──> quantised layers
     files/hub.py           files/shards.py        float tensor or NVFP4Tensor       model.py       layers/weights.py

What the checkpoint holds for a projection, and what is made of it (`weights` = what the caller asks for):

    in the checkpoint               weights="nvfp4"          "bf16"             "nf4"
    fp32, fp16, bf16                quantised here           as it is           quantised here
    NVFP4, compressed-tensors       as it is, bit for bit    dequantised        refused
    NVFP4, ModelOpt                 as it is, bit for bit    dequantised        refused

The 4-bit activation scales of a W4A4 checkpoint and 8-bit KV scales are left out, with one line saying so: activations
here stay 16-bit. Every tensor is checked for its shape and for NaN and infinity when it is read.

Where we differ from transformers' from_pretrained: quantised on the way in, never whole in memory, no silent
re-initialisation of what a checkpoint lacks. Cost: one pass over the files. Limits: see files/hub.py and model.py.
Copy along: nvfp4.py, model.py, layers/rope.py, files/hub.py, files/layouts.py, files/shards.py. For the demo also assets/tiny/.

    python -m convert.loader [MODEL]     loads a model on the CPU and continues a sentence ("tiny", which ships with the code)
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import nvfp4
from files import layouts
from files.hub import GenerationInfo, generation_info, load_tokenizer, quantised_layout, read_config, resolve_model
from files.shards import ShardReader, check_finite
from layers.rope import rope_tables
from model import ModelConfig, Transformer
from nvfp4 import NVFP4Tensor

__all__ = ["CheckpointSource", "GenerationInfo", "ShardReader", "load_model", "pick_device", "resolve_model"]


def note(line: str) -> None:
    """One line for the user about something that was decided for them."""
    print(line, file=sys.stderr, flush=True)


class CheckpointSource:
    """source(name, shape) of model.Transformer: tensors of a checkpoint under their Hugging Face names, on `device`."""

    def __init__(self, reader: ShardReader, layout: str | None, device: torch.device | str = "cpu"):
        self.reader, self.layout, self.device = reader, layout, device
        self.float_projections = 0  # projections that a quantised checkpoint leaves in 16 bits

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor | NVFP4Tensor:
        """A float tensor, or an NVFP4Tensor where the checkpoint holds the projection quantised.

        ValueError when it is missing, has another shape than the config says, or holds NaN or infinity.
        """
        linear, _, last = name.rpartition(".")
        if self.layout and last == "weight" and f"{linear}.weight_scale" in self.reader:
            q = self._quantised(linear, shape)
            return q if linear.endswith("_proj") else nvfp4.dequantize(q)  # a 4-bit head is computed in 16 bits
        if name in self.reader:  # shapes come from the headers: a wrong tensor is refused unread
            self._check_shape(name, self.reader.infos[name].shape, shape)
        tensor = self.reader.get(name, self.device)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ValueError(
                f"{name} is {tensor.dtype}, but no quantization_config in {self.reader.folder} says how to read that; "
                "take a 16-bit or an NVFP4 checkpoint"
            )
        self.float_projections += last == "weight" and linear.endswith("_proj")
        return check_finite(tensor, name)

    def _quantised(self, linear: str, shape: tuple[int, ...]) -> NVFP4Tensor:
        parts = layouts.NAMES[self.layout]
        q = layouts.from_layout({p: self.reader.get(f"{linear}.{p}", self.device) for p in parts}, self.layout, linear)
        self._check_shape(linear, q.shape, shape)
        return q

    def _check_shape(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if tuple(found) != tuple(wanted):
            raise ValueError(
                f"{name} has shape {tuple(found)} where config.json implies {tuple(wanted)}; "
                f"config and weights in {self.reader.folder} do not belong together"
            )


def model_config(folder: Path, raw: dict, weights: str) -> ModelConfig:
    """The model's shape from config.json, refused where its matrices do not fit the 4-bit blocks."""
    path = folder / "config.json"
    try:
        config = ModelConfig.from_hf(raw)
    except (TypeError, AttributeError, ArithmeticError) as error:  # a field of the wrong kind
        raise ValueError(f"{path} has a malformed field ({str(error)[:200]!r}); download it again") from error
    try:  # here, and not at the first rollout
        is_finite = all(table.isfinite().all() for table in rope_tables(config, 2, "cpu"))
    except (TypeError, AttributeError, ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        is_finite, reason = False, f"{type(error).__name__}: {str(error)[:150]!r}"
    else:
        reason = "its angles are not finite"
    if not is_finite:
        raise ValueError(f"{path}: rope with theta {config.rope_theta} and scaling {str(config.rope_scaling)[:150]!r} cannot be "
                         f"computed ({reason}); take another checkpoint")
    widths = {"hidden_size": config.hidden, "heads * head_dim": config.heads * config.head_dim, "ffn": config.ffn}
    for field, width in widths.items():
        if weights == "nvfp4" and width % nvfp4.BLOCK:
            raise ValueError(
                f"{folder}: {field}={width} is the in_features of a projection and not a multiple of the NVFP4 block "
                f"{nvfp4.BLOCK}; take --weights bf16 for this model"
            )
    return config


def _tell_what_is_left_out(reader: ShardReader) -> None:
    last = [name.rpartition(".")[2] for name in reader.names()]
    found = {part: last.count(part) for part in layouts.ACTIVATION_SCALES if part in last}
    if found:
        listed = ", ".join(f"{count} {part}" for part, count in found.items())
        note(f"{reader.folder}: {listed} left out: activations and KV cache stay as they are, only weights are 4-bit")


def pick_device(name: str) -> str:
    """`auto`, `cpu` or `cuda` -> where to run; ValueError where there is no such device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but PyTorch sees no CUDA GPU; use --device cpu, or install PyTorch's CUDA build")
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def load_model(
    name: str,
    *,
    weights: str = "nvfp4",
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    full: bool = False,
) -> tuple[Transformer, object, GenerationInfo]:
    """The model (frozen unless full), its tokenizer, and what generation must know.

    name: hub id, bare name or folder (see hub.resolve_model). dtype: of activations; None = bf16 on a GPU, fp32 on a
    CPU. ValueError of one line for every kind of damaged, unsupported or missing model.
    """
    folder = resolve_model(name)
    raw = read_config(folder)
    config, layout = model_config(folder, raw, weights), quantised_layout(folder, raw)
    tokenizer = load_tokenizer(folder)
    info = generation_info(folder, raw, tokenizer)
    reader = ShardReader(folder)
    source = CheckpointSource(reader, layout, device)
    model = Transformer(config, source, weights=weights, device=device, dtype=dtype, full=full)
    if layout:
        _tell_what_is_left_out(reader)
    if not layout and weights != "bf16":
        print(f"{name}: 16-bit weights, rounded to {weights} on loading (--weights bf16 keeps them)")
    if layout and weights == "nvfp4" and source.float_projections:
        note(f"{folder}: {source.float_projections} projections are 16-bit in this checkpoint and were quantised here")
    if info.valid_vocab > config.vocab:
        note(f"{folder}: the tokenizer has {info.valid_vocab} ids, the model {config.vocab}; the surplus is never used")
    valid_vocab = min(info.valid_vocab, config.vocab)
    model.valid_vocab = valid_vocab
    return model, tokenizer, replace(info, valid_vocab=valid_vocab)


def demo(name: str) -> None:
    """Greedy words from a model read off the disk, without a cache: the whole prefix again for each token."""
    model, tokenizer, info = load_model(name)
    tokens = tokenizer.encode("Anna has 25 books. Anna buys 73 more. How many books does Anna have now?\n")
    with torch.no_grad():
        for _ in range(24):
            hidden = model(torch.tensor(tokens), model.packed([len(tokens)]))
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
            if tokens[-1] in info.stop_ids:
                break
    lines = tokenizer.decode(tokens).split("\n")
    print("\n".join(line if line.isprintable() else repr(line) for line in lines))
    print(f"ends with any of {info.stop_ids}; {info.valid_vocab} ids of {model.config.vocab} rows")


if __name__ == "__main__":
    try:
        demo(sys.argv[1] if len(sys.argv) > 1 else "tiny")
    except ValueError as error:
        print(f"convert/loader.py: {error}", file=sys.stderr)
        sys.exit(2)
