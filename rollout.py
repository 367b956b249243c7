"""Prompts in, sampled completions with their log-probs out: continuous batching over fixed slots of a KV cache.

The sampler shares the trainer's weights: no second copy, no weight sync, no server. What it adds to model.py is a
schedule. P prompts with G completions each are P*G samples in a queue, and the cache has a fixed number of slots:

    queue  p0.0 p0.1 p0.2 p1.0 p1.1 p1.2 ...
             |    |
    slot 0  [p0 prompt|p0.0 tokens ....... EOS]  -> refilled by p1.0: p1 is prefilled here
    slot 1  [p0 prompt|p0.1 tokens .. EOS]       -> refilled by p0.2: p0's keys are here already, nothing to do
                                                 -> refilled by p1.1: p1's keys are copied from slot 0

Each prompt is prefilled once (decoding/prefill.py); its other samples copy the keys and values, or find them in place.
When the queue is empty the batch shrinks: sequences left in high slots move down, and the long tail runs in small batches.

A step (decoding/decode.py) never asks the host anything. On a GPU the host launches a few steps, then looks at the flags
as they were a few steps *before* those: it waits for nothing, and a row that has stopped idles for at most twice that
many steps. What is returned is cut exactly all the same, because a stopped row no longer writes.

Samples are reproducible one by one: the uniforms come from (seed, step, prompt key, sample), see sampling.py. A sample
does not depend on slots, batch or order, except for rounding: matrix products of different batch sizes may differ in
the last bit.

Source: continuous batching, Orca (Yu et al., OSDI 2022). Where we differ from a server: all samples of a call are known
beforehand, so there are no pages, no preemption and no queue of strangers; weights are read where the trainer has them.
Cost: a step reads the weights once and the keys and values of every running sequence (bench/rollout.py).
Limits: prompt + completion <= max_len; one Sampling for a whole call. The memory rule: as many slots as the samples
need, at most MAX_SLOTS, one in sixteen more for prompts ahead when some must wait, and in all no more than fits in four
fifths of the free memory; half of that, and all samples anew, whenever it runs out all the same.

Copy along: sampling.py, decoding/attention.py, decoding/prefill.py, decoding/decode.py, decoding/graph_decode.py,
decoding/stops.py. For the demo also model.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decoding.attention import KVCache, slots_that_fit
from decoding.decode import Decoder
from decoding.graph_decode import GraphDecoder, can_fuse
from decoding.prefill import PromptKeys
from decoding.stops import StopStrings
from sampling import Sampling, uniforms

__all__ = ["Completion", "Rollout", "Sampling"]

MAX_SLOTS = 256  # beyond, a decode step is compute-bound and a larger batch gains nothing
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NO_SAMPLE = -1


@dataclass
class Completion:
    """One sampled completion, token for token as it was drawn."""

    tokens: list[int]  # the stop id is included when it stopped
    logps: list[float]  # fp32 log-probs of the tokens under the distribution they were drawn from, nats
    entropies: list[float]  # of those distributions, nats
    stopped: bool  # by a stop id or string; False = truncated by length


class Rollout:
    """A KV cache with slots, filled by generate() and given back by free().

    max_len: tokens of prompt and completion together. slots: sequences at a time; None = what the samples and the free
    memory allow. kv_dtype: of the cache; None = the model's own, torch.float8_e4m3fn takes a byte. head: "16bit" or
    "nvfp4", see decoding/decode.py. tokenizer: for stop strings alone. prefill_tokens: of prompts, in one pass.
    """

    def __init__(
        self,
        model,
        *,
        max_len: int,
        slots: int | None = None,
        kv_dtype: torch.dtype | None = None,
        head: str = "16bit",
        tokenizer=None,
        prefill_tokens: int = 8192,
    ):
        if max_len < 2:
            raise ValueError(f"max_len={max_len} leaves no room for a prompt and a token; give at least 2")
        if slots is not None and slots < 1:
            raise ValueError(f"slots={slots} must be at least 1; leave it out to plan from free memory")
        self.model, self.config, self.max_len = model, model.config, max_len
        self.device = model.device
        self.kv_dtype = kv_dtype or model.dtype
        self.tokenizer, self.slots, self.prefill_tokens = tokenizer, slots, prefill_tokens
        self.decoder: Decoder | None = None
        self.keys: PromptKeys | None = None
        self.rows = self.planned_for = 0  # slots that run sequences; samples that they were planned for
        self.is_fused, self.head = can_fuse(model), head
        self.check_every, self.lag = (4, 1) if self.is_fused else (1, 0)  # steps between looks; looks in flight
        self.stats: dict[str, float] = {}

    # ------------------------------------------------------------------------------------------------- memory

    def plan_slots(self, samples: int) -> tuple[int, int]:
        """The memory rule for so many samples: slots that run sequences, and spare ones for prompts ahead."""
        rows = self.slots or batch_size_for(min(samples, MAX_SLOTS))
        spare = rows // 16 if samples > rows else 0
        if self.slots is None:
            fits = slots_that_fit(self.config, self.max_len, self.kv_dtype, self.device)
            if rows + spare > fits:
                rows, spare = fits - fits // 17, fits // 17
        return rows, spare

    def _allocate(self, samples: int) -> None:
        samples = min(samples, (self.slots or MAX_SLOTS) + 1)  # what more there are wait in the queue
        if self.decoder is not None and samples <= self.planned_for:
            return
        self.free()
        self.planned_for = samples
        self.rows, spare = self.plan_slots(samples)
        cache = KVCache(self.config, self.rows + spare, self.max_len, self.kv_dtype, self.device)
        tables = self.model.rope(self.max_len)
        self.decoder = (GraphDecoder if self.is_fused else Decoder)(self.model, cache, *tables, head=self.head)

    def free(self) -> None:
        """Give the cache back; the next generate() allocates it anew."""
        self.decoder = self.keys = None  # both hold it
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ----------------------------------------------------------------------------------------------- generate

    @torch.no_grad()  # not inference_mode: a weight cached by the model on the way must stay usable in training
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        group: int,
        sampling: Sampling,
        *,
        key: tuple[int, int] = (0, 0),
        prompt_keys: Sequence[int] | None = None,
        norm_weights: list[Tensor] | None = None,
        progress: Callable[[int, int, int], None] | None = None,
    ) -> list[list[Completion]]:
        """`group` completions of each prompt (token ids). key = (seed, step); prompt_keys default to 0..P-1.

        norm_weights: fp32 RMSNorm weights to sample with (AQN), None = the model's own.
        progress(done, total, tokens) is called every few tokens; what it raises ends the call.
        """
        started = time.perf_counter()
        self._check(prompts, group, sampling, prompt_keys)
        self.stats = dict.fromkeys(("tokens", "prefill_tokens", "decode_steps", "slots"), 0)
        self.stats |= dict.fromkeys(("seconds", "prefill_seconds", "tok_per_s"), 0.0)
        if not prompts:
            return []
        samples = len(prompts) * group
        self.prompts, self.group, self.sampling, self.progress = prompts, group, sampling, progress
        prompt_keys = range(len(prompts)) if prompt_keys is None else prompt_keys
        room = self.max_len - np.repeat([len(p) for p in prompts], group)
        self.limit = np.minimum(room, sampling.max_new_tokens)  # (P*G,) tokens
        uniform = np.zeros((samples, sampling.max_new_tokens), dtype=np.float32)
        if not sampling.is_greedy:
            for s, limit in enumerate(self.limit):
                uniform[s, :limit] = uniforms((*key, prompt_keys[s // group], s % group), limit)
        completions = self._complete(uniform, norm_weights)
        tokens = sum(len(c.tokens) for c in completions)
        seconds = time.perf_counter() - started
        on_cuda = self.device.type == "cuda"
        prefill = sum(a.elapsed_time(b) / 1e3 if on_cuda else b - a for a, b in self.prefills)
        self.stats |= {"tokens": tokens, "seconds": seconds, "tok_per_s": tokens / seconds, "prefill_seconds": prefill}
        self.stats |= {"slots": self.rows, "prefill_tokens": self.keys.tokens}
        return [completions[i : i + group] for i in range(0, samples, group)]

    def _check(self, prompts, group: int, sampling: Sampling, prompt_keys) -> None:
        if group < 1:
            raise ValueError(f"group={group} must be at least 1")
        if prompt_keys is not None and len(prompt_keys) != len(prompts):
            raise ValueError(f"{len(prompt_keys)} prompt_keys for {len(prompts)} prompts; give one each")
        if sampling.stop_strings and self.tokenizer is None:
            raise ValueError("stop_strings need a tokenizer; pass tokenizer= to Rollout, or use stop_ids")
        for i, prompt in enumerate(prompts):
            if not 0 < len(prompt) < self.max_len:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens; it must have at least 1 and, to leave room for a "
                    f"completion, fewer than max_len={self.max_len}: drop it, or raise max_len"
                )

    def _complete(self, uniform: np.ndarray, norm_weights: list[Tensor] | None) -> list[Completion]:
        """All samples; whenever memory runs out, all of them again in half the slots, to the same samples."""
        samples, strings = len(self.limit), self.sampling.stop_strings
        while True:
            try:
                self._allocate(samples)
                self.prefills, self.stats["decode_steps"] = [], 0
                self.decoder.begin(uniform, self.sampling, norm_weights)
                stops = StopStrings(self.tokenizer, strings, samples) if strings else None
                self._run(stops)
                return self._collect(stops)
            except torch.OutOfMemoryError:
                if self.rows == 1:
                    raise RuntimeError(f"out of memory with one sequence of max_len={self.max_len} at a time; lower "
                                       "--max-new-tokens or --max-prompt-tokens, or take a smaller model") from None  # fmt: skip
            # Here, not in the handler: there the traceback still holds the failed attempt's tensors.
            self.slots, self.prefill_tokens = self.rows // 2, max(1, self.prefill_tokens // 2)
            self.free()
            print(f"out of memory in the rollout: trying again with {self.slots} sequences at once", flush=True)

    def _run(self, stops: StopStrings | None) -> None:
        """The schedule: admit, launch a few steps, look at what has stopped, shrink; until every sample has ended."""
        samples, slots = len(self.limit), self.rows
        budget, norms = self.prefill_tokens, self.decoder.norm_weights
        self.keys = PromptKeys(self.model, self.decoder.cache, self.prompts, slots, budget, norms)
        self.queue = deque(range(samples))
        self.owner = np.full(slots, NO_SAMPLE)  # sample in each slot
        self.left = np.zeros(slots, dtype=np.int64)  # steps until the sample in the slot reaches its limit for certain
        self.ended, self.ended_tokens = np.zeros(samples, dtype=bool), 0
        self.batch = min(batch_size_for(samples), slots)
        looks: deque[tuple[np.ndarray, Tensor]] = deque()  # (who owned the rows, their done flags) in flight
        while not self.ended.all():
            self._admit()
            steps = min(self.check_every, int(self.left.max()))
            for _ in range(steps):
                self.decoder.step(self.batch)
            self.stats["decode_steps"] += steps
            self.left -= steps
            looks.append((self.owner[: self.batch].copy(), self.decoder.done(self.batch)))
            is_over = np.zeros(samples, dtype=bool)
            while len(looks) > self.lag:
                owner, done = looks.popleft()
                is_over[owner[(done.numpy() != 0) & (owner != NO_SAMPLE)]] = True
            is_over[self.owner[(self.left <= 0) & (self.owner != NO_SAMPLE)]] = True
            if stops is not None:
                cut = stops.scan(self.decoder, self.owner[self.owner != NO_SAMPLE])
                self.decoder.freeze_(np.flatnonzero(np.isin(self.owner, cut)).tolist())
                is_over[cut] = True
            self._end(is_over)
            self._tell()

    def _end(self, is_over: np.ndarray) -> None:
        """Free the slots of samples that are over (their rows are frozen), and shrink the batch when nothing waits."""
        rows = np.flatnonzero((self.owner != NO_SAMPLE) & is_over[self.owner])
        if not len(rows):
            return
        self.ended[self.owner[rows]] = True
        self.ended_tokens += int((self.limit[self.owner[rows]] - self.left[rows]).sum())
        self.owner[rows], self.left[rows] = NO_SAMPLE, 0
        self._shrink()

    def _tell(self) -> None:
        """Progress, at every look: a caller that wants to stop need not wait until a long completion ends."""
        if self.progress is not None:
            is_live = self.owner != NO_SAMPLE
            running = int((self.limit[self.owner[is_live]] - self.left[is_live]).sum())
            self.progress(int(self.ended.sum()), len(self.ended), self.ended_tokens + running)

    def _shrink(self) -> None:
        live = np.flatnonzero(self.owner != NO_SAMPLE)
        if self.queue or not len(live) or (batch := batch_size_for(len(live))) >= self.batch:
            return
        source = live[live >= batch]
        target = np.flatnonzero(self.owner[:batch] == NO_SAMPLE)[: len(source)]
        if len(source):
            self.decoder.move_(source.tolist(), target.tolist(), self._longest(self.owner[source]))
            self.owner[target], self.left[target] = self.owner[source], self.left[source]
            self.owner[source], self.left[source] = NO_SAMPLE, 0
        self.batch = batch

    def _longest(self, samples: np.ndarray) -> int:
        return max(len(self.prompts[s // self.group]) + int(self.limit[s]) for s in samples)

    # -------------------------------------------------------------------------------------------------- admit

    def _admit(self) -> None:
        """Move samples from the queue into free slots, with their prompts' keys and values."""
        free = [int(slot) for slot in np.flatnonzero(self.owner[: self.batch] == NO_SAMPLE)]
        placed: list[tuple[int, int]] = []  # (slot, sample)
        while free and self.queue:
            sample = self.queue.popleft()
            slot = self.keys.slot_for(sample // self.group, free)
            free.remove(slot)
            placed.append((slot, sample))
        if not placed:
            return
        started = self._mark()
        wanted = [(slot, sample // self.group) for slot, sample in placed]
        self.keys.bring_(wanted, self.queue[0] // self.group if self.queue else len(self.prompts))
        states = []
        for slot, sample in placed:
            prompt, limit = self.prompts[sample // self.group], int(self.limit[sample])
            at = len(prompt) - 1  # the last prompt token is the first decode step's input
            states.append((prompt[-1], at, at + limit - 1, sample * self.sampling.max_new_tokens - at, 0))
            self.owner[slot], self.left[slot] = sample, limit
        self.decoder.place_([slot for slot, _ in placed], states)
        self.prefills.append((started, self._mark()))

    def _mark(self) -> float | torch.cuda.Event:
        """Now, on the clock of the device: nobody waits for it."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    # ------------------------------------------------------------------------------------------------ results

    def _collect(self, stops: StopStrings | None) -> list[Completion]:
        tokens, logps, entropies = self.decoder.results()
        lengths = (tokens >= 0).sum(1)
        if stops is not None:
            stops.scan(self.decoder, np.arange(len(lengths)))
            lengths = np.minimum(lengths, stops.cut)
        if not all(np.isfinite(logps[s, :n]).all() for s, n in enumerate(lengths)):
            raise ValueError("the model gave NaN or infinite logits; check its weights and the adapter for NaN")
        completions = []
        for s, n in enumerate(lengths.tolist()):
            row = tokens[s, :n].tolist()
            stopped = row[-1] in self.sampling.stop_ids or (stops is not None and stops.is_cut(s))
            completions.append(Completion(row, logps[s, :n].tolist(), entropies[s, :n].tolist(), stopped))
        return completions


def batch_size_for(sequences: int) -> int:
    """The smallest batch that a decode step runs at and that holds so many sequences."""
    return next((size for size in BATCH_SIZES if size >= sequences), sequences)


def demo() -> None:
    """Two prompts, three samples each, through two slots and through six: the same tokens."""
    from model import ModelConfig, random_model

    model = random_model(ModelConfig("qwen2", 64, 2, 4, 2, 16, 128, 50, qkv_bias=True, tied=True))
    sampling = Sampling(max_new_tokens=8, stop_ids=(7,))
    for slots in (2, 6):
        rollout = Rollout(model, max_len=32, slots=slots)
        groups = rollout.generate([[1, 2, 3], [4, 5]], 3, sampling, key=(0, 1))
        print(f"{slots} slots, {rollout.stats['decode_steps']} steps:", [c.tokens for group in groups for c in group])


if __name__ == "__main__":
    demo()
