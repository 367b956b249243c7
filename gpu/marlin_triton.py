"""The 4-bit GEMM's Triton kernels: decode in registers, multiply in the tensor cores, share out the work evenly.

The idea: y^T = W x^T. The weights are the tensor core's *A* operand, which wgmma takes from registers, so a decoded
weight never goes through shared memory; the few rows of x are its B operand. Marlin's "swap AB".

    global memory --cp.async--> shared memory --one 16-byte load a thread--> 4 words --13 instructions each-->
    32 bf16 weights in the registers where wgmma m64n16k16 wants them (gpu/marlin_layout.py) --> fp32 sums

Equal work. The k-steps of all output tiles form one line of units; it is cut into equal stripes, one a program, as many
as fit on the GPU at a time. A tile that a cut goes through is summed from fp32 partial sums, in the order of the stripes,
so that the result does not depend on timing:

    tiles     |----- 0 -----|----- 1 -----|----- 2 -----|      the program that has a tile's end adds what the others
    stripes   |-- a --|-- b --|-- c --|-- d --|-- e --|        left (0: a + b), or, where a tile has many pieces
                                                               (SHARED), everybody sums blocks of rows of split tiles

Stripes are worked through from the end, so that what others wait for comes first. A program only ever waits for lower
ones, which started earlier, or (SHARED) for programs that all run at the same time; counters return to zero by themselves.

LoRA in the same launch. Extra programs, the first ones, make slices of h = x A^T; the last to finish a part adds up its
slices; whoever completes a block of y adds h B^T before storing it. No atomics on numbers, no second launch.

Overlap. With PDL (programmatic dependent launch, Hopper) a launch starts while the previous kernel ends: it computes its
addresses, asks for its first weights, and only then waits. A kernel launched so must call gdc_wait before it reads or writes
what another kernel touches.

The interpreter (CPU tests) knows no packed bf16 instructions: with fp32 inputs the same kernels decode in plain Triton.
Source: Marlin (arXiv 2408.11743), stream-K (arXiv 2301.03598).
Cost: the packed words once, x from the L2, and an fp32 partial tile for each piece of a tile that is cut.
Limits: fewer than 2^31 elements in x, y and the words.
Copy along: gpu/marlin_decode.py, gpu/marlin_few.py. The operands come from gpu/marlin_layout.py,
the launches from marlin_kernel.py.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gpu.marlin_decode import decode_bf16, decode_fp32
from gpu.marlin_few import accumulate_few, add_fragments, store_fragments, to_matrix


@triton.jit
def _prefetch(ptrs):
    """Asks for the 128-byte lines at ptrs to come into the L2 cache, and does not wait."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _prefetch_weights(w_ptr, N, K, tile_n, step, BN: tl.constexpr, BK: tl.constexpr, LINES: tl.constexpr):
    """Asks for the first LINES lines of each 64 rows of a tile, from a k-step on."""
    tiles_n, tiles_k = (N + 63) // 64, (K + 127) // 128 * 2
    rows = tl.minimum(tile_n * (BN // 64) + tl.arange(0, BN // 64), tiles_n - 1)
    words = (rows[:, None] * tiles_k + step * (BK // 64)) * 512 + tl.arange(0, LINES)[None, :] * 32
    _prefetch(w_ptr + tl.minimum(words, tiles_n * tiles_k * 512 - 32))


@triton.jit
def _wait_for(flag_ptr, value):
    while tl.atomic_add(flag_ptr, 0, sem="acquire") < value:
        pass


@triton.jit
def _stripe_of(unit, units, stripes):
    """The stripe that holds the unit. Stripe i is the units from units * i // stripes on."""
    return ((unit + 1) * stripes - 1) // units


@triton.jit
def _settle(step):
    """Waits until the products in flight have ended, and the tensor cores can see what was copied for the next ones.

    Triton 3.6 and 3.7 reuse the registers of decoded weights while a product may still read them (triton issue 9433), and 3.6
    reads copies through another path than they came by, without a fence (its pull request 9610). Now and then a tile was wrong.
    """
    tl.inline_asm_elementwise("wgmma.wait_group.sync.aligned 0; fence.proxy.async.shared::cta; mov.b32 $0, $1;", "=r,r", [step],
                              dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip


@triton.jit
def _accumulate(x_ptr, w_ptr, s_ptr, M, N, K, tile_n, tile_m, first, last, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr, EVEN_K: tl.constexpr, HOPPER: tl.constexpr):  # fmt: skip
    """acc (BN, BM) = W[tile_n, k] x[tile_m, k]^T over the k-steps first .. last - 1, in units of g / 128."""
    TN: tl.constexpr = BN // 64
    TK: tl.constexpr = BK // 64
    tiles_n, tiles_k = (N + 63) // 64, (K + 127) // 128 * 2
    rows = tl.minimum(tile_n * TN + tl.arange(0, TN), tiles_n - 1)  # beyond the matrix: any tile, never stored
    tiles = rows[:, None, None] * tiles_k + (first * TK + tl.arange(0, TK))[None, :, None]
    w_ptrs = w_ptr + tiles * 512 + tl.arange(0, 512)[None, None, :]
    s_ptrs = s_ptr + tiles * 64 + tl.arange(0, 64)[None, None, :]
    offs_m, offs_k = tile_m * BM + tl.arange(0, BM), first * BK + tl.arange(0, BK)
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    for step in range(first, last):
        w = tl.load(w_ptrs, eviction_policy="evict_first")  # (TN, TK, 512) words
        s = tl.load(s_ptrs, eviction_policy="evict_first")  # (TN, TK, 64) words
        mask = offs_m[:, None] < M
        if not EVEN_K:
            mask = mask & ((step * BK + tl.arange(0, BK))[None, :] < K)
        x = tl.load(x_ptrs, mask=mask, other=0.0)  # (BM, BK)
        if x_ptr.dtype.element_ty == tl.float32:
            code, scale = decode_fp32(w, s, TN, TK)
            acc = tl.dot(code * (scale * 0.0078125), x.T, acc, input_precision="ieee")
        else:
            if HOPPER:
                _settle(step)
            acc = tl.dot(decode_bf16(w, s, TN, TK), x.T, acc)
        w_ptrs += TK * 512
        s_ptrs += TK * 64
        x_ptrs += BK
    return acc


@triton.jit
def _add(acc, ptrs, first, last, stride, BATCH: tl.constexpr):
    """acc + blocks first .. last - 1, `stride` numbers apart, in this order; BATCH loads in flight hide latency."""
    for i in range(first, last, BATCH):
        acc += tl.load(ptrs + i * stride, cache_modifier=".cg")
        for j in tl.static_range(1, BATCH):
            acc += tl.load(ptrs + (i + j) * stride, mask=i + j < last, other=0.0, cache_modifier=".cg")
    return acc


@triton.jit
def _lora_shrink(x_ptr, a_ptr, bounds_ptr, h_ptr, flag_ptr, job, slices, M, K, scaling, BM: tl.constexpr,
                 BK: tl.constexpr, RN: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
                 PARTS: tl.constexpr, HOPPER: tl.constexpr, DIRECT: tl.constexpr):  # fmt: skip
    """One slice of h_p = x A_p^T. DIRECT: every reader sums the slices itself, one step less until h is there, but more to
    read. Else who finishes a part last sums them, times scaling, and raises its flag.

    flags: [part] slices done; [PARTS + part] blocks of RN rows that have read h, or still want to: 0 before it is ready.
    """
    part, slice_ = job // slices, job % slices
    steps = (K + BK - 1) // BK
    offs_m, offs_r = tl.arange(0, BM), tl.arange(0, BR)
    acc = tl.zeros((BM, BR), tl.float32)
    for step in range(steps * slice_ // slices, steps * (slice_ + 1) // slices):
        offs_k = step * BK + tl.arange(0, BK)
        x_mask = (offs_m[:, None] < M) & (offs_k[None, :] < K)
        a_mask = (offs_r[:, None] < R) & (offs_k[None, :] < K)
        x = tl.load(x_ptr + offs_m[:, None] * K + offs_k[None, :], mask=x_mask, other=0.0)  # (BM, BK)
        a = tl.load(a_ptr + (part * R + offs_r[:, None]) * K + offs_k[None, :], mask=a_mask, other=0.0)  # (BR, BK)
        if HOPPER and BM >= 64:  # fewer rows go through mma.sync, which needs no waits
            _settle(step)
        acc = tl.dot(x, a.T, acc, input_precision="ieee")
    offs = offs_m[:, None] * BR + offs_r[None, :]
    slices_ptr = h_ptr + (PARTS + part * slices) * BM * BR + offs
    tl.store(slices_ptr + slice_ * BM * BR, acc)
    tl.debug_barrier()  # all threads have stored before one of them says so
    if DIRECT:
        tl.atomic_add(flag_ptr + part, 1, sem="release")
    elif tl.atomic_add(flag_ptr + part, 1, sem="acq_rel") == slices - 1:
        h = _add(tl.zeros((BM, BR), tl.float32), slices_ptr, 0, slices, BM * BR, 8 if BM * BR <= 2048 else 2)
        tl.store(h_ptr + part * BM * BR + offs, h * scaling)
        tl.store(flag_ptr + part, 0)
        start, end = tl.load(bounds_ptr + part), tl.load(bounds_ptr + part + 1)
        tl.debug_barrier()
        tl.atomic_add(flag_ptr + PARTS + part, (end - 1) // RN - start // RN + 1, sem="release")


@triton.jit
def _lora_expand(acc, b_ptr, bounds_ptr, h_ptr, flag_ptr, slices, scaling, offs_n, row, BM: tl.constexpr,
                 BLOCK: tl.constexpr, RN: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, PARTS: tl.constexpr,
                 DIRECT: tl.constexpr):  # fmt: skip
    """acc (BLOCK, BM) += B h^T, for each part that has rows in this block (more than one only at a seam)."""
    offs_m, offs_r = tl.arange(0, BM), tl.arange(0, BR)
    for part in range(PARTS):
        start, end = tl.load(bounds_ptr + part), tl.load(bounds_ptr + part + 1)
        if (start < row + BLOCK) & (end > row):
            mask = (offs_n[:, None] >= start) & (offs_n[:, None] < end) & (offs_r[None, :] < R)
            b = tl.load(b_ptr + offs_n[:, None] * R + offs_r[None, :], mask=mask, other=0.0)  # (BLOCK, BR)
            h_ptrs = h_ptr + offs_m[None, :] * BR + offs_r[:, None]  # (BR, BM)
            blocks = (tl.minimum(end, row + BLOCK) - 1) // RN - tl.maximum(start, row) // RN + 1
            if DIRECT:
                _wait_for(flag_ptr + part, slices)
                ptrs = h_ptrs + (PARTS + part * slices) * BM * BR
                h = _add(tl.zeros((BR, BM), tl.float32), ptrs, 0, slices, BM * BR, 8) * scaling
                tl.debug_barrier()  # h is read: the last reader may lower both flags
                if tl.atomic_add(flag_ptr + PARTS + part, blocks, sem="acq_rel") + blocks == (end - 1) // RN - start // RN + 1:
                    tl.store(flag_ptr + part, 0)
                    tl.store(flag_ptr + PARTS + part, 0)
            else:
                _wait_for(flag_ptr + PARTS + part, 1)
                h = tl.load(h_ptrs + part * BM * BR, cache_modifier=".cg")
                tl.debug_barrier()  # h is read: the flag may go down, to 0 with the last reader
                tl.atomic_add(flag_ptr + PARTS + part, -blocks, sem="relaxed")
            acc = tl.dot(b, h.to(b.dtype), acc, input_precision="ieee")
    return acc


@triton.jit
def _finish(acc, row_scale, bias, y_ptr, b_ptr, bounds_ptr, h_ptr, flag_ptr, slices, scaling, M, N, row, tile_m,
            BM: tl.constexpr, BLOCK: tl.constexpr, RN: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
            PARTS: tl.constexpr,
            DIRECT: tl.constexpr):  # fmt: skip
    """y[tile_m, row ..] = acc^T * 128 / g + bias + LoRA, for a complete sum acc (BLOCK, BM)."""
    offs_n, offs_m = row + tl.arange(0, BLOCK), tile_m * BM + tl.arange(0, BM)
    acc = acc * row_scale[:, None] + bias[:, None]
    if R:  # rounded before and after LoRA, as the training forward rounds: what both round alike does not part them
        acc = acc.to(y_ptr.dtype.element_ty).to(tl.float32)
        acc = _lora_expand(acc, b_ptr, bounds_ptr, h_ptr, flag_ptr, slices, scaling, offs_n, row, BM, BLOCK, RN, R, BR,
                           PARTS, DIRECT)  # fmt: skip
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, acc.T.to(y_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


@triton.jit
def _per_row(row_scale_ptr, bias_ptr, N, row, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr):
    """128 / g and the bias of rows row .. row + BLOCK - 1, asked for early because they come from far."""
    offs_n = row + tl.arange(0, BLOCK)
    scale = tl.load(row_scale_ptr + offs_n, mask=offs_n < N, other=0.0) * 128.0
    if HAS_BIAS:
        return scale, tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    return scale, tl.zeros((BLOCK,), tl.float32)


@triton.jit
def _sum_split_tiles(row_scale_ptr, bias_ptr, y_ptr, partial_ptr, flag_ptr, b_ptr, bounds_ptr, h_ptr, lora_flags, slices,
                     scaling, M, N, tiles, tiles_m, steps, stripes, BM: tl.constexpr, BN: tl.constexpr, RN: tl.constexpr,
                     HAS_BIAS: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """This program's share of the blocks of RN rows of all split tiles: waits for a tile's pieces, sums, stores."""
    BLOCKS: tl.constexpr = BN // RN
    begin, stride = tl.program_id(0), tl.num_programs(0)
    if y_ptr.dtype.element_ty == tl.float32:  # the interpreter runs programs in turn: the last one sums for all
        begin, stride = tl.where(begin == stride - 1, 0, tiles * BLOCKS), 1
    for item in tl.range(begin, tiles * BLOCKS, stride, disable_licm=True):
        tile, row = item // BLOCKS, item % BLOCKS * RN
        first = _stripe_of(tile * steps, tiles * steps, stripes)
        last = _stripe_of(tile * steps + steps - 1, tiles * steps, stripes)
        if last > first:
            tile_row = tile // tiles_m * BN + row
            row_scale, bias = _per_row(row_scale_ptr, bias_ptr, N, tile_row, RN, HAS_BIAS)
            _wait_for(flag_ptr + tile, last - first + 1)
            offs = (row + tl.arange(0, RN))[:, None] * BM + tl.arange(0, BM)[None, :]
            acc = tl.load(partial_ptr + 2 * first * (BN * BM) + offs, cache_modifier=".cg")
            ptrs = partial_ptr + (BN * BM) + offs
            acc = _add(acc, ptrs, first + 1, last + 1, 2 * BN * BM, 4 if BM * RN <= 4096 else 1)
            _finish(acc, row_scale, bias, y_ptr, b_ptr, bounds_ptr, h_ptr, lora_flags, slices, scaling, M, N, tile_row,
                    tile % tiles_m, BM, RN, RN, R, BR, PARTS, False)  # fmt: skip
            if BLOCKS == 1:
                tl.store(flag_ptr + tile, 0)
            elif tl.atomic_add(flag_ptr + tile, 1, sem="acq_rel") == last - first + BLOCKS:
                tl.store(flag_ptr + tile, 0)  # the last of the tile's readers


@triton.jit
def _leave(acc, ptr, BM: tl.constexpr, BN: tl.constexpr, FEW: tl.constexpr, WARPS: tl.constexpr):
    """Stores an unfinished tile."""
    if FEW:
        store_fragments(acc, ptr, BN * BM // (128 * WARPS), WARPS)
    else:
        tl.store(ptr + tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :], acc)


@triton.jit
def _take(acc, partial_ptr, first, last, BM: tl.constexpr, BN: tl.constexpr, FEW: tl.constexpr, WARPS: tl.constexpr):
    """acc + what stripes first .. last - 1 have left."""
    if FEW:
        acc = add_fragments(acc, partial_ptr, first, last, BN * BM, BN * BM // (128 * WARPS), WARPS)
    else:
        offs = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        acc = _add(acc, partial_ptr + offs, first, last, BN * BM, 4 if BM * BN <= 4096 else 1)
    return acc


@triton.jit(do_not_specialize=["M", "scaling", "stripes", "slices"])
def gemm_kernel(x_ptr, w_ptr, s_ptr, row_scale_ptr, bias_ptr, y_ptr, partial_ptr, flag_ptr,
                a_ptr, b_ptr, bounds_ptr, h_ptr, M, N, K, scaling, stripes, slices,
                BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr, RN: tl.constexpr,
                SHARED: tl.constexpr, FEW: tl.constexpr, WARPS: tl.constexpr, DIRECT: tl.constexpr, HAS_BIAS: tl.constexpr,
                R: tl.constexpr, BR: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """A program does a LoRA job, or its stripe, tile by tile from the end; then (SHARED) it sums blocks of split tiles."""
    pid = tl.program_id(0)
    tiles_m, steps = (M + BM - 1) // BM, (K + BK - 1) // BK
    tiles = (N + BN - 1) // BN * tiles_m
    units, i = tiles * steps, pid - PARTS * slices  # the first programs have jobs, the others stripes
    start, end = units * i // stripes, units * (i + 1) // stripes
    lora_flags = flag_ptr + tiles
    BLOCK: tl.constexpr = 16 * WARPS if FEW else BN
    if PDL:  # the previous kernel may still run: weights are nobody's output, so ask for the first; then wait
        if i >= 0:
            tile = (end - 1) // steps
            _prefetch_weights(w_ptr, N, K, tile // tiles_m, tl.maximum(start - tile * steps, 0), BN, BK, PDL)
        gdc_wait()
        gdc_launch_dependents()
    if R:
        if i < 0:
            _lora_shrink(x_ptr, a_ptr, bounds_ptr, h_ptr, lora_flags, pid, slices, M, K, scaling,
                         BM, BK, RN, R, BR, PARTS, PDL, DIRECT)  # fmt: skip
    count = tl.where(i < 0, 0, (end - 1) // steps - start // steps + 1)
    for j in tl.range(count, disable_licm=True):
        tile = (end - 1) // steps - j
        first, last = tl.maximum(start - tile * steps, 0), tl.minimum(end - tile * steps, steps)
        tile_n, tile_m = tile // tiles_m, tile % tiles_m
        per_row = ()
        for block in tl.static_range(BN // BLOCK):
            per_row = per_row + _per_row(row_scale_ptr, bias_ptr, N, tile_n * BN + block * BLOCK, BLOCK, HAS_BIAS)
        if FEW:
            acc = accumulate_few(x_ptr, w_ptr, s_ptr, M, N, K, tile_n, tile_m, first, last, BM, BN, BK, EVEN_K, FEW,
                                 WARPS)  # fmt: skip
        else:
            acc = _accumulate(x_ptr, w_ptr, s_ptr, M, N, K, tile_n, tile_m, first, last, BM, BN, BK, EVEN_K, PDL)
        is_split = last - first < steps if SHARED else last < steps
        if is_split:  # in its first tile a stripe does not begin at 0
            slot = 2 * i + (first > 0) if SHARED else i
            _leave(acc, partial_ptr + slot * (BN * BM), BM, BN, FEW, WARPS)
            tl.debug_barrier()  # all threads have stored before one of them says so
            tl.atomic_add(flag_ptr + tile, 1, sem="release")
        else:
            if not SHARED:
                if first > 0:  # this stripe has the tile's end, and so owns it: add what the others have
                    helper = _stripe_of(tile * steps, units, stripes)
                    _wait_for(flag_ptr + tile, i - helper)
                    acc = _take(acc, partial_ptr, helper, i, BM, BN, FEW, WARPS)
                    tl.store(flag_ptr + tile, 0)
            for block in tl.static_range(BN // BLOCK):
                _finish(to_matrix(acc, block, BM, WARPS) if FEW else acc, per_row[2 * block], per_row[2 * block + 1],
                        y_ptr, b_ptr, bounds_ptr, h_ptr, lora_flags, slices, scaling, M, N, tile_n * BN + block * BLOCK,
                        tile_m, BM, BLOCK, RN, R, BR, PARTS, DIRECT)  # fmt: skip
    if SHARED:
        _sum_split_tiles(row_scale_ptr, bias_ptr, y_ptr, partial_ptr, flag_ptr, b_ptr, bounds_ptr, h_ptr, lora_flags, slices,
                         scaling, M, N, tiles, tiles_m, steps, stripes, BM, BN, RN, HAS_BIAS, R, BR, PARTS)  # fmt: skip


def demo() -> None:
    """How equal stripes cut the tiles of Qwen2.5-7B's layers on 132 SMs."""
    for name, n, k, bn, bk, stripes in (("qkv", 4608, 3584, 64, 128, 264), ("gate_up", 37888, 3584, 128, 128, 396),
                                        ("down", 3584, 18944, 64, 128, 264)):  # fmt: skip
        tiles, steps = n // bn, k // bk
        cuts = [tiles * steps * i // stripes for i in range(1, stripes)]
        split = {cut // steps for cut in cuts if cut % steps}
        print(f"{name:8} {tiles:4} tiles of {steps:3} k-steps, {stripes} stripes of {tiles * steps / stripes:.1f}: "
              f"{len(split)} tiles are split, into {stripes / tiles:.1f} pieces on average")  # fmt: skip


if __name__ == "__main__":
    demo()
