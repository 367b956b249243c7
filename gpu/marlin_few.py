"""Few rows: mma.sync instead of wgmma, with the fragments of its operands named by hand.

The idea: wgmma with weights in registers takes the same time for 8 rows of x as for 40, at 16 rows longer than reading the
weights takes, and while a warp decodes, its tensor core waits (bench/gemm.md). mma.sync m16n8k16 works for one warp at a time
and costs by the rows, so that one warp decodes while another multiplies. Its A fragment is what marlin_layout.py packs: a
word holds a thread's eight weights of a 16 x 16 block, and the four registers that decoding makes of it are a0 .. a3. A
program keeps everything as fragments, vectors with four neighbours for each of its threads (4 or 8 warps):

    w     words: thread (warp, g, t) has the 16 x 16 blocks j = 0 .. 3 of rows 16 warp .. + 15, columns 16 j .. + 15
    x     words of two columns, for b0 and b1 and for each eight rows: row g, columns 16 j + 2 t, and + 8
    acc   fp32, for each eight rows: c0 .. c3 = (weight row g or g + 8; row 2 t or 2 t + 1 of x)

One instruction sequence decodes a thread's four words, another multiplies them by sixteen rows. Nothing is asynchronous, so
nothing can be overwritten in flight.

Triton must give all of these vectors the layout of four neighbours a thread; it takes it from the 16-byte loads of w. A test
reads it off the compiled kernel, and on a GPU every plan is compared with float64.

No plan in marlin_kernel.py uses it yet: it has not run on a GPU. On a CPU a PTX interpreter executes it (tests/ptx.py).

Source: PTX ISA, mma.m16n8k16; marlin_decode.py for the decoding. Limits: 16, 32 or 64 rows a tile; 4 or 8 warps.
Cost: 2.9 instructions a weight at 16 rows, 3.3 at 32, loads and all, of the four that an SM can start while its memory
delivers a weight.
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
    fma.rn.bf16x2 {a0}, p, upper, zero;
    shl.b32 p, {w}, 6;                     // pair 1
    and.b32 p, p, 0x81C081C0;
    fma.rn.bf16x2 {a1}, p, lower, zero;
    shf.r.wrap.b32 p, {w}, {w}, 6;         // pair 2
    and.b32 p, p, 0x81C081C0;
    fma.rn.bf16x2 {a2}, p, upper, zero;
    shl.b32 p, {w}, 4;                     // pair 3
    and.b32 p, p, 0x01000100;
    shf.r.wrap.b32 q, {w}, {w}, 4;
    lop3.b32 p, q, 0x80C080C0, p, 0xEA;
    fma.rn.bf16x2 {a3}, p, lower, zero;"""
PRODUCT = """
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{c}}}, {{{a}}}, {{{b0}, {b1}}}, {{{c}}};"""


def _operand(vector: int, j: int) -> str:
    """Number j of a thread's four of an operand; results count first."""
    return f"${4 * vector + j}"


def _decode_all() -> str:
    """a0, a1, a2, a3 = operands 0 .. 3 of w (4) and its scales (5)."""
    text = "{\n    .reg .b32 p, q, upper, lower, zero;\n    .reg .b16 s0, s1;"
    text += "\n    mov.b32 zero, 0x80008000;"  # -0: products keep their sign
    for j in range(4):
        a = {f"a{i}": _operand(i, j) for i in range(4)}
        text += DECODE.format(w=_operand(4, j), s=_operand(5, j), **a)
    return text + "\n}"


def _multiply_all() -> str:
    """Sums of twice eight rows = operands 0 and 1, of a0 .. a3 (2 .. 5), b0 and b1 of both (6 .. 9), the sums before (10, 11)."""
    text = "{\n    .reg .f32 c<8>;"
    text += "".join(f"\n    mov.f32 c{i}, {_operand(10 + i // 4, i % 4)};" for i in range(8))
    for j in range(4):
        a = ", ".join(_operand(2 + i, j) for i in range(4))
        for block in range(2):
            c = ", ".join(f"c{4 * block + i}" for i in range(4))
            text += PRODUCT.format(c=c, a=a, b0=_operand(6 + 2 * block, j), b1=_operand(7 + 2 * block, j))
    return text + "".join(f"\n    mov.f32 {_operand(i // 4, i % 4)}, c{i};" for i in range(8)) + "\n}"


DECODE_ALL, DECODE_CONSTRAINTS = tl.constexpr(_decode_all()), tl.constexpr(",".join(["=&r"] * 16 + ["r"] * 8))
MULTIPLY_ALL = tl.constexpr(_multiply_all())
MULTIPLY_CONSTRAINTS = tl.constexpr(",".join(["=f"] * 8 + ["r"] * 32 + ["f"] * 8))


@triton.jit
def _decode(w, scale):
    return tl.inline_asm_elementwise(DECODE_ALL, DECODE_CONSTRAINTS, [w, scale], dtype=(tl.uint32,) * 4, is_pure=True, pack=4)


