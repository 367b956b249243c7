"""Does vLLM take the checkpoints that `nvfp4.py quantize` writes as NVFP4 weights with 16-bit activations?

    python bench/check_vllm.py [MODEL]        MODEL: a folder or hub name, else the tiny model; needs vllm, no GPU

Both layouts are written, and each folder's own config.json (and hf_quant_config.json) is given to vLLM's own parsers.
Asked are: which quantisation is it, what becomes of a fused projection, is lm_head left alone.  vLLM is no dependency
and not in the test suite: it is a gigabyte, and its parsers want a dozen packages beside it.  They need no compiled code:

    pip install --no-deps vllm==0.24.0        then what the import asks for

Without a GPU vLLM still picks its kernel and then says that this one cannot run here; its name is the answer.
"""
from __future__ import annotations

import json
import sys
import tempfile
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from files.layouts import LAYOUTS  # noqa: E402
from files.shards import quantize_checkpoint  # noqa: E402

QKV, HEAD = "model.layers.0.self_attn.qkv_proj", "lm_head"
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def compressed_tensors(config: dict) -> dict:
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    parsed = CompressedTensorsConfig.from_config(config)
    parsed.packed_modules_mapping = PACKED
    linear = torch.nn.Linear(16, 16)
    scheme = parsed.get_scheme_dict(linear, QKV)
    try:
        kernel = type(parsed.get_scheme(linear, QKV)).__name__
    except ValueError as error:  # without a GPU: "Forced NVFP4 kernel MarlinNvFp4LinearKernel is not supported"
        kernel = str(error)
    return {"method": parsed.get_name(), "nvfp4_weights": parsed._is_nvfp4_format(scheme["weights"]),
            "activations_16bit": scheme["input_activations"] is None, "kernel": kernel,
            "head_left_alone": parsed.get_scheme(linear, HEAD) is None}


def modelopt(config: dict) -> dict:
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    chosen = ModelOptNvFp4Config.override_quantization_method({"quant_method": "modelopt", **config}, None)
    parsed = ModelOptNvFp4Config.from_config(config)
    parsed.packed_modules_mapping = PACKED
    return {"method": chosen, "nvfp4_weights": parsed.is_checkpoint_nvfp4_serialized and parsed.group_size == 16,
            "activations_16bit": parsed.quant_method == "W4A16_NVFP4", "kernel": parsed.LinearMethodCls.__name__,
            "head_left_alone": parsed.is_layer_excluded(HEAD) and not parsed.is_layer_excluded(QKV)}


def main() -> int:
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        print("vllm is not installed; nothing was checked", file=sys.stderr)
        return 2
    model, found, is_right = (sys.argv[1:] or ["tiny"])[0], [], True
    with tempfile.TemporaryDirectory() as scratch:
        for layout in LAYOUTS:
            folder = Path(scratch, layout)
            quantize_checkpoint(model, str(folder), layout, device="cpu")
            configs = {"config.json": json.loads((folder / "config.json").read_text())["quantization_config"]}
            if layout == "modelopt":
                configs["hf_quant_config.json"] = json.loads((folder / "hf_quant_config.json").read_text())
            for file, config in configs.items():
                said = (modelopt if layout == "modelopt" else compressed_tensors)(config)
                is_fit = all(said[key] for key in ("nvfp4_weights", "activations_16bit", "head_left_alone"))
                is_right &= is_fit and any(name in said["kernel"] for name in ("Marlin", "W4A16"))
                found.append({"vllm": version, "layout": layout, "file": file, **said})
                print(f"vLLM {version}, {layout}, {file}: {said}")
    Path(__file__).parent.joinpath("results", "vllm.json").write_text(json.dumps(found, indent=1) + "\n")
    print("taken as NVFP4A16" if is_right else "NOT taken as NVFP4A16")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
