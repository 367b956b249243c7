"""From a word of eight 4-bit codes to eight bf16 weights in registers: thirteen instructions; and a whole matrix to memory.

The idea: gpu/marlin_layout.py has put the codes where shifts and masks turn them into bf16 numbers at once (value *
2^-126), and the scales where they read as s * 2^119. What is left is

    pair 0    x & M                                      M = 0x81C081C0: sign and E1 E0 M of two bf16 numbers
    pair 1    (x << 6) & M                               then each pair * (s of its row), one packed multiplication,
    pair 2    rotate right 6, & M                        exact: code * s * 2^-7 has at most six significant bits
    pair 3    (x << 4) & 0x01000100 | rotate right 4 & 0x80C080C0

Cost. An SM of an H200 must decode 31 weights a clock to keep up with its memory and can start 128 thread-instructions in
that time: four a weight for everything, loads and addresses included. The GEMM spends about three.

dequantize_kernel does the same for a whole matrix, for cuBLAS (EXACT) or as the format defines it. It is bound by memory:
4.5 bits in, 16 out. decode_fp32 is the same in plain Triton, for the interpreter and for exact division by g.
Source: the decoding of NVFP4 in vLLM's Marlin gave the idea of code * 2^-126; the encoding is ours.
Limits: scales not negative; a zero scale decodes as 2^-22 (gpu/marlin_layout.py).
Copy along: nothing. The words come from gpu/marlin_layout.py.

    python -m gpu.marlin_decode        the four pairs of one word, by the formulas above
"""

import triton
import triton.language as tl


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
def decode_fp32(w, s, TN: tl.constexpr, TK: tl.constexpr):
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
def decode_bf16(w, s, TN: tl.constexpr, TK: tl.constexpr):
    """Weights as a bf16 matrix code * s * 2^-7, exact. The one place with PTX: 13 instructions for 8 weights.

    $8 is the word, $9 the scales of its two rows; $0 $1, $2 $3, .. the pairs. Written out because Triton masks
    the halves of a pair one by one, and has no packed bf16 multiplication.
    """
    a0, a1, b0, b1, c0, c1, d0, d1 = tl.inline_asm_elementwise(
        asm="""{
        .reg .b32 p, q, upper, lower, zero;
        .reg .b16 s0, s1;
        mov.b32 zero, 0x80008000;               // -0: products keep their sign; a plain mul.bf16x2 needs sm_90
        mov.b32 {s0, s1}, $9;
        mov.b32 upper, {s0, s0};                // row g twice
        mov.b32 lower, {s1, s1};                // row g + 8 twice
        and.b32 p, $8, 0x81C081C0;              // pair 0 is in place
        fma.rn.bf16x2 p, p, upper, zero;
        mov.b32 {$0, $1}, p;
        shl.b32 p, $8, 6;                       // pair 1: 6 bits up
        and.b32 p, p, 0x81C081C0;
        fma.rn.bf16x2 p, p, lower, zero;
        mov.b32 {$2, $3}, p;
        shf.r.wrap.b32 p, $8, $8, 6;            // pair 2: 6 bits down, around the end
        and.b32 p, p, 0x81C081C0;
        fma.rn.bf16x2 p, p, upper, zero;
        mov.b32 {$4, $5}, p;
        shl.b32 p, $8, 4;                       // pair 3: one bit from above,
        and.b32 p, p, 0x01000100;
        shf.r.wrap.b32 q, $8, $8, 4;            // the others from below
        lop3.b32 p, q, 0x80C080C0, p, 0xEA;     // (q & mask) | p
        fma.rn.bf16x2 p, p, lower, zero;
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
        value = decode_bf16(w, s, TN, TK)
    else:
        code, scale = decode_fp32(w, s, TN, TK)
        scale = tl.where(scale < 0.001, 0.0, scale)  # the stand-in for a zero scale
        g = tl.load(g_ptr + offs_n, mask=offs_n < N, other=1.0)[:, None]
        value = code * scale * 0.0078125 if EXACT else code * tl.div_rn(scale, g)
    out = out_ptr + offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=mask)


def demo() -> None:
    """The formulas on one word, in Python, and what the multiplication by the scale makes of them."""
    word, mask = 0xA696A64C, 0x81C081C0
    right6, right4 = ((word >> n | word << (32 - n)) & 0xFFFFFFFF for n in (6, 4))
    pairs = [word & mask, word << 6 & mask, right6 & mask, word << 4 & 0x01000100 | right4 & 0x80C080C0]
    for i, pair in enumerate(pairs):
        codes = [(half >> 12 & 8) | (half >> 6 & 7) for half in (pair & 0xFFFF, pair >> 16)]
        values = [(-1) ** (c >> 3) * (0, 0.5, 1, 1.5, 2, 3, 4, 6)[c & 7] for c in codes]
        print(f"word {word:08x} pair {i}: bits {pair:08x} = codes {codes} = {values} * 2^-126; times s * 2^119: * s * 2^-7")


if __name__ == "__main__":
    demo()
