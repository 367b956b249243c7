"""One decode step, held entirely on the device: newest tokens in, next tokens out, ready to run again.

Every row r of the batch is a slot of the KV cache with five integers of state, and a step is a pure function of them:

    token      newest token, not yet in the cache
    position   where that token goes
    last       the position whose sampled token is the completion's last by length
    table      table + position is this token's place in the tables below
    done       1 = frozen: the row stays as it is, and its samples are thrown away

    tables, flat over (completion, token):   uniform (in)   token, logp, entropy (out; token -1 = never written)

        hidden = model(token, attention over the cache)        logits = head(hidden)
        sampled, logp, entropy = inverse CDF at uniform[table + position]
        write the three tables; done |= sampled is a stop id or position == last
        if not done: token = sampled, position += 1

The step asks the host nothing, so the host may launch several in a row and look at `done` later: a row that has
stopped only idles until then, and the tables hold exactly its tokens. A prompt enters the same way: all but its last
token are prefilled, the last is the first `token`, so sampling happens in one place only.

lm_head: 16-bit with fp32 logits by default. head="nvfp4" quantises a copy for the rollout alone: a fifth of a 7B step's
bytes become a twentieth, and log-probs move by a measurable gap (bench/rollout.py --gap); truncated importance sampling
corrects for it, as the log-probs returned are those of the policy that was sampled.
Where we differ from the usual loop: it asks the host for each token whether the sequence has ended; here nothing waits.
Cost: that of the model, and 20 bytes of tables for each token that may be generated.
Limits: one temperature for all rows; stop strings need text, and so the host (decoding/stops.py).

Copy along: sampling.py, layers/weights.py, decoding/attention.py. For the demo also model.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from decoding.attention import DecodeAttention, KVCache, to_device
from layers.weights import make_weight
from sampling import Sampling, sample

TOKEN, POSITION, LAST, TABLE, DONE = range(5)  # rows of Decoder.state


class Decoder:
    """State of all slots, the result tables, and the step that advances them."""

    def __init__(self, model, cache: KVCache, cos: Tensor, sin: Tensor, head: str = "16bit"):
        self.model, self.cache, self.cos, self.sin = model, cache, cos, sin
        self.device = cache.kv.device
        if head not in ("16bit", "nvfp4"):
            raise ValueError(f"head={head!r} is not 16bit or nvfp4")
        self.head = None if head == "16bit" else make_weight(head, [model.head.detach()], self.device, model.dtype)
        self.state = torch.zeros(5, cache.slots, dtype=torch.int64, device=self.device)
        self.state[DONE] = 1

    def begin(self, uniform: np.ndarray, sampling: Sampling, norm_weights: list[Tensor] | None) -> None:
        """Fresh tables for completions of uniform's shape (N, max_new_tokens), fp32."""
        self.shape, self.sampling, self.norm_weights = uniform.shape, sampling, norm_weights
        size = uniform.size + 1  # the last entry is where frozen rows write
        self.uniform = torch.zeros(size, device=self.device)
        self.uniform[:-1] = torch.from_numpy(uniform).flatten()
        self.tokens = torch.full((size,), -1, dtype=torch.int64, device=self.device)
        self.logps = torch.zeros(size, device=self.device)
        self.entropies = torch.zeros(size, device=self.device)
        self.stop_ids = torch.tensor(list(sampling.stop_ids), dtype=torch.int64, device=self.device)
        self.state[DONE] = 1

    def place_(self, rows: Sequence[int], states: Sequence[Sequence[int]]) -> None:
        """Start completions: one (token, position, last, table, done) for each row."""
        self.state[:, to_device(rows, self.device)] = to_device(states, self.device).T

    def move_(self, source: list[int], target: list[int], length: int) -> None:
        """Let the sequences in slots `source` go on in slots `target`; their first `length` positions move along."""
        self.cache.copy_(source, target, length)
        rows = to_device(source, self.device)
        self.state[:, to_device(target, self.device)] = self.state[:, rows]
        self.freeze_(source)

    def freeze_(self, rows: list[int]) -> None:
        self.state[DONE, to_device(rows, self.device)] = 1

    def step(self, batch: int) -> None:
        """Advance rows 0..batch-1 by one token."""
        token, position = self.state[TOKEN, :batch], self.state[POSITION, :batch]
        attend = DecodeAttention(self.cache, position, self.cos, self.sin)
        hidden = self.model(token, attend, self.norm_weights)
        if self.head is None:
            logits = self.model.logits(hidden)  # (B, V) fp32
        else:
            logits = self.head.matmul(hidden).float()
            logits[:, self.model.valid_vocab :] = -torch.inf
        self.sample_and_advance_(logits)

    def sample_and_advance_(self, logits: Tensor) -> None:
        state = self.state[:, : len(logits)]
        is_frozen = state[DONE].bool()
        place = torch.where(is_frozen, len(self.tokens) - 1, state[TABLE] + state[POSITION])
        token, logp, entropy = sample(logits, self.uniform[place], self.sampling)
        self.tokens[place], self.logps[place], self.entropies[place] = token, logp, entropy
        is_done = is_frozen | (state[POSITION] == state[LAST])
        if len(self.stop_ids):
            is_done |= (token.unsqueeze(1) == self.stop_ids).any(1)
        state[DONE] = is_done
        state[TOKEN] = torch.where(is_done, state[TOKEN], token)
        state[POSITION] += ~is_done

    def done(self, batch: int) -> Tensor:
        """A copy, on the host, of the rows' done flags (B,)."""
        return self.state[DONE, :batch].cpu().clone()

    def tokens_of(self, samples: np.ndarray) -> np.ndarray:
        """Rows of the token table, on the host."""
        table = self.tokens[: math.prod(self.shape)].view(self.shape)
        return table[torch.from_numpy(samples).to(self.device)].cpu().numpy()

    def results(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tables (N, max_new_tokens): tokens int64 (-1 = not generated), logps and entropies fp32."""
        tables = (self.tokens, self.logps, self.entropies)
        return tuple(table[: math.prod(self.shape)].view(self.shape).cpu().numpy() for table in tables)


def demo() -> None:
    """The state of two rows, step by step: the second may make two tokens only, and freezes."""
    from model import ModelConfig, random_model

    model = random_model(ModelConfig("qwen2", 32, 2, 4, 2, 8, 64, 40, tied=True))
    with torch.no_grad():
        decoder = Decoder(model, KVCache(model.config, 2, 8, torch.float32, "cpu"), *model.rope(8))
        decoder.begin(np.full((2, 4), 0.5, dtype=np.float32), Sampling(4), None)
        decoder.place_([0, 1], [(3, 0, 3, 0, 0), (5, 0, 1, 4, 0)])
        for step in range(4):
            print(f"step {step}: token {decoder.state[TOKEN].tolist()} at {decoder.state[POSITION].tolist()}, "
                  f"done {decoder.state[DONE].tolist()}")  # fmt: skip
            decoder.step(2)
    print("tokens:", [row[row >= 0].tolist() for row in decoder.results()[0]])


if __name__ == "__main__":
    demo()
