"""Advantages and losses against TRL's own code, hand calculations and autograd; pitfalls that trainers shipped."""
import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

import grpo

LENGTHS = torch.tensor([5, 1, 9, 3, 7, 2, 6, 4])


def numbers(seed=0, lengths=LENGTHS, spread=0.5, dtype=torch.float32):
    """Log-probs of four policies (B, T), advantages (B, 1) and the mask; garbage behind each answer's end."""
    generator = torch.Generator().manual_seed(seed)
    width = int(lengths.max()) + 2
    old = -3 * torch.rand(len(lengths), width, generator=generator, dtype=dtype) - 0.1

    def near():
        return old + spread * torch.randn(old.shape, generator=generator, dtype=dtype)

    logp, rollout, reference = near(), near(), near()
    advantage = torch.randn(len(lengths), 1, generator=generator, dtype=dtype)
    return SimpleNamespace(logp=logp, old=old, rollout=rollout, ref=reference, advantage=advantage,
                           mask=grpo.completion_mask(lengths, width), lengths=lengths)


@pytest.mark.parametrize("name", ["old_logp", "advantage", "weight", "is_trained", "tis", "ref_logp"])
@pytest.mark.parametrize("shape", [(4,), (1,), (4, 3), (1, 4, 4)], ids=str)
def test_a_value_an_answer_is_never_taken_for_a_value_a_token(name, shape):
    """With B = T = 4 an advantage (4,) went along the tokens: the sign of the update depended on a token's place."""
    logp = torch.full((4, 4), -1.0)
    arguments = dict(old_logp=logp, advantage=torch.ones(4, 1), weight=torch.ones(()), is_trained=torch.ones(4, 4).bool(),
                     tis=torch.ones(1, 4), ref_logp=logp)
    loss, _ = grpo.policy_loss(logp, **arguments)
    assert loss == -16
    with pytest.raises(ValueError, match=rf"{name} of shape .* beside logp \(4, 4\): .*\[:, None\]"):
        grpo.policy_loss(logp, **arguments | {name: torch.ones(shape, dtype=arguments[name].dtype)})


def loss_of(n, algo, *, rows=slice(None), trained=None, tis=True, beta=0.0, max_tokens=16, logp=None, high=0.28):
    """Our loss for some rows of the batch; the weights are those of the whole batch."""
    trained = torch.ones(len(n.lengths), dtype=torch.bool) if trained is None else trained
    weights = grpo.token_weights(n.lengths, trained, algo, max_tokens)[rows, None].to(n.old.dtype)
    logp = n.logp[rows] if logp is None else logp[rows]
    weight_tis = grpo.tis_weight(n.old[rows], n.rollout[rows], 2.0) if tis else None
    mask = n.mask[rows] & trained[rows, None]
    return grpo.policy_loss(logp, n.old[rows], n.advantage[rows], weights, mask, clip_low=0.2, clip_high=high,
                            tis=weight_tis, ref_logp=n.ref[rows] if beta else None, beta=beta)


# ------------------------------------------------------------------------------------------------ advantages


@pytest.mark.parametrize("ddof, scale", [(1, "std"), (None, "none")])
def test_advantages_match_the_formula(ddof, scale):
    rewards = torch.tensor([[1.0, 0, 0, 0, 0, 0, 0, 0], [0.2, 1.2, 0.2, 1.0, 0, 1, 1, 0]])
    got = grpo.advantages(rewards, scale)
    for row, values in zip(got.tolist(), rewards.tolist()):
        mean = sum(values) / 8
        std = math.sqrt(sum((r - mean) ** 2 for r in values) / 7) + 1e-4 if scale == "std" else 1.0
        assert row == pytest.approx([(r - mean) / std for r in values], rel=1e-5)


def test_std_has_one_degree_of_freedom_taken_off():
    """One success in eight: 2.47 with ddof 1 (TRL, the paper's code), 2.65 with ddof 0; two answers: 0.71, not 1."""
    assert grpo.advantages(torch.eye(8)[:1])[0, 0] == pytest.approx(2.475 * 0.99972, rel=1e-4)
    assert grpo.advantages(torch.tensor([[1.0, 0.0]]))[0, 0] == pytest.approx(0.7070, abs=2e-4)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, -2.3, 1e6 + 0.1])