@triton.jit
def _multiply(a, b, row: tl.constexpr, acc0, acc1):
    args = [a[0], a[1], a[2], a[3], b[4 * row], b[4 * row + 1], b[4 * row + 2], b[4 * row + 3], acc0, acc1]
    return tl.inline_asm_elementwise(
        MULTIPLY_ALL, MULTIPLY_CONSTRAINTS, args, dtype=(tl.float32,) * 2, is_pure=True, pack=4)  # fmt: skip


@triton.jit
def _spread(x, WARPS: tl.constexpr):
    """(g, t, j) -> a vector: the same for each of the warps."""
    return tl.broadcast_to(x.reshape(1, 128), WARPS, 128).reshape(WARPS * 128)


@triton.jit
def _fragments(x, WARPS: tl.constexpr):
    """x (8, 16, 4) words, by four columns of words -> b0 and b1 of its first eight rows, then of the others."""
    low, high = x.reshape(4, 2, 2, 8, 4).trans(3, 4, 0, 2, 1).split()  # (g, t, j, block, half) by halves of sixteen columns
    low0, low1 = low.split()
    high0, high1 = high.split()
    return _spread(low0, WARPS), _spread(high0, WARPS), _spread(low1, WARPS), _spread(high1, WARPS)


@triton.jit
def to_matrix(acc, vector: tl.constexpr, BM: tl.constexpr, WARPS: tl.constexpr):
    """The sums of one vector's 16 WARPS weight rows as a matrix (16 WARPS, BM)."""
    BLOCKS: tl.constexpr = BM // 8
    f: tl.constexpr = vector * BLOCKS
    if BLOCKS == 2:
        v = tl.join(acc[f], acc[f + 1])
    elif BLOCKS == 4:
        v = tl.join(tl.join(acc[f], acc[f + 2]), tl.join(acc[f + 1], acc[f + 3]))
    else:
        even = tl.join(tl.join(acc[f], acc[f + 4]), tl.join(acc[f + 2], acc[f + 6]))
        v = tl.join(even, tl.join(tl.join(acc[f + 1], acc[f + 5]), tl.join(acc[f + 3], acc[f + 7])))
    v = v.reshape(WARPS, 8, 4, 2, 2, BLOCKS)  # warp, g, t, half row, second, block
    return v.trans(0, 3, 1, 5, 2, 4).reshape(16 * WARPS, BM)


