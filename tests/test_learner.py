"""The learner against transformers + peft + a loss written out, its invariances, and the faults it must survive."""
import copy
import dataclasses
import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

import grpo
import logps
from layers.shapes import SHAPES, ModelConfig
from layers.weights import DenseWeight, fingerprint
from lora import add_adapters, lora_layers
from model import random_model
from training.learner import Learner, Sequence, Settings

VALID = 259  # the tokenizer's ids; the embedding has 272 rows


def adapted(tiny_model, kind="qwen2", rank=4, b=0.05, seed=1, **options):
    """A tiny model with adapters whose B is not zero, as after some training (b=0: as at step 0)."""
    model = tiny_model(kind, **options)
    model.valid_vocab = VALID
    generator = torch.Generator().manual_seed(seed)
    add_adapters(model, rank, 2 * rank, generator=generator)
    with torch.no_grad():
        for layer in lora_layers(model):
            for matrix in layer.lora_B.values():
                matrix.copy_(b * torch.randn(matrix.shape, generator=generator))
            layer.sync_()
    return model


def step_of(model, seed=0, groups=3, spread=0.1, equal=(), truncated=(), prompt_tokens=3):
    """Ragged groups of 4, log-probs of a sampler that differs a little, advantages; answers of one token included."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for g in range(groups):
        prompt = torch.randint(VALID, (prompt_tokens + 4 * g,), generator=generator).tolist()
        rewards = torch.full((1, 4), 0.1) if g in equal else torch.rand(1, 4, generator=generator)
        for a, length in zip(grpo.advantages(rewards)[0].tolist(), (5 + g, 1, 11, 3)):
            completion = torch.randint(VALID, (length,), generator=generator).tolist()
            sequences.append(Sequence(prompt, completion, [], a, is_trained=len(sequences) not in truncated))
    clean = Learner(model, Settings()).score(sequences)
    noise = [spread * torch.randn(len(s.completion), generator=generator) for s in sequences]
    return [dataclasses.replace(s, rollout_logps=(logp.cpu() + n).tolist())
            for s, logp, n in zip(sequences, clean, noise)]


def gradients(model, sequences, checkpoint_layers=False, measure_kl=False, **settings):
    """Of one update, before clipping, by parameter name."""
    learner = Learner(model, Settings(recompute=checkpoint_layers or None, **settings))
    kept = model.kept_layers
    learner.budget()
    model.kept_layers = kept
    found = {}

    def step(outcome, rate):
        found.update({name: p.grad.clone() for name, p in learner.parameters.items() if p.grad is not None})
        learner._zero_grad()
        return outcome | {"grad_norm": 0.0, "loss": float(outcome["loss"])}

    learner._step = step
    metrics = learner.update(sequences, measure_kl)
    return found, metrics


def assert_same(a, b, relative):
    assert a.keys() == b.keys() and a
    for name in a:
        assert (a[name] - b[name]).norm() <= relative * b[name].norm() + 1e-9, name  # 1e-9: gradients of exactly 0


# ------------------------------------------------------------------------------------------------ against peers


@pytest.fixture
def peer(tiny_hf_folder):
    """make(model, kind) -> the same weights and adapters in transformers + peft."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    def make(model, kind):
        base = AutoModelForCausalLM.from_pretrained(tiny_hf_folder(kind), dtype=torch.float32)
        rank = lora_layers(model)[0].rank
        wrapped = peft.get_peft_model(base, peft.LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"))
        named = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
        pairs = {}
        with torch.no_grad():
            for layer in lora_layers(model):
                for which in ("lora_A", "lora_B"):
                    for part, matrix in getattr(layer, which).items():
                        theirs = named.pop(f"base_model.model.{layer.path}.{part}.{which}.default.weight")
                        theirs.copy_(matrix)
                        pairs[matrix] = theirs
        assert not named
        return wrapped, pairs

    return make


def plain_logps(hf, s, temperature):
    """Unpacked, unchunked: one sequence, all logits, padded ids at -inf."""
    logits = hf(input_ids=torch.tensor([s.prompt + s.completion])).logits[0, len(s.prompt) - 1 : -1, :VALID] / temperature
    return logits.log_softmax(-1)[torch.arange(len(s.completion)), s.completion]


def written_out_loss(hf, sequences, algo, beta, tis, temperature):
    """The formulas of the papers, sequence by sequence, for the first update (pi_old = pi)."""
    total, tokens = 0.0, sum(len(s.completion) for s in sequences)
    for s in sequences:
        logp = plain_logps(hf, s, temperature)
        with torch.no_grad(), hf.disable_adapter():
            reference = plain_logps(hf, s, temperature)
        weight = torch.exp(logp.detach() - torch.tensor(s.rollout_logps)).clamp(max=2.0) if tis else 1.0
        d = reference - logp
        token_loss = -weight * torch.exp(logp - logp.detach()) * s.advantage + beta * (torch.exp(d) - d - 1)
        total = total + {"grpo": token_loss.mean() / len(sequences), "dapo": token_loss.sum() / tokens,
                         "dr_grpo": token_loss.sum() / (len(sequences) * 64)}[algo]
    return total


@pytest.mark.parametrize("kind, algo, beta, tis, temperature", [
    ("qwen2", "grpo", 0.0, True, 1.0), ("qwen2-tied", "dapo", 0.1, True, 0.7), ("qwen3", "dr_grpo", 0.05, False, 1.0),
    ("llama", "grpo", 0.1, True, 1.3),
])
def test_loss_and_every_adapter_gradient_equal_transformers_with_peft(
        tiny_model, peer, kind, algo, beta, tis, temperature):
    """The plain path, unpacked, unshared, unchunked, through ordinary autograd, against ours; relative 1e-4 in fp32."""
    model = adapted(tiny_model, kind)
    sequences = step_of(model)
    ours, metrics = gradients(model, sequences, algo=algo, beta=beta, tis=tis, temperature=temperature, token_budget=40,
                              max_new_tokens=64)
    hf, pairs = peer(model, kind)
    theirs = written_out_loss(hf, sequences, algo, beta, tis, temperature)
    theirs.backward()
    assert metrics["loss"] == pytest.approx(theirs.item(), rel=1e-4, abs=1e-6)
    parameters = dict(model.named_parameters())
    for name, gradient in ours.items():
        expected = pairs[parameters[name]].grad
        assert (gradient - expected).norm() <= 1e-4 * expected.norm() + 1e-7, name
    assert len(ours) == len(pairs)


def test_full_training_has_the_gradients_of_transformers(tiny_model, tiny_hf_folder):
    """--full: embedding (as input and as tied head), norms, biases and matrices, through the recomputed head gradient."""
    from transformers import AutoModelForCausalLM

    model = tiny_model("qwen2-tied", full=True)
    model.valid_vocab = VALID
    sequences = step_of(model)
    ours, _ = gradients(model, sequences, algo="dapo", tis=False, token_budget=30)
    hf = AutoModelForCausalLM.from_pretrained(tiny_hf_folder("qwen2-tied"), dtype=torch.float32)
    tokens = sum(len(s.completion) for s in sequences)
    sum(-(plain_logps(hf, s, 1.0) * s.advantage).sum() / tokens for s in sequences).backward()
    theirs = {name: p.grad for name, p in hf.named_parameters()}
    layer = "model.layers.1."
    qkv = torch.cat([theirs[f"{layer}self_attn.{p}_proj.weight"] for p in "qkv"])
    expected = {
        "embed": theirs["model.embed_tokens.weight"], "final_norm": theirs["model.norm.weight"],
        "layers.1.input_norm": theirs[layer + "input_layernorm.weight"], "layers.1.qkv.weight.tensor": qkv,
        "layers.1.qkv.bias": torch.cat([theirs[f"{layer}self_attn.{p}_proj.bias"] for p in "qkv"]),
        "layers.1.down.weight.tensor": theirs[layer + "mlp.down_proj.weight"],
    }
    for name, gradient in expected.items():
        assert (ours[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


# ------------------------------------------------------------------------------------------------ invariances


@pytest.mark.parametrize("algo", grpo.ALGORITHMS)
@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_gradients_do_not_depend_on_the_token_budget(tiny_model, algo, weights):
    """Pitfall 29, at relative 1e-5 in fp32: one sequence at a time, ragged cuts through groups, all at once."""
    model = adapted(tiny_model, weights=weights)
    sequences = step_of(model, truncated=(2, 7))
    whole, reference = gradients(model, sequences, algo=algo, beta=0.05, token_budget=10**6)
    for budget in (1, 17, 30, 61):
        cut, metrics = gradients(model, sequences, algo=algo, beta=0.05, token_budget=budget)
        assert_same(cut, whole, 1e-5)
        for name in reference.keys() - {"train/tokens", "train/micro_batches"}:
            assert metrics[name] == pytest.approx(reference[name], rel=1e-4, abs=1e-6), name


def test_gradients_do_not_depend_on_the_order_or_the_chunk_of_logits(tiny_model):
    """Pitfall 34: answers keep their own prompt, advantage and log-probs however they are shuffled."""
    model = adapted(tiny_model)
    sequences = step_of(model)
    whole, _ = gradients(model, sequences, token_budget=40)
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(3)).tolist()
    shuffled, _ = gradients(model, [sequences[i] for i in order], token_budget=40)
    assert_same(shuffled, whole, 1e-5)
    learner = Learner(model, Settings(), max_logits=1)
    for a, b in zip(learner.score(sequences), Learner(model, Settings()).score(sequences)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_checkpointed_layers_give_the_same_gradients_and_every_adapter_has_one(tiny_model):
    """Pitfall 23: recomputation with frozen inputs once gave gradients of zero. At step 0 A has none yet, B must."""
    model = adapted(tiny_model, b=0.0)
    sequences = step_of(model)
    kept, _ = gradients(model, sequences)
    found, _ = gradients(model, sequences, checkpoint_layers=True)
    assert_same(found, kept, 1e-6)
    model.kept_layers = 1  # one layer recomputed, one not
    some, _ = gradients(model, sequences, checkpoint_layers=True)
    assert_same(some, kept, 1e-6)
    parts = [n for n in found if ".lora_B." in n]
    assert len(parts) == 7 * model.config.layers and all(found[n].norm() > 0 for n in parts)
    assert all(found[n].norm() == 0 for n in found if ".lora_A." in n)


def test_recomputation_leaves_out_what_the_backward_does_not_read(tiny_model, monkeypatch):
    """Forward, and again every projection but `down`; nothing again in the layers that keep their activations."""
    model = adapted(tiny_model)
    sequences = step_of(model)
    products = []
    names = {id(getattr(layer, name).weight): f"{i}.{name}" for i, layer in enumerate(model.layers)
             for name in ("qkv", "o", "gate_up", "down")}
    original = DenseWeight.lora_matmul
    monkeypatch.setattr(DenseWeight, "lora_matmul", lambda self, *a: products.append(names[id(self)]) or original(self, *a))
    model.kept_layers = 1
    gradients(model, sequences, checkpoint_layers=True, token_budget=10**6)
    again = ["0.qkv", "0.o", "0.gate_up"]
    assert sorted(products) == sorted([*names.values(), *again])


def test_answers_without_an_advantage_are_skipped_without_a_trace(tiny_model):
    """They keep their place in the denominators; with a KL term they are forwarded, because it acts on them."""
    model = adapted(tiny_model)
    sequences = step_of(model, equal=(1,))
    skipped, metrics = gradients(model, sequences, algo="dapo")
    tiny = [dataclasses.replace(s, advantage=s.advantage or 1e-30) for s in sequences]  # forces them through
    forced, all_metrics = gradients(model, tiny, algo="dapo")
    assert_same(skipped, forced, 1e-5)
    assert metrics["train/tokens"] < all_metrics["train/tokens"]
    _, with_kl = gradients(model, sequences, algo="dapo", beta=0.1)
    assert with_kl["train/tokens"] == all_metrics["train/tokens"]


def test_masked_answers_are_as_if_never_sampled(tiny_model):
    """Pitfall 30, through the whole learner."""
    model = adapted(tiny_model)
    sequences = step_of(model, truncated=(0, 6))
    for algo in grpo.ALGORITHMS:
        masked, _ = gradients(model, sequences, algo=algo)
        absent, _ = gradients(model, [s for s in sequences if s.is_trained], algo=algo)
        assert_same(masked, absent, 1e-5)


# ------------------------------------------------------------------------------------------------ steps


@pytest.mark.parametrize("equal, truncated", [((0, 1, 2), ()), ((), range(12))])
def test_a_step_without_a_gradient_changes_nothing_and_still_reports(tiny_model, equal, truncated):
    """Neither momentum nor weight decay may move the policy; the mismatch is logged at every step."""
    model = adapted(tiny_model)
    learner = Learner(model, Settings(lr=1e-2, warmup=0, weight_decay=0.1))
    learner.update(step_of(model))  # so that there is momentum
    before = copy.deepcopy(learner.state_dict())
    metrics = learner.update(step_of(model, equal=equal, truncated=truncated))
    after = learner.state_dict()
    assert all(torch.equal(before["parameters"][n], p) for n, p in after["parameters"].items())
    assert str(before["optimiser"]) == str(after["optimiser"])
    assert all(math.isfinite(value) for value in metrics.values()) and metrics["train/updates"] == 0
    assert 0 < metrics["sampling/sampling_logp_difference/mean"] < 0.5
    assert "grad_norm" not in metrics


def test_the_first_update_has_ratio_one_and_its_closed_form(tiny_model):
    """Pitfall 25, and no extra pass: pi_old is the forward that is differentiated."""
    model = adapted(tiny_model)
    sequences = step_of(model)
    learner = Learner(model, Settings(algo="dapo", tis=False))
    learner.score = None  # any extra pass would fail
    metrics = learner.update(sequences)
    tokens = sum(len(s.completion) for s in sequences)
    assert metrics["loss"] == pytest.approx(-sum(len(s.completion) * s.advantage for s in sequences) / tokens, rel=1e-5)
    assert metrics["ratio/mean"] == 1.0 and metrics["clip_ratio/region_mean"] == 0.0 and metrics["grad_norm"] > 0


def test_frozen_weights_are_bit_identical_after_updates(tiny_model):
    model = adapted(tiny_model, weights="nvfp4")

    def frozen():
        stored = [t for layer in lora_layers(model) for t in layer.weight.stored()]
        return fingerprint(stored + [p for p in model.parameters() if not p.requires_grad])

    before, adapters_before = frozen(), [p.clone() for p in model.parameters() if p.requires_grad]
    learner = Learner(model, Settings(lr=1e-2, warmup=0, updates=3))
    learner.update(step_of(model))
    assert frozen() == before
    assert all(not torch.equal(a, p) for a, p in zip(adapters_before, learner.parameters.values()))


def test_training_raises_good_answers_and_lowers_bad_ones(tiny_model):
    model = adapted(tiny_model, weights="nvfp4", b=0.0)
    sequences = step_of(model)
    learner = Learner(model, Settings(lr=3e-3, warmup=0))
    before = [logp.mean() for logp in learner.score(sequences)]
    for _ in range(5):
        learner.update(sequences)
    change = torch.stack([logp.mean() for logp in learner.score(sequences)]) - torch.stack(before)
    assert torch.corrcoef(torch.stack([change, torch.tensor([s.advantage for s in sequences])]))[0, 1] > 0.7


def test_later_updates_of_a_rollout_take_their_ratio_to_the_policy_before_the_first(tiny_model):
    """Mini-batches of whole groups; pi_old is scored before anything moves."""
    model, twin = adapted(tiny_model), adapted(tiny_model)
    sequences = step_of(model, groups=4)
    settings = dict(lr=1e-2, warmup=0, steps=1)
    learner = Learner(model, Settings(updates=2, **settings))
    old = learner.score(sequences[8:])
    halves = learner._minibatches(sequences)
    assert [len(h) for h in halves] == [8, 8] and halves[0][-1].prompt != halves[1][0].prompt
    seen = []
    original = learner._accumulate
    learner._accumulate = lambda active, *rest: seen.append(original(active, *rest)) or seen[-1]
    metrics = learner.update(sequences)
    first = Learner(twin, Settings(updates=1, **settings))
    first.update(sequences[:8])
    expected = torch.exp(torch.cat(first.score(sequences[8:])) - torch.cat(old))
    ratios = [torch.cat([part["ratio"] for part in outcome["parts"]]) for outcome in seen]
    assert torch.equal(ratios[0], torch.ones_like(ratios[0]))
    assert ratios[1].mean() == pytest.approx(expected.mean().item(), rel=1e-4) and (ratios[1] - 1).abs().max() > 1e-3
    assert metrics["train/updates"] == 2 and learner.updates_done == 2


def test_mini_batches_cover_the_rollout_even_when_groups_do_not_divide():
    learner = object.__new__(Learner)
    sequences = [Sequence([g], [i]) for g in range(5) for i in range(4)]
    for updates in (1, 2, 3, 5, 7, 20, 50):
        learner.settings = Settings(updates=updates)
        parts = learner._minibatches(sequences)
        assert [s for part in parts for s in part] == sequences and all(parts)
        assert len(parts) == min(updates, 20)


def test_tis_weighs_tokens_that_the_noisy_sampler_liked_too_much(tiny_model):
    model = adapted(tiny_model)
    sequences = step_of(model, spread=0.5)
    weighed, metrics = gradients(model, sequences, tis=True)
    plain, _ = gradients(model, sequences, tis=False)
    name = next(iter(plain))
    assert (weighed[name] - plain[name]).norm() > 1e-2 * plain[name].norm()
    assert metrics["sampling/importance_sampling_ratio/max"] > 2  # logged before truncation


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_samplers_log_probs_are_the_trainers(tiny_model, temperature):
    """Pitfalls 1, 2, 10, 11, 15: token in, token out, same temperature, same ids, the adapter in both; ratio 1."""
    from rollout import Rollout, Sampling

    model = adapted(tiny_model, weights="nvfp4")
    prompts = [[5, 6, 7, 8], [200], list(range(40, 60))]
    groups = Rollout(model, max_len=64).generate(prompts, 4, Sampling(12, temperature, stop_ids=(256, 258)))
    sequences = [Sequence(p, c.tokens, c.logps, (-1.0) ** i) for p, g in zip(prompts, groups) for i, c in enumerate(g)]
    metrics = Learner(model, Settings(temperature=temperature)).update(sequences)
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)
    assert metrics["ratio/mean"] == 1.0
    assert metrics["entropy"] == pytest.approx(
        sum(sum(c.entropies) for g in groups for c in g) / sum(len(c.tokens) for g in groups for c in g), rel=1e-3)


def test_two_forwards_are_equal(tiny_model):
    """Pitfall 24: dropout in the trained policy makes the ratio noise."""
    model = adapted(tiny_model)
    model.train()
    learner = Learner(model, Settings())
    sequences = step_of(model)
    assert all(torch.equal(a, b) for a, b in zip(learner.score(sequences), learner.score(sequences)))


def test_reference_is_the_adapter_off_until_one_is_frozen(tiny_model):
    """Pitfall 21: a run that starts from an adapter has its KL at 0 only against that adapter."""
    from lora import freeze_reference

    model = adapted(tiny_model)
    learner = Learner(model, Settings(beta=0.1, token_budget=10**6))
    sequences = step_of(model)
    off, reference = learner.score(sequences, "off"), learner.score(sequences, "reference")
    assert all(torch.equal(a, b) for a, b in zip(off, reference))
    assert not torch.equal(off[0], learner.score(sequences)[0])
    freeze_reference(model)
    assert learner.update(sequences)["kl"] == pytest.approx(0, abs=1e-9)
    assert learner.update(sequences)["kl"] > 0


@pytest.mark.parametrize("settings", [{}, {"algo": "dapo", "updates": 3}, {"algo": "dr_grpo", "tis": False}], ids=str)
def test_a_kl_that_is_only_measured_is_that_of_the_loss_and_leaves_the_gradient_alone(tiny_model, settings):
    """Reported from an update's own tokens; a reference that leaked into the loss would train on a term nobody asked for."""
    model = adapted(tiny_model)
    sequences = step_of(model, truncated=(2,))
    assert all(s.advantage for s in sequences)  # a KL term also trains answers without one
    plain, without = gradients(model, sequences, **settings)
    measured, metrics = gradients(model, sequences, measure_kl=True, **settings)
    assert all(torch.equal(measured[name], plain[name]) for name in plain) and measured.keys() == plain.keys()
    assert metrics["kl"] > 0 and without == {name: value for name, value in metrics.items() if name != "kl"}
    _, trained_on = gradients(model, sequences, beta=0.1, **settings)
    assert metrics["kl"] == trained_on["kl"]
    learner, trained = Learner(model, Settings()), [s for s in sequences if s.is_trained]  # the formula once more, in float64
    difference = torch.cat(learner.score(trained, "off")).double() - torch.cat(learner.score(trained)).double()
    assert metrics["kl"] == pytest.approx(float((difference.exp() - difference - 1).mean()), rel=1e-4)


def test_a_measured_kl_is_exactly_zero_before_the_first_update(tiny_model):
    model = adapted(tiny_model, b=0.0)
    learner = Learner(model, Settings(lr=1e-2, warmup=0))
    assert learner.update(step_of(model), measure_kl=True)["kl"] == 0.0
    assert learner.update(step_of(model), measure_kl=True)["kl"] > 0


# ------------------------------------------------------------------------------------------------ optimiser and state


def test_learning_rate_warms_up_then_stays_or_falls():
    learner = object.__new__(Learner)
    learner.settings = Settings(lr=1.0, warmup=0.1, steps=50, updates=2)
    assert [learner.learning_rate(i) for i in (0, 4, 9, 10, 99)] == pytest.approx([0.1, 0.5, 1, 1, 1])
    learner.settings = Settings(lr=1.0, warmup=4, steps=100)
    assert [learner.learning_rate(i) for i in (0, 3, 4)] == pytest.approx([0.25, 1, 1])
    learner.settings = Settings(lr=1.0, warmup=0, steps=100, lr_schedule="cosine")
    assert [learner.learning_rate(i) for i in (0, 50, 100, 150)] == pytest.approx([1, 0.5, 0, 0], abs=1e-12)


def test_the_update_is_adamws_with_the_clipped_gradient(tiny_model):
    """One step by hand: after clipping to norm c, Adam moves every entry with a gradient by lr * g / (|g| + eps)."""
    model = adapted(tiny_model)
    sequences = step_of(model)
    raw, _ = gradients(model, sequences)
    learner = Learner(model, Settings(lr=1e-3, warmup=0, weight_decay=0.1, max_grad_norm=0.01))
    before = {name: p.detach().clone() for name, p in learner.parameters.items()}
    metrics = learner.update(sequences)
    norm = torch.stack([g.norm() for g in raw.values()]).norm()
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5) and norm > 0.01
    for name, p in learner.parameters.items():
        g = raw[name] * 0.01 / (norm + 1e-6)
        expected = before[name] * (1 - 1e-3 * 0.1) - 1e-3 * g / (g.abs() + 1e-8)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("updates", [1, 2])
def test_six_steps_equal_three_a_restart_and_three_bit_for_bit(tiny_model, updates):
    """Pitfall 35, the learner's share: parameters, moments, counters."""
    settings = Settings(lr=1e-2, warmup=4, steps=6, updates=updates, token_budget=50)
    model = adapted(tiny_model, weights="nvfp4")
    steps = [step_of(model, seed=i) for i in range(6)]
    straight = Learner(model, settings)
    for sequences in steps:
        straight.update(sequences)
    model = adapted(tiny_model, weights="nvfp4")
    half = Learner(model, settings)
    for sequences in steps[:3]:
        half.update(sequences)
    saved = copy.deepcopy(half.state_dict())
    model = adapted(tiny_model, weights="nvfp4", seed=9)  # other adapters: everything must come from the state
    resumed = Learner(model, settings)
    resumed.load_state_dict(saved)
    for sequences in steps[3:]:
        resumed.update(sequences)
    for name, p in straight.parameters.items():
        assert torch.equal(p, resumed.parameters[name]), name
    assert straight.state_dict()["counters"] == resumed.state_dict()["counters"]


def test_a_state_of_another_model_is_refused(tiny_model):
    state = Learner(adapted(tiny_model, rank=4), Settings()).state_dict()
    with pytest.raises(ValueError, match="does not fit"):
        Learner(adapted(tiny_model, rank=8), Settings()).load_state_dict(state)


def test_full_training_in_bf16_moves_through_fp32_masters(tiny_model):
    """A rate of 1e-6 beside weights of 0.3 is far below bf16's spacing: alone, no weight would ever change."""
    model = tiny_model("qwen2", full=True, dtype=torch.bfloat16)
    model.valid_vocab = VALID
    learner = Learner(model, Settings(lr=1e-6, warmup=0))
    sequences = step_of(model)
    before = {name: m.clone() for name, m in learner.masters.items()}
    for _ in range(3):
        learner.update(sequences)
    name = "layers.0.down.weight.tensor"
    moved = (learner.masters[name] - before[name]).abs()
    assert 1e-6 < moved.max() < 1e-5 and moved.count_nonzero() > 0.9 * moved.numel()
    assert torch.equal(learner.parameters[name], learner.masters[name].bfloat16())


# ------------------------------------------------------------------------------------------------ faults


def test_a_non_finite_gradient_is_skipped_counted_and_ends_the_run_after_several(tiny_model):
    model = adapted(tiny_model)
    sequences = step_of(model)
    poisoned = [dataclasses.replace(s, advantage=float("nan")) for s in sequences]
    learner = Learner(model, Settings(lr=1e-2, warmup=0, max_bad_steps=3))
    learner.update(sequences)
    before = copy.deepcopy(learner.state_dict())
    for expected in (1, 2):
        assert learner.update(poisoned)["train/skipped_total"] == expected
        assert all(torch.equal(before["parameters"][n], p) for n, p in learner.state_dict()["parameters"].items())
        assert str(before["optimiser"]) == str(learner.state_dict()["optimiser"])
    learner.update(sequences)  # a good one ends the row
    learner.update(poisoned)
    learner.update(poisoned)
    with pytest.raises(RuntimeError, match="3 updates in a row"):
        learner.update(poisoned)


def out_of_memory_above(learner, limit):
    original = learner.forward

    def forward(batch):
        result = original(batch)
        if len(batch.tokens) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result

    learner.forward = forward


def test_out_of_memory_halves_the_budget_says_so_once_a_time_and_changes_nothing(tiny_model, capsys):
    """The gradients of the micro-batches that had fitted are dropped, or they would count twice."""
    model, twin = adapted(tiny_model), adapted(tiny_model)
    sequences = step_of(model)
    plain, short = Learner(model, Settings(token_budget=80)), Learner(twin, Settings(token_budget=80))
    out_of_memory_above(short, 45)
    expected, got = plain.update(sequences), short.update(sequences)
    assert short.token_budget == 40 and got["train/micro_batches"] > expected["train/micro_batches"]
    assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert capsys.readouterr().out.count("\n") == 1
    short.update(sequences)
    assert capsys.readouterr().out == ""  # the lower budget stays


def test_out_of_memory_first_gives_up_kept_activations(tiny_model, capsys):
    model = adapted(tiny_model)
    sequences = step_of(model)
    learner = Learner(model, Settings(token_budget=80, recompute=True))
    learner.budget()
    model.kept_layers = 2
    original = learner.forward

    def forward(batch):
        if model.kept_layers:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(batch)

    learner.forward = forward
    learner.update(sequences)
    assert learner.token_budget == 80 and model.kept_layers == 0
    assert capsys.readouterr().out == "out of memory: trying again with micro-batches of 80 tokens, every layer recomputed\n"


def test_one_sequence_that_does_not_fit_is_an_error_with_a_remedy(tiny_model):
    model = adapted(tiny_model)
    sequences = step_of(model)
    learner = Learner(model, Settings(token_budget=10**6))
    out_of_memory_above(learner, 3)
    with pytest.raises(RuntimeError, match="max-new-tokens"):
        learner.update(sequences)
    assert all(p.grad is None for p in learner.parameters.values())


def test_a_model_with_nothing_to_train_is_refused(tiny_model):
    with pytest.raises(ValueError, match="adapters"):
        Learner(tiny_model("qwen2"), Settings())


def test_config_serves_as_settings():
    """The learner reads the fields of config.Config; a renamed field must fail here, not after an hour."""
    from training.config import Config

    assert {f.name for f in dataclasses.fields(Settings)} <= {f.name for f in dataclasses.fields(Config)}


def test_the_benchmark_of_a_step_runs_and_keeps_what_it_measured(tmp_path, monkeypatch, capsys):
    """bench/step.py on a CPU; a second run of a case replaces its row, another case adds one; a failure is a row."""
    path = Path(__file__).resolve().parent.parent / "bench" / "step.py"
    spec = importlib.util.spec_from_file_location("bench_step", path)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    out = tmp_path / "step.json"
    small = ["--models", "tiny", "--device", "cpu", "--prompt-tokens", "5", "--completion-tokens", "6",
             "--warmup-tokens", "2", "--group", "2", "--out", str(out)]
    for extra in (["--weights", "nvfp4,bf16"], ["--weights", "nvfp4"], ["--weights", "int3"]):
        monkeypatch.setattr("sys.argv", ["step.py", *small, *extra])
        bench.main()
    rows = json.loads(out.read_text())
    assert [row["weights"] for row in rows] == ["nvfp4", "bf16", "int3"]
    assert rows[0]["train_tokens"] == 5 + 2 * 5 and rows[0]["logp_difference_max"] < 1e-4
    assert rows[0]["step_s"] == pytest.approx(rows[0]["rollout_s"] + rows[0]["train_s"])
    assert "int3" in rows[2]["failed"] and "int3" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_on_a_gpu_gradients_agree_with_the_plain_path(weights):
    """Relative 1e-2 in bf16: packed, shared, chunked, recomputed against one sequence at a time, all logits, autograd.

    Both round activations at 2^-9, at the same places but not in the same sums; four layers of order-one activations.
    Prompts are long because up to 512 rows the 4-bit kernel adds the adapter before it rounds, and beyond, after: below,
    the comparison would be between two roundings (2.6% of the gradient at 4 layers), not between packings.
    """
    config = ModelConfig("qwen2", 256, 4, 4, 2, 64, 512, 1000, qkv_bias=True)
    model = random_model(config, weights, "cuda")
    generator = torch.Generator().manual_seed(1)
    add_adapters(model, 16, 16, generator=generator)
    with torch.no_grad():
        for layer in lora_layers(model):
            for matrix in layer.lora_B.values():
                matrix.copy_(0.05 * torch.randn(matrix.shape, generator=generator))
    model.valid_vocab = 990
    sequences = step_of(model, groups=6, prompt_tokens=520)
    tokens = sum(len(s.completion) for s in sequences)
    loss = 0.0
    for s in sequences:
        row = torch.tensor(s.prompt + s.completion, device="cuda")
        hidden = model(row, model.packed([len(row)]))[len(s.prompt) - 1 : -1]
        logp, _ = logps.plain_logps(hidden.float(), model.head.float(), row[len(s.prompt) :], 1.0, 990)
        weight = torch.exp(logp.detach() - torch.tensor(s.rollout_logps, device="cuda")).clamp(max=2.0)
        loss = loss - (weight * torch.exp(logp - logp.detach())).sum() * s.advantage / tokens
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    expected = dict(zip(named, torch.autograd.grad(loss, list(named.values()))))
    for budget in (1, 1500, 10**6):
        got, metrics = gradients(model, sequences, algo="dapo", token_budget=budget)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-2)
        difference = torch.cat([(got[n] - expected[n]).flatten() for n in named]).norm()
        assert difference / torch.cat([g.flatten() for g in expected.values()]).norm() < 1e-2


