"""The small operations around the GEMMs: norm, SwiGLU, rotary positions.

Each is a torch function that autograd can differentiate: the specification, and what runs on a CPU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual add, then RMSNorm: x_new = x + delta; normed = x_new / rms(x_new) * weight, in fp32, cast back.

    x, delta (T, d) in the compute dtype; weight (d,) fp32. Returns (normed, x_new), both in x's dtype.
    """
    x_new = x if delta is None else x + delta
    x32 = x_new.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps) * weight
    return normed.to(x.dtype), x_new


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up (T, 2F) = [gate | up]; returns (T, F)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rope_tables(config, max_len: int, device) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency, fp32 (S, D/2); config gives head_dim, rope_theta, rope_scaling."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    inv_freq = config.rope_theta ** (-half / config.head_dim)  # (D/2,) radians a position
    scale = 1.0
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        inv_freq = inv_freq / scaling["factor"]
    elif kind == "llama3":
        inv_freq = _llama3_frequencies(inv_freq, scaling)
    elif kind == "yarn":
        inv_freq, scale = _yarn_frequencies(inv_freq, config, scaling)
    elif kind != "default":
        raise ValueError(f"rope_scaling type {kind!r} is not supported; use default, linear, llama3 or yarn")
    angle = torch.outer(torch.arange(max_len).float(), inv_freq.float())  # (S, D/2) radians, fp32 as in training
    return (angle.cos() * scale).to(device), (angle.sin() * scale).to(device)


def _llama3_frequencies(inv_freq: Tensor, scaling: dict) -> Tensor:
    """Llama 3.1: wavelengths beyond the old context are stretched by `factor`, short ones kept, a ramp between."""
    wavelength = 2 * math.pi / inv_freq
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelength
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1 = unchanged, 0 = fully stretched
    return keep * inv_freq + (1 - keep) * inv_freq / scaling["factor"]


def _yarn_frequencies(inv_freq: Tensor, config, scaling: dict) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): the same ramp, placed by rotations over the old context; cos and sin are scaled too."""
    factor = scaling["factor"]
    old = scaling.get("original_max_position_embeddings") or config.max_positions
    fast, slow = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1
    dim, base = config.head_dim, config.rope_theta

    def channel(turns: float) -> float:
        return dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = max(math.floor(channel(fast)), 0), min(math.ceil(channel(slow)), dim - 1)
    stretch = ((torch.arange(dim // 2, dtype=torch.float64) - first) / max(last - first, 1e-3)).clamp(0, 1)
    scale = scaling.get("attention_factor") or (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return (1 - stretch) * inv_freq + stretch * inv_freq / factor, scale


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q (T, H, D) and k (T, Hkv, D) by their positions (T,); channel i is paired with i + D/2 as in HF."""
    cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # (T, 1, D/2) fp32

    def rotate(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    return rotate(q), rotate(k)
