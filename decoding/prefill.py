"""Where the keys and values of prompts are in the cache, and how they get there: each prompt is computed once.

A group's G samples share their prompt. Its keys fill the first positions of some slot; from there they are copied, and a
slot that ran a sample of the same prompt has them in place already (decoding writes behind the prompt only):

    held     slot 0: prompt 3    slot 1: prompt 3    slot 2: prompt 4    ...    spare slots: prompts 5, 6

    wanted   slot 1 <- prompt 3    in place                     samples enter in order, so a prompt stays in some slot
             slot 0 <- prompt 4    copied from slot 2           until its last sample has started
             slot 4 <- prompt 5    copied from a spare slot
             slot 2 <- prompt 7    prefilled; and, since a pass is under way, prompts 8, 9 ahead into spare slots

All but the last token of a prompt go through the model in one pass, padding-free, several prompts packed up to a budget
of tokens; the last token is the first decode step's input, so prefill needs no logits. A pass of one prompt of 255
tokens takes the host longer to launch than a GPU to run; that is why a few prompts are computed ahead.

Order of events: copies first (their sources may be overwritten), then prefill, then copies of what was prefilled.
Where we differ from prefix caches (SGLang, arXiv 2312.07104): a prompt is shared with its own group, and as a whole.
Cost: one slot in sixteen more memory when samples wait. Limits: two prompts with the same beginning compute it twice.
Copy along: decoding/attention.py. For the demo also model.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from decoding.attention import KVCache, PrefillAttention

NOTHING = -1


class PromptKeys:
    """The prompts of one rollout in its cache; slots from `rows` on are spare."""

    def __init__(self, model, cache: KVCache, prompts: Sequence[Sequence[int]], rows: int, budget: int, norm_weights):
        self.model, self.cache, self.prompts, self.rows, self.budget = model, cache, prompts, rows, budget
        self.norm_weights: list[Tensor] | None = norm_weights
        self.held = np.full(cache.slots, NOTHING)  # prompt in each slot
        self.longest = max(len(prompt) for prompt in prompts) - 1
        self.tokens = self.passes = 0

    def slot_for(self, prompt: int, free: list[int]) -> int:
        """The free slot that holds the prompt already, else the first one."""
        return next((slot for slot in free if self.held[slot] == prompt), free[0])

    def bring_(self, wanted: list[tuple[int, int]], next_prompt: int) -> None:
        """Give every (slot, prompt) its keys and values. Prompts from next_prompt on still have samples that wait."""
        resident = {int(prompt): slot for slot, prompt in enumerate(self.held) if prompt != NOTHING}
        fresh: dict[int, int] = {}  # prompt -> slot to prefill it into
        early, late = [], []  # (source, target) of prompts that are here already, and of fresh ones
        for slot, prompt in wanted:
            if prompt in fresh:
                late.append((fresh[prompt], slot))
            elif prompt not in resident:
                fresh[prompt] = slot
            elif self.held[slot] != prompt:
                early.append((resident[prompt], slot))
        if fresh:
            fresh |= self._ahead(next_prompt, resident.keys() | fresh.keys())
        self._copy(early)
        self._prefill(fresh)
        self._copy(late)
        for slot, prompt in wanted:
            self.held[slot] = prompt
        for prompt, slot in fresh.items():
            self.held[slot] = prompt

    def _ahead(self, next_prompt: int, here: set[int]) -> dict[int, int]:
        """The next prompts that are not here yet, for the spare slots that nobody waits for."""
        spare = [slot for slot in range(self.rows, len(self.held)) if self.held[slot] < next_prompt]
        coming = (prompt for prompt in range(next_prompt, len(self.prompts)) if prompt not in here)
        return dict(zip(coming, spare))

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        self.cache.copy_([source for source, _ in pairs], [target for _, target in pairs], self.longest)

    def _prefill(self, fresh: dict[int, int]) -> None:
        """All but the last token of each prompt through the model, into its slot."""
        jobs = [(self.prompts[prompt][:-1], slot) for prompt, slot in fresh.items() if len(self.prompts[prompt]) > 1]
        while jobs:
            size, tokens = 0, 0
            while size < len(jobs) and (size == 0 or tokens + len(jobs[size][0]) <= self.budget):
                tokens += len(jobs[size][0])
                size += 1
            pack, jobs = jobs[:size], jobs[size:]
            rope = self.model.rope(self.cache.max_len)
            attend = PrefillAttention(self.cache, [slot for _, slot in pack], [len(prompt) for prompt, _ in pack], *rope)
            flat = torch.tensor([token for prompt, _ in pack for token in prompt], device=self.model.device)
            self.model(flat, attend, self.norm_weights)
            self.tokens, self.passes = self.tokens + tokens, self.passes + 1


def demo() -> None:
    """Four prompts, two samples each, enter two slots one after the other; one spare slot."""
    from model import ModelConfig, random_model

    model = random_model(ModelConfig("qwen2", 32, 2, 4, 2, 8, 64, 40, tied=True))
    keys = PromptKeys(model, KVCache(model.config, 3, 8, torch.float32, "cpu"), [[1, 2, 3]] * 4, 2, 64, None)
    with torch.no_grad():
        for sample in range(8):
            passes, slot = keys.passes, keys.slot_for(sample // 2, [sample % 2])
            keys.bring_([(slot, sample // 2)], (sample + 1) // 2)
            how = "prefilled" if keys.passes > passes else "in place or copied"
            print(f"sample {sample // 2}.{sample % 2} in slot {slot}: {how}; held now {keys.held.tolist()}")


if __name__ == "__main__":
    demo()
