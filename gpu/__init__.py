"""What runs on the GPU besides the GEMM's front door (marlin_kernel.py): small Triton kernels, each beside a slow twin.

    marlin_layout.py      where each 4-bit code and scale must lie so that the tensor cores can take them
    marlin_decode.py      eight codes in a word become eight bf16 numbers by shifts and masks
    marlin_sync.py        waiting for other programs and for the tensor cores; sums in a fixed order
    marlin_lora.py        the adapter inside the GEMM's launch
    marlin_triton.py      the GEMM for decoding: few rows of activations against packed weights
    fused_ops.py          residual add with RMSNorm, and SwiGLU, in one launch each
    decode_attention.py   attention of one new token a sequence, its cache write included
    fused_sampling.py     a token drawn from 152k logits in two launches

Every demo runs on a CPU. The marlin modules but the layout import Triton; what calls them does without it.
"""
