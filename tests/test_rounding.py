"""bench/rounding.py: its forward pass is the model's, and the gap between two of its passes is rounding and nothing else."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

SPEC = importlib.util.spec_from_file_location("rounding", Path(__file__).parent.parent / "bench/rounding.py")
IDS = [[(7 * i + start) % 256 for i in range(40)] for start in (3, 90)]


@pytest.fixture(scope="module")
def rounding():
    module, path = importlib.util.module_from_spec(SPEC), list(sys.path)
    sys.modules["rounding"] = module  # its dataclass looks itself up
    SPEC.loader.exec_module(module)
    sys.path[:] = path
    return module


@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen2", "llama"])
def test_without_rounding_the_pass_is_the_models(kind, tiny_hf_folder, rounding, monkeypatch):
    """A wrong mask, rotation or bias would be off by nats, and the gap would be that of another model."""
    from transformers import AutoModelForCausalLM

    folder = tiny_hf_folder(kind)
    config, tensors = rounding.read_model(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    monkeypatch.setattr(rounding, "bf16", lambda x: x)
    for ids in IDS:
        with torch.no_grad():
            logits = theirs(torch.tensor([ids])).logits[0, :-1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            found = rounding.Pass(config, tensors, rounding.VARIANTS[0], 1).logps(ids)
        # Noise of 1e-6 in every product, some ten of them in a row, and logits of up to 20.
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_a_gap_needs_another_order_and_rounding(tiny_hf_folder, rounding, monkeypatch):
    """Without rounding, what stands for the order of summation is a thousandth of what rounding makes of it."""
    config, tensors = rounding.read_model(tiny_hf_folder("qwen2-tied"))
    variant = rounding.VARIANTS[0]
    first, again = (rounding.Pass(config, tensors, variant, 1).logps(IDS[0]) for _ in range(2))
    assert torch.equal(first, again)
    rounded = rounding.compare(config, tensors, variant, IDS)
    assert 1e-3 < rounded["mean"] <= rounded["rms"] <= max(rounded["largest"]) and rounded["residual"] == "bf16"
    monkeypatch.setattr(rounding, "bf16", lambda x: x)
    assert rounding.compare(config, tensors, variant, IDS)["mean"] < rounded["mean"] / 100


def test_what_it_does_not_compute_is_refused(tiny_hf_folder, rounding):
    with pytest.raises(ValueError, match="is qwen3; this takes 16-bit checkpoints of Qwen2 and Llama"):
        rounding.read_model(tiny_hf_folder("qwen3"))
