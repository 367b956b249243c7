"""A kernel that stores what gpu.marlin_few makes of 16 rows of x, for its test."""

import triton
import triton.language as tl

from gpu.marlin_few import _fragments


@triton.jit
def fragments_kernel(x_ptr, out_ptr):
    x = tl.load(x_ptr + tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :])
    b00, b01, b10, b11 = _fragments(x, 4)
    out = out_ptr + tl.arange(0, 512)
    tl.store(out, b00)
    tl.store(out + 512, b01)
    tl.store(out + 1024, b10)
    tl.store(out + 1536, b11)
