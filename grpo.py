"""Group-relative policy optimisation: rewards of a group of answers in, one scalar loss out.

A prompt is answered G times. An answer is as good as it is better than its siblings, and each of its tokens is pushed
by that one number, as long as the policy stays close to the one that answered:

    rewards (P, G) --> advantages (P, G) --+                       rho = pi / pi_old    (1 at the first update)
                                           |                       w   = min(pi_old / pi_rollout, C), no gradient
    logp, old_logp, rollout_logp, ref_logp +--> loss = sum over tokens of  token_weight * token_loss

    token_loss = -w * min(rho * A, clip(rho, 1 - low, 1 + high) * A) + beta * (e^d - d - 1),   d = ref_logp - logp

The algorithms differ in what one token weighs. Over the N answers of length |o_i| that train in this optimiser step:

    algo       token_weight               source
    grpo       1 / (N * |o_i|)            DeepSeekMath, arXiv 2402.03300, eq. 3: mean of per-answer means
    dapo       1 / sum_i |o_i|            DAPO, arXiv 2503.14476, eq. 8: every token alike; clip 0.2 / 0.28, beta 0
    dr_grpo    1 / (N * max_tokens)       Dr. GRPO, arXiv 2503.20783, section 3.2: constant; advantages without 1/std

With gradient accumulation the weights are worked out once, from lengths and is_trained of ALL answers of the optimiser
step; the losses of its micro-batches then add up, however it is cut, and nothing is divided by their number. With lengths
100, 100, 100, 2000 and A = 1, 1, 1, -1 the step's dapo loss is +0.739; averaging the averages of micro-batches of one
would give -0.5: the other sign.

Where we differ: equal rewards give exact zeros (a residue of 1e-9 over a std of 1e-9 is a huge advantage); answers that
are masked leave the numerator and the denominator; masked positions are zeroed before exp (inf * 0 is NaN in backward);
k3's d and the log ratios are clamped. std uses ddof = 1, as TRL and the authors do (ddof = 0 is 7% larger at G = 8).
Zero-variance groups have A = 0 but stay in the denominators, as in TRL: what a token weighs depends on lengths alone.
Cost: elementwise on one number a token. Limits: no critic, no sequence-level ratios.

Tensors are flat (T,) or padded (B, T), all alike; what there is one of an answer, (B,), takes [:, None] beside (B, T):

    >>> lengths, logp = torch.tensor([3, 2]), torch.full((2, 3), -1.0, requires_grad=True)      # two answers to one prompt
    >>> advantage, weight = advantages(torch.tensor([[1.0, 0.0]]))[0], token_weights(lengths, lengths > 0, "dapo")
    >>> loss, _ = policy_loss(logp, logp.detach(), advantage[:, None], weight[:, None], completion_mask(lengths, 3))
    >>> loss.backward()                                           # -A / 5 on each of the five tokens
    >>> logp.grad
    tensor([[-0.1414, -0.1414, -0.1414],
            [ 0.1414,  0.1414,  0.0000]])

Copy along: nothing. The log-probs may come from logps.py.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALGORITHMS = ("grpo", "dapo", "dr_grpo")
LOG_CLAMP = 20.0  # e^20 = 5e8: beyond any ratio that means something, far below fp32's overflow at e^88


def advantages(rewards: Tensor, scale: str = "std", eps: float = 1e-4) -> Tensor:
    """(P, G) rewards -> (P, G) fp32 advantages: (r - mean) / (std + eps) in each row, std with ddof 1.

    scale="none" (Dr. GRPO) leaves the division out. A row of equal rewards gives exact zeros.

    >>> advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.1, 0.1, 0.1, 0.1]])).tolist()[1]
    [0.0, 0.0, 0.0, 0.0]
    """
    if scale not in ("std", "none"):
        raise ValueError(f"advantage scale {scale!r} is unknown; choose 'std' (GRPO, DAPO) or 'none' (Dr. GRPO)")
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards of shape {tuple(rewards.shape)}: needs (prompts, group) with a group of 2 or more")
    if not torch.isfinite(rewards).all():
        raise ValueError("a reward is NaN or infinite; a reward function must return a finite number for every answer")
    # Relative to r[0] equal rewards are exactly 0; around a rounded mean they are not (0.1 * 8 / 8 != 0.1 in fp32).
    relative = rewards.double() - rewards[:, :1].double()
    centred = relative - relative.mean(1, keepdim=True)
    if scale == "std":
        centred = centred / (relative.std(1, keepdim=True) + eps)
    return centred.float()


def has_signal(rewards: Tensor) -> Tensor:
    """(P, G) -> (P,) bool: True where the rewards of a group differ. Dynamic sampling keeps these (DAPO, eq. 11)."""
    return (rewards != rewards[:, :1]).any(1)


def overlong_penalty(lengths: Tensor, limit: int, buffer: int) -> Tensor:
    """Soft punishment of long answers, added to the reward: 0 up to limit - buffer, then linearly to -1 (DAPO, eq. 13).

    >>> overlong_penalty(torch.tensor([60, 80, 90, 100, 101]), limit=100, buffer=20).tolist()
    [0.0, 0.0, -0.5, -1.0, -1.0]
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"overlong buffer {buffer} must lie in 1..{limit}, the completion limit")
    return ((limit - buffer - lengths.float()) / buffer).clamp(-1.0, 0.0)


