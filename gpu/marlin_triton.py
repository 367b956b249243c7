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
ones, which started earlier, for the LoRA jobs of the first ones, no more than multiprocessors, or (SHARED) for programs that
all run at the same time; counters return to zero by themselves.

LoRA in the same launch (gpu/marlin_lora.py). The first programs make slices of h = x A^T before their stripes, which are
shorter by as much; whoever completes a tile waits for its pieces and for h in one look at one counter, and adds h B^T.

Overlap. With PDL (programmatic dependent launch, Hopper) a launch starts while the previous kernel ends: it computes its
addresses, asks for its first weights, and only then waits. A kernel launched so must call gdc_wait before it reads or writes
what another kernel touches.

The interpreter (CPU tests) knows no packed bf16 instructions: with fp32 inputs the same kernels decode in plain Triton.
Source: Marlin (arXiv 2408.11743), stream-K (arXiv 2301.03598).
Cost: the packed words once, x from the L2, and an fp32 partial tile for each piece of a tile that is cut.
Limits: fewer than 2^31 elements in x, y and the words.
Copy along: gpu/marlin_decode.py, gpu/marlin_lora.py, gpu/marlin_sync.py. The operands come from gpu/marlin_layout.py,
the launches from marlin_kernel.py.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gpu.marlin_decode import decode_bf16, decode_fp32
from gpu.marlin_lora import LORA_READY, load_b, load_h, lora_expand, lora_jobs, lora_ready, part_at, prefetch_a, seams_of
from gpu.marlin_sync import add_in_order, after_products, fence_copies, prefetch, settle, wait_for


