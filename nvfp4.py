"""NVFP4: a weight matrix in 4.5 bits a weight.

The idea: a 4-bit float has only eight magnitudes, so give every 16 weights a scale of their own, itself an 8-bit
float, and the whole matrix one 32-bit scale that moves those 8-bit scales to the middle of their range.

    E2M1 code c (4 bit)   sign | 2 exponent bits | 1 mantissa bit    0 .5 1 1.5 2 3 4 6   and their negatives
    E4M3 scale s (8 bit)  one for 16 neighbours along the in-features; largest value 448
    FP32 scale g          one for the matrix (one for q, k, v together, one for gate, up): g = 448 * 6 / amax|W|

    s = e4m3(min(g * (amax|block| / 6), 448))          the block's largest weight becomes a 6
    c = e2m1(w / (s / g)), nearest, ties to even       saturating at +-6
    w ~ c * (s / g)                                    g is a divisor; fp32 arithmetic, in this order

Packed, one row of a matrix with K in-features (k = 0 is the leftmost weight):

    packed  uint8  K/2    |c1 c0|c3 c2| ... |c15 c14| ...        even k sits in the low nibble
    scale   e4m3   K/16   |        s of k 0..15       | ...      16 * 4 + 8 bits = 4.5 bits a weight
    g       fp32   1      for all rows

Source: QeRL (arXiv 2510.11696) eq. 6; the arithmetic is that of compressed-tensors, bit for bit on fp32 weights.
Where we differ: compressed-tensors works in the dtype of the weights, so that bf16 weights get a bf16-rounded g
(28160 where fp32 says 28230.9); here all arithmetic is fp32 whatever comes in, which is what the format means.
A zero block takes s = 0.125 and a zero matrix g = 1, as there.
How checkpoints name and store the three: files/layouts.py.
Cost: quantising reads each weight twice; temporaries are bounded by chunks of rows, not by the matrix.
Limits: plain rounding, no calibration; in-features must be a multiple of 16.
Copy along: nothing. For the command below also files/layouts.py, files/shards.py.

    python nvfp4.py                                                              the 16 codes and one block by hand
    python nvfp4.py quantize MODEL OUT [--layout compressed-tensors|modelopt]    a checkpoint for other programs
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 16
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitude of codes 0..7; code | 8 is the negative
E2M1_MAX, E4M3_MAX = 6.0, 448.0
ZERO_BLOCK_SCALE = 0.125  # any value would do (0 / s = 0); compressed-tensors takes this one
CHUNK_ELEMENTS = 1 << 20  # weights quantised at a time: the fp32 temporaries stay below 30 MB


@dataclass(frozen=True)
class NVFP4Tensor:
    """A quantised (N, K) matrix. Fields are never written to after construction."""

    packed: Tensor  # (N, K/2) uint8, even k in the low nibble
    scale: Tensor  # (N, K/16) float8_e4m3fn
    global_scale: Tensor  # (1,) fp32, g: a divisor

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.packed.shape[1] * 2

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scale.nbytes + self.global_scale.nbytes

    def to(self, device: torch.device | str) -> NVFP4Tensor:
        return NVFP4Tensor(self.packed.to(device), self.scale.to(device), self.global_scale.to(device))


def _boundaries(device: torch.device) -> Tensor:
    """Seven fp32 boundaries between the magnitudes: a value takes the code that counts the boundaries below it.

    They lie half way. A value exactly half way goes to the neighbour with an even mantissa bit, an even code: down
    where the lower code is even, up where it is odd; there the boundary is the next smaller float, so the tie counts.
    """
    levels = torch.tensor(LEVELS, dtype=torch.float32, device=device)
    middle = (levels[1:] + levels[:-1]) / 2  # .25 .75 1.25 1.75 2.5 3.5 5
    middle[1::2] = torch.nextafter(middle[1::2], torch.zeros_like(middle[1::2]))
    return middle


def encode_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 code, uint8 0..15, of each fp32 value; ties to even, saturating at +-6.

    >>> encode_e2m1(torch.tensor([0.25, 0.26, 0.75, -5.0, -5.1, 99.0])).tolist()   # 0, .5, 1, -4, -6, 6
    [0, 1, 2, 14, 15, 7]
    """
    magnitude = x.abs()
    code = (x < 0).to(torch.uint8) << 3
    for boundary in _boundaries(x.device):  # seven comparisons: four times as fast on a CPU as torch.bucketize
        code += magnitude > boundary
    return code


