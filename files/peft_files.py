"""LoRA adapters as peft writes and reads them: a folder of two files, and nothing is guessed.

    adapter_config.json           r, lora_alpha, target_modules, base_model_name_or_path, ...
    adapter_model.safetensors     base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   (R, K)
                                  base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   (N, R)
                                  ... a pair for every target of every layer

In memory that is an Adapter: rank, alpha, and a pair (A, B) for each module path.

peft can say far more than these models can do (a rank for each layer, DoRA, trained embeddings, ...), and silently
ignoring one of those would compute another model. So the reader lists what it understands; any other
option that is switched on is refused by name, whatever peft calls it in years to come. The tensors are held against the
config: a missing half, an unknown name or a wrong shape is an error here, not a base model in disguise later.

Source: peft's LoraConfig. Where we differ: dropout is read, not applied (the sampled policy must be the scored one).
Cost: the adapter is read whole, as fp32. Limits: safetensors only; adapter_model.bin is a pickle and is refused.
Copy along: nothing.

    python -m files.peft_files [FOLDER]      what is in an adapter; without FOLDER a demo
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
KEY = re.compile(r"base_model\.model\.([\w.]+)\.lora_([AB])\.weight")

# Options that do not change what the adapter computes, beside those that are checked one by one below.
HARMLESS = {
    "peft_type", "peft_version", "base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping",
    "r", "lora_alpha", "target_modules", "lora_dropout", "bias", "init_lora_weights", "megatron_core",
    "qalora_group_size",
}  # fmt: skip
# Starts that also change the base weights, so that the adapter is right beside those weights only.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class Adapter:
    """One rank and alpha, and the pair A (R, K), B (N, R) of each module path ("model.layers.0.mlp.up_proj")."""

    rank: int
    alpha: float
    pairs: dict[str, tuple[Tensor, Tensor]]
    base: str = ""

    @property
    def targets(self) -> set[str]:
        return {path.rpartition(".")[2] for path in self.pairs}


def write_adapter(adapter: Adapter, folder: Path | str) -> None:
    """Writes both files into folder (made if need be), each replaced whole. OSError when the disk is full."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, pair in adapter.pairs.items():
        for letter, tensor in zip("AB", pair):
            tensors[f"base_model.model.{path}.lora_{letter}.weight"] = tensor.detach().cpu().contiguous()
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": adapter.base, "inference_mode": True,
        "r": adapter.rank, "lora_alpha": adapter.alpha, "target_modules": sorted(adapter.targets), "lora_dropout": 0.0,
        "bias": "none", "fan_in_fan_out": False, "use_rslora": False, "use_dora": False, "modules_to_save": None,
    }  # fmt: skip
    temporary = folder / f".{TENSORS}.tmp"
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        os.replace(temporary, folder / TENSORS)
        temporary = folder / f".{CONFIG}.tmp"
        temporary.write_text(json.dumps(config, indent=2) + "\n")
        os.replace(temporary, folder / CONFIG)
        shutil.copymode(folder / CONFIG, folder / TENSORS)  # save_file leaves it to the owner alone, whatever the umask says
    except SafetensorError as error:
        raise OSError(f"cannot write {folder / TENSORS} ({error}); is the disk full?") from error
    finally:
        temporary.unlink(missing_ok=True)


def _read_config(folder: Path) -> dict:
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} has no {CONFIG}; give the folder that holds a PEFT adapter")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); the adapter is damaged") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise ValueError(f"{path}: peft_type is {str(kind)[:80]!r}; only LORA adapters can be loaded")
    return config


def _check_config(config: dict, path: Path) -> None:
    """ValueError naming the first option that this code would not honour."""
    for key, value in config.items():
        if value and key not in HARMLESS:
            raise ValueError(f"{path}: {key[:80]!r}={str(value)[:80]!r} is not supported; only plain LoRA (one rank and alpha "
                             "for all targets, nothing else) can be loaded: merge this one with peft")  # fmt: skip
    if config.get("bias", "none") != "none":
        raise ValueError(f"{path}: bias={str(config['bias'])[:80]!r} trains biases, which are frozen here; use bias='none'")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        raise ValueError(f"{path}: init_lora_weights={start[:80]!r} changes the base weights as well; convert "
                         "it with peft's path_initial_model_for_weight_conversion first")  # fmt: skip
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if type(rank) is not int or not 1 <= rank <= 4096:
        raise ValueError(f"{path}: r={str(rank)[:80]!r} should be a whole number from 1 to 4096")
    if type(alpha) not in (int, float) or not -1e6 < alpha < 1e6:  # NaN is not; nor an integer too large for a float
        raise ValueError(f"{path}: lora_alpha={str(alpha)[:80]!r} should be a number below a million")
    names = isinstance(targets, list) and all(isinstance(t, str) for t in targets)
    if not (names or targets == "all-linear"):
        raise ValueError(f"{path}: target_modules={str(targets)[:80]!r} should be a list of module names; "
                         "patterns are not matched here")  # fmt: skip


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        pickled = path.with_name("adapter_model.bin").exists()
        why = "adapter_model.bin is a pickle, which can run code, and is never loaded; save it as safetensors"
        why = why if pickled else "the adapter is incomplete"
        raise ValueError(f"{path.parent} has no {TENSORS}: {why}")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is truncated or corrupt ({str(error)[:200]!r}); copy the adapter again") from error