@pytest.mark.parametrize("group", [2, 7, 8, 16])
def test_equal_rewards_give_exact_zeros(value, group):
    """Pitfall 26: 8 x 0.1 leaves a residue around its rounded mean, and the std of that residue is as small."""
    assert torch.equal(grpo.advantages(torch.full((3, group), value)), torch.zeros(3, group))


def test_groups_do_not_see_each_other():
    rewards = torch.tensor([[0.0, 1, 0, 1], [5.0, 5, 5, 9]])
    torch.testing.assert_close(grpo.advantages(rewards)[1:], grpo.advantages(rewards[1:]))
    assert grpo.advantages(rewards).sum(1).abs().max() < 1e-6


@pytest.mark.parametrize("rewards", [torch.tensor([[1.0, float("nan")]]), torch.ones(3, 1), torch.ones(4)])
def test_rewards_that_cannot_be_compared_are_refused(rewards):
    """Pitfall 26: the std of a single answer is NaN."""
    with pytest.raises(ValueError):
        grpo.advantages(rewards)


def test_dynamic_sampling_keeps_the_groups_that_differ():
    assert grpo.has_signal(torch.tensor([[0.1] * 8, [0.1] * 7 + [1.1], [1.0] * 8])).tolist() == [False, True, False]


def test_overlong_penalty_by_hand():
    """DAPO eq. 13 with L = 100, C = 20."""
    got = grpo.overlong_penalty(torch.tensor([1, 80, 81, 90, 99, 100, 130]), 100, 20).tolist()
    assert got == pytest.approx([0, 0, -0.05, -0.5, -0.95, -1, -1])
    for buffer in (0, 101):
        with pytest.raises(ValueError, match="buffer"):
            grpo.overlong_penalty(torch.tensor([1]), 100, buffer)


def test_the_end_token_trains_and_what_follows_does_not():
    """Pitfall 8: a mask made from `token != pad` hides the end token where pad == eos, and answers grow for ever."""
    tokens = torch.tensor([[5, 9, 2, 2, 2], [7, 7, 7, 7, 2], [2, 2, 2, 2, 2]])  # 2 ends and pads
    mask = grpo.completion_mask(torch.tensor([3, 5, 1]), 5)
    assert mask.tolist() == [[True] * 3 + [False] * 2, [True] * 5, [True] + [False] * 4]
    assert tokens[0][mask[0]].tolist()[-1] == 2


# ------------------------------------------------------------------------------------------------ losses


@pytest.fixture(scope="module")
def trl_loss():
    """TRL's GRPOTrainer._compute_loss on given numbers: the installed code, a stand-in for the trainer."""
    trainer_module = pytest.importorskip("trl.trainer.grpo_trainer", reason="trl is the oracle of this test")

    def compute(n, loss_type, logp, *, tis, beta, max_tokens, high=0.28):
        metrics = {"train": defaultdict(list)}
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logp, torch.zeros_like(logp), None),
            aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
            importance_sampling_level="token", beta=beta, loss_type=loss_type, epsilon_low=0.2, epsilon_high=high,
            use_vllm=tis, vllm_importance_sampling_correction=tis, max_completion_length=max_tokens,
            current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False, _metrics=metrics,
            model=SimpleNamespace(training=True),
            args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
            accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        )
        inputs = {
            "prompt_ids": torch.zeros(len(logp), 1, dtype=torch.long), "prompt_mask": torch.ones(len(logp), 1).long(),
            "completion_ids": torch.zeros(logp.shape, dtype=torch.long), "completion_mask": n.mask.long(),
            "advantages": n.advantage.squeeze(1), "old_per_token_logps": n.old, "ref_per_token_logps": n.ref,
            "importance_sampling_ratio": torch.exp(n.old - n.rollout).clamp(max=2.0),
            "num_items_in_batch": n.mask.sum(),
        }
        loss = trainer_module.GRPOTrainer._compute_loss(trainer, None, inputs)
        return loss, {name: values[0] for name, values in metrics["train"].items()}

    return compute


