"""The small operations between the GEMMs: residual add + RMSNorm, and SwiGLU. Forward and backward.

The idea: each moves a few bytes an element and computes next to nothing, so its time is its launches and its trips
through memory. As torch operations a norm is six launches and reads its row three times; here it is one launch that
reads the row once, and its backward is another one.

    add_rms_norm    x' = x + delta            y = x' / rms(x') * w        rms(x') = sqrt(mean x'^2 + eps), w fp32
                    dx' = r (w dy - x^ mean(w dy x^)) + (gradient of x' from above)        r = 1/rms, x^ = r x'
    swiglu          y = silu(g) u             dg = dy u s (1 + g (1 - s)),  du = dy g s           s = sigmoid(g)

One program a row:      x  |.................... d ....................|  one load, sums in registers, one store

Each function has a torch twin, `*_reference`: its specification, its test oracle, and what runs on a CPU. On CUDA the
Triton kernels run, under autograd too. Arithmetic is fp32 inside, whatever the tensors are; what torch would round to
the tensors' dtype on the way is rounded here too, so that both paths agree to the last bit or one beside it.

Where we differ from transformers: the norm weight is fp32 and multiplies before the cast to bf16 (in bf16, noise of
1e-3 beside a weight of 1 vanishes); the gradient of the weight is made only when something trains it.

Programmatic dependent launch: on Hopper each kernel lets the next one start its preamble (launch_dependents) before it
has ended, and itself waits (wait) before it reads what the one before wrote. A decode step is some 230 launches that each
last a few microseconds; what they spend on starting is worth having. When to let the next one start matters as much: a
swiglu that did so before its own wait cost 10% of a step at 8 sequences, because its programs, still waiting, took the
places of the next GEMM's, whose work is shared out for all of them to run at once.

Source: RMSNorm (arXiv 1910.07467), SwiGLU (2002.05202). Rotary positions, the third such operation, are layers/rope.py.
Cost: every tensor in the formulas passes through memory once. Limits: rows up to 16384 elements.
Copy along: nothing. Packages: torch, and triton for the fast path.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a CPU-only install: the torch twins remain
    triton = None

__all__ = ["add_rms_norm", "swiglu"]

# ------------------------------------------------------------------------------------------------ the torch twins


def add_rms_norm_reference(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual add, then RMSNorm: x_new = x + delta; normed = x_new / rms(x_new) * weight, in fp32, cast back.

    x, delta (T, d) in the compute dtype; weight (d,) fp32. Returns (normed, x_new), both in x's dtype.
    """
    x_new = x if delta is None else x + delta
    x32 = x_new.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps) * weight
    return normed.to(x.dtype), x_new


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up (T, 2F) = [gate | up]; returns (T, F)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


# ------------------------------------------------------------------------------------------------ Triton kernels

