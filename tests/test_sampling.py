"""The sampler against exact distributions, and against transformers' own warpers."""

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from sampling import Sampling, sample, truncate, uniforms

VOCAB = 24


def logits_row(seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def warped(z: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """transformers' pipeline in its own order: temperature, top-k, top-p, min-p."""
    z = z / sampling.temperature
    if sampling.top_k:
        z = TopKLogitsWarper(sampling.top_k)(None, z)
    if sampling.top_p < 1:
        z = TopPLogitsWarper(sampling.top_p)(None, z)
    if sampling.min_p:
        z = MinPLogitsWarper(sampling.min_p)(None, z)
    return z


def chi_square_p_value(counts: np.ndarray, exact: np.ndarray) -> float:
    """How likely so large a deviation from the exact probabilities is by chance."""
    expected = exact / exact.sum() * counts.sum()
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), len(exact) - 1
    return torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)).item()


SAMPLERS = {
    "whole softmax": Sampling(1),
    "temperature 0.6": Sampling(1, temperature=0.6),
    "temperature 1.7": Sampling(1, temperature=1.7),
    "top-p 0.8": Sampling(1, top_p=0.8),
    "top-k 5": Sampling(1, top_k=5),
    "min-p 0.1": Sampling(1, min_p=0.1),
    "all of them": Sampling(1, temperature=0.8, top_p=0.9, top_k=12, min_p=0.02),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_sampled_tokens_follow_the_exact_distribution(name):
    """Chi-square of 200,000 seeded draws against transformers' distribution; p < 1e-4 would be a wrong sampler."""
    sampling = SAMPLERS[name]
    exact = warped(logits_row(), sampling)[0].double().softmax(-1).numpy()
    draws = torch.from_numpy(uniforms((0, 1, 2, 3), 200_000))
    token, logp, entropy = sample(logits_row().expand(len(draws), VOCAB), draws, sampling)
    counts = token.bincount(minlength=VOCAB).numpy()
    assert (counts[exact == 0] == 0).all(), "a truncated token was drawn"
    is_kept = exact > 0
    assert chi_square_p_value(counts[is_kept], exact[is_kept]) > 1e-4
    np.testing.assert_allclose(logp.numpy(), np.log(exact[token]), rtol=0, atol=1e-5)
    np.testing.assert_allclose(entropy[0].item(), -(exact[is_kept] * np.log(exact[is_kept])).sum(), rtol=0, atol=1e-5)


def test_greedy_takes_the_likeliest_token_and_reports_its_logp_at_temperature_one():
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(1))
    token, logp, _ = sample(logits, torch.zeros(9), Sampling(1, temperature=0))
    assert token.equal(logits.argmax(-1))
    torch.testing.assert_close(logp, logits.log_softmax(-1).amax(-1))


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1.0, 50.0])
def test_extreme_temperatures_stay_finite(temperature):
    token, logp, entropy = sample(logits_row(), torch.tensor([0.5]), Sampling(1, temperature=temperature))
    assert 0 <= token.item() < VOCAB and logp.isfinite().all() and entropy.isfinite().all() and entropy >= -1e-6


def test_masked_ids_are_never_drawn_not_even_at_the_ends_of_the_unit_interval():
    """u = 0 must skip a masked first id, u = 1 - 2^-24 must not run into masked ids behind the last one."""
    logits = logits_row().clone()
    logits[:, :2] = logits[:, -5:] = -torch.inf
    u = torch.tensor([0.0, 1 - 2**-24])
    token, logp, entropy = sample(logits.expand(2, VOCAB), u, Sampling(1))
    assert token.tolist() == [2, VOCAB - 6]
    assert logp.isfinite().all() and entropy.isfinite().all()


def test_logp_is_exact_on_a_large_vocabulary():
    """fp32 sums over 152k tokens stay within 1e-4 nats of fp64 (bf16 logits would be off by 0.03)."""
    logits = torch.randn(2, 152_064, generator=torch.Generator().manual_seed(2)) * 3
    token, logp, entropy = sample(logits, torch.tensor([0.3, 0.999]), Sampling(1))
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(logp.double(), exact.gather(1, token[:, None])[:, 0], rtol=0, atol=1e-4)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), rtol=0, atol=1e-4)


def test_the_likeliest_token_survives_any_truncation_and_ties_are_cut_to_k():
    flat = torch.zeros(1, 6)
    assert (truncate(flat, 2, 1.0, 0.0) == 0).sum() == 2
    assert (truncate(flat, 0, 1e-9, 0.0) == 0).sum() == 1


def test_streams_differ_by_every_part_of_the_key_and_repeat():
    """Identical samples across the group, or across steps, are the bug that a seed bound to a rank or batch makes."""
    base = uniforms((0, 1, 2, 3), 8)
    assert (base == uniforms((0, 1, 2, 3), 8)).all()
    for key in [(1, 1, 2, 3), (0, 2, 2, 3), (0, 1, 3, 3), (0, 1, 2, 4), (0, 1, 3, 2)]:
        assert (base != uniforms(key, 8)).any()
    assert base.dtype == np.float32 and (base >= 0).all() and (base < 1).all()


@pytest.mark.parametrize(
    "bad",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.0},
        {"stop_strings": [""]},
    ],
)
def test_impossible_settings_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad)).replace("strings", "string")):
        Sampling(**{"max_new_tokens": 4, **bad})