@pytest.mark.parametrize("algo", grpo.ALGORITHMS)
@pytest.mark.parametrize("tis", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_loss_gradient_and_metrics_equal_trls(trl_loss, algo, tis, beta):
    n = numbers()
    leaf = n.logp.clone().requires_grad_()
    theirs, their_metrics = trl_loss(n, algo, leaf, tis=tis, beta=beta, max_tokens=16)
    (their_gradient,) = torch.autograd.grad(theirs, leaf)
    ours, parts = loss_of(n, algo, tis=tis, beta=beta, logp=leaf)
    (our_gradient,) = torch.autograd.grad(ours, leaf)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-5, atol=1e-7)
    metrics = grpo.summarise([parts])
    for name in ["clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"] + ["kl"] * (beta > 0):
        assert metrics[name] == pytest.approx(their_metrics[name], rel=1e-5), name


@pytest.mark.parametrize("algo", grpo.ALGORITHMS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_micro_batches_add_up_to_the_whole_step(algo, size):
    """Pitfall 29: with unequal lengths, means of means are another loss, for some batches of the other sign."""
    n = numbers(dtype=torch.float64)
    leaf = n.logp.clone().requires_grad_()
    whole = loss_of(n, algo, beta=0.01, logp=leaf)[0]
    (expected,) = torch.autograd.grad(whole, leaf)
    parts = [loss_of(n, algo, beta=0.01, logp=leaf, rows=slice(i, i + size)) for i in range(0, 8, size)]
    loss = sum(loss for loss, _ in parts)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], expected)
    one = grpo.summarise([loss_of(n, algo, beta=0.01)[1]])
    assert grpo.summarise([metrics for _, metrics in parts]) == pytest.approx(one)


def test_the_sign_of_the_accumulation_example():
    """Header of grpo.py: lengths 100, 100, 100, 2000 and A = 1, 1, 1, -1."""
    lengths, advantage = torch.tensor([100, 100, 100, 2000]), torch.tensor([1.0, 1, 1, -1])
    everyone = torch.ones(4, dtype=torch.bool)
    weights = grpo.token_weights(lengths, everyone, "dapo")
    assert -(weights * lengths * advantage).sum() == pytest.approx(1700 / 2300)
    assert -(advantage.sum() / 4) == -0.5


@pytest.mark.parametrize("algo", grpo.ALGORITHMS)
def test_ranks_that_share_a_step_add_up_with_given_totals(algo):
    lengths, everyone = LENGTHS, torch.ones(8, dtype=torch.bool)
    whole = grpo.token_weights(lengths, everyone, algo, 16)
    totals = 8.0, float(lengths.sum())
    ranks = slice(0, 3), slice(3, 8)
    halves = [grpo.token_weights(lengths[rank], everyone[rank], algo, 16, totals) for rank in ranks]
    torch.testing.assert_close(torch.cat(halves), whole)


@pytest.mark.parametrize("algo", grpo.ALGORITHMS)
def test_the_first_step_has_its_closed_form_and_a_gradient(algo):
    """Pitfall 25: at a ratio of 1 the loss says nothing (grpo: 0), the gradient is -A * weight, and it trains."""
    n = numbers()
    n.advantage = grpo.advantages(torch.tensor([[1.0, 0, 0, 1, 0, 0, 0, 1]])).T
    n.old = n.logp
    leaf = n.logp.clone().requires_grad_()
    loss, metrics = loss_of(n, algo, tis=False, logp=leaf)
    (gradient,) = torch.autograd.grad(loss, leaf)
    total = (n.lengths[:, None] * n.advantage).sum()
    expected = {"grpo": -n.advantage.mean(), "dapo": -total / n.lengths.sum(), "dr_grpo": -total / (8 * 16)}[algo]
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    weights = grpo.token_weights(n.lengths, torch.ones(8, dtype=torch.bool), algo, 16)[:, None]
    torch.testing.assert_close(gradient, torch.where(n.mask, -n.advantage * weights, 0.0))
    assert gradient.norm() > 0 and grpo.summarise([metrics])["ratio/mean"] == 1.0


