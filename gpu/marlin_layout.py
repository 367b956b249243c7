"""NVFP4 weights in the order in which a tensor core's threads want them: repacked once at load, and back bit for bit.

The idea: the matrix instruction (wgmma m64n16k16, and mma.sync) fixes which thread must hold which element of its A
operand. If memory already has that order, a thread's 16-byte load is its own data, and decoded weights never pass
through shared memory. 4.5 bits a weight, as in the public layout.

A tile is 64 rows x 64 columns: 512 words of eight codes, 64 words of four scales. Word (warp, g, t, j) belongs to thread
4g + t of a warp; j is a k-step of 16 columns, so that one NVFP4 block is one k-step; its eight weights are

    row 16 warp + g       k = 16j + 2t, +1   pair 0         k = 16j + 2t + 8, +9   pair 2
    row 16 warp + g + 8   k = 16j + 2t, +1   pair 1         k = 16j + 2t + 8, +9   pair 3

The bit trick. A code is sign | E1 E0 | M. In a bf16 number these bits sit at 15 | 8 7 | 6, where they read as
value * 2^-126 (0.5 becomes a bf16 subnormal, which the multiplier takes). A word keeps pair 0 in place and pairs 1 and 2
six bits to either side; pair 3 fills the gaps. Nine shifts and masks give four pairs, ready to be multiplied:

    bit    15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0      the upper half alike, for the second weight of each pair
    pair    0  2  2  2  3  3  1  0  0  0  2' 3  3' 1  1  1      ' comes around from the other half

Scales. E4M3 becomes E5M3 (its subnormals become normal numbers): with the bits 0x7000 it reads, as bf16, s * 2^119. One
multiplication a pair gives code * s * 2^-7, exactly: six significant bits. A scale word holds rows g and g + 8 (16 bits
apart, as the pairs' multipliers) of k-steps j (in place) and j + 1 (8 bits around).

Source: the fragment layout is PTX's (wgmma, "register fragments"); repacking for it is Marlin's idea (arXiv 2408.11743);
the encoding is ours. Cost: one pass at load; the bytes of the public layout.
Limits: N and K multiples of 16 (padded to 64 and 128 inside), scales not negative.
Copy along: nvfp4.py.

    python -m gpu.marlin_layout        one word taken apart
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import nvfp4
from nvfp4 import NVFP4Tensor

TILE = 64  # rows and columns of a packed tile
WORDS, SCALE_WORDS = TILE * TILE // 8, TILE * (TILE // 16) // 4  # int32 words of one tile


@dataclass(frozen=True)
class MarlinWeight:
    """Frozen NVFP4 weights of projections that share an input, stacked along N, in fragment order. See pack()."""

    words: Tensor  # (tiles along N, tiles along K, 512) int32, zero-padded
    scales: Tensor  # (tiles along N, tiles along K, 64) int32
    row_scale: Tensor  # (N padded,) fp32: 1 / g of the row's part
    global_scales: Tensor  # (P,) fp32: g of each part
    bounds: Tensor  # (P + 1,) int32 on the device: part p is rows bounds[p] .. bounds[p + 1] - 1
    parts: tuple[int, ...]  # rows of each part
    alphas: tuple[float, ...]  # 128 / g of each part: what the decoded numbers must be multiplied by
    n: int
    k: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.n, self.k


# ------------------------------------------------------------------------------------------------------- packing


def _rotl(x: Tensor, n: int) -> Tensor:
    return ((x << n) | (x >> (32 - n))) & 0xFFFFFFFF  # on int64 that holds 32 bits


def _int32(x: Tensor) -> Tensor:
    return torch.where(x >= 2**31, x - 2**32, x).to(torch.int32)


def _words_from_codes(codes: Tensor) -> Tensor:
    """(rows, K) codes, multiples of 64 -> (rows/64, K/64, 512) int32."""
    rows, columns = codes.shape
    bits = codes.long()
    bits = ((bits & 8) << 12) | ((bits & 7) << 6)  # sign at 15, E1 E0 M at 8..6
    #                      rows: tile, warp, half, g;           columns: tile, j, half, t, pair
    bits = bits.view(rows // 64, 4, 2, 8, columns // 64, 4, 2, 4, 2).permute(0, 4, 1, 3, 7, 5, 6, 2, 8)
    pair = bits[..., 0] | (bits[..., 1] << 16)
    p0, p1, p2, p3 = pair.flatten(-2).unbind(-1)
    word = p0 | (p1 >> 6) | _rotl(p2, 6) | ((p3 & 0x01000100) >> 4) | _rotl(p3 & 0x80C080C0, 4)
    return _int32(word).flatten(2)


def _codes_from_words(words: Tensor) -> Tensor:
    """The inverse of _words_from_codes; also the readable form of what the kernel does to a word."""
    x = words.long() & 0xFFFFFFFF
    p3 = ((x << 4) & 0x01000100) | (_rotl(x, 28) & 0x80C080C0)
    pair = torch.stack((x & 0x81C081C0, (x << 6) & 0x81C081C0, _rotl(x, 26) & 0x81C081C0, p3), -1)
    bits = torch.stack((pair & 0xFFFF, pair >> 16), -1)  # (.., 512, pair 4, 2)
    codes = ((bits >> 12) & 8 | (bits >> 6) & 7).to(torch.uint8)
    tiles_n, tiles_k = words.shape[:2]
    codes = codes.view(tiles_n, tiles_k, 4, 8, 4, 4, 2, 2, 2).permute(0, 2, 7, 3, 1, 5, 6, 4, 8)
    return codes.reshape(tiles_n * 64, tiles_k * 64)


@functools.cache
def _e5m3_table() -> tuple[int, ...]:
    """E5M3 byte of each E4M3 byte 0..126: (floor(log2 s) + 22) << 3 | 3 mantissa bits; 0 for s = 0.

    A zero scale decodes as 2^-22 instead: its weights are then below 2e-9 of the largest, and its codes survive.
    """
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    mantissa, exponent = torch.frexp(values)  # s = mantissa * 2^exponent, 0.5 <= mantissa < 1
    table = (exponent + 21).long() * 8 + ((mantissa * 2 - 1) * 8).long()
    return tuple(torch.where(values > 0, table, 0).tolist())


def _scale_words(scale_bytes: Tensor) -> Tensor:
    """(rows, K/16) E4M3 bytes -> (rows/64, K/64, 64) int32: four E5M3 bytes a word, rows g and g + 8 of two k-steps."""
    rows, blocks = scale_bytes.shape
    table = torch.tensor(_e5m3_table(), device=scale_bytes.device)
    byte = table[scale_bytes.long()].view(rows // 64, 4, 2, 8, blocks // 4, 2, 2).permute(0, 4, 1, 3, 5, 6, 2)
    pair = (byte[..., 0] << 4) | (byte[..., 1] << 20)  # (.., j even/odd): where bf16 keeps exponent and mantissa
    return _int32(pair[..., 0] | _rotl(pair[..., 1], 8)).flatten(2)


def _bytes_from_scale_words(words: Tensor) -> Tensor:
    x = words.long() & 0xFFFFFFFF
    pair = torch.stack((x, _rotl(x, 24)), -1)  # (.., 64, j)
    byte = torch.stack(((pair >> 4) & 0xFF, (pair >> 20) & 0xFF), -1)  # (.., 64, j, half)
    table = torch.zeros(256, dtype=torch.uint8, device=words.device)
    table[torch.tensor(_e5m3_table(), device=words.device)] = torch.arange(127, dtype=torch.uint8, device=words.device)
    tiles_n, tiles_k = words.shape[:2]
    byte = table[byte].view(tiles_n, tiles_k, 4, 8, 2, 2, 2).permute(0, 2, 6, 3, 1, 4, 5)
    return byte.reshape(tiles_n * 64, tiles_k * 4)


@torch.no_grad()
def pack(parts: Sequence[NVFP4Tensor]) -> MarlinWeight:
    """Repacks parts (N_p, K), which share their input, into one weight (sum N_p, K) on the device of the parts.

    Done once, at load; unpack() gives the parts back bit for bit. ValueError for parts that do not fit together or
    scales that are negative or NaN (no quantiser makes them).
    """
    sizes, k = tuple(part.shape[0] for part in parts), parts[0].shape[1]
    n, device = sum(sizes), parts[0].packed.device
    if any(part.shape[1] != k for part in parts):
        raise ValueError(f"in_features {[part.shape[1] for part in parts]} differ: only parts with one input stack")
    if n % 16 or k % 16:
        raise ValueError(f"weight is {n} x {k}; both must be multiples of 16: keep this model in bf16 (--weights bf16)")
    packed = torch.cat([part.packed for part in parts])
    scale = torch.cat([part.scale.view(torch.uint8) for part in parts])
    if (scale >= 127).any():
        raise ValueError("a block scale is negative or NaN; NVFP4 scales are positive: the checkpoint is damaged")
    tiles_n, tiles_k = -(-n // TILE), -(-k // (2 * TILE)) * 2  # K to 128, the kernel's step
    words = torch.zeros(tiles_n, tiles_k, WORDS, dtype=torch.int32, device=device)
    scales = torch.zeros(tiles_n, tiles_k, SCALE_WORDS, dtype=torch.int32, device=device)
    for tile in range(0, tiles_n, 32):  # 2048 rows at a time: the int64 temporaries stay small
        rows = slice(tile * TILE, (tile + 32) * TILE)
        codes = nvfp4.unpack_codes(packed[rows])
        pad_n, pad_k = -codes.shape[0] % TILE, tiles_k * TILE - k
        words[tile : tile + 32] = _words_from_codes(F.pad(codes, (0, pad_k, 0, pad_n)))
        scales[tile : tile + 32] = _scale_words(F.pad(scale[rows], (0, pad_k // 16, 0, pad_n)))
    g = torch.cat([part.global_scale.reshape(1).float() for part in parts])
    row_scale = F.pad((1 / g).repeat_interleave(torch.tensor(sizes, device=device)), (0, -n % TILE))
    bounds = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32, device=device)
    alphas = tuple(128 / value for value in g.tolist())
    return MarlinWeight(words, scales, row_scale, g, bounds, sizes, alphas, n, k)


@torch.no_grad()
def unpack(w: MarlinWeight) -> list[NVFP4Tensor]:
    """The parts that pack() was given, bit for bit."""
    packed = nvfp4.pack_codes(_codes_from_words(w.words)[: w.n, : w.k]).split(w.parts)
    scale = _bytes_from_scale_words(w.scales)[: w.n, : w.k // 16].split(w.parts)
    return [
        NVFP4Tensor(p.contiguous(), s.contiguous().view(torch.float8_e4m3fn), g.reshape(1))
        for p, s, g in zip(packed, scale, w.global_scales)
    ]


def demo() -> None:
    """Packs two parts and reads one word by hand."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(192, 128, generator=generator), torch.randn(64, 128, generator=generator)
    parts = [nvfp4.quantize(weight, nvfp4.global_scale(*weights)) for weight in weights]
    w = pack(parts)
    size = w.words.nbytes + w.scales.nbytes
    print(f"two parts, {w.n} x {w.k} in all: {8 * size / (w.n * w.k):.2f} bits a weight; words {tuple(w.words.shape)}")
    word = w.words[0, 0, 4].item() & 0xFFFFFFFF  # warp 0, g 0, t 1, j 0
    x = torch.tensor(word)
    pairs = x & 0x81C081C0, (x << 6) & 0x81C081C0, _rotl(x, 26) & 0x81C081C0
    pairs = [*pairs, ((x << 4) & 0x01000100) | (_rotl(x, 28) & 0x80C080C0)]
    print(f"word {word:08x} holds, of rows 0 and 8, columns 2 3 10 11 (times their block scales):")
    for pair, (row, k) in zip(pairs, ((0, 2), (8, 2), (0, 10), (8, 10))):
        bits = torch.tensor([int(pair) & 0xFFFF, int(pair) >> 16]).to(torch.int32).to(torch.int16)
        values = bits.view(torch.bfloat16).double() * 2.0**126
        codes = nvfp4.unpack_codes(parts[0].packed)[row, k : k + 2].tolist()
        print(f"  row {row} columns {k:2} {k + 1:2}: bits {int(pair):08x} = {values.tolist()}, public codes {codes}")
    back = all(torch.equal(a.packed, b.packed) for a, b in zip(parts, unpack(w)))
    print(f"unpacked bit for bit: {back}")


if __name__ == "__main__":
    demo()
