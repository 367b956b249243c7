"""The small kernels against their torch twins: in Triton's interpreter on a CPU, compiled for sm_90, and on a GPU.

The interpreter is run on fp32 only: its bf16 arithmetic works on raw bits. Tolerances: fp32 sums in another order, 1e-6
relative to values of order one; bf16 outputs may fall one bit apart, 2^-8.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import gradcheck
from triton_offline import compile_for_hopper, interpret_kernels

from gpu import fused_ops
from gpu.fused_ops import add_rms_norm, add_rms_norm_reference, swiglu, swiglu_reference
from layers import rope
from layers.rope import apply_rope, apply_rope_reference, rope_tables

SHAPES = [(1, 64), (5, 123), (3, 1000), (2, 4096)]


@pytest.fixture
def interpreted(monkeypatch):
    """Runs the kernels of gpu/fused_ops.py and layers/rope.py in the interpreter, on CPU tensors."""
    interpret_kernels(monkeypatch, fused_ops, rope)


def random(*shape, seed=0, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(**options)


def grads(outputs, inputs, seed=1):
    cotangents = [random(*o.shape, seed=seed + i, dtype=o.dtype, device=o.device) for i, o in enumerate(outputs)]
    return torch.autograd.grad(outputs, inputs, cotangents)


@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_kernel_equals_its_twin_forward_and_backward(interpreted, shape, with_delta):
    x, weight = random(*shape).requires_grad_(), (1 + random(shape[1], seed=3)).requires_grad_()
    delta = random(*shape, seed=2).requires_grad_() if with_delta else None
    inputs = [x, weight] + ([delta] if with_delta else [])
    expected = add_rms_norm_reference(x, delta, weight, 1e-6)
    got = fused_ops._AddRmsNorm.apply(x, delta, weight, 1e-6)
    got, expected = (got, expected) if with_delta else ([got], expected[:1])
    torch.testing.assert_close(list(got), list(expected), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(grads(got, inputs), grads(expected, inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 64), (4, 3000)])
def test_swiglu_kernel_equals_its_twin_forward_and_backward(interpreted, shape):
    x = random(*shape).requires_grad_()
    got, expected = fused_ops._SwiGLU.apply(x), swiglu_reference(x)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grads([got], [x]), grads([expected], [x]), rtol=1e-5, atol=1e-6)


def stacked_qkv(tokens, heads, kv_heads, dim, **options):
    """q and k as the model hands them in: views of one (T, H + 2 Hkv, D) tensor."""
    q, k, _ = random(tokens, heads + 2 * kv_heads, dim, **options).split((heads, kv_heads, kv_heads), dim=1)
    return q, k


ROPE = SimpleNamespace(head_dim=16, rope_theta=10000.0, rope_scaling=None)


def test_rope_kernel_equals_its_twin_forward_and_backward(interpreted):
    cos, sin = rope_tables(ROPE, 50, "cpu")
    positions = torch.tensor([0, 3, 49, 3, 7])
    q, k = (x.detach().requires_grad_() for x in stacked_qkv(5, 3, 1, 16))
    expected = apply_rope_reference(q, k, cos, sin, positions)
    for x, turned in zip((q, k), expected):
        got = rope._Rope.apply(x, cos, sin, positions)
        torch.testing.assert_close(got, turned, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(grads([got], [x]), grads([turned], [x]), rtol=1e-6, atol=1e-6)


def test_twins_have_correct_gradients():
    """The specification itself, against finite differences in float64 (norms and rope compute in fp32: loose)."""
    x = random(3, 8, dtype=torch.float64).requires_grad_()
    assert gradcheck(swiglu_reference, (x,))


def test_norm_is_transformers_norm():
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    theirs = Qwen2RMSNorm(96, eps=1e-6)
    theirs.weight.data = 1 + random(96)
    x = random(7, 96, seed=1)
    torch.testing.assert_close(add_rms_norm(x, None, theirs.weight, 1e-6)[0], theirs(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ],
    ids=lambda s: s["rope_type"],
)  # fmt: skip
def test_rope_is_transformers_rope(scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=131072,
                         rope_parameters=scaling | {"rope_theta": 5e5})  # fmt: skip
    positions = torch.tensor([0, 1, 17, 200, 999])
    q, k = random(5, 4, 64), random(5, 2, 64, seed=1)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    theirs = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    ours = SimpleNamespace(head_dim=64, rope_theta=5e5, rope_scaling=scaling, max_positions=131072)
    for a, b in zip(apply_rope(q, k, *rope_tables(ours, 1000, "cpu"), positions), theirs):
        # frequencies are fp32: at position 999 the last bit of one is 999 * 2^-24 radians
        torch.testing.assert_close(a, b[0].transpose(0, 1), rtol=0, atol=3e-4)


def test_unknown_rope_scaling_is_refused_by_name():
    config = SimpleNamespace(head_dim=8, rope_theta=1e4, rope_scaling={"rope_type": "dynamic"})
    with pytest.raises(ValueError, match="'dynamic'.*llama3 or yarn"):
        rope_tables(config, 10, "cpu")


def test_kernels_compile_for_sm_90():
    b, f = "*bf16", "*fp32"
    norm = {"x_ptr": b, "delta_ptr": b, "w_ptr": f, "y_ptr": b, "sum_ptr": b, "rrms_ptr": f, "d": "i32", "eps": "fp32"}
    compile_for_hopper(fused_ops._add_rms_norm_kernel, norm,
                       {"HAS_DELTA": True, "SAVE": False, "BLOCK": 4096, "PDL": True}, num_warps=8)  # fmt: skip
    back = {"dy_ptr": b, "dsum_ptr": b, "x_ptr": b, "w_ptr": f, "rrms_ptr": f, "dx_ptr": b, "d": "i32"}
    compile_for_hopper(fused_ops._rms_norm_backward_kernel, back, {"HAS_DSUM": True, "BLOCK": 4096}, num_warps=8)
    compile_for_hopper(fused_ops._swiglu_kernel, {"x_ptr": b, "y_ptr": b, "F": "i32"}, {"BLOCK": 1024, "PDL": True})
    compile_for_hopper(fused_ops._swiglu_backward_kernel, {"dy_ptr": b, "x_ptr": b, "dx_ptr": b, "F": "i32"},
                       {"BLOCK": 1024})  # fmt: skip
    turn = {"x_ptr": b, "y_ptr": b, "cos_ptr": f, "sin_ptr": f, "position_ptr": "*i64", "stride_xt": "i32",
            "stride_xh": "i32", "H": "i32", "HALF": "i32"}  # fmt: skip
    compile_for_hopper(rope._rope_kernel, turn, {"SIGN": 1, "BLOCK_H": 32, "BLOCK_D": 64})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, (300, 3584), (2, 5120)])
def test_on_a_gpu_norm_and_swiglu_equal_their_twins(shape, dtype):
    close = {"rtol": 2**-7, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    x, delta = (random(*shape, seed=i, dtype=dtype, device="cuda").requires_grad_() for i in (0, 1))
    weight = (1 + random(shape[1], seed=3, device="cuda")).requires_grad_()
    for d in (None, delta):
        inputs = [x, weight] + ([] if d is None else [d])
        got, expected = (f(x, d, weight, 1e-6) for f in (add_rms_norm, add_rms_norm_reference))
        torch.testing.assert_close(got, expected, **close)
        torch.testing.assert_close(add_rms_norm(x.detach(), d, weight.detach(), 1e-6), expected, **close)
        got, expected = grads(got, inputs), grads(expected, inputs)
        for a, b in zip(got, expected):  # the weight's gradient is a sum over rows: relative to its size
            assert (a - b).norm() <= (1e-2 if dtype == torch.bfloat16 else 1e-5) * b.norm()
    if shape[1] % 2 == 0:
        got, expected = swiglu(x), swiglu_reference(x)
        torch.testing.assert_close(got, expected, **close)
        torch.testing.assert_close(grads([got], [x]), grads([expected], [x]), **close)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(28, 4, 128), (14, 2, 64), (3, 1, 16)])
def test_on_a_gpu_rope_equals_its_twin(heads):
    config = SimpleNamespace(head_dim=heads[2], rope_theta=1e6, rope_scaling=None)
    cos, sin = rope_tables(config, 3000, "cuda")
    positions = torch.randint(3000, (257,), generator=torch.Generator().manual_seed(0)).cuda()
    q, k = (x.detach().requires_grad_() for x in stacked_qkv(257, *heads, device="cuda", dtype=torch.bfloat16))
    got, expected = (f(q, k, cos, sin, positions) for f in (apply_rope, apply_rope_reference))
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-2)
    torch.testing.assert_close(grads(got, [q, k]), grads(expected, [q, k]), rtol=2**-7, atol=1e-2)
