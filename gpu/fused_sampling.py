"""The sampler of a decode step in two Triton launches over the fp32 logits: draw, log-prob, entropy, next state.

The idea: a 152k-token vocabulary is 38 chunks of 4096. The first launch reads every chunk once and keeps three numbers of
it; the second, one program a sequence, finds the token from those and one more look at a single chunk:

    chunk c   m_c = max z,  S_c = sum e^(z - m_c),  Z_c = sum e^(z - m_c) (z - m_c)          z = logits / T

    m = max m_c      w_c = e^(m_c - m)      S = sum w_c S_c
    the chunk is the first whose running sum of w_c S_c exceeds u S; the token is found in it in the same way

        S_0 w_0 | S_1 w_1 | S_2 w_2 | ...           logp    = z_token - m - log S
                     ^ u S                          entropy = log S - sum w_c (Z_c + S_c (m_c - m)) / S

It then does what Decoder.sample_and_advance_ does: writes the tables, looks for stop ids, advances the row. Ids that the
tokenizer does not know are skipped here, so the head's GEMM may write them and nobody pays a pass to mask them.

The torch twin is decode.Decoder.sample_and_advance_ with sampling.sample; sums are taken in another order, so a token
differs only where u falls within fp32 rounding of a boundary.
Source: the softmax whose maximum and sum are found in one pass, arXiv 1805.02867; drawing from the same sums is ours.
Cost: the bytes of the logits, once. Limits: top-k, top-p and min-p must have been applied to the logits before.
Copy along: nothing. Its slow twins are sampling.py and decoding/decode.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a CPU-only install: Decoder's own step remains
    triton = None

CHUNK = 4096
MAX_STOPS = 32

if triton is not None:

    @triton.jit
    def _vocabulary_kernel(logits_ptr, chunks_ptr, inv_temperature_ptr, stride_b, valid, CHUNK: tl.constexpr, PDL: tl.constexpr):
        b, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
        offs = c * CHUNK + tl.arange(0, CHUNK)
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        z = tl.load(logits_ptr + b * stride_b + offs, mask=offs < valid, other=-1e30)  # one chunk of one row
        z = tl.maximum(z * tl.load(inv_temperature_ptr), -1e30)  # -inf (truncated) as well
        m = tl.max(z, axis=0)
        e = tl.exp(z - m)
        out = chunks_ptr + (b * tl.num_programs(1) + c) * 3
        tl.store(out, m)
        tl.store(out + 1, tl.sum(e, axis=0))
        tl.store(out + 2, tl.sum(e * tl.maximum(z - m, -1e4), axis=0))

    @triton.jit
    def _pick_kernel(
        logits_ptr, chunks_ptr, inv_temperature_ptr, state_ptr, stops_ptr,
        uniform_ptr, tokens_ptr, logps_ptr, entropies_ptr, stride_b, valid, chunks, slots,
        GREEDY: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STOPS: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        b = tl.program_id(0).to(tl.int64)
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        # state: token, position, last, table, done; a row of `slots` each
        position = tl.load(state_ptr + slots + b)
        last = tl.load(state_ptr + 2 * slots + b)
        place = tl.load(state_ptr + 3 * slots + b) + position
        if tl.load(state_ptr + 4 * slots + b) == 0:  # frozen rows stay as they are
            c = tl.arange(0, CHUNKS)
            at = chunks_ptr + (b * chunks + c) * 3
            m_c = tl.load(at, mask=c < chunks, other=-1e30)
            s_c = tl.load(at + 1, mask=c < chunks, other=0.0)
            z_c = tl.load(at + 2, mask=c < chunks, other=0.0)
            m = tl.max(m_c, axis=0)
            w_c = tl.exp(m_c - m)
            mass = w_c * s_c
            total = tl.sum(mass, axis=0)
            log_total = tl.log(total)
            entropy = log_total - tl.sum(w_c * z_c + mass * tl.maximum(m_c - m, -1e4), axis=0) / total
            target = tl.load(uniform_ptr + place) * total
            if GREEDY:
                chunk = tl.min(tl.where(m_c == m, c, CHUNKS), axis=0)
            else:
                chunk = tl.sum((tl.cumsum(mass, axis=0) <= target).to(tl.int32), axis=0)
                chunk = tl.minimum(chunk, tl.max(tl.where(mass > 0, c, 0), axis=0))
            before = tl.sum(tl.where(c < chunk, mass, 0.0), axis=0)

            offs = tl.arange(0, CHUNK)
            v = chunk * CHUNK + offs
            z = tl.load(logits_ptr + b * stride_b + v, mask=v < valid, other=-1e30)
            z = tl.maximum(z * tl.load(inv_temperature_ptr), -1e30)
            e = tl.exp(z - m)
            if GREEDY:
                pick = tl.min(tl.where(z == m, offs, CHUNK - 1), axis=0)
            else:
                pick = tl.sum((tl.cumsum(e, axis=0) <= target - before).to(tl.int32), axis=0)
                pick = tl.minimum(pick, tl.max(tl.where(e > 0, offs, 0), axis=0))
            logp = tl.sum(tl.where(offs == pick, z, 0.0), axis=0) - m - log_total
            token = (chunk * CHUNK + pick).to(tl.int64)

            tl.store(tokens_ptr + place, token)
            tl.store(logps_ptr + place, logp)
            tl.store(entropies_ptr + place, entropy)
            stops = tl.load(stops_ptr + tl.arange(0, STOPS))
            is_done = (tl.sum((stops == token).to(tl.int32), axis=0) > 0) | (position == last)
            if is_done:
                tl.store(state_ptr + 4 * slots + b, 1)
            else:
                tl.store(state_ptr + b, token)
                tl.store(state_ptr + slots + b, position + 1)


class FusedSampler:
    """sample_and_advance_ for a Decoder on CUDA; holds the scratch and the temperature, at fixed addresses."""

    def __init__(self, slots: int, vocab: int, valid_vocab: int, device):
        self.valid, self.chunks = valid_vocab, triton.cdiv(valid_vocab, CHUNK)
        self.partial = torch.empty(slots, self.chunks, 3, device=device)
        self.inv_temperature = torch.ones(1, device=device)
        self.stops = torch.full((MAX_STOPS,), -1, dtype=torch.int64, device=device)
        device = torch.device(device)
        self.is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)

    def begin(self, sampling, scaled: bool) -> None:
        """scaled: the logits will come already divided by the temperature (and truncated)."""
        stop_ids = list(sampling.stop_ids)
        if len(stop_ids) > MAX_STOPS:
            raise ValueError(f"{len(stop_ids)} stop ids; on a GPU at most {MAX_STOPS} are watched")
        self.stops.copy_(torch.tensor(stop_ids + [-1] * (MAX_STOPS - len(stop_ids))))
        self.inv_temperature.fill_(1.0 if scaled or sampling.is_greedy else 1.0 / sampling.temperature)

    def __call__(self, decoder, logits: Tensor, greedy: bool) -> None:
        """Draws for rows 0..B-1 of logits (B, V) fp32 and advances the decoder's state and tables."""
        batch, slots = len(logits), decoder.state.shape[1]
        options = {"PDL": True, "launch_pdl": True} if self.is_hopper else {"PDL": False}
        _vocabulary_kernel[(batch, self.chunks)](
            logits, self.partial, self.inv_temperature, logits.stride(0), self.valid, CHUNK=CHUNK, num_warps=8, **options
        )
        _pick_kernel[(batch,)](
            logits, self.partial, self.inv_temperature, decoder.state, self.stops,
            decoder.uniform, decoder.tokens, decoder.logps, decoder.entropies,
            logits.stride(0), self.valid, self.chunks, slots,
            GREEDY=greedy, CHUNK=CHUNK, CHUNKS=triton.next_power_of_2(self.chunks), STOPS=MAX_STOPS,
            num_warps=8, **options,
        )  # fmt: skip


def demo() -> None:
    """The two launches in torch, for one row: chunks first, then one chunk; and the draw from the whole softmax."""
    z = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3
    u, chunk = torch.tensor(0.7), 128
    m_c = torch.stack([c.max() for c in z.split(chunk)])
    s_c = torch.stack([(c - m).exp().sum() for c, m in zip(z.split(chunk), m_c)])
    mass = s_c * (m_c - m_c.max()).exp()
    target = u * mass.sum()
    which = int((mass.cumsum(0) <= target).sum())
    inside = (z.split(chunk)[which] - m_c.max()).exp().cumsum(0)
    token = which * chunk + int((inside <= target - mass[:which].sum()).sum())
    print(f"u = 0.7 falls into chunk {which} of {len(mass)}, there on token {token}")
    print(f"whole cumulative softmax: token {int((z.softmax(0).cumsum(0) <= u).sum())}")


if __name__ == "__main__":
    demo()
