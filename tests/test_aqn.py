"""The noise is as large as stated, where stated, when stated, and nowhere else."""
import math

import pytest
import torch

import aqn

CURVES = [s for s in aqn.SCHEDULES if s != "none"]


def norms(count=6, size=257, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(size, generator=generator) * 3.5 + 0.5 for _ in range(count)]


@pytest.mark.parametrize("schedule", CURVES)
@pytest.mark.parametrize("stages", [3, 4, 10])
def test_every_schedule_is_silent_then_starts_and_ends_alike(schedule, stages):
    total = 7 * stages
    sigmas = [aqn.sigma_at(step, total, schedule, 1e-2, 5e-4, stages) for step in range(total)]
    assert sigmas[:7] == [0.0] * 7
    assert sigmas[7] == pytest.approx(1e-2, rel=1e-12)
    assert sigmas[-1] == pytest.approx(5e-4, rel=1e-12)  # the paper's own formula stops short of it
    noisy = sigmas[7:]
    assert all(a >= b for a, b in zip(noisy, noisy[1:]))
    assert len(set(noisy)) == stages - 1 and all(noisy.count(s) == 7 for s in set(noisy))  # equal stages


def test_the_exponential_schedule_is_the_released_codes():
    """facts: K = 10, 1e-2 -> 1e-4 gives 1.0e-2 5.6e-3 3.2e-3 1.8e-3 1.0e-3 5.6e-4 3.2e-4 1.8e-4 1.0e-4."""
    got = [aqn.sigma_at(k, 10, "exponential", 1e-2, 1e-4, 10) for k in range(1, 10)]
    assert got == pytest.approx([1e-2 * 10 ** (-i / 4) for i in range(9)], rel=1e-12)


def test_other_schedules_by_hand():
    at = {s: [aqn.sigma_at(k, 5, s, 1.0, 0.5, 5) for k in range(1, 5)] for s in CURVES}
    assert at["linear"] == pytest.approx([1, 1 - 1 / 6, 1 - 2 / 6, 0.5])
    assert at["cosine"] == pytest.approx([1, 0.875, 0.625, 0.5])  # 0.5 + 0.25 * (1 + cos 60, 120 degrees)
    assert at["logarithmic"] == pytest.approx([1, 1 - 0.5 * math.log(2) / math.log(4), 1 - 0.5 * math.log(3, 4), 0.5])


def test_none_is_no_noise_at_any_step():
    assert {aqn.sigma_at(step, 20, "none") for step in range(20)} == {0.0}


