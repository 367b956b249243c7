"""The two layouts in which the world stores NVFP4 weights: their tensors, and what config.json says of them.

The idea: both hold the same codes and block scales, byte for byte. They differ in names, in what is written beside them,
and in the sense of the global scale, which is the classic way to load a model that answers nonsense:

    of one linear           compressed-tensors (vLLM, llm-compressor)     ModelOpt (TensorRT-LLM)
    codes, uint8 (N, K/2)   weight_packed                                 weight
    scales, E4M3 (N, K/16)  weight_scale                                  weight_scale
    global scale, fp32      weight_global_scale (1,) = g, a divisor       weight_scale_2 () = 1/g, a multiplier
    config.json             quant_method compressed-tensors, a scheme     quant_method modelopt, quant_algo W4A16_NVFP4
                            of 4 bits, float, groups of 16                or NVFP4 (also in hf_quant_config.json)

    from_layout(to_layout(q, layout), layout) is q        bit for bit; ModelOpt's g to one unit in the last place

A file is a stranger's: dtypes, shapes and scales are checked, and whatever is not NVFP4 is refused with its own name.

Source: compressed-tensors' nvfp4-pack-quantized, ModelOpt's export. Cost: none, tensors are passed on as they are.
Limits: weights only. The 4-bit activation scales of W4A4 checkpoints are named (ACTIVATION_SCALES), for readers to skip.
Copy along: nvfp4.py.

    python -m files.layouts        one matrix in both layouts
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4 import BLOCK, NVFP4Tensor, quantize

LAYOUTS = ("compressed-tensors", "modelopt")
# Tensors of a quantised linear, by the last part of their name: codes, block scales, global scale.
NAMES = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
}
# Scales of 4-bit activations and of 8-bit KV caches: a weight-only reader may leave them out.
ACTIVATION_SCALES = ("input_scale", "input_global_scale", "k_scale", "v_scale")


def to_layout(q: NVFP4Tensor, layout: str) -> dict[str, Tensor]:
    """The tensors of one linear as `layout` stores them, by the last part of their name."""
    g = q.global_scale if layout == "compressed-tensors" else (1 / q.global_scale).reshape(())
    return dict(zip(NAMES[layout], (q.packed, q.scale, g)))


def from_layout(tensors: dict[str, Tensor], layout: str, name: str) -> NVFP4Tensor:
    """The inverse of to_layout, checked: `name` (the linear's) opens the ValueError when a tensor cannot be right.

    ModelOpt's multiplier m is read as g = 1/m in fp32, at most one unit in the last place from what was meant.
    """
    packed, scale, g = (tensors[part] for part in NAMES[layout])
    if packed.dtype != torch.uint8 or packed.ndim != 2 or packed.shape[1] % (BLOCK // 2):
        raise ValueError(
            f"{name}: NVFP4 codes are {packed.dtype} of shape {tuple(packed.shape)}; they should be "
            "uint8 (N, K/2) with K a multiple of 16; the checkpoint is not NVFP4, or damaged"
        )
    wanted = (packed.shape[0], packed.shape[1] * 2 // BLOCK)
    if scale.dtype != torch.float8_e4m3fn or tuple(scale.shape) != wanted:
        raise ValueError(
            f"{name}: block scales are {scale.dtype} of shape {tuple(scale.shape)}; for codes of shape "
            f"{tuple(packed.shape)} they should be float8_e4m3fn {wanted}; the checkpoint is not NVFP4, or damaged"
        )
    if scale.view(torch.uint8).amax() > 0x7E:  # 0x7F and 0xFF are NaN, 0x80 and above negative
        raise ValueError(f"{name}: a block scale is NaN or negative; the checkpoint is damaged, download it again")
    if g.numel() != 1 or not torch.isfinite(g.float()).all() or g.float().item() <= 0:
        raise ValueError(
            f"{name}: global scale {g.flatten()[:4].tolist()} should be one positive number; "
            "the checkpoint is damaged, download it again"
        )
    g = g.float().reshape(1)
    return NVFP4Tensor(packed, scale, g if layout == "compressed-tensors" else 1 / g)


def quantization_config(layout: str, ignore: list[str]) -> dict:
    """The "quantization_config" entry of config.json that tells other programs how to read the weights."""
    if layout == "modelopt":
        # W4A16: activations stay 16-bit. "NVFP4" there would quantise them to 4 bits as well.
        return {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": BLOCK,
                "kv_cache_quant_algo": None, "ignore": ignore}  # fmt: skip
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": BLOCK, "strategy": "tensor_group",
               "dynamic": False, "scale_dtype": "torch.float8_e4m3fn"}  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None,
             "format": "nvfp4-pack-quantized"}  # fmt: skip
    return {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed",
            "ignore": ignore, "kv_cache_scheme": None, "global_compression_ratio": None,
            "config_groups": {"group_0": group}}  # fmt: skip


def read_layout(config: dict) -> str:
    """The layout that a "quantization_config" (or hf_quant_config.json's "quantization") describes.

    ValueError naming the method when it is another quantisation than NVFP4 with blocks of 16.
    """
    method = str(config.get("quant_method") or "modelopt")  # hf_quant_config.json is ModelOpt's own and says no method
    remedy = "load the 16-bit original (it is quantised on the way in) or an NVFP4 checkpoint"
    if method == "compressed-tensors":
        groups = config.get("config_groups")
        groups = list(groups.values()) if isinstance(groups, dict) else []
        schemes = [group.get("weights") if isinstance(group, dict) else None for group in groups]
        schemes = [scheme if isinstance(scheme, dict) else {} for scheme in schemes]
        kinds = [(scheme.get("num_bits"), scheme.get("type"), scheme.get("group_size")) for scheme in schemes]
        if kinds and all(kind == (4, "float", BLOCK) for kind in kinds):
            return "compressed-tensors"
        raise ValueError(f"compressed-tensors checkpoint with (bits, type, group) = {str(kinds or 'nothing')[:200]}, "
                         f"not NVFP4's (4, float, {BLOCK}); {remedy}")  # fmt: skip
    algorithm, group_size = config.get("quant_algo"), config.get("group_size", BLOCK)
    if method == "modelopt" and algorithm in ("NVFP4", "W4A16_NVFP4") and group_size == BLOCK:
        return "modelopt"
    said = [repr(str(value)[:40])[1:-1] for value in (method, algorithm or "", group_size)]  # escaped: it is a stranger's
    raise ValueError(f"checkpoint quantised by {said[0]} {said[1]} (group {said[2]}) is not NVFP4; {remedy}")


def demo() -> None:
    """One matrix in both layouts: the same bytes under other names, but for the global scale."""
    q = quantize(torch.randn(4, 32, generator=torch.Generator().manual_seed(0)))
    for layout in LAYOUTS:
        print(f"{layout}: config.json says {quantization_config(layout, ['lm_head'])['quant_method']!r}")
        for name, tensor in to_layout(q, layout).items():
            first = tensor.flatten()[0].item()
            print(f"    {name:20} {str(tensor.dtype)[6:]:14} {str(tuple(tensor.shape)):8} begins with {first:g}")
        back = from_layout(to_layout(q, layout), layout, "demo")
        print(f"    read back: codes equal {torch.equal(back.packed, q.packed)}, g {back.global_scale.item():.3f}")


if __name__ == "__main__":
    demo()
