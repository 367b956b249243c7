"""Safetensors shards in and out, one tensor at a time; and a float checkpoint turned into an NVFP4 one.

The idea: a safetensors file says in its header where each tensor lies, so nothing has to be read before it is needed,
and nothing needs to stay. A 62 GiB checkpoint is read, quantised and written through the memory of one projection.

    folder/model.safetensors                     ShardReader
          /model.safetensors.index.json           .infos    name -> file, dtype, shape   all headers, checked at once
          /model-00001-of-00017.safetensors ...   .get(name, device)                     one tensor, when asked for

A model folder is untrusted input. Only safetensors are read: a pickle (.bin, .pt) can run code and is refused by name.
An index may name plain files of its folder only; a truncated or corrupt file is found when the reader is made, before
minutes are spent. Each failure is a ValueError of one line: value, limit, remedy.

quantize_checkpoint writes the NVFP4 checkpoint of a float one, for compressed-tensors, transformers and vLLM to read.
Projections that a server stacks into one matrix get one global scale:

    model.layers.i.self_attn.{q,k,v}_proj    one g      .weight -> .weight_packed, .weight_scale, .weight_global_scale
    model.layers.i.self_attn.o_proj          its own               (or ModelOpt's names, see files/layouts.py)
    model.layers.i.mlp.{gate,up}_proj        one g
    model.layers.i.mlp.down_proj             its own    everything else becomes bf16 or is copied

Source: the safetensors format, and the two layouts of files/layouts.py. Where we differ from save_pretrained: the new folder
appears whole or not at all (written beside, then renamed). Cost: one pass over the files; what is written is held until
a shard is full. Limits: the tensor names of Qwen2/2.5, Qwen3 and Llama.
Copy along: nvfp4.py, files/hub.py, files/layouts.py.

    python -m files.shards [MODEL]     what is in a checkpoint, by kind (reads headers only); without MODEL a demo
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import nvfp4
from files import layouts
from files.hub import quantised_layout, read_config, read_json, resolve_model

# Projections that read the same input are stacked, here and in servers, and share one NVFP4 global scale.
FUSED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
COPIED = (".json", ".jinja", ".txt", ".model", ".md")  # beside the weights, into a converted checkpoint
SHARD_BYTES = 2 << 30  # of a written shard; it is also what the writer holds in memory


def _shard_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """File names of the shards, and the index (tensor -> file) where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} has no weight_map; download it again")
        for tensor, file in weight_map.items():
            # A plain file of this folder: no separators, so neither absolute paths nor '..' can get through.
            if not isinstance(file, str) or not re.fullmatch(r"[\w.+-]+\.safetensors", file):
                raise ValueError(
                    f"{index} maps {tensor[:80]!r} to {str(file)[:80]!r}: only *.safetensors files of the "
                    "folder itself are read (no paths, no pickles); the index is damaged or hostile"
                )
        return sorted(set(weight_map.values())), weight_map
    if (folder / "model.safetensors").exists():
        return ["model.safetensors"], None
    found = sorted(path.name for path in folder.iterdir())
    if pickles := [name for name in found if name.endswith(PICKLES)]:
        raise ValueError(
            f"{folder} holds only pickled weights ({pickles[0]}): a pickle can run code and is never loaded; "
            "convert it with save_pretrained(safe_serialization=True) or take a safetensors copy"
        )
    if "adapter_model.safetensors" in found:
        raise ValueError(f"{folder} is a LoRA adapter; give its base model as --model and this folder as --adapter")
    raise ValueError(f"{folder} has neither model.safetensors nor model.safetensors.index.json; not a model folder")


@dataclass(frozen=True)
class TensorInfo:
    file: str
    dtype: str  # as safetensors spells it: BF16, F32, U8, F8_E4M3 ...
    shape: tuple[int, ...]


