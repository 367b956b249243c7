"""LoRA inside the 4-bit GEMM's launch: slices of h = x A^T first, h B^T when a tile of y is complete.

The idea: for few rows a layer's time is its launches, and two small GEMMs for each adapter would double it. Inside the launch
the adapter costs little more than its bytes, if nobody waits for it:

    programs    0: slice of h | stripe ...     first the jobs, one a (rows tile, part, slice of K); their stripes are shorter
                1: slice of h | stripe ...
                2: stripe .................    who completes a tile has asked for its B, waits for one counter (pieces of the
                3: stripe .................    tile and slices of h), and adds h B^T

    h is summed by its readers from up to 8 slices (DIRECT: up to 32 rows, one round of loads), else by the last of its jobs.
    A part is one of the projections that share the input (q, k, v; gate, up); a tile of y that lies across a seam of two
    parts needs the h of both.

Rounding: h, h B^T * scaling and the sum are rounded to the dtype of y, each, as in training, where they are GEMMs of their own
and cuBLAS rounds the product before it adds y: what both round alike does not part the sampler from the trainer.

Source: LoRA (arXiv 2106.09685). Cost: A and B once, 5% of a 7B layer's packed bytes at rank 32; measured, bench/gemm.md.
Limits: rank up to 128; above 32 A's slices take the memory of programs, so fewer run at a time and the launch is slower, and
plans whose programs must all run at the same time (SHARED) are not for it. No atomics on numbers: gpu/marlin_sync.py.
Copy along: gpu/marlin_sync.py.
"""

import triton
import triton.language as tl

from gpu.marlin_sync import add_in_order, prefetch, settle

LORA_READY = tl.constexpr(4096)  # what a slice, or a finished h, adds to the counter of a tile, which is in fewer pieces