def completion_mask(lengths: Tensor, width: int) -> Tensor:
    """(B,) lengths -> (B, width) bool, True on an answer's own tokens, its end token included.

    From lengths, never from `token != pad`: where pad is the end token, that test hides what ends an answer.
    """
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def token_weights(lengths: Tensor, is_trained: Tensor, algo: str, max_tokens: int | None = None,
                  totals: tuple[float, float] | None = None) -> Tensor:
    """What each token of an answer weighs in the loss: (B,) fp32, see the table above; 0 where an answer is masked.

    lengths, is_trained  (B,) of ALL answers of the optimiser step, before it is cut into micro-batches
    totals               (answers, tokens) that train, if more ranks share the step: then their gradients must be summed
    With nothing to train every weight is 0 and so is the loss.
    """
    if algo not in ALGORITHMS:
        raise ValueError(f"algo {algo!r} is unknown; choose one of {', '.join(ALGORITHMS)}")
    trains = is_trained & (lengths > 0)
    counts = lengths.double()
    answers, tokens = totals or (float(trains.sum()), float(counts[trains].sum()))
    if algo == "grpo":
        denominator = answers * counts
    elif algo == "dapo":
        denominator = torch.full_like(counts, tokens)
    elif max_tokens is None:
        raise ValueError("dr_grpo divides by the completion limit; pass max_tokens")
    else:
        denominator = torch.full_like(counts, answers * max_tokens)
    return torch.where(trains, 1.0 / denominator.clamp(min=1.0), 0.0).float()


def tis_weight(old_logp: Tensor, rollout_logp: Tensor, cap: float = 2.0) -> Tensor:
    """min(pi_old / pi_rollout, cap), without gradient: the token was drawn from pi_rollout, the update assumes pi_old.

    Truncated importance sampling, fengyao.notion.site/off-policy-rl. Noise on the sampler (aqn.py) or another kernel
    makes the two differ; the cap bounds the variance and leaves a bias only where the ratio exceeds it.
    """
    if cap <= 0:
        raise ValueError(f"TIS cap {cap} must be positive; 2 is usual")
    return torch.exp((old_logp - rollout_logp).detach().clamp(-LOG_CLAMP, LOG_CLAMP)).clamp(max=cap)


def kl_k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """e^d - d - 1 with d = ref_logp - logp: unbiased for KL(pi || ref) on samples of pi, never negative.

    http://joschu.net/blog/kl-approx.html; DeepSeekMath eq. 4. On fixed samples its gradient is that of the forward KL.
    """
    d = (ref_logp - logp).clamp(-LOG_CLAMP, LOG_CLAMP)
    return torch.expm1(d) - d  # expm1: e^d - 1 for d = 1e-4 keeps 1 digit of fp32 otherwise


