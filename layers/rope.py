"""Rotary positions: tables of cos and sin, and the rotation of queries and keys. Forward and backward.

Channel i of a head is paired with channel i + D/2 (the half-split convention of Hugging Face checkpoints); the pair at
position p turns by the angle p * f_i, so that the product of a query and a key depends on their distance alone:

    (a, b) -> (a cos - b sin, b cos + a sin)            f_i = theta^(-2i/D)            backward: the same with -sin

    x  |a_0 a_1 ... a_(D/2-1) | b_0 b_1 ... b_(D/2-1)|          one program turns all heads of one token

Longer contexts stretch the frequencies: `linear` divides them all, `llama3` only the slow ones (wavelengths beyond the
old context), `yarn` likewise, with a gain on cos and sin. Angles are made in fp32, as the models were trained.

The torch twin `apply_rope_reference` is the specification and what runs on a CPU; on CUDA a Triton kernel does the same
in one launch each for q and k, reading them from the stacked qkv tensor as it lies.

Source: RoFormer (arXiv 2104.09864), YaRN (2309.00071), Llama 3.1's config.
Cost: q and k pass through memory once. Limits: the whole head is rotated.
Copy along: nothing. Packages: torch, and triton for the fast path.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only install: the torch twin remains
    triton = None


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


def apply_rope_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q (T, H, D) and k (T, Hkv, D) by their positions (T,); channel i is paired with i + D/2 as in HF."""
    cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # (T, 1, D/2) fp32

    def rotate(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    return rotate(q), rotate(k)


if triton is not None:

    @triton.jit
    def _rope_kernel(
        x_ptr, y_ptr, cos_ptr, sin_ptr, position_ptr, stride_xt, stride_xh, H, HALF,
        SIGN: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        head = tl.arange(0, BLOCK_H)[:, None]
        offs = tl.arange(0, BLOCK_D)[None, :]
        at = tl.load(position_ptr + token) * HALF + offs
        cos = tl.load(cos_ptr + at, mask=offs < HALF, other=0.0)  # (1, D/2) fp32
        sin = tl.load(sin_ptr + at, mask=offs < HALF, other=0.0) * SIGN
        mask = (head < H) & (offs < HALF)
        x_at = x_ptr + token * stride_xt + head * stride_xh + offs
        a = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)  # (H, D/2) first halves of all heads
        b = tl.load(x_at + HALF, mask=mask, other=0.0).to(tl.float32)  # second halves
        y_at = y_ptr + (token * H + head) * 2 * HALF + offs
        tl.store(y_at, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_at + HALF, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=mask)


def rope_triton(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, sign: int) -> Tensor:
    """x (T, H, D), any strides over T and H, rotated by sign * position."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens, heads, dim = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_h, block_d = triton.next_power_of_2(heads), triton.next_power_of_2(dim // 2)
    if tokens:
        _rope_kernel[(tokens,)](
            x, y, cos, sin, positions, x.stride(0), x.stride(1), heads, dim // 2,
            SIGN=sign, BLOCK_H=block_h, BLOCK_D=block_d, num_warps=min(max(block_h * block_d // 512, 1), 8),
        )  # fmt: skip
    return y


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin, positions)
        return rope_triton(x, cos, sin, positions, 1)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return rope_triton(dy, *ctx.saved_tensors, -1), None, None, None


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """q (T, H, D) and k (T, Hkv, D) rotated by positions (T,): see apply_rope_reference."""
    if not q.is_cuda or triton is None:
        return apply_rope_reference(q, k, cos, sin, positions)
    return _Rope.apply(q, cos, sin, positions), _Rope.apply(k, cos, sin, positions)


def demo() -> None:
    """Rotating q and k by their positions makes their product depend on the distance alone."""

    class Config:
        head_dim, rope_theta, rope_scaling = 8, 10000.0, None

    cos, sin = rope_tables(Config, 1000, "cpu")
    q, k = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    for at in (0, 10, 900):
        turned_q = apply_rope(q, k, cos, sin, torch.tensor([at + 5]))[0]
        turned_k = apply_rope(q, k, cos, sin, torch.tensor([at]))[1]
        print(f"query at {at + 5:3d}, key at {at:3d}: q . k = {(turned_q * turned_k).sum():+.5f}")


if __name__ == "__main__":
    demo()
