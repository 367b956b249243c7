"""Draw one token for each row of logits, with the log-prob and the entropy of the distribution it was drawn from.

A sample must depend on nothing around it: not on the slot it runs in, the batch it shares, or the machine's other
work. So each completion owns a stream of uniforms u_0, u_1, ... made from (seed, step, prompt, sample) alone, and token
t is the inverse of the cumulative distribution at u_t:

    z = logits / T      p = softmax(z)      token = first v with  p_0 + ... + p_v > u        (u in [0, 1))

     cumulative   0     .2        .5  .6            1
                  |--p0--|---p1----|p2|-----p3------|
                               ^ u = .4  ->  token 1

A Gumbel or multinomial draw would need V random numbers a token, from a generator that the whole batch shares; this
needs one. The log-prob is the fp32 log-softmax of the very z that was sampled (T-scaled and, if truncated,
renormalised), and the entropy comes from the same sums, so neither costs a pass over the logits:

    logp = z_token - m - log S      H = log S - sum e^(z-m) (z-m) / S          S = sum e^(z-m),  m = max z

Truncation (top-k, then top-p, then min-p, each on what the one before left, as transformers orders them) sets the
logits of dropped tokens to -inf first. Training never truncates: a policy that is scored with the whole softmax must be
sampled from it. Temperature 0 is greedy; the log-prob and entropy reported there are those of the softmax at T = 1.

On CUDA two Triton kernels (gpu/fused_sampling.py) do the same: the vocabulary is cut into chunks, the first kernel
reduces each to (m, S, sum e z), the second finds the chunk that holds u * S and then the token in it. Sums are fp32 on
both paths, so a CPU and a GPU agree except where u falls within rounding of a boundary.

Source: inverse transform sampling. Where we differ from torch.multinomial: one number a token, and nobody else draws from it.
Cost: a few passes over (B, V) fp32 logits here, one in the kernels; truncation sorts them. 4 bytes a token for u.
Limits: u has 24 bits: tokens rarer than 6e-8 are drawn at a wrong rate.
Copy along: nothing. Packages: torch, numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn and when they end."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # keep the smallest set of tokens with at least this probability; 1 = off
    top_k: int = 0  # keep the k likeliest; 0 = off
    min_p: float = 0.0  # keep tokens at least this fraction as likely as the likeliest; 0 = off
    stop_ids: Sequence[int] = ()  # any of them ends the completion and is its last token
    stop_strings: Sequence[str] = ()  # the completion ends with the token that completes one of them

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be finite and at least 0 (0 = greedy)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]; 1 turns it off")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0; 0 turns it off")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p={self.min_p} must be in [0, 1); 0 turns it off")
        if any(not s for s in self.stop_strings):
            raise ValueError("an empty stop string would end every completion at once; remove it from stop_strings")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        return not self.is_greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


def uniforms(key: Sequence[int], length: int) -> np.ndarray:
    """The first `length` numbers, fp32 in [0, 1), of the stream that belongs to a key (seed, step, prompt, sample).

    >>> uniforms((0, 1, 2, 3), 4)[:2].tolist() == uniforms((0, 1, 2, 3), 2).tolist()
    True
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).random(length, dtype=np.float32)


def truncate(z: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Logits (B, V) with those of dropped tokens set to -inf; the likeliest token always stays."""
    ranked, order = z.sort(dim=-1, descending=True, stable=True)
    is_kept = torch.ones_like(ranked, dtype=torch.bool)
    if top_k:
        is_kept[:, top_k:] = False
    if top_p < 1:
        p = ranked.masked_fill(~is_kept, -torch.inf).softmax(-1)
        is_kept &= p.cumsum(-1) - p < top_p  # mass of the likelier tokens, this one not counted
    if min_p > 0:
        is_kept &= (ranked - ranked[:, :1]).exp() >= min_p
    is_kept[:, 0] = True
    return z.masked_fill(~torch.zeros_like(is_kept).scatter(1, order, is_kept), -torch.inf)


def sample(logits: Tensor, u: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (B,) int64, their log-probs (B,) fp32 and the entropies (B,) fp32 from logits (B, V) fp32 and u (B,)."""
    z = logits if sampling.temperature in (0, 1) else logits / sampling.temperature
    if sampling.truncates:
        z = truncate(z, sampling.top_k, sampling.top_p, sampling.min_p)
    # -inf (masked ids) becomes -1e4: its exp is still exactly 0, and 0 * -1e4 is 0 where 0 * -inf would be NaN
    shifted = (z - z.amax(-1, keepdim=True)).clamp_min_(-1e4)  # (B, V)
    weight = shifted.exp()
    cumulative = weight.cumsum(-1)
    total = cumulative[:, -1:]  # (B, 1)
    if sampling.is_greedy:
        token = shifted.argmax(-1, keepdim=True)
    else:
        token = torch.searchsorted(cumulative, u.unsqueeze(1) * total, right=True).clamp_max_(z.shape[1] - 1)
    log_total = total.log()
    logp = shifted.gather(1, token) - log_total
    entropy = log_total - torch.linalg.vecdot(weight, shifted).unsqueeze(1) / total
    return token.squeeze(1), logp.squeeze(1), entropy.squeeze(1)


def demo() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    draws = torch.from_numpy(uniforms((0, 0, 0, 0), 100_000))
    token, logp, entropy = sample(logits.expand(len(draws), 4), draws, Sampling(1))
    print("softmax  ", [round(p, 3) for p in logits.softmax(-1)[0].tolist()])
    print("drawn    ", [round(n / len(draws), 3) for n in token.bincount(minlength=4).tolist()])
    print(f"entropy {entropy[0]:.3f} nats; mean -logp of the draws {-logp.mean():.3f}")


if __name__ == "__main__":
    demo()