if triton is not None:

    @triton.jit
    def _add_rms_norm_kernel(
        x_ptr, delta_ptr, w_ptr, y_ptr, sum_ptr, rrms_ptr, d, eps,
        HAS_DELTA: tl.constexpr, SAVE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        offs = tl.arange(0, BLOCK)
        mask = offs < d
        w = tl.load(w_ptr + offs, mask=mask, other=0.0)  # (d,) fp32; no kernel writes it, so it need not wait
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        x = tl.load(x_ptr + row * d + offs, mask=mask, other=0.0)  # one row
        if HAS_DELTA:
            delta = tl.load(delta_ptr + row * d + offs, mask=mask, other=0.0)
            x = (x.to(tl.float32) + delta.to(tl.float32)).to(x_ptr.dtype.element_ty)
            tl.store(sum_ptr + row * d + offs, x, mask=mask)
        x = x.to(tl.float32)
        rrms = tl.rsqrt(tl.sum(x * x, axis=0) / d + eps)
        tl.store(y_ptr + row * d + offs, (x * rrms * w).to(y_ptr.dtype.element_ty), mask=mask)
        if SAVE:
            tl.store(rrms_ptr + row, rrms)

    @triton.jit
    def _rms_norm_backward_kernel(
        dy_ptr, dsum_ptr, x_ptr, w_ptr, rrms_ptr, dx_ptr, d, HAS_DSUM: tl.constexpr, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        offs = tl.arange(0, BLOCK)
        mask = offs < d
        rrms = tl.load(rrms_ptr + row)
        x_hat = tl.load(x_ptr + row * d + offs, mask=mask, other=0.0).to(tl.float32) * rrms  # one row of x'
        dy = tl.load(dy_ptr + row * d + offs, mask=mask, other=0.0).to(tl.float32)  # the same row of dy
        dy *= tl.load(w_ptr + offs, mask=mask, other=0.0)
        dx = rrms * (dy - x_hat * (tl.sum(dy * x_hat, axis=0) / d))
        if HAS_DSUM:
            dx += tl.load(dsum_ptr + row * d + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * d + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)

    @triton.jit
    def _swiglu_kernel(x_ptr, y_ptr, F, BLOCK: tl.constexpr, PDL: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = offs < F
        if PDL:  # not earlier: the next GEMM's programs come when they all fit beside these many, or some start late
            gdc_wait()
            gdc_launch_dependents()
        gate = tl.load(x_ptr + row * 2 * F + offs, mask=mask, other=0.0).to(tl.float32)  # a piece of the gate half
        up = tl.load(x_ptr + row * 2 * F + F + offs, mask=mask, other=0.0).to(tl.float32)  # and of the up half
        silu = (gate * tl.sigmoid(gate)).to(x_ptr.dtype.element_ty).to(tl.float32)  # rounded here, as in torch
        tl.store(y_ptr + row * F + offs, (silu * up).to(y_ptr.dtype.element_ty), mask=mask)

    @triton.jit
    def _swiglu_backward_kernel(dy_ptr, x_ptr, dx_ptr, F, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = offs < F
        dy = tl.load(dy_ptr + row * F + offs, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(x_ptr + row * 2 * F + offs, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + row * 2 * F + F + offs, mask=mask, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        dgate = dy * up * s * (1 + gate * (1 - s))
        tl.store(dx_ptr + row * 2 * F + offs, dgate.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dx_ptr + row * 2 * F + F + offs, (dy * gate * s).to(dx_ptr.dtype.element_ty), mask=mask)


def has_pdl(x: Tensor) -> bool:
    """Whether this tensor's GPU knows programmatic dependent launch."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 8)


def add_rms_norm_triton(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, save: bool = False):
    """(normed, x_new, 1/rms or None); the arguments of add_rms_norm."""
    x, rows, d = x.contiguous(), x.shape[0], x.shape[1]
    delta = delta if delta is None else delta.contiguous()
    y, x_new = torch.empty_like(x), x if delta is None else torch.empty_like(x)
    rrms = torch.empty(rows, dtype=torch.float32, device=x.device) if save else None
    block, pdl = triton.next_power_of_2(d), has_pdl(x)
    options = {"launch_pdl": True} if pdl else {}
    if rows:
        _add_rms_norm_kernel[(rows,)](
            x, x if delta is None else delta, weight, y, x_new, weight if rrms is None else rrms, d, eps,
            HAS_DELTA=delta is not None, SAVE=save, BLOCK=block, PDL=pdl, num_warps=_warps(block), **options,
        )  # fmt: skip
    return y, x_new, rrms


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float):
        y, x_new, rrms = add_rms_norm_triton(x, delta, weight, eps, save=True)
        ctx.save_for_backward(x_new, weight, rrms)
        ctx.has_delta = delta is not None
        return (y, x_new) if ctx.has_delta else y

    @staticmethod
    def backward(ctx, dy: Tensor, dsum: Tensor | None = None):
        x, weight, rrms = ctx.saved_tensors
        dy, dx = dy.contiguous(), torch.empty_like(x)
        rows, d = x.shape
        block = triton.next_power_of_2(d)
        _rms_norm_backward_kernel[(rows,)](
            dy, dy if dsum is None else dsum.contiguous(), x, weight, rrms, dx, d,
            HAS_DSUM=dsum is not None, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
        dweight = None
        if ctx.needs_input_grad[2]:  # full-parameter training only
            dweight = (dy.float() * x.float() * rrms.unsqueeze(1)).sum(0)
        return dx, dx if ctx.has_delta else None, dweight, None


def swiglu_triton(gate_up: Tensor) -> Tensor:
    gate_up, (rows, width) = gate_up.contiguous(), gate_up.shape
    y, pdl = gate_up.new_empty(rows, width // 2), has_pdl(gate_up)
    grid = (rows, triton.cdiv(width // 2, 1024))
    options = {"launch_pdl": True} if pdl else {}
    if rows:
        _swiglu_kernel[grid](gate_up, y, width // 2, BLOCK=1024, PDL=pdl, num_warps=4, **options)
    return y


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu_triton(gate_up)

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate_up, dy = gate_up.contiguous(), dy.contiguous()
        dx = torch.empty_like(gate_up)
        rows, width = dy.shape
        _swiglu_backward_kernel[(rows, triton.cdiv(width, 1024))](dy, gate_up, dx, width, BLOCK=1024, num_warps=4)
        return dx


# ------------------------------------------------------------------------------------------------ public functions


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, x + delta) for x, delta (T, d) and weight (d,) fp32: see add_rms_norm_reference."""
    if not x.is_cuda or triton is None:
        return add_rms_norm_reference(x, delta, weight, eps)
    if not _needs_grad(x, delta, weight):
        return add_rms_norm_triton(x, delta, weight, eps)[:2]
    result = _AddRmsNorm.apply(x, delta, weight, eps)
    return result if delta is not None else (result, x)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up (T, 2F) = [gate | up]: see swiglu_reference."""
    if not gate_up.is_cuda or triton is None:
        return swiglu_reference(gate_up)
    return _SwiGLU.apply(gate_up) if _needs_grad(gate_up) else swiglu_triton(gate_up)


def demo() -> None:
    """Why norm weights are fp32: noise of 1e-3 beside weights near 1, as a bf16 weight would hold it."""
    generator = torch.Generator().manual_seed(0)
    weight = 1 + torch.rand(4096, generator=generator)
    noisy = weight + 1e-3 * torch.randn(4096, generator=generator)
    x = torch.randn(1, 4096, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        before, after = (add_rms_norm(x, None, w.to(dtype).float(), 1e-6)[0] for w in (weight, noisy))
        print(f"weights in {str(dtype)[6:]:9} {(before == after).float().mean():4.0%} of channels feel no noise")


if __name__ == "__main__":
    demo()
