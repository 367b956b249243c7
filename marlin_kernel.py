"""The 4-bit linear layer: NVFP4 weights stay packed from load to result. Forward, backward to the input, dequantising.

The idea: a decoding step reads every weight once and computes little, so a quarter of the bytes is up to four times the
speed, if decoding and multiplying cost less than reading. What is called depends on the rows of x:

    rows          way                                                          bound by (bench/gemm.md)
    1 .. 32       gemm_kernel (gpu/marlin_triton.py), 4.5 bits a weight        the tensor core's time for few rows; the floor
                                                                               would be memory, 0.5625 N K bytes
    .. 512        gemm_kernel with larger tiles                                decoding between products, then the tensor cores
    more, and     dequantise into one scratch buffer that all layers           the tensor cores; dequantising moves 2.56
    backward      share, then cuBLAS                                           bytes a weight and is paid once a call

Exactness. code * scale has at most six significant bits, so bf16 holds it; both ways multiply exactly these numbers and
apply 128 / g to the fp32 sums (cuBLAS: as alpha). A rollout and the training step that follows thus see the same weights
and differ by the order of summation alone; with LoRA too, because every way rounds to bf16 before LoRA and after it (once,
inside the kernel, would be finer, but would part sampler and trainer). dequantize() rounds code * (scale / g), as the
public format defines it.

LoRA up to FUSED_ROWS rows is part of the launch; for more rows it is one small GEMM, and another one a part.

Tiles come from a table (PLANS), measured on one H200 (SXM, 132 SMs, Triton 3.6) by bench/tune_gemm.py. Nothing is tuned at
run time; each (rows bucket, adapter) compiles once. Other GPUs with bf16 tensor cores (A100, L40S, Blackwell) take PORTABLE,
which is right but not tuned. A GPU without them, or no Triton: supports() says so in one line, the reference below computes.

Safe under CUDA-graph capture: the workspace exists after the first call, nothing is allocated but y, nothing waits for the
host. All launches on a GPU share the workspace, so they must be in one stream's order.

Source: Marlin (arXiv 2408.11743). Where we differ: Triton; exact scales; equal stripes instead of a chain of locks; LoRA
and bias inside. Cost: how near the floor it comes, bench/gemm.md.
Limits: bf16 activations, N and K multiples of 16, no autograd (lora.py has it).
Copy along: nvfp4.py, gpu/marlin_layout.py, gpu/marlin_decode.py, gpu/marlin_triton.py. And theirs.

    python marlin_kernel.py        a product from the packed form: what it loses and what it saves
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import nvfp4
from gpu.marlin_layout import MarlinWeight, pack, unpack

try:
    import triton
except ImportError:  # a CPU-only installation: the reference still works
    triton = None
if triton is not None:
    from gpu.marlin_decode import dequantize_kernel
    from gpu.marlin_triton import gemm_kernel

__all__ = ["LoraOperands", "MarlinWeight", "add_lora_", "dequantize", "grad_input", "linear", "pack", "supports", "unpack"]


@dataclass(frozen=True)
class LoraOperands:
    """An adapter in the compute dtype: row n of part p uses columns p*R .. (p+1)*R - 1 of x A^T."""

    a: Tensor  # (P*R, K) every part's A, stacked; zeros for a part without adapter
    b: Tensor  # (N, R) every part's B, stacked
    parts: tuple[int, ...]  # rows of each part, N in all
    scaling: float  # alpha / R


# ------------------------------------------------------------------------------------------- the slow reference


def linear_reference(x: Tensor, w: MarlinWeight, bias: Tensor | None = None, lora: LoraOperands | None = None) -> Tensor:
    """What linear() computes, from the public layout, in the dtype of x: specification, CPU path and test oracle."""
    y = x @ torch.cat([nvfp4.dequantize(part, x.dtype) for part in unpack(w)]).T
    if bias is not None:
        y = y + bias
    return y if lora is None else add_lora_(y, x, lora)


def add_lora_(y: Tensor, x: Tensor, lora: LoraOperands) -> Tensor:
    """y (M, N) += scaling * (x A^T) B^T for x (M, K), part by part, in place."""
    rank, start = lora.b.shape[1], 0
    h = x @ lora.a.T  # (M, P*R)
    for part, rows in enumerate(lora.parts):
        columns = slice(start, start + rows)
        y[:, columns].addmm_(h[:, part * rank : (part + 1) * rank], lora.b[columns].T, alpha=lora.scaling)
        start += rows
    return y


# ------------------------------------------------------------------------------------------------- choosing tiles


@dataclass(frozen=True)
class Plan:
    """Tile and resources of one launch: BM x BN outputs in k-steps of BK."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    programs: int  # that run at the same time on an SM
    registers: int  # a thread may use, so that they fit
    shared: bool = False  # split tiles are summed by all programs, block by block; else by the one with the tile's end
    halves: bool = False  # products of one half of a tile run while the other is decoded; BN at least 32 a warp

    @functools.cached_property
    def constants(self) -> dict[str, int]:
        """What the kernel is compiled for."""
        return {"BM": self.bm, "BN": self.bn, "BK": self.bk, "RN": max(16, min(self.bn, 4096 // self.bm)),
                "SHARED": self.shared, "HALVES": self.halves, "DIRECT": self.bm <= 32}  # fmt: skip


FUSED_ROWS = 512  # more rows: dequantise, then cuBLAS
PREFETCHED_LINES = 64  # of 128 bytes, for each 64 rows, asked for before the previous kernel has ended

# rows up to: (wide layers, N >= 16384), (deep ones, K > 8192), (the others)
PLANS = {
    16: (Plan(16, 128, 256, 4, 3, 3, 168), Plan(16, 64, 256, 4, 4, 3, 168), Plan(16, 64, 128, 4, 5, 2, 255)),
    32: (Plan(32, 128, 128, 4, 4, 3, 168), Plan(32, 64, 256, 4, 3, 3, 168), Plan(32, 64, 128, 4, 4, 2, 255)),
    64: (Plan(64, 128, 64, 4, 4, 3, 168),
         Plan(64, 256, 128, 8, 3, 1, 255, shared=True),
         Plan(64, 64, 128, 4, 4, 2, 255, shared=True)),
    128: (Plan(128, 128, 64, 8, 5, 1, 255),
         Plan(128, 128, 64, 8, 5, 1, 255, shared=True),
         Plan(128, 128, 64, 8, 5, 1, 255, shared=True)),
    256: (Plan(256, 128, 64, 8, 4, 1, 255), Plan(128, 128, 64, 8, 5, 2, 128, shared=True), Plan(128, 128, 64, 8, 5, 1, 255)),
    512: (Plan(256, 128, 64, 8, 4, 1, 255), Plan(256, 128, 64, 8, 4, 1, 255), Plan(128, 128, 64, 8, 5, 1, 255)),
}
PORTABLE = {16: Plan(16, 64, 64, 4, 3, 2, 255), 64: Plan(64, 64, 64, 4, 3, 2, 255), 512: Plan(128, 64, 64, 4, 3, 1, 255)}


def plan(m: int, n: int, k: int, hopper: bool) -> Plan:
    """The plan for m <= FUSED_ROWS rows of a layer (n, k)."""
    if not hopper:
        return PORTABLE[min(rows for rows in PORTABLE if rows >= m)]
    chosen = PLANS[min(rows for rows in PLANS if rows >= m)][0 if n >= 16384 else 1 if k > 8192 else 2]
    return chosen if chosen.bk <= 128 or k % chosen.bk == 0 else replace(chosen, bk=128)  # words are padded to 128 columns


class _Device:
    """What a launch must know about a GPU, and the memory that all launches on it share, in stream order."""

    def __init__(self, device: torch.device):
        properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        self.device = device
        self.sms = properties.multi_processor_count if properties else 4
        self.hopper = bool(properties) and properties.major == 9
        self.partial = torch.empty(self.sms << 16, dtype=torch.float32, device=device)  # unfinished tiles
        self.h = torch.empty(1 << 20, dtype=torch.float32, device=device)  # LoRA's h, and its slices
        self.flags = torch.zeros(1 << 16, dtype=torch.int32, device=device)  # counters; every launch leaves them zero
        self.scratches: list[Tensor] = []  # outgrown ones stay: a captured graph may hold their address

    def scratch(self, elements: int) -> Tensor:
        """bf16 space for one dequantised weight."""
        if not self.scratches or self.scratches[-1].numel() < elements:
            self.scratches.append(torch.empty(elements, dtype=torch.bfloat16, device=self.device))
        return self.scratches[-1][:elements]


@functools.cache
def _workspace(device: torch.device) -> _Device:
    return _Device(device)


@functools.cache
def supports(device: torch.device | str) -> str:
    """"" where the kernel runs, else one line that says why not (linear() then uses the slow reference)."""
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"the 4-bit kernel needs a CUDA GPU; on {device} weights are dequantised first"
    if triton is None:
        return "the 4-bit kernel needs Triton, which is not installed; weights are dequantised first"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"this GPU (sm_{major}{minor}) has no bf16 tensor cores; weights are dequantised first"
    return ""


def _launch(x: Tensor, w: MarlinWeight, bias: Tensor | None, lora: LoraOperands | None, y: Tensor, p: Plan,
            device: _Device) -> None:  # fmt: skip
    """One launch of gemm_kernel: y (M, N) = x W^T + bias + LoRA."""
    m, n, k = x.shape[0], w.n, w.k
    tiles, steps = -(-n // p.bn) * -(-m // p.bm), -(-k // p.bk)
    stripes = max(1, min(p.programs * device.sms, tiles * steps, device.partial.numel() // (2 * p.bm * p.bn)))
    if whole := 0.8 * stripes <= tiles <= stripes:  # whole tiles: a few programs less, but nothing to sum
        stripes = tiles
    rank, parts, slices, short, small = 0, 0, 0, 0, 1
    if lora is not None:
        rank, parts, each = lora.b.shape[1], len(w.parts), len(w.parts) * -(-m // p.bm)  # h has one piece a part and rows tile
        room = device.h.numel() // (each * p.bm * max(16, triton.next_power_of_2(rank))) - 1
        slices = max(1, min(k // 512, p.programs * device.sms // (4 * each), room, 8 if p.bm <= 32 else k))
        jobs, cost = each * slices, -(-steps // slices) + 2  # about as many k-steps as a job takes time, start and end included
        p = replace(p, shared=False) if p.shared and rank > 32 else p  # A takes memory of programs that must all run at a time
        if jobs < stripes and not whole:
            short, small = jobs, max(1, (tiles * steps + jobs * cost) // stripes - cost)
    a, b = (x, x) if lora is None else (lora.a, lora.b)
    gemm_kernel[(stripes,)](
        x, w.words, w.scales, w.row_scale, x if bias is None else bias, y, device.partial, device.flags,
        a, b, w.bounds, device.h, m, n, k, 0.0 if lora is None else lora.scaling, stripes, slices, short, small,
        **p.constants, EVEN_K=k % p.bk == 0, HAS_BIAS=bias is not None, R=rank, BR=max(16, triton.next_power_of_2(rank)),
        PARTS=parts, PDL=PREFETCHED_LINES if device.hopper else 0, num_warps=p.warps, num_stages=p.stages,
        maxnreg=p.registers, launch_pdl=device.hopper,
    )  # fmt: skip


def _exact(w: MarlinWeight, device: _Device) -> Tensor:
    """W * g / 128 in bf16, exactly, in the scratch buffer: valid until the next call on this GPU."""
    out = device.scratch(w.n * w.k).view(w.n, w.k)
    _dequantize_into(out, w, exact=True)
    return out


def _dequantize_into(out: Tensor, w: MarlinWeight, exact: bool) -> None:
    g = w.row_scale if exact else w.global_scales.repeat_interleave(w.bounds.diff(), output_size=w.n)
    grid = (-(-w.n // 64), -(-w.k // 128))
    dequantize_kernel[grid](w.words, w.scales, g, out, w.n, w.k, BN=64, BK=128, EXACT=exact, num_warps=4)


def _check(x: Tensor, columns: int, what: str) -> None:
    if x.ndim != 2 or x.shape[1] != columns:
        raise ValueError(f"input has shape {tuple(x.shape)}; this weight wants (rows, {columns}), its {what}")


# ------------------------------------------------------------------------------------------------------ public API


@torch.no_grad()
def linear(x: Tensor, w: MarlinWeight, bias: Tensor | None = None, lora: LoraOperands | None = None,
           out: Tensor | None = None) -> Tensor:  # fmt: skip
    """y (M, N) = x W^T + bias + scaling * (x A^T) B^T for x (M, K) bf16. No autograd: see lora.py.

    On a GPU: one launch up to FUSED_ROWS rows (LoRA: up to rank 128), allocating at most y, never waiting for the host,
    so it may be captured in a CUDA graph. Elsewhere: linear_reference.
    """
    _check(x, w.k, "in-features")
    if lora is not None and tuple(lora.parts) != w.parts:
        raise ValueError(f"the adapter's parts {tuple(lora.parts)} are not the weight's {w.parts}; build it for this layer")
    if supports(x.device):
        y = linear_reference(x, w, bias, lora)
        return y if out is None else out.copy_(y)
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x is {x.dtype}; the 4-bit kernel takes bfloat16: convert it, or use linear_reference")
    y, x = torch.empty(x.shape[0], w.n, dtype=x.dtype, device=x.device) if out is None else out, x.contiguous()
    if x.shape[0] == 0:
        return y
    device, m = _workspace(x.device), x.shape[0]
    inside = lora if lora is not None and m <= FUSED_ROWS and lora.b.shape[1] <= 128 else None
    if m <= FUSED_ROWS:
        _launch(x, w, bias, inside, y, plan(m, w.n, w.k, device.hopper), device)
    else:
        _dense(x, _exact(w, device).T, w, bias, y)
    return y if lora is None or inside is not None else add_lora_(y, x, lora)


def _dense(x: Tensor, matrix: Tensor, w: MarlinWeight, bias: Tensor | None, y: Tensor) -> None:
    """y = alpha * x matrix + bias, one GEMM where the parts share g, else one a part."""
    sizes = (w.n,) if len(set(w.alphas)) == 1 else w.parts
    start = 0
    for rows, alpha in zip(sizes, w.alphas):
        part = slice(start, start + rows)
        base, beta = (y[:, part], 0) if bias is None else (bias[part], 1)
        torch.addmm(base, x, matrix[:, part], beta=beta, alpha=alpha, out=y[:, part])
        start += rows


@torch.no_grad()
def grad_input(dy: Tensor, w: MarlinWeight) -> Tensor:
    """dx (M, K) = dy W for dy (M, N) bf16: dequantise into scratch, then cuBLAS."""
    _check(dy, w.n, "out-features")
    if supports(dy.device):
        return dy @ torch.cat([nvfp4.dequantize(part, dy.dtype) for part in unpack(w)])
    matrix, sizes = _exact(w, _workspace(dy.device)), (w.n,) if len(set(w.alphas)) == 1 else w.parts
    dx, start = torch.empty(dy.shape[0], w.k, dtype=dy.dtype, device=dy.device), 0
    for rows, alpha in zip(sizes, w.alphas):
        part = slice(start, start + rows)
        torch.addmm(dx, dy[:, part], matrix[part], beta=float(start > 0), alpha=alpha, out=dx)
        start += rows
    return dx


@torch.no_grad()
def dequantize(w: MarlinWeight, out: Tensor | None = None) -> Tensor:
    """W (N, K) bf16 = code * (s / g), as nvfp4.dequantize gives it, bit for bit."""
    out = torch.empty(w.n, w.k, dtype=torch.bfloat16, device=w.words.device) if out is None else out
    if supports(w.words.device):
        return out.copy_(torch.cat([nvfp4.dequantize(part) for part in unpack(w)]))
    _dequantize_into(out, w, exact=False)
    return out


def demo() -> None:
    """What a product through the packed weights loses, by cause, and what it saves."""
    generator, device = torch.Generator().manual_seed(0), "cuda" if torch.cuda.is_available() else "cpu"
    weights = torch.randn(192, 128, generator=generator), torch.randn(64, 128, generator=generator)
    parts = [nvfp4.quantize(weight, nvfp4.global_scale(*weights)) for weight in weights]
    w, x = pack([part.to(device) for part in parts]), torch.randn(3, 128, generator=generator).bfloat16()
    y = linear(x.to(device), w).double().cpu()

    def loss(*matrices: Tensor) -> str:
        exact = x.double() @ torch.cat(matrices).double().T
        return f"{((y - exact).norm() / exact.norm()).item():7.2%} of its norm"

    print(f"weights (192 + 64) x 128 packed: {8 * (w.words.nbytes + w.scales.nbytes) / (w.n * w.k):.2f} bits each")
    print(f"x W^T in bf16 is off from float64 by      {loss(*(nvfp4.dequantize(part, torch.float32) for part in parts))}")
    print(f"    and from the unquantised weights by   {loss(*weights)}: rounding to 4 bits, not the product")
    n, k, terabytes_s = 37888, 3584, 4.4
    print(f"one row through the 7B model's gate and up projections, {n} x {k}, reads")
    for name, bytes_a_weight in (("16 bits", 2), ("NVFP4", 4.5 / 8)):
        megabytes = n * k * bytes_a_weight / 1e6
        print(f"    {name:8} {megabytes:4.0f} MB: at {terabytes_s} TB/s (H200) never under {megabytes / terabytes_s:3.0f} us")
    print(supports(device) or "computed by the 4-bit kernel on this GPU")


if __name__ == "__main__":
    demo()
