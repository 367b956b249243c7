"""Adaptive Quantization Noise: a little Gaussian noise in the RMSNorm weights makes the sampler explore.

Rounding weights to 4 bits already perturbs the policy, and QeRL found that this raises its entropy early in training.
The error of the rounding never changes, though. AQN adds a part that does: for every rollout the sampler runs with

    RMSNorm_noisy(x) = (w + Z) * x / rms(x),     Z ~ N(0, sigma^2 I), one value a channel

    x --> norm(w + Z) --+--> q, k, v       Z_c shifts input channel c of every projection that reads the norm, as if
                        |                  its weight columns had been multiplied by (1 + Z_c / w_c): multiplicative
    x --> norm(w + Z) --+--> gate, up      weight noise for the price of one vector, no copy of the 4-bit weights.

sigma falls in K equal stages of the run (sigma 1e-2 -> 5e-4, K = 10):

    stage    0      1          k                                   K-1
    sigma    0      start      start * (end/start)^((k-1)/(K-2))   end            (exponential)

linear, cosine and logarithmic join the same two ends; the paper only plots them, so these formulas are ours.

Source: QeRL, arXiv 2510.11696, section 3.3, equations 8-10 and algorithm 1.
Where we differ: (1) the paper's exponent divides by K-1 and never reaches sigma_end; its code divides by K-2, as here.
(2) Noise and noisy weights are fp32: next to a weight of 1, bf16 steps are 4e-3 to 8e-3 wide and noise of 1e-3 vanishes
in 97.5% of the channels. (3) The noisy weights are new tensors: noise ends by dropping them, never by subtracting.
(4) The released code looks for a norm class that its sampler does not use and so, very likely, adds noise nowhere; here
count and rms are measured on the tensors that the sampler gets, and `check_applied` refuses silence.
Cost: one draw of 2 * layers * d values a rollout (200,000 for a 7B model).
Limits: the noisy policy is not the one that is trained; grpo.tis_weight corrects for it. With fewer steps than stages
some stages are passed over.
Copy along: nothing. Your model must accept norm weights from outside.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SCHEDULES = ("exponential", "linear", "cosine", "logarithmic", "none")


def stage_of(step: int, total_steps: int, stages: int) -> int:
    """The stage, 0 .. stages-1, of a 0-based step: `stages` equal parts of the run.

    >>> [stage_of(step, 6, 3) for step in range(6)]
    [0, 0, 1, 1, 2, 2]
    """
    if not 0 <= step < total_steps:
        raise ValueError(f"step={step} is outside the run of {total_steps} steps; steps count from 0")
    return step * stages // total_steps


def sigma_at(step: int, total_steps: int, schedule: str = "exponential", sigma_start: float = 1e-2,
             sigma_end: float = 5e-4, stages: int = 10) -> float:
    """The standard deviation of the noise at a 0-based step; 0.0 in stage 0 and for the schedule "none".

    >>> [round(sigma_at(step, 4, "exponential", 1e-2, 1e-4, stages=4), 6) for step in range(4)]
    [0.0, 0.01, 0.001, 0.0001]
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"noise schedule {schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}")
    if schedule == "none":
        return 0.0
    if stages < 3:
        raise ValueError(f"stages={stages} is below 3 (one silent, one at each end of sigma); take 3 or more")
    for name, sigma in (("sigma_start", sigma_start), ("sigma_end", sigma_end)):
        if not (sigma > 0 and math.isfinite(sigma)):
            raise ValueError(f"{name}={sigma} must be positive and finite; use the schedule 'none' for no noise")
    stage = stage_of(step, total_steps, stages)
    if stage == 0:
        return 0.0
    progress = (stage - 1) / (stages - 2)  # 0 at the first noisy stage, exactly 1 at the last
    if schedule == "exponential":  # equal ratios: most of the run is spent at small sigma
        return sigma_start ** (1 - progress) * sigma_end**progress
    if schedule == "linear":  # equal steps
        fraction = 1 - progress
    elif schedule == "cosine":  # flat, steep, flat
        fraction = (1 + math.cos(math.pi * progress)) / 2
    else:  # logarithmic in the stage number: steep at first, flat at the end
        fraction = 1 - math.log(stage) / math.log(stages - 1)
    return sigma_end + (sigma_start - sigma_end) * fraction


