"""Few rows: mma.sync instead of wgmma, with the fragments of its operands named by hand.

The idea: wgmma with weights in registers takes the same time for 8 rows of x as for 40, and at 16 rows that time is longer than
reading the weights (bench/gemm.md). mma.sync m16n8k16 works for one warp at a time and costs by the rows. Its A fragment is
what marlin_layout.py packs: a word holds a thread's eight weights of a 16 x 16 block, and the four registers that decoding
makes of it are a0 .. a3. So a program keeps everything as fragments, vectors of 512 numbers for 128 threads with 4 each:

    w     (512,) words: thread (warp, g, t) has the 16 x 16 blocks j = 0 .. 3 of rows 16 warp .. + 15, columns 16 j .. + 15
    x     (512,) words of two columns, for b0 and b1 and for each eight rows: row g, columns 16 j + 2 t, and + 8
    acc   (512,) fp32, for each eight rows: c0 .. c3 = (weight row g or g + 8; row 2 t or 2 t + 1 of x)

One inline instruction sequence decodes a thread's four words and multiplies them by all rows: 15 instructions a word to decode,
one product for each eight rows. Nothing is asynchronous, so nothing can be overwritten in flight.

Triton must give all of these vectors the layout of four neighbours a thread; it takes it from the 16-byte loads of w. A test
reads it off the compiled kernel, and on a GPU every plan is compared with float64.

Source: PTX ISA, mma.m16n8k16; marlin_decode.py for the decoding. Limits: 16 or 32 rows a tile, 4 warps.
Cost: 2.8 instructions a weight at 16 rows, 3.3 at 32, of the four that an SM can start while its memory delivers a weight.
Copy along: gpu/marlin_decode.py. The words come from gpu/marlin_layout.py.

    python -m gpu.marlin_few        the instructions for one word
"""

import triton
import triton.language as tl

from gpu.marlin_decode import _scale_pairs, decode_fp32

DECODE = """
    mov.b32 {{s0, s1}}, {s};
    mov.b32 upper, {{s0, s0}};             // scale of row g twice
    mov.b32 lower, {{s1, s1}};             // scale of row g + 8 twice
    and.b32 p, {w}, 0x81C081C0;            // as in marlin_decode.py: pair 0
    fma.rn.bf16x2 a0, p, upper, zero;
    shl.b32 p, {w}, 6;                     // pair 1
    and.b32 p, p, 0x81C081C0;
    fma.rn.bf16x2 a1, p, lower, zero;
    shf.r.wrap.b32 p, {w}, {w}, 6;         // pair 2
    and.b32 p, p, 0x81C081C0;
    fma.rn.bf16x2 a2, p, upper, zero;
    shl.b32 p, {w}, 4;                     // pair 3
    and.b32 p, p, 0x01000100;
    shf.r.wrap.b32 q, {w}, {w}, 4;
    lop3.b32 p, q, 0x80C080C0, p, 0xEA;
    fma.rn.bf16x2 a3, p, lower, zero;"""
PRODUCT = """
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{c}}}, {{a0, a1, a2, a3}}, {{{b0}, {b1}}}, {{{c}}};"""


def instructions(blocks: int) -> str:
    """PTX for a thread's four words and `blocks` times eight rows of x.

    Operands, four registers each: the sums, one group a block; then w; scales; b0 and b1 of each block; the sums before.
    """
    w = 4 * blocks
    s, x, before = w + 4, w + 8, w + 8 + 8 * blocks
    text = f"{{\n    .reg .b32 p, q, upper, lower, zero, a<4>;\n    .reg .b16 s0, s1;\n    .reg .f32 c<{4 * blocks}>;"
    text += "\n    mov.b32 zero, 0x80008000;"  # -0: products keep their sign
    text += "".join(f"\n    mov.f32 c{i}, ${before + i};" for i in range(4 * blocks))
    for j in range(4):
        text += DECODE.format(w=f"${w + j}", s=f"${s + j}")
        for block in range(blocks):
            c = ", ".join(f"c{4 * block + i}" for i in range(4))
            text += PRODUCT.format(c=c, b0=f"${x + 8 * block + j}", b1=f"${x + 8 * block + 4 + j}")
    return text + "".join(f"\n    mov.f32 ${i}, c{i};" for i in range(4 * blocks)) + "\n}"


def constraints(blocks: int) -> str:
    return ",".join(["=f"] * (4 * blocks) + ["r"] * (8 + 8 * blocks) + ["f"] * (4 * blocks))


ASM2, CONSTRAINTS2 = tl.constexpr(instructions(2)), tl.constexpr(constraints(2))
ASM4, CONSTRAINTS4 = tl.constexpr(instructions(4)), tl.constexpr(constraints(4))


@triton.jit
def _spread(x):
    """(g, t, j) -> a vector of 512: the same for each of the four warps."""
    return tl.broadcast_to(x.reshape(1, 128), 4, 128).reshape(512)


@triton.jit
def _fragments(x):
    """x (16, 32) words -> b0 and b1 of its first eight rows, then of the others."""
    low, high = x.reshape(2, 8, 4, 2, 4).trans(1, 4, 2, 0, 3).split()  # (g, t, j, block, half) by halves of sixteen columns
    low0, low1 = low.split()
    high0, high1 = high.split()
    return _spread(low0), _spread(high0), _spread(low1), _spread(high1)