@pytest.mark.gpu
def test_on_a_gpu_frozen_weights_are_bit_identical_and_every_b_has_a_gradient():
    config = dataclasses.replace(SHAPES["Qwen2.5-0.5B"], layers=3)
    model = random_model(config, "nvfp4", "cuda")
    add_adapters(model, 16, 16, generator=torch.Generator().manual_seed(0))
    stored = [t for layer in lora_layers(model) for t in layer.weight.stored()]
    before = fingerprint(stored + [model.embed])
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(1000, (100,), generator=generator).tolist()
    sequences = [Sequence(prompt, torch.randint(1000, (50 + 30 * i,), generator=generator).tolist(), [], (-1.0) ** i)
                 for i in range(8)]
    found, _ = gradients(model, sequences)
    assert all(g.norm() > 0 for name, g in found.items() if ".lora_B." in name)
    metrics = Learner(model, Settings(lr=1e-3, warmup=0)).update(sequences)
    assert math.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0
    assert fingerprint(stored + [model.embed]) == before


@pytest.mark.gpu
def test_on_a_gpu_memory_follows_the_token_budget():
    """Twice the tokens in micro-batches of the same size cost no more memory."""
    model = random_model(dataclasses.replace(SHAPES["Qwen2.5-1.5B"], layers=4, vocab=32000), "nvfp4", "cuda")
    add_adapters(model, 16, 16, generator=torch.Generator().manual_seed(0))
    learner = Learner(model, Settings(token_budget=2048), max_logits=2**24)
    peaks = []
    for count in (8, 8, 32):  # the first update allocates the optimiser's state
        sequences = [Sequence([i] * 128, [7] * 384, [], (-1.0) ** i) for i in range(count)]
        torch.cuda.reset_peak_memory_stats()
        learner.update(sequences)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[2] < 1.02 * peaks[1], peaks
