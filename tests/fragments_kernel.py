"""A kernel that stores what gpu.marlin_few makes of 16 rows of x, for its test."""

import triton
import triton.language as tl

from gpu.marlin_few import _load_fragments


@triton.jit
def fragments_kernel(x_ptr, out_ptr):
    b00, b01, b10, b11 = _load_fragments(x_ptr, 16, 64, 0, 0, 16, True, 4)
    out = out_ptr + tl.arange(0, 512)
    tl.store(out, b00)
    tl.store(out + 512, b01)
    tl.store(out + 1024, b10)
    tl.store(out + 1536, b11)