def pack_codes(codes: Tensor) -> Tensor:
    """(N, K) codes 0..15 -> (N, K/2) uint8; even k goes to the low nibble.

    >>> [hex(byte) for byte in pack_codes(torch.tensor([[0x1, 0xA, 0x7, 0xF]], dtype=torch.uint8))[0].tolist()]
    ['0xa1', '0xf7']
    """
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_codes(packed: Tensor) -> Tensor:
    """(N, K/2) uint8 -> (N, K) codes 0..15; the inverse of pack_codes."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)


def _row_chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _finite_amax(w: Tensor) -> Tensor:
    amax = torch.stack(w.aminmax()).abs().amax().float()  # NaN is handed on; no copy of w as w.abs() would make
    if not torch.isfinite(amax):
        raise ValueError(
            f"weight of shape {tuple(w.shape)} holds NaN or infinity: NVFP4 has neither; "
            "the checkpoint is damaged or diverged, take another one"
        )
    return amax


def _check_matrix(w: Tensor) -> None:
    if w.ndim != 2 or w.numel() == 0 or not w.is_floating_point():
        raise ValueError(f"weight is {w.dtype} of shape {tuple(w.shape)}; NVFP4 wants a non-empty float (N, K) matrix")
    if w.shape[1] % BLOCK:
        padded = -(-w.shape[1] // BLOCK) * BLOCK
        raise ValueError(
            f"in_features={w.shape[1]} is not a multiple of the NVFP4 block {BLOCK}; "
            f"pad to {padded} or keep this model in bf16 (--weights bf16)"
        )


def _global_scale(amax: Tensor) -> Tensor:
    g = E4M3_MAX * E2M1_MAX / amax
    return torch.where(torch.isfinite(g), g, torch.ones_like(g)).reshape(1)


@torch.no_grad()
def global_scale(*weights: Tensor) -> Tensor:
    """(1,) fp32 g = 448 * 6 / amax over all the weights: the smallest of their own, shared where projections fuse.

    All-zero (or so tiny that g would overflow fp32) weights take g = 1.

    >>> global_scale(torch.tensor([[0.5, -2.0]]), torch.tensor([[1.0, 1.0]]))
    tensor([1344.])
    """
    return _global_scale(torch.stack([_finite_amax(w) for w in weights]).amax())


@torch.no_grad()
def quantize(w: Tensor, g: Tensor | None = None) -> NVFP4Tensor:
    """(N, K) weights of any float dtype -> NVFP4Tensor, on the device of w. Arithmetic in fp32.

    g: a global scale shared with other matrices (global_scale(q, k, v)); None = the matrix's own. A g larger than
    its own makes blocks saturate. ValueError for NaN, infinity, or K not a multiple of 16.

    >>> q = quantize(torch.tensor([[6.0, 3.1, -0.4] + [0.0] * 13]))
    >>> unpack_codes(q.packed)[0, :3].tolist(), q.scale.float().item(), q.global_scale.item()
    ([7, 5, 9], 448.0, 448.0)
    >>> dequantize(q, torch.float32)[0, :3]
    tensor([ 6.0000,  3.0000, -0.5000])
    """
    _check_matrix(w)
    rows, columns = w.shape
    amax = _finite_amax(w)  # refuses NaN, also where g is given
    g = _global_scale(amax) if g is None else g.to(w.device, torch.float32).reshape(1)
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=w.device)
    scale = torch.empty(rows, columns // BLOCK, dtype=torch.float8_e4m3fn, device=w.device)
    for part in _row_chunks(rows, columns):
        blocks = w[part].float().unflatten(1, (-1, BLOCK))  # (n, K/16, 16)
        s = (g * (blocks.abs().amax(-1) / E2M1_MAX)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
        # A block of zeros, or one 2^20 below the matrix's largest weight, whose scale has rounded to 0.
        s = torch.where(s.float() == 0, ZERO_BLOCK_SCALE, s.float()).to(torch.float8_e4m3fn)
        step = s.float() / g  # (n, K/16): what one unit of the code is worth
        scale[part] = s
        packed[part] = pack_codes(encode_e2m1(blocks / step[..., None]).flatten(1))
    return NVFP4Tensor(packed, scale, g)


@torch.no_grad()
def dequantize(q: NVFP4Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """(N, K) weights: code * (s / g) in fp32, rounded once to dtype. Bit for bit what compressed-tensors gives."""
    rows, columns = q.shape
    magnitudes = torch.tensor(LEVELS, dtype=torch.float32, device=q.device)
    values = torch.cat((magnitudes, -magnitudes))  # by code
    out = torch.empty(rows, columns, dtype=dtype, device=q.device)
    for part in _row_chunks(rows, columns):
        step = q.scale[part].float() / q.global_scale  # (n, K/16)
        codes = unpack_codes(q.packed[part]).int().unflatten(1, (-1, BLOCK))
        out[part] = (values[codes] * step[..., None]).flatten(1).to(dtype)
    return out


def demo() -> None:
    """Print the 16 codes, and one block from weights to bits and back."""
    print("code  " + " ".join(f"{code:4d}" for code in range(8)) + "   (code + 8 is the negative)")
    print("bits  " + " ".join(f"{code:04b}" for code in range(8)))
    print("value " + " ".join(f"{level:4g}" for level in LEVELS))
    w = torch.tensor([[0.10, -0.20, 0.30, 0.05, -0.01, 0.60, -0.45, 0.25, 0, 0, 0.15, -0.35, 0.5, 0.02, -0.6, 0.4]])
    matrix = torch.cat((w, torch.full_like(w, 1.2)))  # a second row, twice as large: it fixes g
    q = quantize(matrix)
    g, s = q.global_scale.item(), q.scale[0, 0].float().item()
    print(f"\ng = 448 * 6 / 1.2 = {g:g};  s = e4m3({g:g} * 0.6 / 6) = {s:g};  one unit of code = s / g = {s / g:g}")
    codes, back = unpack_codes(q.packed)[0], dequantize(q, torch.float32)[0]
    print("weight " + " ".join(f"{x:5.2f}" for x in w[0].tolist()))
    print("code   " + " ".join(f"{c:5d}" for c in codes.tolist()))
    print("back   " + " ".join(f"{x:5.2f}" for x in back.tolist()))
    scale_byte = q.scale.view(torch.uint8)[0, 0].item()
    print("bytes  " + " ".join(f"{byte:02x}" for byte in q.packed[0].tolist()) + f"   scale {scale_byte:02x}")
    big = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    q = quantize(big)
    error = (dequantize(q, torch.float32) - big).square().mean().sqrt() / big.square().mean().sqrt()
    print(f"\n512 x 1024 Gaussian weights: {8 * q.nbytes / big.numel():.2f} bits a weight, relative error {error:.3f}")


def main(arguments: list[str]) -> int:
    if not arguments:
        demo()
        return 0
    try:
        from files.layouts import LAYOUTS  # only the command below needs to know how files look
        from files.shards import quantize_checkpoint
    except ModuleNotFoundError as error:
        print(f"nvfp4.py: its commands need the folders files/ and layers/ beside it ({error}); copy them", file=sys.stderr)
        return 2

    parser = argparse.ArgumentParser(prog="nvfp4.py", description="write an NVFP4 checkpoint for other programs")
    quantizer = parser.add_subparsers(dest="command", required=True).add_parser("quantize")
    quantizer.add_argument("model", help="hub name or folder of a bf16, fp16 or fp32 safetensors model")
    quantizer.add_argument("out", help="folder to write; must not exist or be empty")
    quantizer.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0])
    options = parser.parse_args(arguments)
    try:
        quantize_checkpoint(options.model, options.out, options.layout)
    except (ValueError, OSError) as error:
        print(f"nvfp4.py: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: NVFP4 in the {options.layout} layout")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
