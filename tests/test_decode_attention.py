"""The fused decode attention against its slow twin: interpreter, sm_90 compile, GPU."""

from types import SimpleNamespace

import pytest
import torch
from triton_offline import compile_for_hopper, interpret_kernels

from decoding.attention import DecodeAttention, KVCache
from gpu import decode_attention
from gpu.decode_attention import FusedDecodeAttention
from layers.rope import rope_tables


def case(heads, kv_heads, dim, positions, max_len, dtype, device, kv_dtype=None, seed=0):
    """Two equal caches full of numbers, a step's q, k, v as views of one stacked tensor, and rope tables."""
    generator = torch.Generator().manual_seed(seed)
    config = SimpleNamespace(layers=2, kv_heads=kv_heads, head_dim=dim, rope_theta=1e4, rope_scaling=None)
    caches = [KVCache(config, len(positions) + 1, max_len, kv_dtype or dtype, device) for _ in range(2)]
    content = torch.randn(caches[0].kv.shape, generator=generator)
    for cache in caches:
        cache.kv.copy_(content)
    qkv = torch.randn(len(positions), heads + 2 * kv_heads, dim, generator=generator).to(device, dtype)
    cos, sin = rope_tables(config, max_len, device)
    return caches, qkv.split((heads, kv_heads, kv_heads), dim=1), torch.tensor(positions, device=device), cos, sin


def assert_twins_agree(caches, qkv, position, cos, sin, tolerance):
    fused = FusedDecodeAttention(caches[0], qkv[0].shape[1], cos, sin)
    slow = DecodeAttention(caches[1], position, cos, sin)
    for layer in (1, 0, 1):  # the ticket must be ready again, the other layer untouched
        got, expected = fused.at(position)(layer, *qkv), slow(layer, *qkv)
        torch.testing.assert_close(got.float(), expected.float(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(caches[0].kv.float(), caches[1].kv.float(), rtol=tolerance, atol=tolerance)
    assert not fused.ticket.any()
    return fused


@pytest.mark.parametrize("programs", [1, 24, 264])
def test_kernel_equals_its_twin_for_every_split(monkeypatch, programs):
    """First position, block edges, the cache's last position; one split, some splits, more splits than blocks."""
    interpret_kernels(monkeypatch, decode_attention)
    monkeypatch.setattr(decode_attention, "TILE", (16, 4, 3))
    monkeypatch.setattr(decode_attention, "PROGRAMS", programs)
    positions = [0, 1, 15, 16, 17, 79]
    assert_twins_agree(*case(6, 2, 32, positions, 80, torch.float32, "cpu"), tolerance=1e-5)


def test_kernel_takes_one_query_head_a_kv_head(monkeypatch):
    interpret_kernels(monkeypatch, decode_attention)
    assert_twins_agree(*case(2, 2, 16, [5, 70], 96, torch.float32, "cpu"), tolerance=1e-5)


def test_shapes_that_the_kernel_cannot_do_are_refused():
    cache = KVCache(SimpleNamespace(layers=1, kv_heads=1, head_dim=80), 1, 8, torch.float32, "cpu")
    with pytest.raises(ValueError, match="powers of two"):
        FusedDecodeAttention(cache, 4, torch.zeros(8, 40), torch.zeros(8, 40))


@pytest.mark.parametrize("kv_type", ["*bf16", "*fp8e4nv"])
@pytest.mark.parametrize("split", [1, 8, 16])
def test_kernel_compiles_for_sm_90_without_spills(split, kv_type):
    b, f, i = "*bf16", "*fp32", "i32"
    signature = {
        "q_ptr": b, "k_ptr": b, "v_ptr": b, "keys_ptr": kv_type, "values_ptr": kv_type, "position_ptr": "*i64",
        "cos_ptr": f, "sin_ptr": f, "out_ptr": b, "acc_ptr": f, "sums_ptr": f, "ticket_ptr": "*i32",
        "stride_qt": i, "stride_kt": i, "stride_vt": i, "stride_slot": i, "scale": "fp32",
    }  # fmt: skip
    constants = {"HKV": 4, "GROUP": 7, "S": 768, "D": 128, "SPLIT": split, "BLOCK": 64, "ROWS": 16, "PDL": True}
    compiled = compile_for_hopper(decode_attention._decode_attention_kernel, signature, constants,
                                  num_warps=4, num_stages=3)  # fmt: skip
    assert compiled.metadata.shared < 110_000, "two programs must fit one multiprocessor's shared memory"


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3, 8, 70])
@pytest.mark.parametrize(("heads", "kv_dtype"), [
    ((28, 4, 128), torch.bfloat16), ((28, 4, 128), torch.float8_e4m3fn), ((14, 2, 64), torch.bfloat16)
])  # fmt: skip
def test_on_a_gpu_it_equals_its_twin_and_repeats_bit_for_bit(heads, batch, kv_dtype):
    """bf16 probabilities and outputs: 2^-8 of values of order one, twice. FP8 only rounds what both sides then read."""
    positions = ([0, 767, 64, 63, 511, 1] * 12)[:batch]
    arguments = case(*heads, positions, 768, torch.bfloat16, "cuda", kv_dtype)
    fused = assert_twins_agree(*arguments, tolerance=2e-2)
    first = fused.at(arguments[2])(1, *arguments[1])
    for _ in range(20):
        assert fused(1, *arguments[1]).equal(first)