@triton.jit
def to_matrix(acc, tile: tl.constexpr, BM: tl.constexpr):
    """The sums of 64 weight rows as a matrix (64, BM)."""
    if BM == 16:
        v = tl.join(acc[2 * tile], acc[2 * tile + 1])
    else:
        v = tl.join(tl.join(acc[4 * tile], acc[4 * tile + 2]), tl.join(acc[4 * tile + 1], acc[4 * tile + 3]))
    v = v.reshape(4, 8, 4, 2, 2, BM // 8)  # warp, g, t, half row, second, block
    return v.trans(0, 3, 1, 5, 2, 4).reshape(64, BM)


@triton.jit
def _to_fragments(matrix, BM: tl.constexpr):
    """The inverse of to_matrix, for the interpreter."""
    v = matrix.reshape(4, 2, 8, BM // 8, 4, 2).trans(0, 2, 4, 1, 5, 3)  # warp, g, t, half row, second, block
    if BM == 16:
        a0, a1 = v.reshape(512, 2).split()
        return a0, a1
    even, odd = v.reshape(512, 2, 2).split()
    a0, a2 = even.split()
    a1, a3 = odd.split()
    return a0, a1, a2, a3


@triton.jit
def accumulate_few(x_ptr, w_ptr, s_ptr, M, N, K, tile_n, tile_m, first, last, BM: tl.constexpr, BN: tl.constexpr,
                   BK: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """As _accumulate in marlin_triton.py, but acc is a tuple of fragments: BM / 8 for each 64 rows of the tile."""
    BLOCKS: tl.constexpr = BM // 8
    tiles_n, tiles_k = (N + 63) // 64, (K + 127) // 128 * 2
    rows, words = tile_m * BM + tl.arange(0, 16), tl.arange(0, 32)
    pairs_ptr = x_ptr.to(tl.pointer_type(tl.int32)) + rows[:, None] * (K // 2) + words[None, :]  # two columns a word
    zero = tl.zeros((512,), tl.float32)
    acc = (zero, zero)
    for _ in tl.static_range(BN // 64 * BLOCKS - 2):
        acc = acc + (zero,)
    for step in tl.range(first, last, num_stages=STAGES):
        for u in tl.static_range(BK // 64):
            k = step * BK + u * 64
            new = ()
            if x_ptr.dtype.element_ty == tl.float32:  # the interpreter has no instructions
                at = k + tl.arange(0, 64)
                wide = tile_m * BM + tl.arange(0, BM)
                x = tl.load(x_ptr + wide[:, None] * K + at[None, :], mask=(wide[:, None] < M) & (at[None, :] < K), other=0.0)
            else:
                mask = rows[:, None] < M
                more = rows[:, None] < M - 16
                if not EVEN_K:
                    mask = mask & (k // 2 + words < K // 2)[None, :]
                    more = more & (k // 2 + words < K // 2)[None, :]
                b00, b01, b10, b11 = _fragments(tl.load(pairs_ptr + k // 2, mask=mask, other=0))
                if BLOCKS == 4:
                    b20, b21, b30, b31 = _fragments(tl.load(pairs_ptr + k // 2 + 8 * K, mask=more, other=0))
            for tile in tl.static_range(BN // 64):
                place = tl.minimum(tile_n * (BN // 64) + tile, tiles_n - 1) * tiles_k + k // 64
                w = tl.load(w_ptr + place * 512 + tl.arange(0, 512), eviction_policy="evict_first")
                s = tl.load(s_ptr + place * 64 + tl.arange(0, 64), eviction_policy="evict_first")
                if x_ptr.dtype.element_ty == tl.float32:
                    code, scale = decode_fp32(w.reshape(1, 1, 512), s.reshape(1, 1, 64), 1, 1)
                    product = tl.dot(code * (scale * 0.0078125), x.T, input_precision="ieee")
                    parts = _to_fragments(product, BM)
                    for block in tl.static_range(BLOCKS):
                        new = new + (acc[tile * BLOCKS + block] + parts[block],)
                else:
                    scale = _scale_pairs(s.reshape(1, 1, 64), 1, 1).reshape(512)
                    if BLOCKS == 2:
                        new = new + tl.inline_asm_elementwise(
                            ASM2, CONSTRAINTS2, [w, scale, b00, b01, b10, b11, acc[2 * tile], acc[2 * tile + 1]],
                            dtype=(tl.float32,) * 2, is_pure=True, pack=4)  # fmt: skip
                    else:
                        new = new + tl.inline_asm_elementwise(
                            ASM4, CONSTRAINTS4, [w, scale, b00, b01, b10, b11, b20, b21, b30, b31, acc[4 * tile],
                                                 acc[4 * tile + 1], acc[4 * tile + 2], acc[4 * tile + 3]],
                            dtype=(tl.float32,) * 4, is_pure=True, pack=4)  # fmt: skip
            acc = new
    return acc


@triton.jit
def store_fragments(acc, ptr, COUNT: tl.constexpr):
    for f in tl.static_range(COUNT):
        tl.store(ptr + f * 512 + tl.arange(0, 512), acc[f])


@triton.jit
def add_fragments(acc, ptr, first, last, stride, COUNT: tl.constexpr):
    """acc + the fragments of slots first .. last - 1, `stride` numbers apart, in this order."""
    for i in range(first, last):
        new = ()
        for f in tl.static_range(COUNT):
            new = new + (acc[f] + tl.load(ptr + i * stride + f * 512 + tl.arange(0, 512), cache_modifier=".cg"),)
        acc = new
    return acc


def demo() -> None:
    """What one word of eight weights becomes, and how often."""
    lines = [line.split("//")[0].strip() for line in (DECODE + PRODUCT).format(
        w="word", s="scales", c="c0, c1, c2, c3", b0="b0", b1="b1").splitlines() if line.strip()]  # fmt: skip
    print("\n".join(lines))
    for rows in (16, 32):
        work = sum("mov" not in line for line in lines[:-1]) + rows // 8
        print(f"{rows} rows: {work} instructions for a word of 8 weights, {work / 8:.2f} a weight; loads and scales come on top")


if __name__ == "__main__":
    demo()
