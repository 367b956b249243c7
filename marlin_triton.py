"""The Triton kernels: a GEMM whose weights stay in 4 bits until they are in registers, and a dequantiser.

TBD
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _rotr(x, n: tl.constexpr):
    return (x >> n) | (x << (32 - n))


@triton.jit
def _fp32_pair(p):
    """Two bf16 numbers in 32 bits -> fp32, with a new last axis."""
    return tl.join((p << 16).to(tl.float32, bitcast=True), (p & 0xFFFF0000).to(tl.float32, bitcast=True))


@triton.jit
def _scale_pairs(s, TN: tl.constexpr, TK: tl.constexpr):
    """Scale words (TN, TK, 64) -> for each weight word (TN, TK, 512): bf16 s * 2^119 of rows g (low) and g + 8."""
    y = s.to(tl.uint32, bitcast=True)
    pairs = tl.join((y & 0x0FF00FF0) | 0x70007000, (_rotr(y, 8) & 0x0FF00FF0) | 0x70007000)
    pairs = pairs.reshape(TN, TK, 4, 8, 1, 4)  # warp, g, (t), j: the four threads of a row share its scales
    return tl.broadcast_to(pairs, TN, TK, 4, 8, 4, 4).reshape(TN, TK, 512)


@triton.jit
def _matrix(pair0, pair1, pair2, pair3, TN: tl.constexpr, TK: tl.constexpr):
    """Four pairs a word -> the (rows, columns) matrix. Only names change: every number stays in its register."""
    v = tl.join(tl.join(pair0, pair1), tl.join(pair2, pair3))  # (TN, TK, 512, second, half row, half column)
    v = v.reshape(TN, TK, 4, 8, 4, 4, 2, 2, 2)  # tile, tile, warp, g, t, j, second, half row, half column
    return v.trans(0, 2, 7, 3, 1, 5, 8, 4, 6).reshape(TN * 64, TK * 64)


@triton.jit
def _decode_fp32(w, s, TN: tl.constexpr, TK: tl.constexpr):
    """Codes and scales as fp32 matrices, in plain Triton: for the interpreter and for dequantising."""
    x = w.to(tl.uint32, bitcast=True)
    p3 = ((x << 4) & 0x01000100) | (_rotr(x, 4) & 0x80C080C0)
    pair0, pair1 = _fp32_pair(x & 0x81C081C0), _fp32_pair((x << 6) & 0x81C081C0)
    pair2, pair3 = _fp32_pair(_rotr(x, 6) & 0x81C081C0), _fp32_pair(p3)
    code = _matrix(pair0, pair1, pair2, pair3, TN, TK) * 8.507059173023462e37  # 2^126
    pairs = _scale_pairs(s, TN, TK)
    low, high = (pairs << 16).to(tl.float32, bitcast=True), (pairs & 0xFFFF0000).to(tl.float32, bitcast=True)
    low, high = tl.join(low, low), tl.join(high, high)
    scale = _matrix(low, high, low, high, TN, TK) * 1.504632769052528e-36  # 2^-119
    return code, scale


@triton.jit
def _decode_bf16(w, s, TN: tl.constexpr, TK: tl.constexpr):
    """Weights as a bf16 matrix code * s * 2^-7, exact. The one place with PTX: 13 instructions for 8 weights.

    $8 is the word, $9 the scales of its two rows; $0 $1, $2 $3, .. the pairs. Written out because Triton masks
    the halves of a pair one by one, and has no packed bf16 multiplication.
    """
    a0, a1, b0, b1, c0, c1, d0, d1 = tl.inline_asm_elementwise(
        asm="""{
        .reg .b32 p, q, upper, lower;
        .reg .b16 s0, s1;
        mov.b32 {s0, s1}, $9;
        mov.b32 upper, {s0, s0};                // row g twice
        mov.b32 lower, {s1, s1};                // row g + 8 twice
        and.b32 p, $8, 0x81C081C0;              // pair 0 is in place
        mul.bf16x2 p, p, upper;
        mov.b32 {$0, $1}, p;
        shl.b32 p, $8, 6;                       // pair 1: 6 bits up
        and.b32 p, p, 0x81C081C0;
        mul.bf16x2 p, p, lower;
        mov.b32 {$2, $3}, p;
        shf.r.wrap.b32 p, $8, $8, 6;            // pair 2: 6 bits down, around the end
        and.b32 p, p, 0x81C081C0;
        mul.bf16x2 p, p, upper;
        mov.b32 {$4, $5}, p;
        shl.b32 p, $8, 4;                       // pair 3: one bit from above,
        and.b32 p, p, 0x01000100;
        shf.r.wrap.b32 q, $8, $8, 4;            // the others from below
        lop3.b32 p, q, 0x80C080C0, p, 0xEA;     // (q & mask) | p
        mul.bf16x2 p, p, lower;
        mov.b32 {$6, $7}, p;
        }""",
        constraints="=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        args=[w, _scale_pairs(s, TN, TK)],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )
    return _matrix(tl.join(a0, a1), tl.join(b0, b1), tl.join(c0, c1), tl.join(d0, d1), TN, TK)


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
def _stripe_start(i, units, stripes, DYNAMIC: tl.constexpr):
    """First unit of stripe i. DYNAMIC: three rounds of `stripes` stripes share 10/16, 4/16 and 2/16 of the line."""
    if not DYNAMIC:
        return units * i // stripes
    first, second = units * 10 // 16, units * 14 // 16
    early, middle = first * i // stripes, first + (second - first) * (i - stripes) // stripes
    late = second + (units - second) * (i - 2 * stripes) // stripes
    return tl.where(i < stripes, early, tl.where(i < 2 * stripes, middle, late))


@triton.jit
def _stripe_of(unit, units, stripes, DYNAMIC: tl.constexpr):
    """The stripe that holds the unit: the inverse of _stripe_start."""
    if not DYNAMIC:
        return ((unit + 1) * stripes - 1) // units
    first, second = units * 10 // 16, units * 14 // 16
    early, middle = ((unit + 1) * stripes - 1) // first, ((unit - first + 1) * stripes - 1) // (second - first)
    late = ((unit - second + 1) * stripes - 1) // (units - second)
    return tl.where(unit < first, early, tl.where(unit < second, stripes + middle, 2 * stripes + late))


@triton.jit
def _accumulate(x_ptr, w_ptr, s_ptr, M, N, K, tile_n, tile_m, first, last, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr, EVEN_K: tl.constexpr):  # fmt: skip
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
            code, scale = _decode_fp32(w, s, TN, TK)
            acc = tl.dot(code * (scale * 0.0078125), x.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(_decode_bf16(w, s, TN, TK), x.T, acc)
        w_ptrs += TK * 512
        s_ptrs += TK * 64
        x_ptrs += BK
    return acc


@triton.jit
def _sum(ptrs, first, last, stride, BATCH: tl.constexpr):
    """The sum of blocks first .. last - 1, `stride` numbers apart, in this order; BATCH loads in flight hide latency."""
    total = tl.load(ptrs + first * stride, cache_modifier=".cg")
    for i in range(first + 1, last, BATCH):
        for j in tl.static_range(BATCH):
            total += tl.load(ptrs + (i + j) * stride, mask=i + j < last, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _lora_shrink(x_ptr, a_ptr, bounds_ptr, h_ptr, flag_ptr, job, M, K, scaling, BM: tl.constexpr, BK: tl.constexpr,
                 RN: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, PARTS: tl.constexpr,
                 SLICES: tl.constexpr):  # fmt: skip
    """One slice of h_p = scaling * x A_p^T; who finishes a part last sums its slices and raises its flag.

    flags: [part] slices done; [PARTS + part] blocks of RN rows that still want to read h, 0 before it is ready.
    """
    part, slice_ = job // SLICES, job % SLICES
    steps = (K + BK - 1) // BK
    offs_m, offs_r = tl.arange(0, BM), tl.arange(0, BR)
    acc = tl.zeros((BM, BR), tl.float32)
    for step in range(steps * slice_ // SLICES, steps * (slice_ + 1) // SLICES):
        offs_k = step * BK + tl.arange(0, BK)
        x_mask = (offs_m[:, None] < M) & (offs_k[None, :] < K)
        a_mask = (offs_r[:, None] < R) & (offs_k[None, :] < K)
        x = tl.load(x_ptr + offs_m[:, None] * K + offs_k[None, :], mask=x_mask, other=0.0)  # (BM, BK)
        a = tl.load(a_ptr + (part * R + offs_r[:, None]) * K + offs_k[None, :], mask=a_mask, other=0.0)  # (BR, BK)
        acc = tl.dot(x, a.T, acc, input_precision="ieee")
    offs = offs_m[:, None] * BR + offs_r[None, :]
    slices_ptr = h_ptr + (PARTS + part * SLICES) * BM * BR + offs
    tl.store(slices_ptr + slice_ * BM * BR, acc)
    tl.debug_barrier()  # all threads have stored before one of them says so
    if tl.atomic_add(flag_ptr + part, 1, sem="acq_rel") == SLICES - 1:
        h = _sum(slices_ptr, 0, SLICES, BM * BR, 8 if BM * BR <= 2048 else 2)
        tl.store(h_ptr + part * BM * BR + offs, h * scaling)
        tl.store(flag_ptr + part, 0)
        start, end = tl.load(bounds_ptr + part), tl.load(bounds_ptr + part + 1)
        tl.debug_barrier()
        tl.atomic_add(flag_ptr + PARTS + part, (end - 1) // RN - start // RN + 1, sem="release")


@triton.jit
def _lora_expand(acc, b_ptr, bounds_ptr, h_ptr, flag_ptr, offs_n, row, BM: tl.constexpr, BLOCK: tl.constexpr,
                 RN: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """acc (BLOCK, BM) += B h^T, for each part that has rows in this block (more than one only at a seam)."""
    offs_m, offs_r = tl.arange(0, BM), tl.arange(0, BR)
    for part in range(PARTS):
        start, end = tl.load(bounds_ptr + part), tl.load(bounds_ptr + part + 1)
        if (start < row + BLOCK) & (end > row):
            mask = (offs_n[:, None] >= start) & (offs_n[:, None] < end) & (offs_r[None, :] < R)
            b = tl.load(b_ptr + offs_n[:, None] * R + offs_r[None, :], mask=mask, other=0.0)  # (BLOCK, BR)
            _wait_for(flag_ptr + PARTS + part, 1)
            h = tl.load(h_ptr + part * BM * BR + offs_m[None, :] * BR + offs_r[:, None], cache_modifier=".cg")
            blocks = (tl.minimum(end, row + BLOCK) - 1) // RN - tl.maximum(start, row) // RN + 1
            tl.debug_barrier()  # h is read: the flag may go down, to 0 with the last reader
            tl.atomic_add(flag_ptr + PARTS + part, -blocks, sem="relaxed")
            acc = tl.dot(b, h.to(b.dtype), acc, input_precision="ieee")
    return acc


@triton.jit
def _finish(acc, row_scale_ptr, bias_ptr, y_ptr, b_ptr, bounds_ptr, h_ptr, flag_ptr, M, N, row, tile_m,
            BM: tl.constexpr, BLOCK: tl.constexpr, RN: tl.constexpr, HAS_BIAS: tl.constexpr, R: tl.constexpr,
            BR: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """y[tile_m, row ..] = acc^T * 128 / g + bias + LoRA, for a complete sum acc (BLOCK, BM)."""
    offs_n, offs_m = row + tl.arange(0, BLOCK), tile_m * BM + tl.arange(0, BM)
    is_column = offs_n < N
    acc *= (tl.load(row_scale_ptr + offs_n, mask=is_column, other=0.0) * 128.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if R:
        acc = _lora_expand(acc, b_ptr, bounds_ptr, h_ptr, flag_ptr, offs_n, row, BM, BLOCK, RN, R, BR, PARTS)
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, acc.T.to(y_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["M", "scaling", "stripes"])
def gemm_kernel(x_ptr, w_ptr, s_ptr, row_scale_ptr, bias_ptr, y_ptr, partial_ptr, flag_ptr,
                a_ptr, b_ptr, bounds_ptr, h_ptr, M, N, K, scaling, stripes,
                BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr, RN: tl.constexpr,
                DYNAMIC: tl.constexpr, HAS_BIAS: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
                PARTS: tl.constexpr, SLICES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """A program does its LoRA job or its first stripe, then draws further stripes, then sums tiles that were split."""
    pid, jobs = tl.program_id(0), PARTS * SLICES
    tiles_m, steps = (M + BM - 1) // BM, (K + BK - 1) // BK
    tiles = (N + BN - 1) // BN * tiles_m
    units = tiles * steps
    total = stripes * 3 if DYNAMIC else stripes
    tile_flags, lora_flags = flag_ptr + 1, flag_ptr + 1 + tiles  # flag 0 counts the draws
    i = pid - jobs
    if PDL:  # the previous kernel may still run: weights are nobody's output, so ask for the first; then wait
        unit = _stripe_start(tl.maximum(i, 0), units, stripes, DYNAMIC)
        _prefetch_weights(w_ptr, N, K, unit // steps // tiles_m, unit % steps, BN, BK, PDL)
        gdc_wait()
        gdc_launch_dependents()
    while i < total:
        if i < 0:
            _lora_shrink(x_ptr, a_ptr, bounds_ptr, h_ptr, lora_flags, -1 - i, M, K, scaling,
                         BM, BK, RN, R, BR, PARTS, SLICES)  # fmt: skip
        else:
            start, end = _stripe_start(i, units, stripes, DYNAMIC), _stripe_start(i + 1, units, stripes, DYNAMIC)
            for tile in tl.range(start // steps, (end - 1) // steps + 1, disable_licm=True):
                first, last = tl.maximum(start - tile * steps, 0), tl.minimum(end - tile * steps, steps)
                tile_n, tile_m = tile // tiles_m, tile % tiles_m
                acc = _accumulate(x_ptr, w_ptr, s_ptr, M, N, K, tile_n, tile_m, first, last, BM, BN, BK, EVEN_K)
                if last - first == steps:
                    _finish(acc, row_scale_ptr, bias_ptr, y_ptr, b_ptr, bounds_ptr, h_ptr, lora_flags, M, N,
                            tile_n * BN, tile_m, BM, BN, RN, HAS_BIAS, R, BR, PARTS)  # fmt: skip
                else:  # a stripe splits at most two tiles: in the first it does not begin at 0
                    slot = 2 * i + (first > 0)
                    offs = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
                    tl.store(partial_ptr + slot * (BN * BM) + offs, acc)
                    tl.debug_barrier()  # all threads have stored before one of them says so
                    tl.atomic_add(tile_flags + tile, 1, sem="release")
        if DYNAMIC:
            draw = tl.atomic_add(flag_ptr, 1, sem="relaxed")
            i = stripes + draw
            if draw == total + jobs - 1:  # every program's last draw fails; this was the last of all
                tl.store(flag_ptr, 0)
        else:
            i = total
    BLOCKS: tl.constexpr = BN // RN
    item, stride = pid, tl.num_programs(0)
    if x_ptr.dtype.element_ty == tl.float32:  # the interpreter runs programs in turn: its last one sums for all
        item, stride = tl.where(pid == stride - 1, 0, tiles * BLOCKS), 1
    for item in tl.range(item, tiles * BLOCKS, stride, disable_licm=True):
        tile, block = item // BLOCKS, item % BLOCKS
        first = _stripe_of(tile * steps, units, stripes, DYNAMIC)
        last = _stripe_of(tile * steps + steps - 1, units, stripes, DYNAMIC)
        if last > first:
            _wait_for(tile_flags + tile, last - first + 1)
            offs = (block * RN + tl.arange(0, RN))[:, None] * BM + tl.arange(0, BM)[None, :]
            acc = tl.load(partial_ptr + 2 * first * (BN * BM) + offs, cache_modifier=".cg")
            ptrs = partial_ptr + (BN * BM) + offs  # the others begin inside the tile: slot 2 i + 1
            acc += _sum(ptrs, first + 1, last + 1, 2 * BN * BM, 4 if BM * RN <= 4096 else 1)
            if tl.atomic_add(tile_flags + tile, 1, sem="acq_rel") == last - first + BLOCKS:
                tl.store(tile_flags + tile, 0)
            _finish(acc, row_scale_ptr, bias_ptr, y_ptr, b_ptr, bounds_ptr, h_ptr, lora_flags, M, N,
                    tile // tiles_m * BN + block * RN, tile % tiles_m, BM, RN, RN, HAS_BIAS, R, BR, PARTS)  # fmt: skip


@triton.jit
def dequantize_kernel(w_ptr, s_ptr, g_ptr, out_ptr, N, K, BN: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr):
    """W tile by tile. EXACT: code * s / 128, which bf16 holds exactly, for cuBLAS; else code * (s / g), rounded."""
    tile_n, tile_k = tl.program_id(0), tl.program_id(1)
    TN: tl.constexpr = BN // 64
    TK: tl.constexpr = BK // 64
    rows = tl.minimum(tile_n * TN + tl.arange(0, TN), (N + 63) // 64 - 1)
    tiles = rows[:, None, None] * ((K + 127) // 128 * 2) + (tile_k * TK + tl.arange(0, TK))[None, :, None]
    w = tl.load(w_ptr + tiles * 512 + tl.arange(0, 512)[None, None, :], eviction_policy="evict_first")
    s = tl.load(s_ptr + tiles * 64 + tl.arange(0, 64)[None, None, :], eviction_policy="evict_first")
    offs_n, offs_k = tile_n * BN + tl.arange(0, BN), tile_k * BK + tl.arange(0, BK)
    mask = (offs_n[:, None] < N) & (offs_k[None, :] < K)
    if EXACT and out_ptr.dtype.element_ty == tl.bfloat16:
        value = _decode_bf16(w, s, TN, TK)
    else:
        code, scale = _decode_fp32(w, s, TN, TK)
        scale = tl.where(scale < 0.001, 0.0, scale)  # the stand-in for a zero scale
        g = tl.load(g_ptr + offs_n, mask=offs_n < N, other=1.0)[:, None]
        value = code * scale * 0.0078125 if EXACT else code * tl.div_rn(scale, g)
    out = out_ptr + offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=mask)