@pytest.mark.parametrize("total", [1, 3, 10, 97, 1000])
def test_stages_cover_the_run_in_order_and_differ_by_one_step(total):
    """A stage of floor(M / K) steps leaves the remainder of the division outside every stage."""
    stages = [aqn.stage_of(step, total, 10) for step in range(total)]
    assert stages == sorted(stages) and stages[0] == 0 and max(stages) < 10
    if total >= 10:
        sizes = [stages.count(k) for k in range(10)]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("arguments, word", [
    ((5, 5), "step=5"), ((-1, 5), "step=-1"), ((0, 5, "quadratic"), "quadratic"),
    ((0, 5, "linear", 0.0), "sigma_start"),
    ((0, 5, "linear", 1e-2, float("nan")), "sigma_end"), ((0, 5, "linear", 1e-2, 1e-3, 2), "stages=2"),
])
def test_bad_schedules_are_refused_by_name(arguments, word):
    with pytest.raises(ValueError, match=word):
        aqn.sigma_at(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sigma", [1e-2, 1e-3, 5e-4])
def test_noise_is_fp32_so_that_none_of_it_rounds_away(sigma, dtype):
    """In bf16 a sigma of 5e-4 beside weights of 0.5 to 4 changes nothing at all."""
    weights = [w.to(dtype) for w in norms(size=4096)]
    noisy = aqn.noisy_norms(weights, sigma, torch.Generator().manual_seed(1))
    assert all(n.dtype == torch.float32 for n in noisy)
    count, rms = aqn.applied_rms(weights, noisy)
    assert count == len(weights)
    assert rms == pytest.approx(sigma, rel=0.03)  # 24,576 draws: standard error 0.5%
    aqn.check_applied(sigma, len(weights), count, rms)


def test_noise_leaves_the_weights_bit_identical_and_shares_no_memory():
    weights = norms()
    before = [w.clone() for w in weights]
    noisy = aqn.noisy_norms(weights, 1e-2, torch.Generator().manual_seed(1))
    for n in noisy:
        n.fill_(7.0)
    assert all(torch.equal(w, b) for w, b in zip(weights, before))


def test_noise_is_the_generators_and_no_one_elses():
    weights = norms()
    torch.manual_seed(5)
    first = aqn.noisy_norms(weights, 1e-2, torch.Generator().manual_seed(3))
    state = torch.get_rng_state()
    torch.manual_seed(6)
    second = aqn.noisy_norms(weights, 1e-2, torch.Generator().manual_seed(3))
    other = aqn.noisy_norms(weights, 1e-2, torch.Generator().manual_seed(4))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert not torch.equal(first[0], other[0])
    assert torch.equal(state, torch.manual_seed(5).get_state())  # the global stream was not touched
    draws = torch.stack([n - w for n, w in zip(first, weights)])
    correlation = torch.corrcoef(draws)[~torch.eye(len(draws), dtype=torch.bool)]
    assert correlation.abs().max() < 5 / math.sqrt(draws.shape[1])  # every norm has its own draw


def test_a_silent_or_partial_or_leftover_noise_is_an_error():
    """The released code's class test matches no layer of its sampler and nobody notices."""
    weights = norms()
    noisy = aqn.noisy_norms(weights, 1e-2, torch.Generator().manual_seed(1))
    clean = [w.clone() for w in weights]
    cases = [(1e-2, clean), (1e-2, noisy[:-1] + clean[-1:]), (0.0, noisy), (1e-3, noisy), (1e-2, [])]
    for sigma, applied in cases:
        count, rms = aqn.applied_rms(weights if applied else [], applied)
        with pytest.raises(RuntimeError, match="norms"):
            aqn.check_applied(sigma, len(weights), count, rms)
    aqn.check_applied(0.0, len(weights), *aqn.applied_rms(weights, clean))


def test_noise_reaches_the_sampled_policy_through_the_block_norms_and_is_gone_without_them(tiny_model):
    """Exactly the two norms a layer, not the final one; dropping the noisy weights restores the clean output bits."""
    model = tiny_model("qwen2")
    targets = model.noisy_norms_targets()
    assert len(targets) == 2 * model.config.layers and not any(t is model.final_norm for t in targets)
    before = [p.clone() for p in model.parameters()]
    tokens, attend = torch.arange(20), model.packed([20])
    with torch.no_grad():
        clean = model(tokens, attend)
        noisy = model(tokens, attend, aqn.noisy_norms(targets, 1e-2, torch.Generator().manual_seed(0)))
        again = model(tokens, attend)
    assert not torch.equal(clean, noisy) and torch.equal(clean, again)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_additive_noise_on_the_norm_is_multiplicative_noise_on_the_weight_columns():
    """Paper, section 3.3: (w + Z) * n, read by W, is w * n read by W with its columns scaled by 1 + Z / w."""
    generator = torch.Generator().manual_seed(0)
    w, x = norms(1, 64)[0].double(), torch.randn(5, 64, generator=generator, dtype=torch.float64)
    matrix = torch.randn(32, 64, generator=generator, dtype=torch.float64)
    noisy = aqn.noisy_norms([w], 1e-2, generator)[0].double()
    normed = x / x.square().mean(1, keepdim=True).sqrt()
    z = noisy - w.float().double()
    torch.testing.assert_close((normed * (w + z)) @ matrix.T, (normed * w) @ (matrix * (1 + z / w)).T)


def test_the_share_of_noise_that_bf16_would_lose_is_the_headers_the_demos_and_the_normal_distributions(capsys):
    """Around 1 bf16 rounds away what lies within half a step: 2^-9 below, 2^-8 above. The header once said 99%."""
    below, above = (0.5 * (1 + math.erf(x / 1e-3 / math.sqrt(2))) for x in (2**-9, 2**-8))
    share = f"{below + above - 1:.1%}"
    aqn.demo()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "sigma 1e-03" in line]
    assert share == "97.5%" and share in line and f"in {share} of the channels" in " ".join(aqn.__doc__.split())