class ShardReader:
    """The tensors of a model folder by name. Headers are read and checked at once, tensors when asked for.

    No file stays open and no tensor is kept: what `get` returns is the caller's, and the only thing in memory.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        files, index = _shard_files(self.folder)
        self.infos: dict[str, TensorInfo] = {}
        for file in files:
            with self._open(file) as shard:
                for name in shard.keys():  # noqa: SIM118 -- safe_open is no dict
                    if index is not None and index.get(name) != file:
                        continue  # the index decides: it may leave tensors out
                    view = shard.get_slice(name)
                    self.infos[name] = TensorInfo(file, view.get_dtype(), tuple(view.get_shape()))
        if index and (missing := sorted(index.keys() - self.infos.keys())):
            raise ValueError(
                f"{self.folder}: {index[missing[0]]} lacks tensor {missing[0][:80]!r} that the index promises "
                f"({len(missing)} in all); download it again"
            )

    def _open(self, file: str):
        path = self.folder / file
        if not path.is_file():
            raise ValueError(f"{path} is missing; the download is incomplete, fetch the model again")
        try:
            return safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError, ValueError) as error:
            size = path.stat().st_size
            raise ValueError(
                f"{path} ({size} bytes) is truncated or corrupt ({str(error)[:200]!r}); delete it and download it again"
            ) from error

    def __contains__(self, name: str) -> bool:
        return name in self.infos

    def __len__(self) -> int:
        return len(self.infos)

    def names(self) -> list[str]:
        return list(self.infos)

    def get(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """One tensor, on `device`; a copy, so that the file may change or go away afterwards."""
        if name not in self.infos:
            raise ValueError(f"{self.folder} lacks tensor {name!r}; its config and its weights do not belong together")
        with self._open(self.infos[name].file) as shard:
            mapped = shard.get_tensor(name)  # still on the disk; pages come in as the copy reads them
            return mapped.to(device, copy=True)


def check_finite(tensor: Tensor, name: str) -> Tensor:
    """The tensor itself; ValueError naming it when it holds NaN or infinity."""
    if tensor.is_floating_point() and not torch.isfinite(torch.stack(tensor.aminmax())).all():
        raise ValueError(f"{name} holds NaN or infinity; the checkpoint is damaged or diverged, take another one")
    return tensor


# ------------------------------------------------------------------------------------------------ float -> NVFP4


def _converted(reader: ShardReader, layout: str, device: torch.device | str) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the NVFP4 checkpoint, one fused group in memory at a time."""
    layers = sorted({int(m[1]) for name in reader.names() if (m := re.match(r"model\.layers\.(\d{1,5})\.", name))})
    if not layers:
        raise ValueError(f"{reader.folder} has no tensor model.layers.0...; not a Qwen2, Qwen3 or Llama checkpoint")
    linears = [[f"model.layers.{i}.{part}" for part in group] for i in layers for group in FUSED]
    for group in linears:
        weights = [reader.get(f"{linear}.weight", device) for linear in group]
        try:
            g = nvfp4.global_scale(*weights)
            for linear, weight in zip(group, weights):
                for part, tensor in layouts.to_layout(nvfp4.quantize(weight, g), layout).items():
                    yield f"{linear}.{part}", tensor
        except ValueError as error:
            raise ValueError(f"{', '.join(group)}: {error}") from error
    done = {f"{linear}.weight" for group in linears for linear in group}
    for name in reader.names():
        if name not in done:
            tensor = check_finite(reader.get(name), name)
            # Readers dequantise to bf16 (compressed-tensors: always), and a model computes in one type: fp16 too becomes bf16.
            yield name, tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def _mode(bits: int) -> int:
    """What the user's umask leaves of these permissions: mkdtemp and save_file leave their results to the owner alone."""
    mask = os.umask(0o077)  # it can only be read by setting it; strict for that moment
    os.umask(mask)
    return bits & ~mask