def read_adapter(folder: Path | str) -> Adapter:
    """The adapter in a folder, fp32 on the CPU. ValueError (one line) for anything that is not plain, whole LoRA."""
    folder = Path(folder)
    config = _read_config(folder)
    _check_config(config, folder / CONFIG)
    rank, halves = config["r"], {}
    for name, tensor in _read_tensors(folder / TENSORS).items():
        match = KEY.fullmatch(name)
        if not match:
            raise ValueError(f"{folder / TENSORS}: tensor {name[:100]!r} is not part of a plain LoRA adapter; "
                             "trained embeddings, heads and biases cannot be loaded")  # fmt: skip
        if not tensor.is_floating_point() or tensor.ndim != 2 or tensor.shape[0 if match[2] == "A" else 1] != rank:
            raise ValueError(f"{folder / TENSORS}: {name[:200]} is {tensor.dtype} of shape {tuple(tensor.shape)}, "
                             f"which is not rank r={rank}")  # fmt: skip
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{folder / TENSORS}: {name[:200]} holds NaN or infinity; take an earlier adapter")
        halves[match[1], match[2]] = tensor.float()
    paths = sorted({path for path, _ in halves})
    if single := [f"{p}.lora_{half}" for p in paths for half in "AB" if (p, half) not in halves]:
        raise ValueError(f"{folder / TENSORS} lacks {single[0]} ({len(single)} in all); the adapter is incomplete")
    pairs = {path: (halves[path, "A"], halves[path, "B"]) for path in paths}
    base = re.sub(r"\s", " ", str(config.get("base_model_name_or_path") or ""))[:200]
    adapter = Adapter(rank, float(config["lora_alpha"]), pairs, base)
    if config["target_modules"] != "all-linear":
        _check_targets(config["target_modules"], paths, folder)
    return adapter


def _check_targets(targets: list[str], paths: list[str], folder: Path) -> None:
    """Every target must name some tensors and every tensor be named; "q_proj" and a full path are both names."""
    def names(target: str, path: str) -> bool:
        return path == target or path.endswith("." + target)

    if empty := [t for t in targets if not any(names(t, path) for path in paths)]:
        raise ValueError(f"{folder}: target_modules has {empty[0][:80]!r}, but {TENSORS} has no adapter for it")
    if unnamed := [path for path in paths if not any(names(t, path) for t in targets)]:
        raise ValueError(f"{folder}: {TENSORS} has an adapter for {unnamed[0]}, which target_modules does not name")


def describe(folder: Path | str) -> str:
    """What is in an adapter, in one line; ValueError as read_adapter."""
    adapter = read_adapter(folder)
    size = sum(t.numel() for pair in adapter.pairs.values() for t in pair)
    targets = ", ".join(sorted(adapter.targets))
    return (f"rank {adapter.rank}, alpha {adapter.alpha:g}, {len(adapter.pairs)} pairs on {targets}: "
            f"{size:,} parameters for {repr(adapter.base[:80]) if adapter.base else 'an unnamed base'}")  # fmt: skip


def demo() -> None:
    """An adapter written and read; then an option that is refused by name."""
    pairs = {f"model.layers.{i}.mlp.up_proj": (torch.ones(4, 16), torch.zeros(32, 4)) for i in range(2)}
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Adapter(4, 8, pairs, "Qwen/Qwen2.5-7B"), folder)
        print(describe(folder))
        path = Path(folder, CONFIG)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rank_pattern": {"layers.0.mlp.up_proj": 8}}))
        try:
            read_adapter(folder)
        except ValueError as error:
            print(str(error).replace(folder, "FOLDER"))


if __name__ == "__main__":
    try:
        print(describe(sys.argv[1])) if len(sys.argv) > 1 else demo()
    except ValueError as error:
        print(f"files/peft_files.py: {error}", file=sys.stderr)
        sys.exit(2)