def policy_loss(logp: Tensor, old_logp: Tensor, advantage: Tensor, weight: Tensor, is_trained: Tensor | None = None, *,
                clip_low: float = 0.2, clip_high: float = 0.2, tis: Tensor | None = None,
                ref_logp: Tensor | None = None, beta: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over tokens of weight * token_loss, and a detached value a trained token for every metric (see `summarise`).

    logp        log pi(token), the one input with a gradient       old_logp  of the policy before the first update
    advantage   of the token's answer                              weight    of the token, from `token_weights`
    is_trained  True where a token trains (None: everywhere)       tis       from `tis_weight` (None: 1)
    ref_logp    of the reference; needed if beta > 0 or for the KL metric
    Everything fp32, of logp's shape, or with a 1 in place of a length, or of no dimension; else ValueError.
    PPO's clipped objective: arXiv 1707.06347 eq. 7; the asymmetric range is DAPO's clip-higher (eq. 10).
    """
    if beta and ref_logp is None:
        raise ValueError(f"beta={beta} needs ref_logp, the log-probs of the reference policy")
    named = dict(old_logp=old_logp, advantage=advantage, weight=weight, is_trained=is_trained, tis=tis, ref_logp=ref_logp)
    for name, t in named.items():  # (B,) beside (B, T) would broadcast along the tokens, silently where B = T
        shape, wanted = () if t is None else tuple(t.shape), tuple(logp.shape)
        if shape and (len(shape) != len(wanted) or any(a not in (1, b) for a, b in zip(shape, wanted))):
            raise ValueError(f"{name} of shape {shape} beside logp {wanted}: one value an answer takes [:, None]")
    is_trained = torch.ones_like(logp, dtype=torch.bool) if is_trained is None else is_trained.expand_as(logp)
    zero = torch.zeros((), dtype=logp.dtype, device=logp.device)
    advantage = advantage.expand_as(logp)

    # Zeroed before exp: a masked position may hold anything, and 0 * inf would make its gradient NaN.
    log_ratio = torch.where(is_trained, logp - old_logp, zero).clamp(-LOG_CLAMP, LOG_CLAMP)
    ratio = torch.exp(log_ratio)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    token_loss = -torch.minimum(ratio * advantage, clipped * advantage)
    if tis is not None:
        token_loss = token_loss * torch.where(is_trained, tis, zero)

    metrics = {
        "ratio": ratio,
        "clip_low": (ratio < 1.0 - clip_low) & (advantage < 0),  # where the clip really stops the gradient
        "clip_high": (ratio > 1.0 + clip_high) & (advantage > 0),
    }
    if ref_logp is not None:
        metrics["kl"] = kl_k3(torch.where(is_trained, logp, zero), torch.where(is_trained, ref_logp, zero))
        if beta:
            token_loss = token_loss + beta * metrics["kl"]
    loss = torch.where(is_trained, token_loss * weight, zero).sum()
    return loss, {name: values.detach()[is_trained].float() for name, values in metrics.items()}


def mismatch(old_logp: Tensor, rollout_logp: Tensor) -> dict[str, Tensor]:
    """One value a token: |log pi_rollout - log pi_old| and pi_old / pi_rollout, the sampler against the trainer."""
    difference = (old_logp - rollout_logp).detach()
    return {"logp_difference": difference.abs(), "importance_ratio": difference.clamp(-LOG_CLAMP, LOG_CLAMP).exp()}


def summarise(parts: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Per-token metrics of all micro-batches -> floats, exact whatever the cut; TRL's names. Empty parts give {}."""
    names = dict.fromkeys(name for part in parts for name in part)
    joined = {name: torch.cat([part[name] for part in parts if name in part]) for name in names}
    joined = {name: values for name, values in joined.items() if values.numel()}
    if "clip_low" in joined:
        joined["clip_region"] = joined["clip_low"] + joined["clip_high"]  # disjoint: A < 0 and A > 0
    wanted = {
        "ratio": [("ratio/mean", torch.mean)],
        "clip_low": [("clip_ratio/low_mean", torch.mean)],
        "clip_high": [("clip_ratio/high_mean", torch.mean)],
        "clip_region": [("clip_ratio/region_mean", torch.mean)],
        "kl": [("kl", torch.mean)],
        "entropy": [("entropy", torch.mean)],
        "logp_difference": [("sampling/sampling_logp_difference/mean", torch.mean),
                            ("sampling/sampling_logp_difference/max", torch.max)],
        "importance_ratio": [("sampling/importance_sampling_ratio/min", torch.min),
                             ("sampling/importance_sampling_ratio/mean", torch.mean),
                             ("sampling/importance_sampling_ratio/max", torch.max)],
    }
    named = [(label, reduce(joined[name])) for name in joined for label, reduce in wanted[name]]
    values = torch.stack([value for _, value in named]).tolist() if named else []  # one copy from the device
    return {label: value for (label, _), value in zip(named, values)}


def demo() -> None:
    """Four rewards become gradients; then a policy of ten numbers learns, with no network, to draw even digits."""
    rewards, lengths = torch.tensor([[1.0, 0.0, 0.0, 1.0]]), torch.tensor([100, 100, 100, 2000])
    print(f"rewards {rewards[0].tolist()}, lengths {lengths.tolist()}, the gradient of the loss to one token's log-prob, x 1000:")
    for algo in ALGORITHMS:
        advantage = advantages(rewards, "none" if algo == "dr_grpo" else "std")[0]
        weight, logp = token_weights(lengths, lengths > 0, algo, max_tokens=2000), torch.zeros(4, requires_grad=True)
        (gradient,) = torch.autograd.grad(policy_loss(logp, logp.detach(), advantage, weight)[0], logp)
        print(f"  {algo:8}" + "".join(f"{1000 * value:+9.3f}" for value in gradient.tolist()))
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(10, requires_grad=True)
    for step in range(41):
        with torch.no_grad():
            draws = torch.multinomial(logits.softmax(0), 64, replacement=True, generator=generator).view(8, 8)
        rewards = (draws % 2 == 0).float()
        logp = logits.log_softmax(0)[draws]
        weight = token_weights(torch.ones(64, dtype=torch.long), torch.ones(64, dtype=torch.bool), "grpo").view(8, 8)
        loss, metrics = policy_loss(logp, logp.detach(), advantages(rewards), weight)
        (gradient,) = torch.autograd.grad(loss, logits)
        if step % 10 == 0:
            print(f"step {step:2d}  even {rewards.mean():.2f}  loss {loss.item():+.4f}"
                  f"  |gradient| {gradient.norm():.3f}  ratio {summarise([metrics])['ratio/mean']:.2f}")
        with torch.no_grad():
            logits -= gradient
    print("the loss reads 0 at a ratio of 1; the gradient is what learns")


if __name__ == "__main__":
    demo()
