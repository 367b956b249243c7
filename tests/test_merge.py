"""convert/merge.py: transformers loads the export and computes what was trained."""

import json

import pytest
import torch
from conftest import read_model
from safetensors.torch import load_file

from convert.loader import load_model
from convert.merge import main, merge, save_model
from files.shards import quantize_checkpoint
from lora import add_adapters, load_adapter, save_adapter


def tokens(count: int) -> torch.Tensor:
    return torch.randint(0, 259, (count,), generator=torch.Generator().manual_seed(0))


def hf_logits(folder, ids: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids[None]).logits[0]


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        hidden = model(ids, model.packed([len(ids)]))
        return hidden @ model.head.T  # padded ids too: transformers does not know that they are none


def trained(folder, out, weights: str = "nvfp4"):
    """A model with an adapter whose B is not zero, and the adapter saved."""
    model = read_model(folder, weights)
    add_adapters(model, 4, 8, {"q_proj", "o_proj", "up_proj", "down_proj"}, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    save_adapter(model, out, str(folder))
    return model


@pytest.mark.parametrize(
    "kind, weights", [("qwen2", "nvfp4"), ("qwen2-tied", "nvfp4"), ("qwen3-tied", "bf16"), ("llama", "nvfp4"), ("llama", "nf4")]
)
def test_transformers_computes_the_trained_logits(kind, weights, tiny_hf_folder, tmp_path):
    """Pitfalls 17, 18 and 19: merged into the dequantised weights, neither re-quantised nor the 16-bit originals."""
    folder, ids = tiny_hf_folder(kind), tokens(30)
    model = trained(folder, tmp_path / "adapter", weights)
    live = logits(model, ids)
    merge(str(folder), str(tmp_path / "adapter"), str(tmp_path / "exact"), weights, "float32", device="cpu")
    if weights != "nf4":  # bitsandbytes' CPU product may itself round to bf16
        torch.testing.assert_close(hf_logits(tmp_path / "exact", ids), live, atol=2e-4, rtol=0)
    merge(str(folder), str(tmp_path / "adapter"), str(tmp_path / "rounded"), weights, device="cpu")
    tensors, exact = (load_file(tmp_path / name / "model.safetensors") for name in ("rounded", "exact"))
    assert tensors.keys() == exact.keys()
    assert all(torch.equal(tensor, exact[name].bfloat16()) for name, tensor in tensors.items())  # rounded once
    assert ("lm_head.weight" in tensors) == (not kind.endswith("tied"))


def test_merging_into_the_original_weights_would_be_another_model(tiny_hf_folder, tmp_path):
    """The bug that this module exists to avoid is visible at this size: the test above could fail."""
    folder, ids = tiny_hf_folder("qwen2"), tokens(30)
    live = logits(trained(folder, tmp_path / "adapter"), ids)
    merge(str(folder), str(tmp_path / "adapter"), str(tmp_path / "wrong"), "bf16", "float32", device="cpu")
    assert (hf_logits(tmp_path / "wrong", ids) - live).norm() / live.norm() > 0.1


def test_a_quantised_checkpoint_merges_to_the_same_model(tiny_hf_folder, tmp_path):
    folder = tiny_hf_folder("qwen2")
    trained(folder, tmp_path / "adapter")
    merge(str(folder), str(tmp_path / "adapter"), str(tmp_path / "a"), device="cpu")
    quantize_checkpoint(str(folder), str(tmp_path / "nvfp4"), device="cpu")
    merge(str(tmp_path / "nvfp4"), str(tmp_path / "adapter"), str(tmp_path / "b"), device="cpu")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())


def test_shards_tokenizer_and_generation_config_come_along(tiny_hf_folder, tmp_path):
    """The export loads back through our own loader too, from several shards, stops and template intact."""
    folder, ids = tiny_hf_folder("llama"), tokens(12)
    model = trained(folder, tmp_path / "adapter", "bf16")
    out = tmp_path / "merged"
    merge(str(folder), str(tmp_path / "adapter"), str(out), "bf16", "float32", device="cpu", shard_bytes=50_000)
    assert (out / "model.safetensors.index.json").exists() and len(list(out.glob("*.safetensors"))) > 2
    again, tokenizer, info = load_model(str(out), weights="bf16")
    assert set(info.stop_ids) == {256, 258} and tokenizer.chat_template and len(tokenizer) == 259
    torch.testing.assert_close(logits(again, ids), logits(model, ids), atol=2e-4, rtol=0)
    torch.testing.assert_close(hf_logits(out, ids), logits(model, ids), atol=2e-4, rtol=0)


def test_what_does_not_fit_is_one_line_and_leaves_nothing(tiny_hf_folder, tmp_path, capsys):
    folder = tiny_hf_folder("qwen2")
    trained(folder, tmp_path / "adapter")
    other = tiny_hf_folder("qwen2", intermediate_size=128)
    assert main([str(other), str(tmp_path / "adapter"), str(tmp_path / "out")]) == 2
    assert main([str(folder), str(tmp_path), str(tmp_path / "out")]) == 2
    assert main([str(folder), str(tmp_path / "adapter"), str(folder)]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "lora.py merge" in line]
    assert len(lines) == 3 and all(line.startswith("lora.py merge: ") for line in lines)
    assert "the model's" in lines[0] and "adapter_config.json" in lines[1] and "not an empty folder" in lines[2]
    assert not (tmp_path / "out").exists()


def test_a_trained_adapter_survives_save_load_and_merge(tiny_hf_folder, tmp_path):
    """The whole way of a run's result: adapter -> file -> fresh model -> the same logits as the merged export."""
    folder, ids = tiny_hf_folder("qwen3"), tokens(20)
    trained(folder, tmp_path / "adapter")
    fresh, _, _ = load_model(str(folder))
    load_adapter(fresh, tmp_path / "adapter")
    merge(str(folder), str(tmp_path / "adapter"), str(tmp_path / "out"), dtype="float32", device="cpu")
    torch.testing.assert_close(hf_logits(tmp_path / "out", ids), logits(fresh, ids), atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen3"])
def test_a_fully_trained_model_is_saved_as_it_is(kind, tiny_hf_folder, tmp_path):
    """--full ends in a model folder; every parameter has moved, so one that is left out shows."""
    folder, ids = tiny_hf_folder(kind), tokens(20)
    model = read_model(folder, "bf16", full=True)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    for _ in range(2):  # the second export replaces the first
        save_model(model, str(folder), tmp_path / "model", "float32")
    torch.testing.assert_close(hf_logits(tmp_path / "model", ids), logits(model, ids), atol=2e-4, rtol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_live_model_and_its_adapter_file_merge_to_the_same_bits(tiny_hf_folder, tmp_path):
    folder = tiny_hf_folder("llama")
    model = trained(folder, tmp_path / "adapter")
    merge(str(folder), str(tmp_path / "adapter"), str(tmp_path / "a"), device="cpu")
    save_model(model, str(folder), tmp_path / "b")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_command_says_what_it_made_of_what(tiny_hf_folder, tmp_path, capsys):
    folder = tiny_hf_folder("qwen2")
    trained(folder, tmp_path / "adapter")
    capsys.readouterr()
    assert main([str(folder), str(tmp_path / "adapter"), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out  # q, o, up and down in each of two layers
    assert said == f"{tmp_path / 'out'}: {folder} in bfloat16, 8 weights with their adapter merged in\n"