@triton.jit
def _shrink(x_ptr, a_ptr, bounds_ptr, h_ptr, flag_ptr, slices_done_ptr, job, slices, M, K, BM: tl.constexpr,
                 BN: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, PARTS: tl.constexpr,
                 DIRECT: tl.constexpr, HOPPER: tl.constexpr):  # fmt: skip
    """One slice of h = x[tile_m] A_p^T, counted in at the part's tiles, which sum the slices (DIRECT). Where that were too
    much to read, who finishes an h last sums it, and counts it in for all.
    """
    which, slice_, tiles_m = job // slices, job % slices, (M + BM - 1) // BM
    part, tile_m, steps = which % PARTS, which // PARTS, (K + BK - 1) // BK
    offs_m, offs_r = tile_m * BM + tl.arange(0, BM), tl.arange(0, BR)
    acc = tl.zeros((BM, BR), tl.float32)
    for step in range(steps * slice_ // slices, steps * (slice_ + 1) // slices):
        offs_k = step * BK + tl.arange(0, BK)
        x_mask = (offs_m[:, None] < M) & (offs_k[None, :] < K)
        a_mask = (offs_r[:, None] < R) & (offs_k[None, :] < K)
        x = tl.load(x_ptr + offs_m[:, None] * K + offs_k[None, :], mask=x_mask, other=0.0)  # (BM, BK)
        a = tl.load(a_ptr + (part * R + offs_r[:, None]) * K + offs_k[None, :], mask=a_mask, other=0.0)  # (BR, BK)
        if HOPPER and BM >= 64:  # fewer rows go through mma.sync, which needs no waits
            settle(step)
        acc = tl.dot(x, a.T, acc, input_precision="ieee")
    offs = tl.arange(0, BM)[:, None] * BR + offs_r[None, :]
    slices_ptr = h_ptr + (PARTS * tiles_m + which * slices) * BM * BR + offs
    tl.store(slices_ptr + slice_ * BM * BR, acc)
    tl.debug_barrier()  # all threads have stored before one of them says so
    is_ready = True
    if not DIRECT:
        is_ready = tl.atomic_add(slices_done_ptr + which, 1, sem="acq_rel") == slices - 1
        if is_ready:
            h = add_in_order(tl.zeros((BM, BR), tl.float32), slices_ptr, 0, slices, BM * BR, 8 if BM * BR <= 2048 else 2)
            tl.store(h_ptr + which * BM * BR + offs, h)
            tl.store(slices_done_ptr + which, 0)
            tl.debug_barrier()
    if is_ready:
        end = (tl.load(bounds_ptr + part + 1) + BN - 1) // BN
        for first in range(tl.load(bounds_ptr + part) // BN, end, 128):
            tile_n = first + tl.arange(0, 128)
            tl.atomic_add(flag_ptr + tile_n * tiles_m + tile_m, LORA_READY, mask=tile_n < end, sem="release")


@triton.jit
def lora_jobs(x_ptr, a_ptr, bounds_ptr, h_ptr, flag_ptr, slices_done_ptr, jobs, slices, M, K, BM: tl.constexpr,
              BN: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, PARTS: tl.constexpr,
              DIRECT: tl.constexpr, HOPPER: tl.constexpr):  # fmt: skip
    """This program's jobs: one or none, unless there are more jobs than programs."""
    job, stride = tl.program_id(0), tl.num_programs(0)
    if x_ptr.dtype.element_ty == tl.float32:  # the interpreter runs programs in turn: the first one does all
        job, stride = tl.where(job == 0, 0, jobs), 1
    for j in range(job, jobs, stride):
        _shrink(x_ptr, a_ptr, bounds_ptr, h_ptr, flag_ptr, slices_done_ptr, j, slices, M, K, BM, BN, BK, R, BR, PARTS,
                DIRECT, HOPPER)  # fmt: skip


@triton.jit
def prefetch_a(a_ptr, K, jobs, slices, BK: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, PARTS: tl.constexpr):
    """Asks for the first 512 columns of A that this program's job reads."""
    job = tl.program_id(0)
    if job < jobs:
        first = (K + BK - 1) // BK * (job % slices) // slices * BK
        rows, lines = job // slices % PARTS * R + tl.arange(0, BR), first + 64 * tl.arange(0, 8)
        prefetch(a_ptr + tl.minimum(rows[:, None] * K + lines[None, :], PARTS * R * K - 1))


@triton.jit
def seams_of(bounds_ptr, PARTS: tl.constexpr):
    """The row where each part begins, and the end."""
    seams = ()
    for part in tl.static_range(PARTS + 1):
        seams = seams + (tl.load(bounds_ptr + part),)
    return seams


@triton.jit
def lora_ready(seams, row, each, BN: tl.constexpr, PARTS: tl.constexpr):
    """What the counter of the tile at `row` gets from LoRA, `each` a part, before the tile may be finished."""
    ready = 0
    for part in tl.static_range(PARTS):
        ready += tl.where((seams[part] < row + BN) & (seams[part + 1] > row), each, 0)
    return ready


@triton.jit
def load_h(h_ptr, part, tile_m, tiles_m, slices, BM: tl.constexpr, BR: tl.constexpr, PARTS: tl.constexpr,
            DIRECT: tl.constexpr):  # fmt: skip
    """h_p^T (BR, BM) of a part and rows tile."""
    which, ptrs = tile_m * PARTS + part, h_ptr + tl.arange(0, BM)[None, :] * BR + tl.arange(0, BR)[:, None]
    if DIRECT:
        ptrs += (PARTS * tiles_m + which * slices) * (BM * BR)
        return add_in_order(tl.zeros((BR, BM), tl.float32), ptrs, 0, slices, BM * BR, 8)
    return tl.load(ptrs + which * (BM * BR), cache_modifier=".cg")


@triton.jit
def part_at(seams, row, PARTS: tl.constexpr):
    """The part that a row belongs to."""
    part = 0
    for p in tl.static_range(1, PARTS):
        part += tl.where(row >= seams[p], 1, 0)
    return part


@triton.jit
def load_b(b_ptr, N, row, BLOCK: tl.constexpr, R: tl.constexpr, BR: tl.constexpr):
    """B (BLOCK, BR) of rows row .. row + BLOCK - 1, whatever their parts."""
    offs_n, offs_r = row + tl.arange(0, BLOCK), tl.arange(0, BR)
    mask = (offs_n[:, None] < N) & (offs_r[None, :] < R)
    return tl.load(b_ptr + offs_n[:, None] * R + offs_r[None, :], mask=mask, other=0.0)


@triton.jit
def lora_expand(lora, seams, row, tile_m, tiles_m, slices, BM: tl.constexpr, BLOCK: tl.constexpr, BR: tl.constexpr,
                 PARTS: tl.constexpr, DIRECT: tl.constexpr):  # fmt: skip
    """B h^T (BLOCK, BM). lora: B, h of the first row's part, h_ptr: the other parts' h are read here, only at a seam."""
    b, h, h_ptr = lora[0], lora[1], lora[2]
    offs_n, end = row + tl.arange(0, BLOCK), seams[PARTS]
    for part in tl.static_range(PARTS - 1, 0, -1):
        end = tl.where(seams[part] > row, seams[part], end)
    delta = tl.dot(tl.where((offs_n < end)[:, None], b, 0.0).to(b.dtype), h.to(b.dtype), input_precision="ieee")
    for part in tl.static_range(1, PARTS):
        if (seams[part] > row) & (seams[part] < row + BLOCK):
            inside = (offs_n >= seams[part]) & (offs_n < seams[part + 1])
            other = load_h(h_ptr, part, tile_m, tiles_m, slices, BM, BR, PARTS, DIRECT).to(b.dtype)
            delta = tl.dot(tl.where(inside[:, None], b, 0.0).to(b.dtype), other, delta, input_precision="ieee")
    return delta


def demo() -> None:
    """Who does what in Qwen2.5-7B's layers at 8 rows on 132 SMs, by the plans of marlin_kernel.py's table for one H200."""
    layers = (("qkv", 4608, 3584, 3, 64, 128, 264), ("o", 3584, 3584, 1, 64, 128, 264),
              ("gate_up", 37888, 3584, 2, 128, 256, 396), ("down", 3584, 18944, 1, 64, 256, 396))  # fmt: skip
    for name, n, k, parts, bn, bk, programs in layers:
        slices, steps = min(8, k // 512), -(-k // bk)
        jobs, cost, units = parts * slices, -(-steps // slices) + 2, -(-n // bn) * steps
        short = max(1, (units + jobs * cost) // programs - cost)
        print(f"{name:8} {jobs:2} jobs of {steps / slices:.1f} k-steps; their programs' stripes have {short} of them, "
              f"the other {programs - jobs} have {(units - jobs * short) / (programs - jobs):.1f}")  # fmt: skip


if __name__ == "__main__":
    demo()
