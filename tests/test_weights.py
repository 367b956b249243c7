"""layers/weights.py: the three storages compute with exactly the weights that they say they hold."""

import builtins

import pytest
import torch

import nvfp4
from layers.weights import KINDS, DenseWeight, NVFP4Weight, fingerprint, make_weight


def matrix(rows: int = 48, columns: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_dequantised_matrix(kind):
    """matmul, grad_input and dequantize must speak of one matrix; a peer merged one and trained beside another."""
    weight = make_weight(kind, [matrix(), matrix(16, seed=1)], "cpu", torch.float32)
    w, x, dy = weight.dequantize(torch.float32), matrix(5, seed=2), matrix(5, seed=3)
    assert w.shape == weight.shape == (64, 64)
    tolerance = 2e-2 if kind == "nf4" else 1e-5  # bitsandbytes multiplies in bf16 on some CPUs
    torch.testing.assert_close(weight.matmul(x), x @ w.T, atol=20 * tolerance, rtol=tolerance)
    torch.testing.assert_close(weight.grad_input(dy), dy @ w, atol=20 * tolerance, rtol=tolerance)


def test_stacked_parts_share_the_smallest_global_scale():
    """Servers fuse q,k,v: a checkpoint exported from here must have one g for the three."""
    small, large = matrix(seed=0), 5 * matrix(seed=1)
    weight = make_weight("nvfp4", [small, large], "cpu", torch.float32)
    g = nvfp4.global_scale(small, large)
    assert torch.equal(g, torch.minimum(nvfp4.global_scale(small), nvfp4.global_scale(large)))
    for part, source in zip(weight.nvfp4_parts(), (small, large)):
        expected = nvfp4.quantize(source, g)
        assert torch.equal(part.packed, expected.packed) and torch.equal(part.global_scale, g)


def test_parts_of_a_quantised_checkpoint_keep_their_bits():
    parts = [nvfp4.quantize(matrix()), nvfp4.quantize(3 * matrix(seed=1))]
    weight = make_weight("nvfp4", parts, "cpu", torch.float32)
    assert fingerprint(weight.stored()) == fingerprint([t for p in parts for t in (p.packed, p.scale, p.global_scale)])
    dense = make_weight("bf16", parts, "cpu", torch.float32)
    assert torch.equal(dense.dequantize(torch.float32), weight.dequantize(torch.float32))


def test_quantising_twice_is_refused():
    with pytest.raises(ValueError, match="NVFP4 already"):
        make_weight("nf4", [nvfp4.quantize(matrix())], "cpu", torch.float32)


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="weights='int8' is not one of nvfp4, nf4, bf16"):
        make_weight("int8", [matrix()], "cpu", torch.float32)


def test_missing_bitsandbytes_is_one_clear_line(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "bitsandbytes":
            raise ImportError("No module named 'bitsandbytes'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="pip install bitsandbytes") as error:
        make_weight("nf4", [matrix()], "cpu", torch.float32)
    assert "\n" not in str(error.value)


def test_bytes_are_four_and_a_half_bits_a_weight():
    weight = make_weight("nvfp4", [matrix(256, 512)], "cpu", torch.float32)
    weight.matmul(matrix(1, 512))  # the CPU's dense copy is not counted as storage
    assert weight.nbytes == 256 * 512 * 4.5 / 8 + 4


def test_a_frozen_weight_has_nothing_that_trains_and_a_full_one_does():
    for kind in KINDS:
        assert not any(p.requires_grad for p in make_weight(kind, [matrix()], "cpu", torch.float32).parameters())
    assert make_weight("bf16", [matrix()], "cpu", torch.float32, trainable=True).tensor.requires_grad
    assert isinstance(make_weight("bf16", [matrix()], "cpu", torch.float32), DenseWeight)


def test_fingerprint_sees_one_bit():
    a, b = matrix(), matrix()
    assert fingerprint([a]) == fingerprint([b])
    b.view(torch.int32)[0, 0] ^= 1
    assert fingerprint([a]) != fingerprint([b])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_storages_compute_with_their_own_matrix(kind):
    parts = [matrix(256, 256).cuda().bfloat16(), matrix(128, 256, seed=1).cuda().bfloat16()]
    weight = make_weight(kind, parts, "cuda", torch.bfloat16)
    w = weight.dequantize(torch.float32)
    for rows in (1, 17, 300):
        x, dy = matrix(rows, 256, seed=2).cuda().bfloat16(), matrix(rows, 384, seed=3).cuda().bfloat16()
        for ours, plain in ((weight.matmul(x), x.float() @ w.T), (weight.grad_input(dy), dy.float() @ w)):
            assert (ours.float() - plain).norm() / plain.norm() < 8e-3  # one bf16 rounding of w, x exact, one of y


@pytest.mark.gpu
def test_gpu_holds_one_copy_and_gives_the_public_layout_back():
    parts = [nvfp4.quantize(matrix(256, 256).cuda()), nvfp4.quantize(matrix(128, 256, seed=1).cuda())]
    weight = NVFP4Weight(parts, torch.bfloat16)
    assert weight.marlin is not None and not weight.parts
    for part, back in zip(parts, weight.nvfp4_parts()):
        assert torch.equal(part.packed, back.packed)
        assert torch.equal(part.scale.view(torch.uint8), back.scale.view(torch.uint8))
        assert torch.equal(part.global_scale, back.global_scale)
