"""lora.py and files/peft_files.py: gradients against autograd, files against peft itself, and what is refused by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import KINDS, read_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import lora
from files.peft_files import read_adapter
from layers.weights import DenseWeight, fingerprint, make_weight
from lora import (
    TARGETS,
    LoraLinear,
    adapters,
    add_adapters,
    freeze_reference,
    load_adapter,
    lora_layers,
    save_adapter,
    sync_adapters,
)

ALL = set(TARGETS)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 259, (count,), generator=generator(seed))


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(ids, model.packed([len(ids)])))


def adapted(model, targets=None, rank: int = 4, seed: int = 1):
    """The model with an adapter whose B is not zero."""
    add_adapters(model, rank, 2 * rank, targets, generator=generator(seed))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.empty(p.shape).normal_(0, 0.1, generator=generator(len(name))))
    return model


# ------------------------------------------------------------------------------------------------------ one layer


@pytest.mark.parametrize("targets", [{"q_proj", "k_proj", "v_proj"}, {"v_proj"}, {"q_proj", "v_proj"}])
@pytest.mark.parametrize("x_trains", [True, False])
def test_backward_is_autograds_in_float64(targets, x_trains):
    """dA, dB and dX by hand, with parts of unequal rows, some without an adapter."""
    parts = {"q_proj": 12, "k_proj": 4, "v_proj": 5}
    w = torch.randn(21, 10, generator=generator(), dtype=torch.float64)
    bias = torch.randn(21, generator=generator(1), dtype=torch.float64)
    layer = LoraLinear(make_weight("bf16", [w], "cpu", torch.float64), parts, bias)
    layer.add_adapter(3, 5, targets, generator(2))
    layer.double()
    with torch.no_grad():
        for b in layer.lora_B.values():
            b.normal_(generator=generator(3))
    x = torch.randn(2, 7, 10, generator=generator(4), dtype=torch.float64, requires_grad=x_trains)
    pieces, start = [], 0
    for name, rows in parts.items():
        y = x @ w[start : start + rows].T + bias[start : start + rows]
        if name in targets:
            y = y + 5 / 3 * (x @ layer.lora_A[name].T @ layer.lora_B[name].T)
        pieces.append(y)
        start += rows
    plain, ours = torch.cat(pieces, -1), layer(x)
    leaves = [*([x] if x_trains else []), *layer.lora_A.values(), *layer.lora_B.values()]
    dy = torch.randn(plain.shape, generator=generator(5), dtype=torch.float64)
    torch.testing.assert_close(ours, plain, atol=1e-12, rtol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), plain, atol=1e-12, rtol=1e-12)
    for got, expected in zip(torch.autograd.grad(ours, leaves, dy), torch.autograd.grad(plain, leaves, dy)):
        torch.testing.assert_close(got, expected, atol=1e-11, rtol=1e-11)


def test_backward_keeps_x_and_nothing_else_of_its_size():
    """autograd would keep h, the scaled h and a dequantised W; a 32B model has no room for that."""
    layer = LoraLinear(make_weight("nvfp4", [torch.randn(64, 32)], "cpu", torch.float32), {"q_proj": 64})
    layer.add_adapter(4, 8, {"q_proj"}, generator())
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.randn(100, 32, requires_grad=True))
    assert sorted(t.numel() for t in kept) == sorted([100 * 32, 4 * 32, 64 * 4])


def test_a_new_adapter_changes_nothing_and_is_kaiming():
    w = torch.randn(64, 400, generator=generator())
    layer = LoraLinear(DenseWeight(w), {"q_proj": 64})
    x = torch.randn(3, 400, generator=generator(1))
    before = layer(x)
    layer.add_adapter(32, 32, ALL, generator(2))
    assert torch.equal(layer(x), before)
    a = layer.lora_A["q_proj"]
    assert a.dtype == layer.lora_B["q_proj"].dtype == torch.float32
    assert a.abs().max() <= 0.05 and abs(a.std() - 0.05 / 3**0.5) < 1e-3  # U(-1/sqrt K, 1/sqrt K)


def test_a_changed_master_is_never_used_stale():
    """Pitfall 15: reward flat but plausible, because the adapter never reached the rollout's copy."""
    layer = LoraLinear(DenseWeight(torch.randn(16, 16)), {"q_proj": 16})
    layer.add_adapter(2, 2, {"q_proj"}, generator())
    x = torch.randn(3, 16)
    base = x @ layer.weight.tensor.T
    optimiser = torch.optim.AdamW(layer.lora_B.values(), lr=0.1)
    layer(x).sum().backward()
    optimiser.step()
    with torch.no_grad():
        expected = base + x @ layer.lora_A["q_proj"].T @ layer.lora_B["q_proj"].T
        torch.testing.assert_close(layer(x), expected)
        assert not torch.allclose(expected, base)