@triton.jit
def _prefetch_weights(w_ptr, N, K, tile_n, step, BN: tl.constexpr, BK: tl.constexpr, LINES: tl.constexpr):
    """Asks for the first LINES lines of each 64 rows of a tile, from a k-step on."""
    tiles_n, tiles_k = (N + 63) // 64, (K + 127) // 128 * 2
    rows = tl.minimum(tile_n * (BN // 64) + tl.arange(0, BN // 64), tiles_n - 1)
    words = (rows[:, None] * tiles_k + step * (BK // 64)) * 512 + tl.arange(0, LINES)[None, :] * 32
    prefetch(w_ptr + tl.minimum(words, tiles_n * tiles_k * 512 - 32))


@triton.jit
def _edge(i, units, stripes, short, small):
    """The unit where stripe i begins: the first `short` stripes have `small` units each, the others share the rest equally."""
    return tl.where(i < short, i * small, short * small + (units - short * small) * (i - short) // (stripes - short))


@triton.jit
def _stripe_of(unit, units, stripes, short, small):
    """The stripe that holds the unit."""
    at = unit - short * small
    return tl.where(at < 0, unit // small, short + ((at + 1) * (stripes - short) - 1) // (units - short * small))


@triton.jit
def _accumulate(x_ptr, w_ptr, s_ptr, M, N, K, tile_n, tile_m, first, last, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr, HALVES: tl.constexpr, EVEN_K: tl.constexpr, HOPPER: tl.constexpr):  # fmt: skip
    """acc (BN, BM) = W[tile_n, k] x[tile_m, k]^T over the k-steps first .. last - 1, in units of g / 128.

    HALVES: the tile's outputs in two halves, each with sums of its own, so that the products of one run while the other's
    weights are decoded. Else the products of a k-step end before the next one's weights are decoded.
    """
    SUBS: tl.constexpr = 2 if HALVES else 1
    TN: tl.constexpr = BN // 64 // SUBS
    TK: tl.constexpr = BK // 64
    tiles_n, tiles_k = (N + 63) // 64, (K + 127) // 128 * 2
    w_ptrs, s_ptrs, acc = (), (), ()
    for sub in tl.static_range(SUBS):
        rows = tl.minimum((tile_n * SUBS + sub) * TN + tl.arange(0, TN), tiles_n - 1)  # beyond W: any tile, never stored
        tiles = rows[:, None, None] * tiles_k + (first * TK + tl.arange(0, TK))[None, :, None]
        w_ptrs = w_ptrs + (w_ptr + tiles * 512 + tl.arange(0, 512)[None, None, :],)
        s_ptrs = s_ptrs + (s_ptr + tiles * 64 + tl.arange(0, 64)[None, None, :],)
        acc = acc + (tl.zeros((BN // SUBS, BM), tl.float32),)
    offs_m, offs_k = tile_m * BM + tl.arange(0, BM), first * BK + tl.arange(0, BK)
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    for step in range(first, last):
        sums, next_w, next_s = (), (), ()
        for sub in tl.static_range(SUBS):
            w = tl.load(w_ptrs[sub], eviction_policy="evict_first")  # (TN, TK, 512) words
            s = tl.load(s_ptrs[sub], eviction_policy="evict_first")  # (TN, TK, 64) words
            if sub == 0:
                mask = offs_m[:, None] < M
                if not EVEN_K:
                    mask = mask & ((step * BK + tl.arange(0, BK))[None, :] < K)
                x = tl.load(x_ptrs, mask=mask, other=0.0)  # (BM, BK)
            if x_ptr.dtype.element_ty == tl.float32:
                code, scale = decode_fp32(w, s, TN, TK)
                sums = sums + (tl.dot(code * (scale * 0.0078125), x.T, acc[sub], input_precision="ieee"),)
            else:
                if HOPPER:
                    if HALVES:
                        if sub == 0:
                            fence_copies(step)
                        w = after_products(w, BK)
                    else:
                        settle(step)
                sums = sums + (tl.dot(decode_bf16(w, s, TN, TK), x.T, acc[sub]),)
            next_w, next_s = next_w + (w_ptrs[sub] + TK * 512,), next_s + (s_ptrs[sub] + TK * 64,)
        acc, w_ptrs, s_ptrs = sums, next_w, next_s
        x_ptrs += BK
    return tl.join(acc[0], acc[1]).trans(2, 0, 1).reshape(BN, BM) if HALVES else acc[0]


@triton.jit
def _finish(acc, row_scale, bias, y_ptr, lora, seams, slices, scaling, M, N, row, tile_m, BM: tl.constexpr,
            BLOCK: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, PARTS: tl.constexpr, DIRECT: tl.constexpr):  # fmt: skip
    """y[tile_m, row ..] = acc^T * 128 / g + bias + LoRA, for a complete sum acc (BLOCK, BM)."""
    offs_n, offs_m = row + tl.arange(0, BLOCK), tile_m * BM + tl.arange(0, BM)
    y = (acc * row_scale[:, None] + bias[:, None]).to(y_ptr.dtype.element_ty)
    if R:  # y, LoRA and their sum are rounded each, as in training, where cuBLAS adds LoRA: what rounds alike does not part them
        delta = lora_expand(lora, seams, row, tile_m, (M + BM - 1) // BM, slices, BM, BLOCK, BR, PARTS, DIRECT)
        delta = (delta * scaling).to(y_ptr.dtype.element_ty)
        y = (y.to(tl.float32) + delta.to(tl.float32)).to(y_ptr.dtype.element_ty)
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, y.T, mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


@triton.jit
def _per_row(row_scale_ptr, bias_ptr, N, row, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr):
    """128 / g and the bias of rows row .. row + BLOCK - 1, asked for early because they come from far."""
    offs_n = row + tl.arange(0, BLOCK)
    scale = tl.load(row_scale_ptr + offs_n, mask=offs_n < N, other=0.0) * 128.0
    if HAS_BIAS:
        return scale, tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    return scale, tl.zeros((BLOCK,), tl.float32)


@triton.jit
def _sum_split_tiles(row_scale_ptr, bias_ptr, y_ptr, partial_ptr, flag_ptr, b_ptr, h_ptr, seams, each, slices, scaling, M, N,
                     tiles, tiles_m, steps, stripes, short, small, BM: tl.constexpr, BN: tl.constexpr, RN: tl.constexpr,
                     HAS_BIAS: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, PARTS: tl.constexpr,
                     DIRECT: tl.constexpr):  # fmt: skip
    """This program's share of the blocks of RN rows of all split tiles: waits for a tile's pieces, sums, stores."""
    BLOCKS: tl.constexpr = BN // RN
    begin, stride = tl.program_id(0), tl.num_programs(0)
    if y_ptr.dtype.element_ty == tl.float32:  # the interpreter runs programs in turn: the last one sums for all
        begin, stride = tl.where(begin == stride - 1, 0, tiles * BLOCKS), 1
    for item in tl.range(begin, tiles * BLOCKS, stride, disable_licm=True):
        tile, row = item // BLOCKS, item % BLOCKS * RN
        first = _stripe_of(tile * steps, tiles * steps, stripes, short, small)
        last = _stripe_of(tile * steps + steps - 1, tiles * steps, stripes, short, small)
        if last > first:
            tile_row = tile // tiles_m * BN + row
            row_scale, bias = _per_row(row_scale_ptr, bias_ptr, N, tile_row, RN, HAS_BIAS)
            complete, lora = last - first + 1, ()
            if R:
                b, complete = load_b(b_ptr, N, tile_row, RN, R, BR), complete + lora_ready(seams, tile_row - row, each, BN, PARTS)
            wait_for(flag_ptr + tile, complete)
            if R:
                h = load_h(h_ptr, part_at(seams, tile_row, PARTS), tile % tiles_m, tiles_m, slices, BM, BR, PARTS, DIRECT)
                lora = (b, h, h_ptr)
            offs = (row + tl.arange(0, RN))[:, None] * BM + tl.arange(0, BM)[None, :]
            acc = tl.load(partial_ptr + 2 * first * (BN * BM) + offs, cache_modifier=".cg")
            ptrs = partial_ptr + (BN * BM) + offs
            acc = add_in_order(acc, ptrs, first + 1, last + 1, 2 * BN * BM, 4 if BM * RN <= 4096 else 1)
            _finish(acc, row_scale, bias, y_ptr, lora, seams, slices, scaling, M, N, tile_row, tile % tiles_m, BM, RN, R, BR,
                    PARTS, DIRECT)  # fmt: skip
            if BLOCKS == 1:
                tl.store(flag_ptr + tile, 0)
            elif tl.atomic_add(flag_ptr + tile, 1, sem="acq_rel") == complete + BLOCKS - 1:
                tl.store(flag_ptr + tile, 0)  # the last of the tile's readers


@triton.jit(do_not_specialize=["M", "scaling", "stripes", "slices", "short", "small"])
def gemm_kernel(x_ptr, w_ptr, s_ptr, row_scale_ptr, bias_ptr, y_ptr, partial_ptr, flag_ptr,
                a_ptr, b_ptr, bounds_ptr, h_ptr, M, N, K, scaling, stripes, slices, short, small,
                BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr, RN: tl.constexpr,
                HALVES: tl.constexpr, SHARED: tl.constexpr, DIRECT: tl.constexpr, HAS_BIAS: tl.constexpr, R: tl.constexpr,
                BR: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """A program does its LoRA job, if any, then its stripe, tile by tile from the end; then (SHARED) blocks of split tiles."""
    pid = tl.program_id(0)
    tiles_m, steps = (M + BM - 1) // BM, (K + BK - 1) // BK
    tiles = (N + BN - 1) // BN * tiles_m
    units, jobs, seams = tiles * steps, PARTS * tiles_m * slices, ()
    each = slices * LORA_READY if DIRECT else LORA_READY
    start, end = _edge(pid, units, stripes, short, small), _edge(pid + 1, units, stripes, short, small)
    offs_tile = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    if R:
        seams = seams_of(bounds_ptr, PARTS)
    if PDL:  # the previous kernel may still run: weights are nobody's output, so ask for the first; then wait
        tile = (end - 1) // steps
        _prefetch_weights(w_ptr, N, K, tile // tiles_m, tl.maximum(start - tile * steps, 0), BN, BK, PDL)
        if R:
            prefetch_a(a_ptr, K, jobs, slices, BK, R, BR, PARTS)
        gdc_wait()
    if R:
        lora_jobs(x_ptr, a_ptr, bounds_ptr, h_ptr, flag_ptr, flag_ptr + tiles, jobs, slices, M, K,
                  BM, BN, BK, R, BR, PARTS, DIRECT, PDL)  # fmt: skip
    for j in tl.range((end - 1) // steps - start // steps + 1, disable_licm=True):
        tile = (end - 1) // steps - j
        first, last = tl.maximum(start - tile * steps, 0), tl.minimum(end - tile * steps, steps)
        tile_n, tile_m = tile // tiles_m, tile % tiles_m
        row_scale, bias = _per_row(row_scale_ptr, bias_ptr, N, tile_n * BN, BN, HAS_BIAS)
        acc = _accumulate(x_ptr, w_ptr, s_ptr, M, N, K, tile_n, tile_m, first, last, BM, BN, BK, HALVES, EVEN_K, PDL)
        is_split = last - first < steps if SHARED else last < steps
        if is_split:  # in its first tile a stripe does not begin at 0
            slot = 2 * pid + (first > 0) if SHARED else pid
            tl.store(partial_ptr + slot * (BN * BM) + offs_tile, acc)
            tl.debug_barrier()  # all threads have stored before one of them says so
            tl.atomic_add(flag_ptr + tile, 1, sem="release")
        else:  # this stripe has the tile's end, and so owns it: add what the others have left (SHARED: nothing)
            helper, complete, lora = pid, 0, ()
            if not SHARED:
                if first > 0:
                    helper = _stripe_of(tile * steps, units, stripes, short, small)
                    complete = pid - helper
            if R:  # what comes from far is asked for before waiting
                b, complete = load_b(b_ptr, N, tile_n * BN, BN, R, BR), complete + lora_ready(seams, tile_n * BN, each, BN, PARTS)
            if complete > 0:
                wait_for(flag_ptr + tile, complete)
                tl.store(flag_ptr + tile, 0)
            if R:
                h = load_h(h_ptr, part_at(seams, tile_n * BN, PARTS), tile_m, tiles_m, slices, BM, BR, PARTS, DIRECT)
                lora = (b, h, h_ptr)
            if not SHARED:
                acc = add_in_order(acc, partial_ptr + offs_tile, helper, pid, BN * BM, 4 if BM * BN <= 4096 else 1)
            _finish(acc, row_scale, bias, y_ptr, lora, seams, slices, scaling, M, N, tile_n * BN, tile_m, BM, BN, R, BR, PARTS,
                    DIRECT)  # fmt: skip
    if PDL:  # the next kernel may come: earlier its programs would take the places of this one's
        gdc_launch_dependents()
    if SHARED:
        _sum_split_tiles(row_scale_ptr, bias_ptr, y_ptr, partial_ptr, flag_ptr, b_ptr, h_ptr, seams, each, slices, scaling, M, N,
                         tiles, tiles_m, steps, stripes, short, small, BM, BN, RN, HAS_BIAS, R, BR, PARTS, DIRECT)  # fmt: skip


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