def test_clip_higher_lets_good_tokens_rise_further_than_bad_ones_fall():
    """DAPO eq. 10: gradient vanishes beyond 1.28 for A > 0 and below 0.8 for A < 0, and never on the other sides."""
    ratios = torch.tensor([0.7, 0.79, 0.81, 1.0, 1.21, 1.27, 1.29, 1.5])
    for sign, alive in ((1.0, ratios < 1.28), (-1.0, ratios > 0.8)):
        logp = ratios.log().requires_grad_()
        loss, _ = grpo.policy_loss(logp, torch.zeros(8), torch.full((8,), sign), torch.ones(8), clip_high=0.28)
        (gradient,) = torch.autograd.grad(loss, logp)
        assert ((gradient != 0) == alive).all()


def test_tis_weight_is_truncated_detached_and_finite():
    old, rollout = torch.tensor([0.0, 0.0, -1.0, -500.0, 0.0]), torch.tensor([0.0, -3.0, 0.0, 0.0, -1e9])
    weight = grpo.tis_weight(old.requires_grad_(), rollout, 2.0)
    assert weight.tolist() == pytest.approx([1, 2, math.exp(-1), 0, 2], abs=1e-6) and not weight.requires_grad
    with pytest.raises(ValueError, match="cap"):
        grpo.tis_weight(old, rollout, 0.0)


def test_tis_makes_the_noisy_samplers_gradient_that_of_the_clean_policy():
    """E over pi_rollout of w * grad = E over pi_old of grad, exactly, while no ratio exceeds the cap."""
    old = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    rollout = torch.tensor([0.4, 0.2, 0.4], dtype=torch.float64)
    reward = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
    logits = old.log().requires_grad_()

    def expected_gradient(sampler, tis):
        logp = logits.log_softmax(0)
        loss, _ = grpo.policy_loss(logp, old.log(), reward, sampler, tis=tis)
        return torch.autograd.grad(loss, logits)[0]

    clean = expected_gradient(old, None)
    torch.testing.assert_close(expected_gradient(rollout, grpo.tis_weight(old.log(), rollout.log())), clean)
    assert (expected_gradient(rollout, None) - clean).norm() > 0.02


# ------------------------------------------------------------------------------------------------ KL


def test_k3_is_unbiased_and_never_negative():
    p, q = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    k3 = grpo.kl_k3(p.log(), q.log())
    assert (k3 >= 0).all()
    assert (p * k3).sum() == pytest.approx((p * (p / q).log()).sum().item())


def test_k3_survives_what_overflows_exp():
    """Pitfall 32: d = 120 is e^120 in fp32, infinity; and d near 0 must not come out negative."""
    logp = torch.tensor([-120.0, 0.0, -1.0, -1.0], requires_grad=True)
    k3 = grpo.kl_k3(logp, torch.tensor([0.0, -120.0, -1.0 + 1e-4, -1.0]))
    k3.sum().backward()
    assert torch.isfinite(k3).all() and torch.isfinite(logp.grad).all()
    k3 = k3.tolist()
    assert k3[2] == pytest.approx(5e-9, rel=0.05) and k3[3] == 0


def test_beta_changes_the_gradient_and_needs_a_reference():
    """Pitfall 22: a KL coefficient that nothing reads."""
    n = numbers()
    gradients = []
    for beta in (0.0, 0.1, 0.2):
        leaf = n.logp.clone().requires_grad_()
        gradients.append(torch.autograd.grad(loss_of(n, "dapo", beta=beta, logp=leaf)[0], leaf)[0])
    torch.testing.assert_close(gradients[2] - gradients[0], 2 * (gradients[1] - gradients[0]), rtol=1e-3, atol=1e-6)
    assert (gradients[1] - gradients[0]).norm() > 0
    with pytest.raises(ValueError, match="beta"):
        grpo.policy_loss(n.logp, n.old, n.advantage, n.advantage, beta=0.1)


def test_kl_is_exactly_zero_against_oneself_and_acts_without_advantages():
    """Pitfalls 21 and 27: at step 0 policy and reference agree; groups without a signal still feel the reference."""
    n = numbers()
    same, _ = grpo.policy_loss(n.logp, n.logp, n.advantage * 0, torch.ones(()), n.mask, ref_logp=n.logp, beta=1.0)
    leaf = n.logp.clone().requires_grad_()
    pull, _ = grpo.policy_loss(leaf, n.logp, n.advantage * 0, torch.ones(()), n.mask, ref_logp=n.ref, beta=1.0)
    assert same == 0 and pull > 0 and torch.autograd.grad(pull, leaf)[0].norm() > 0


