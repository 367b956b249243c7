"""Calibration: never a worse block, never another function before the rounding, always an ordinary checkpoint."""

import pytest
import torch

import nvfp4
from convert import calibrate
from model import Transformer


def draw(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def error(w, q, h=1.0):
    return ((nvfp4.dequantize(q, torch.float32) - w).square() * h).sum()


@pytest.mark.parametrize("rows,columns", [(1, 16), (5, 48), (64, 128)])
def test_no_block_is_worse_than_with_the_plain_scale(rows, columns):
    w = draw(rows, columns)
    g = calibrate.global_scale(w)
    plain, best = calibrate.search(w, g, multiples=(1.0,)), calibrate.search(w, g)
    by_block = [(nvfp4.dequantize(q, torch.float32) - w).square().unflatten(1, (-1, 16)).sum(-1) for q in (plain, best)]
    # Rounding of the fp32 sums: the search compares in one order, this test sums in another.
    assert (by_block[1] <= by_block[0] * (1 + 1e-5)).all()


def test_one_multiple_and_the_plain_global_scale_are_plain_rounding():
    w = draw(32, 64)
    plain, same = nvfp4.quantize(w), calibrate.search(w, nvfp4.global_scale(w), multiples=(1.0,))
    assert torch.equal(plain.packed, same.packed)
    assert torch.equal(plain.scale.view(torch.uint8), same.scale.view(torch.uint8))


def test_the_search_gains_on_gaussian_weights_and_importance_on_what_it_weighs():
    """The published gain of four-over-six is about a tenth of the error; the wider search must not be behind it."""
    w, h = draw(64, 256), torch.ones(256)
    h[::16] = 100.0
    plain, wide = error(w, nvfp4.quantize(w)), error(w, calibrate.search(w))
    assert error(w, calibrate.search(w, multiples=calibrate.FOUR_OVER_SIX)) < 0.9 * plain
    assert wide < 0.8 * plain
    assert error(w, calibrate.search(w, importance=h), h) < 0.9 * error(w, calibrate.search(w), h)


def test_zero_blocks_and_nan():
    w = draw(4, 32)
    w[:, :16] = 0
    assert (nvfp4.dequantize(calibrate.search(w), torch.float32)[:, :16] == 0).all()
    w[3, 5] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        calibrate.search(w)


@pytest.fixture(params=["qwen2-tied", "llama", "qwen3"])
def recorded(request, tiny_model):
    model = tiny_model(request.param)
    sequences = [torch.randint(250, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (9, 30, 17)]
    inputs = calibrate.record_inputs(model, sequences)
    for slots in inputs:  # a few loud channels, so that columns are worth rescaling
        for one in slots.values():
            one.x[:, ::7] *= 30
            one.square[::7] *= 900
    return model, inputs


def logits_of(model):
    tokens = torch.arange(3, 40)
    with torch.no_grad():
        return model.logits(model(tokens, model.packed([len(tokens)])))[:, :250]


def test_rescaled_columns_compute_the_same_function_before_rounding(recorded, monkeypatch):
    """An inverted or misplaced scale would show here and hide behind the rounding otherwise."""
    model, inputs = recorded
    scales = []
    monkeypatch.setattr(calibrate, "search", lambda w, g, h, multiples: w)
    plain = calibrate.column_scale
    monkeypatch.setattr(calibrate, "column_scale", lambda w, x: scales.append(plain(w, x)[1]) or (plain([w[0]], x)[0], 0))
    tensors = calibrate.calibrated(model, inputs)
    same = Transformer(model.config, lambda name, shape: tensors[name], weights="bf16")
    assert any(scales)  # something was rescaled
    assert not torch.equal(same.layers[0].input_norm, model.layers[0].input_norm)
    torch.testing.assert_close(logits_of(same), logits_of(model), rtol=1e-3, atol=1e-3)  # fp32, two layers, logits of order 10


def test_the_written_checkpoint_is_read_back_bit_for_bit(tiny_hf_folder, tmp_path):
    from convert.loader import load_model

    folder = tiny_hf_folder("qwen2-tied", dtype="bfloat16")
    model, _, _ = load_model(str(folder), weights="bf16")
    tensors = calibrate.calibrated(model, calibrate.record_inputs(model, [[1, 2, 3, 4, 5] * 4]), columns=False)
    calibrate.write(tensors, folder, tmp_path / "out")
    read, _, _ = load_model(str(tmp_path / "out"), weights="nvfp4")
    memory = Transformer(model.config, lambda name, shape: tensors[name], weights="nvfp4")
    assert torch.equal(logits_of(read), logits_of(memory))