@triton.jit
def _halves(v):
    """Blocks 0, 2, .. and 1, 3, .. of v (threads * 4, blocks)."""
    return v.reshape(v.shape[0], v.shape[1] // 2, 2).split()


@triton.jit
def _to_fragments(matrix, BM: tl.constexpr, WARPS: tl.constexpr):
    """The inverse of to_matrix, for the interpreter."""
    v = matrix.reshape(WARPS, 2, 8, BM // 8, 4, 2).trans(0, 2, 4, 1, 5, 3).reshape(128 * WARPS, BM // 8)
    even, odd = _halves(v)
    if BM == 16:
        return even.reshape(128 * WARPS), odd.reshape(128 * WARPS)
    a0, a2 = _halves(even)
    a1, a3 = _halves(odd)
    if BM == 32:
        return a0.reshape(128 * WARPS), a1.reshape(128 * WARPS), a2.reshape(128 * WARPS), a3.reshape(128 * WARPS)
    b0, b4 = _halves(a0)
    b2, b6 = _halves(a2)
    b1, b5 = _halves(a1)
    b3, b7 = _halves(a3)
    L: tl.constexpr = 128 * WARPS
    return (b0.reshape(L), b1.reshape(L), b2.reshape(L), b3.reshape(L),
            b4.reshape(L), b5.reshape(L), b6.reshape(L), b7.reshape(L))  # fmt: skip


@triton.jit
def _load_fragments(x_ptr, M, K, tile_m, k, BM: tl.constexpr, EVEN_K: tl.constexpr, WARPS: tl.constexpr):
    """b0 and b1 of each eight rows of x[tile_m, k .. k + 63].

    Four words of each row come next to those of the other rows, because a warp reads four words of eight rows at a time: from
    shared memory laid out row by row they would come from four of its 32 banks.
    """
    pairs_ptr, b = x_ptr.to(tl.pointer_type(tl.int32)), ()  # two columns a word
    words = k // 2 + tl.arange(0, 8)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    for row in tl.static_range(BM // 16):
        rows = tile_m * BM + row * 16 + tl.arange(0, 16)[None, :, None]
        mask = rows < M
        if not EVEN_K:
            mask = mask & (words < K // 2)
        b = b + _fragments(tl.load(pairs_ptr + rows * (K // 2) + words, mask=mask, other=0), WARPS)
    return b


@triton.jit
def _product_fp32(x_ptr, w, s, M, K, tile_m, k, BM: tl.constexpr, WARPS: tl.constexpr):
    """The same product without instructions of its own, for the interpreter."""
    TILES: tl.constexpr = WARPS // 4
    rows, columns = tile_m * BM + tl.arange(0, BM), k + tl.arange(0, 64)
    mask = (rows[:, None] < M) & (columns[None, :] < K)
    x = tl.load(x_ptr + rows[:, None] * K + columns[None, :], mask=mask, other=0.0)
    code, scale = decode_fp32(w.reshape(TILES, 1, 512), s.reshape(TILES, 1, 64), TILES, 1)
    return _to_fragments(tl.dot(code * (scale * 0.0078125), x.T, input_precision="ieee"), BM, WARPS)


@triton.jit
def accumulate_few(x_ptr, w_ptr, s_ptr, M, N, K, tile_n, tile_m, first, last, BM: tl.constexpr, BN: tl.constexpr,
                   BK: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr):  # fmt: skip
    """As _accumulate in marlin_triton.py, but acc is a tuple of fragments: BM / 8 for each 16 WARPS rows of the tile."""
    BLOCKS: tl.constexpr = BM // 8
    VECTORS: tl.constexpr = BN // (16 * WARPS)
    TILES: tl.constexpr = WARPS // 4  # of 64 x 64 weights, in a vector
    tiles_n, tiles_k = (N + 63) // 64, (K + 127) // 128 * 2
    at_w, at_s, zero = tl.arange(0, 128 * WARPS), tl.arange(0, 16 * WARPS), tl.zeros((128 * WARPS,), tl.float32)
    acc = (zero, zero)
    for _ in tl.static_range(VECTORS * BLOCKS - 2):
        acc = acc + (zero,)
    for step in tl.range(first, last, num_stages=STAGES):
        for u in tl.static_range(BK // 64):
            k, new = step * BK + u * 64, ()
            if x_ptr.dtype.element_ty != tl.float32:
                b = _load_fragments(x_ptr, M, K, tile_m, k, BM, EVEN_K, WARPS)
            for vector in tl.static_range(VECTORS):
                tile = (tile_n * VECTORS + vector) * TILES
                w_tile, s_tile = tl.minimum(tile + at_w // 512, tiles_n - 1), tl.minimum(tile + at_s // 64, tiles_n - 1)
                w = tl.load(w_ptr + (w_tile * tiles_k + k // 64) * 512 + at_w % 512, eviction_policy="evict_first")
                s = tl.load(s_ptr + (s_tile * tiles_k + k // 64) * 64 + at_s % 64, eviction_policy="evict_first")
                if x_ptr.dtype.element_ty == tl.float32:
                    product = _product_fp32(x_ptr, w, s, M, K, tile_m, k, BM, WARPS)
                    for block in tl.static_range(BLOCKS):
                        new = new + (acc[vector * BLOCKS + block] + product[block],)
                else:
                    a = _decode(w, _scale_pairs(s.reshape(TILES, 1, 64), TILES, 1).reshape(128 * WARPS))
                    for row in tl.static_range(BM // 16):
                        new = new + _multiply(a, b, row, acc[vector * BLOCKS + 2 * row], acc[vector * BLOCKS + 2 * row + 1])
            acc = new
    return acc


@triton.jit
def store_fragments(acc, ptr, COUNT: tl.constexpr, WARPS: tl.constexpr):
    for f in tl.static_range(COUNT):
        tl.store(ptr + f * 128 * WARPS + tl.arange(0, 128 * WARPS), acc[f])


@triton.jit
def add_fragments(acc, ptr, first, last, stride, COUNT: tl.constexpr, WARPS: tl.constexpr):
    """acc + the fragments of slots first .. last - 1, `stride` numbers apart, in this order; some loads in flight at a time."""
    BATCH: tl.constexpr = 4 if COUNT <= 4 else 2 if COUNT <= 8 else 1
    ptrs = ptr + tl.arange(0, 128 * WARPS)
    for i in range(first, last, BATCH):
        for j in tl.static_range(BATCH):
            new = ()
            for f in tl.static_range(COUNT):
                left = tl.load(ptrs + (i + j) * stride + f * 128 * WARPS, mask=i + j < last, other=0.0, cache_modifier=".cg")
                new = new + (acc[f] + left,)
            acc = new
    return acc


def demo() -> None:
    """What one word of eight weights becomes, and how often."""
    names = {name: name for name in ("a0", "a1", "a2", "a3", "b0", "b1")}
    text = (DECODE + PRODUCT).format(w="word", s="scales", c="c0, c1, c2, c3", a="a0, a1, a2, a3", **names)
    lines = [line.split("//")[0].strip() for line in text.splitlines() if line.strip()]
    print("\n".join(lines))
    decoding = sum("mov" not in line for line in lines[:-1])
    for rows in (16, 32, 64):
        work = decoding + rows // 8
        print(f"{rows} rows: {work} instructions for a word of 8 weights, {work / 8:.2f} a weight; loads and scales come on top")


if __name__ == "__main__":
    demo()