def test_unknown_targets_and_ranks_are_refused(tiny_model):
    with pytest.raises(ValueError, match="target 'lm_head' is not a projection"):
        add_adapters(tiny_model(), 4, 4, {"lm_head"}, generator=generator())
    with pytest.raises(ValueError, match="rank=0"):
        add_adapters(tiny_model(), 0, 4, generator=generator())
    with pytest.raises(ValueError, match="drop --full or the adapter"):
        add_adapters(tiny_model(full=True), 4, 4, generator=generator())


# ------------------------------------------------------------------------------------------------- the whole model


def test_policy_reference_and_off_are_three_models(tiny_model):
    """Pitfall 21: 'adapter off' is the base, not the adapter that training started from."""
    ids, model = tokens(9), tiny_model("qwen2", "nvfp4")
    base = logits(model, ids)
    adapted(model)
    start = logits(model, ids)
    assert not torch.allclose(start, base)
    with adapters(model, "reference"):
        assert torch.equal(logits(model, ids), base)  # never frozen: the reference is the base
    freeze_reference(model)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.05)
    moved = logits(model, ids)
    with adapters(model, "reference"):
        assert torch.equal(logits(model, ids), start)  # KL at step 0 is exactly 0
        with adapters(model, "off"):
            assert torch.equal(logits(model, ids), base)
        assert torch.equal(logits(model, ids), start)
    assert torch.equal(logits(model, ids), moved) and not torch.allclose(moved, start)
    with pytest.raises(ValueError, match="'on' is not policy"), adapters(model, "on"):
        pass


def test_the_reference_gives_the_policy_no_gradient(tiny_model):
    model = adapted(tiny_model())
    freeze_reference(model)
    with adapters(model, "reference"):
        out = model(tokens(5), model.packed([5]))
    assert not out.requires_grad


def test_a_step_moves_the_adapter_and_no_bit_of_the_base(tiny_model):
    """Pitfall 16: merging and unmerging in bf16 changed 17% of a peer's weights in one cycle."""
    model = adapted(tiny_model("qwen3", "nvfp4"))
    frozen = [p for p in model.parameters() if not p.requires_grad]
    frozen += [tensor for layer in lora_layers(model) for tensor in layer.weight.stored()]
    before, ids = fingerprint(frozen), tokens(9)
    start = logits(model, ids)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-2)
    for _ in range(2):
        model(ids, model.packed([9])).square().mean().backward()
        optimiser.step()
        sync_adapters(model)
    assert fingerprint(frozen) == before
    assert not torch.allclose(logits(model, ids), start)
    with adapters(model, "off"):
        assert torch.equal(logits(model, ids), logits(tiny_model("qwen3", "nvfp4"), ids))