def noisy_norms(weights: Sequence[Tensor], sigma: float, generator: torch.Generator) -> list[Tensor]:
    """New fp32 weights w + Z, Z ~ N(0, sigma^2), on each weight's device; the arguments stay as they are.

    Everything is drawn in one call on the generator's device, so that a CPU generator gives a GPU run the same noise.
    """
    sizes = [w.numel() for w in weights]
    noise = torch.randn(sum(sizes), generator=generator, device=generator.device, dtype=torch.float32).mul_(sigma)
    if weights:
        noise = noise.to(weights[0].device)  # one copy instead of one a norm
    return [w.detach().float() + z.view_as(w).to(w.device) for w, z in zip(weights, noise.split(sizes))]


def applied_rms(weights: Sequence[Tensor], noisy: Sequence[Tensor]) -> tuple[int, float]:
    """What was really applied: how many norms differ from their clean weight, and the rms over all channels."""
    if not noisy:
        return 0, 0.0
    difference = [(n.float() - w.detach().float()).flatten() for w, n in zip(weights, noisy, strict=True)]
    changed = torch.stack([d.ne(0).any() for d in difference]).sum()
    return int(changed), float(torch.cat(difference).square().mean().sqrt())


def check_applied(sigma: float, norms: int, count: int, rms: float) -> None:
    """Raise RuntimeError unless all `norms` took noise of about `sigma` (or none at all when sigma is 0)."""
    expected = norms if sigma > 0 else 0
    # Even a tiny model has hundreds of channels, whose rms lies within 10% of sigma; half or double is a bug.
    if count != expected or (sigma > 0 and not 0.5 < rms / sigma < 2.0):
        raise RuntimeError(f"noise of sigma={sigma:.3g} must change {expected} norms: {count} changed, rms {rms:.3g}")


def _entropy(weight: Tensor, sigma: float) -> float:
    """In nats, mean over 16 draws: of a policy that knows 64 inputs by heart, its head being the inputs themselves."""
    generator = torch.Generator().manual_seed(0)
    x = torch.nn.functional.rms_norm(torch.randn(64, 256, generator=generator), (256,))
    noisy = torch.stack(noisy_norms([weight] * 16, sigma, generator))
    logp = (x * noisy[:, None] @ (0.03 * x / weight).T).log_softmax(-1)  # (16, 64, 64); without noise the norm's size cancels
    return float(-(logp.exp() * logp).sum(-1).mean())


def demo() -> None:
    """Print the schedules, what sigma does to the entropy of a small policy, and why the noise must live in fp32."""
    print("sigma by stage, K = 10        " + "".join(f"{k:>9}" for k in range(10)))
    for schedule in SCHEDULES[:-1]:
        print(f"  {schedule:<28}" + "".join(f"{sigma_at(k, 10, schedule):>9.5f}" for k in range(10)))
    print("\nentropy of a policy, nats          " + "".join(f"{f'sigma {s:g}':>13}" for s in (0, 5e-4, 1e-2, 5e-2)))
    for size in (1.0, 0.25, 0.02):
        row = "".join(f"{_entropy(torch.full((256,), size), s):>13.4f}" for s in (0.0, 5e-4, 1e-2, 5e-2))
        print(f"  norm weights of {size:<17}{row}" + ("   sigma is absolute" if size == 0.02 else ""))
    weights = [torch.rand(4096, generator=torch.Generator().manual_seed(i)) * 3.5 + 0.5 for i in range(4)]
    ones = torch.ones(2**18)
    print("\nnorm weights between 0.5 and 4; rms really applied / sigma")
    for sigma in (1e-2, 1e-3, 5e-4):
        noisy = noisy_norms(weights, sigma, torch.Generator().manual_seed(7))
        gone = (noisy_norms([ones], sigma, torch.Generator().manual_seed(7))[0].bfloat16() == 1).float().mean()
        half = [w.bfloat16() for w in weights]
        lost = [h + (n - w).bfloat16() for h, n, w in zip(half, noisy, weights)]
        print(f"  sigma {sigma:.0e}   fp32 {applied_rms(weights, noisy)[1] / sigma:.3f}"
              f"   bf16 {applied_rms(half, lost)[1] / sigma:.3f}; nothing of it in {gone:.1%} of the channels of weight 1")


if __name__ == "__main__":
    demo()