def write_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Safetensors files of at most shard_bytes (or one tensor), with an index when there are several."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        save_file(held, folder / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > shard_bytes:
            flush()
        held[name] = tensor.to("cpu", copy=True).contiguous()  # a copy: q, k and v share one g, which files may not
        total += tensor.nbytes
    flush()
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        (folder / f"part-{i}").rename(folder / file)
        (folder / file).chmod(_mode(0o666))
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def copy_side_files(source: Path, out: Path) -> None:
    """Tokenizer, chat template, generation config and the like: whatever is neither weights nor config.json."""
    for path in source.iterdir():
        if path.is_file() and path.suffix in COPIED and not path.name.startswith(("config.", "model.", "adapter_")):
            shutil.copyfile(path, out / path.name)


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` (new or empty) when all went well and vanishes when not."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"output {str(out)!r} exists and is not an empty folder; choose another or delete it")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield partial
        partial.chmod(_mode(0o777))
        os.replace(partial, out)  # an empty folder may be replaced; the new one appears whole
    except SafetensorError as error:
        raise ValueError(f"cannot write to {out.parent} ({error}); is the disk full?") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_configs(source: Path, out: Path, config: dict, layout: str) -> None:
    copy_side_files(source, out)
    quantisation = layouts.quantization_config(layout, ignore=["lm_head"])
    config = {**config, "quantization_config": quantisation}
    config.update({key: "bfloat16" for key in ("dtype", "torch_dtype") if key in config})
    (out / "config.json").write_text(json.dumps(config, indent=1))
    if layout == "modelopt":  # older readers look here
        described = {key: quantisation[key] for key in ("quant_algo", "kv_cache_quant_algo", "group_size")}
        described["exclude_modules"] = quantisation["ignore"]
        (out / "hf_quant_config.json").write_text(json.dumps({"quantization": described}, indent=1))


def quantize_checkpoint(
    model: str, out: str, layout: str = "compressed-tensors", device: str | None = None, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes the NVFP4 checkpoint of a float model (hub name or folder) to the folder `out`, new or empty.

    ValueError when the source is quantised already, unsupported or damaged, or `out` holds something.
    """
    source = resolve_model(model)
    config = read_config(source)
    if quantised_layout(source, config):
        raise ValueError(f"{source} is NVFP4 already; give the 16-bit model it was made from")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with whole_folder(Path(out)) as partial:
        write_shards(_converted(ShardReader(source), layout, device), partial, shard_bytes)
        _write_configs(source, partial, config, layout)


# ------------------------------------------------------------------------------------------------------------ demo


def describe(folder: Path) -> str:
    """What is in a checkpoint, from its headers."""
    config, reader = read_config(folder), ShardReader(folder)
    lines = [f"{folder}: {config['model_type']}, {quantised_layout(folder, config) or 'float'}, {len(reader)} tensors"]
    counts: dict[tuple[str, str], int] = {}
    for name, info in reader.infos.items():
        key = (re.sub(r"\.\d+\.", ".*.", name), f"{info.dtype} {list(info.shape)}")
        counts[key] = counts.get(key, 0) + 1
    return "\n".join(lines + [f"  {n:4d} x {repr(name)[1:-1]}  {kind}" for (name, kind), n in counts.items()])


def demo() -> None:
    """A two-layer checkpoint of random weights, converted, and what both folders hold."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (32, 64), "model.norm.weight": (64,)}
    for i in range(2):
        shapes |= {f"model.layers.{i}.{part}.weight": (64, 64) for group in FUSED for part in group}
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    with tempfile.TemporaryDirectory() as scratch:
        source, out = Path(scratch, "float"), Path(scratch, "nvfp4")
        source.mkdir()
        save_file(tensors, source / "model.safetensors")
        (source / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": True}))
        quantize_checkpoint(str(source), str(out), device="cpu")
        print(describe(source).replace(scratch, ""), describe(out).replace(scratch, ""), sep="\n\n")
        sizes = [sum(path.stat().st_size for path in folder.glob("*.safetensors")) for folder in (source, out)]
        print(f"\n{sizes[0]} bytes became {sizes[1]}")


if __name__ == "__main__":
    try:
        print(describe(resolve_model(sys.argv[1]))) if len(sys.argv) > 1 else demo()
    except ValueError as error:
        print(f"files/shards.py: {error}", file=sys.stderr)
        sys.exit(2)