# ------------------------------------------------------------------------------------------------------ peft files


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_our_adapter_and_gives_our_logits(kind, tiny_hf_folder, tiny_model, tmp_path):
    """Pitfalls 19 and 20: wrong key names load silently as the base; tied and untied heads both."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model, ids = adapted(tiny_model(kind)), tokens(30)
    save_adapter(model, tmp_path, "Qwen/base")
    base = AutoModelForCausalLM.from_pretrained(tiny_hf_folder(kind), dtype=torch.float32)
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(base, tmp_path)(ids[None]).logits[0]
    torch.testing.assert_close(logits(model, ids), theirs, atol=2e-4, rtol=0)
    with adapters(model, "off"):
        assert (logits(model, ids) - theirs).abs().max() > 0.1


@pytest.mark.parametrize("targets", [sorted(ALL), ["q_proj", "v_proj"], "all-linear"])
def test_an_adapter_made_by_peft_gives_pefts_logits(targets, tiny_hf_folder, tiny_model, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_hf_folder("qwen2"), dtype=torch.float32)
    config = LoraConfig(r=6, lora_alpha=9, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(0)
    peer, ids = get_peft_model(base, config).eval(), tokens(30)
    peer.save_pretrained(tmp_path)
    model = tiny_model("qwen2")
    adapter = load_adapter(model, tmp_path)
    assert adapter.rank == 6 and adapter.alpha == 9
    with torch.no_grad():
        theirs = peer(ids[None]).logits[0]
    torch.testing.assert_close(logits(model, ids), theirs, atol=1e-3, rtol=1e-4)  # B is not small here


def test_save_and_load_give_the_same_logits_bit_for_bit(tiny_model, tmp_path):
    """Also onto a model that has another adapter already, of other rank and targets."""
    model, ids = adapted(tiny_model("llama", "nvfp4"), {"q_proj", "down_proj"}), tokens(12)
    save_adapter(model, tmp_path, "base")
    for fresh in (tiny_model("llama", "nvfp4"), adapted(tiny_model("llama", "nvfp4"), rank=2)):
        load_adapter(fresh, tmp_path)
        assert torch.equal(logits(fresh, ids), logits(model, ids))
        assert {name for layer in lora_layers(fresh) for name in layer.lora_A} == {"q_proj", "down_proj"}


def test_saving_without_an_adapter_is_refused(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="no adapter to save"):
        save_adapter(tiny_model(), tmp_path, "base")


@pytest.fixture
def saved(tiny_model, tmp_path) -> Path:
    save_adapter(adapted(tiny_model()), tmp_path / "adapter", "base")
    return tmp_path / "adapter"


def change_config(folder: Path, **changes) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "option",
    [
        {"rank_pattern": {"q_proj": 8}},
        {"alpha_pattern": {"q_proj": 8}},
        {"modules_to_save": ["lm_head"]},
        {"use_dora": True},
        {"use_rslora": True},
        {"layers_to_transform": [0]},
        {"trainable_token_indices": [1]},
        {"target_parameters": ["experts"]},
        {"fan_in_fan_out": True},
        {"lora_bias": True},
        {"bias": "all"},
        {"init_lora_weights": "pissa_niter_4"},
        {"target_modules": ".*_proj"},
        {"target_modules": ["q_proj", "lm_head"]},
        {"r": 0},
        {"r": "8"},
        {"r": True},
        {"lora_alpha": None},
        {"lora_alpha": float("nan")},
        {"lora_alpha": 10**400},
        {"peft_type": "IA3"},
        {"an_option_of_next_year": 1},
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(option, saved, tiny_model):
    """Loading it as plain LoRA would compute another model without a word."""
    change_config(saved, **option)
    with pytest.raises(ValueError, match=next(iter(option))) as error:
        load_adapter(tiny_model(), saved)
    assert "\n" not in str(error.value)


def damage_missing(tensors):
    tensors.pop("base_model.model.model.layers.1.mlp.up_proj.lora_B.weight")


def damage_pair(tensors):
    for half in "AB":
        tensors.pop(f"base_model.model.model.layers.1.mlp.up_proj.lora_{half}.weight")


def damage_extra_layer(tensors):
    for half in "AB":
        name = "base_model.model.model.layers.{}.mlp.up_proj.lora_" + half + ".weight"
        tensors[name.format(7)] = tensors[name.format(1)].clone()


def damage_name(tensors):
    tensors["base_model.model.lm_head.weight"] = torch.zeros(2, 2)


def damage_shape(tensors):
    tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"] = torch.zeros(5, 4)


def damage_rank(tensors):
    tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"] = torch.zeros(96, 3)


def damage_nan(tensors):
    tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"][0, 0] = torch.nan


@pytest.mark.parametrize(
    "damage, message",
    [
        (damage_missing, "lacks model.layers.1.mlp.up_proj.lora_B"),
        (damage_pair, "lacks model.layers.1.mlp.up_proj"),
        (damage_extra_layer, "has unknown model.layers.7.mlp.up_proj"),
        (damage_name, "lm_head.weight' is not part of a plain LoRA"),
        (damage_shape, "is 5 x 64, the model's"),
        (damage_rank, "which is not rank r=4"),
        (damage_nan, "NaN"),
    ],
)
def test_missing_extra_and_damaged_tensors_are_refused(damage, message, saved, tiny_model):
    """Pitfall 20: peers skip what they do not find, and the reloaded model is the base."""
    path = saved / "adapter_model.safetensors"
    tensors = load_file(path)
    damage(tensors)
    save_file(tensors, path)
    model = tiny_model()
    with pytest.raises(ValueError, match=message):
        load_adapter(model, saved)
    assert not any(len(layer.lora_A) for layer in lora_layers(model))  # nothing half loaded


def test_pickles_truncated_files_and_missing_files_are_refused(saved, tiny_model):
    path = saved / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated or corrupt"):
        load_adapter(tiny_model(), saved)
    path.rename(saved / "adapter_model.bin")
    with pytest.raises(ValueError, match="pickle"):
        load_adapter(tiny_model(), saved)
    (saved / "adapter_config.json").write_text("[1]")
    with pytest.raises(ValueError, match="peft_type"):
        load_adapter(tiny_model(), saved)
    (saved / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        load_adapter(tiny_model(), saved)
    shutil.rmtree(saved)
    with pytest.raises(ValueError, match="has no adapter_config.json"):
        load_adapter(tiny_model(), saved)


def test_an_adapter_of_another_model_is_refused(saved, tiny_hf_folder):
    with pytest.raises(ValueError, match="lacks model.layers.2"):
        load_adapter(read_model(tiny_hf_folder("qwen2", num_hidden_layers=3)), saved)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
OPTIONS = ["r", "lora_alpha", "target_modules", "peft_type", "bias", "init_lora_weights", "base_model_name_or_path", "x"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(OPTIONS), JSON, max_size=3), flips=st.lists(st.integers(0, 5000), max_size=3))
def test_a_damaged_or_hostile_adapter_is_one_line_or_loads(changes, flips, saved, tmp_path):
    """Any JSON for any option, any bytes flipped: a ValueError of one line, or an adapter whose numbers are finite."""
    folder = tmp_path / "fuzzed"
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    change_config(folder, **changes)
    data = bytearray((saved / "adapter_model.safetensors").read_bytes())
    for place in flips:
        data[place % len(data)] ^= 0x41
    (folder / "adapter_model.safetensors").write_bytes(data)
    try:
        adapter = read_adapter(folder)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
    else:
        assert all(torch.isfinite(t).all() and adapter.rank in t.shape for pair in adapter.pairs.values() for t in pair)


@pytest.mark.gpu
def test_gpu_fused_decode_path_agrees_with_the_training_path(tiny_hf_folder):
    """The rollout's fused kernel and the trainer's forward must be one policy."""
    folder = tiny_hf_folder("qwen2", hidden_size=256, intermediate_size=512, initializer_range=0.06)
    model = read_model(folder, "nvfp4", device="cuda")
    adapted(model, {"q_proj", "v_proj", "down_proj"}, rank=16)
    for layer in (model.layers[0].qkv, model.layers[0].down):
        x = torch.randn(7, layer.weight.shape[1], device="cuda", dtype=torch.bfloat16)
        trained = layer(x)
        with torch.no_grad():
            fused = layer(x)
        assert trained.requires_grad and (trained - fused).float().norm() / fused.float().norm() < 8e-3


def test_help_helps_and_an_unknown_command_ends_with_code_2(capsys):
    """`python lora.py --help` once ran the demo."""
    for arguments, code in ((["--help"], 0), (["mrege", "a", "b", "c"], 2), (["merge"], 2), (["merge", "--help"], 0)):
        with pytest.raises(SystemExit) as caught:
            lora.main(arguments)
        said = "".join(capsys.readouterr())
        assert caught.value.code == code and "merge" in said and "difference" not in said