# ------------------------------------------------------------------------------------------------ masks and faults


@pytest.mark.parametrize("poison", [float("inf"), float("-inf"), float("nan"), 1e30])
def test_what_stands_at_masked_positions_does_not_matter(poison):
    """Pitfall 31: the loss looks finite, the gradient of 0 * inf is NaN."""
    n = numbers()
    clean, poisoned = [], []
    for results, value in ((clean, 0.0), (poisoned, poison)):
        m = SimpleNamespace(**vars(n))
        for name in ("logp", "old", "rollout", "ref"):
            setattr(m, name, torch.where(n.mask, getattr(n, name), value))
        leaf = m.logp.clone().requires_grad_()
        loss, metrics = loss_of(m, "grpo", beta=0.1, logp=leaf)
        results += [loss, torch.autograd.grad(loss, leaf)[0], grpo.summarise([metrics])]
    assert torch.equal(clean[0], poisoned[0]) and torch.equal(clean[1], poisoned[1]) and clean[2] == poisoned[2]


@pytest.mark.parametrize("algo", grpo.ALGORITHMS)
def test_masked_answers_leave_the_denominator_too(algo):
    """Pitfall 30: masking two of eight must be the same as never having had them."""
    n = numbers()
    trained = torch.ones(8, dtype=torch.bool)
    trained[[2, 5]] = False
    kept = SimpleNamespace(**{k: v[trained] for k, v in vars(n).items()})
    torch.testing.assert_close(loss_of(n, algo, trained=trained)[0], loss_of(kept, algo)[0])


@pytest.mark.parametrize("algo", grpo.ALGORITHMS)
def test_all_masked_is_a_finite_no_op(algo):
    n = numbers()
    leaf = n.logp.clone().requires_grad_()
    loss, metrics = loss_of(n, algo, trained=torch.zeros(8, dtype=torch.bool), beta=0.1, logp=leaf)
    assert loss == 0 and torch.equal(torch.autograd.grad(loss, leaf)[0], torch.zeros_like(leaf))
    assert grpo.summarise([metrics]) == {}


def test_an_empty_answer_weighs_nothing():
    weights = grpo.token_weights(torch.tensor([0, 4]), torch.ones(2, dtype=torch.bool), "grpo")
    assert weights.tolist() == [0.0, 0.25]


def test_ratios_beyond_reason_stay_finite():
    logp = torch.tensor([0.0, -200.0], requires_grad=True)
    loss, metrics = grpo.policy_loss(logp, torch.tensor([-200.0, 0.0]), torch.tensor([-1.0, 1.0]), torch.ones(2))
    (gradient,) = torch.autograd.grad(loss, logp)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all() and metrics["ratio"].isfinite().all()


def test_unknown_algorithms_and_missing_limits_are_refused():
    trained = torch.ones(8, dtype=torch.bool)
    with pytest.raises(ValueError, match="ppo"):
        grpo.token_weights(LENGTHS, trained, "ppo")
    with pytest.raises(ValueError, match="max_tokens"):
        grpo.token_weights(LENGTHS, trained, "dr_grpo")


def test_the_loss_agrees_with_numerical_derivatives():
    n = numbers(dtype=torch.float64, lengths=torch.tensor([2, 3]), spread=0.1)
    for algo in grpo.ALGORITHMS:
        torch.autograd.gradcheck(lambda x, a=algo: loss_of(n, a, beta=0.1, logp=x)[0], n.logp.clone().requires_grad_())


def test_mismatch_metrics_by_hand():
    old, rollout = torch.tensor([0.0, -1.0]), torch.tensor([math.log(0.5), -1.0])
    metrics = grpo.summarise([grpo.mismatch(old, rollout)])
    assert metrics == pytest.approx({
        "sampling/sampling_logp_difference/mean": math.log(2) / 2,
        "sampling/sampling_logp_difference/max": math.log(2),
        "sampling/importance_sampling_ratio/min": 1.0,
        "sampling/importance_sampling_ratio/mean": 1.5,
        "sampling/importance_sampling_ratio/max": 2.0,
    })
