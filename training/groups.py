"""What a step works on: which problems come next, their groups of completions, and the numbers that describe them.

Group-relative training compares the G completions of one prompt with each other, so the group is the unit of everything
between rollout and update:

    DataOrder ──places──> P problems ──rollout──> Groups    P lists of G completions, texts, rewards, verdicts
                                                    │
                      with_signal: the groups whose rewards differ (DAPO keeps these; the others push nothing)
                      describe:    reward, pass rate, workings, lengths, entropy of the step, under TRL's names

The order is an endless sequence of shuffled passes, a function of (seed, epoch): a cursor is its whole state, and a place in
it, which occurs once in a run, names the random streams of its samples.  A problem that comes again in the same step (few
problems, many prompts) therefore gets other samples.

Cost: none.  Limits: the whole data set's indices are shuffled at once, 8 bytes each.
Copy along: grpo.py, problems/tasks.py, training/distributed.py, grading/working.py. Of each it needs one name: has_signal,
Problem, undeal, share_that_holds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import grpo
from grading.working import share_that_holds
from problems.tasks import Problem
from training.distributed import undeal


class DataOrder:
    """Endless shuffled passes over n problems; the order is a function of (seed, epoch), so a cursor is its whole state."""

    def __init__(self, n: int, seed: int):
        self.n, self.seed, self.cursor = n, seed, 0
        self.epoch, self.order = -1, []

    def take(self, count: int) -> dict[int, int]:
        """The next `count` places in the order -> problem indices; a place occurs once in a run, a problem once an epoch."""
        taken = {}
        for place in range(self.cursor, self.cursor + count):
            epoch, index = divmod(place, self.n)
            if epoch != self.epoch:
                self.epoch, self.order = epoch, list(range(self.n))
                random.Random(f"{self.seed}/{epoch}/order").shuffle(self.order)
            taken[place] = self.order[index]
        self.cursor += count
        return taken


@dataclass
class Groups:
    """P prompts with G completions each: lists of length P, whose items are lists of length G where there is one a sample."""

    problems: list[Problem]
    prompts: list[list[int]]  # token ids
    completions: list[list]  # rollout.Completion
    texts: list[list[str]]
    rewards: list[list[float]]
    correct: list[list[bool]]

    def pick(self, keep: list[int]) -> Groups:
        return Groups(*([values[i] for i in keep] for values in vars(self).values()))

    def __add__(self, other: Groups) -> Groups:
        return Groups(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))

    def __len__(self) -> int:
        return len(self.problems)

    @staticmethod
    def undeal(parts: Sequence[Groups]) -> Groups:
        """The groups of all ranks in the order of their places."""
        return Groups(*(undeal(values) for values in zip(*(vars(part).values() for part in parts))))

    @property
    def tokens(self) -> int:
        """Sampled ones."""
        return sum(len(c.tokens) for group in self.completions for c in group)


def with_signal(groups: Groups) -> list[int]:
    """Indices of the groups whose rewards differ: those that DAPO's dynamic sampling keeps."""
    return grpo.has_signal(torch.tensor(groups.rewards)).nonzero().flatten().tolist()


def describe(groups: Groups) -> dict:
    """What the step's samples look like; TRL's names."""
    rows = torch.tensor(groups.rewards)  # (P, G)
    completions = [c for group in groups.completions for c in group]
    lengths = torch.tensor([len(c.tokens) for c in completions], dtype=torch.float32)
    stopped = torch.tensor([c.stopped for c in completions])
    right = [text for texts, verdicts in zip(groups.texts, groups.correct) for text, is_right in zip(texts, verdicts) if is_right]
    return {
        "reward": rows.mean().item(), "reward_std": rows.std(1).mean().item(),
        "pass_rate": torch.tensor(groups.correct).float().mean().item(), "working": share_that_holds(right),
        "frac_reward_zero_std": 1 - len(with_signal(groups)) / len(groups),
        "completions/mean_length": lengths.mean().item(), "completions/min_length": lengths.min().item(),
        "completions/max_length": lengths.max().item(), "completions/clipped_ratio": 1 - stopped.float().mean().item(),
        "completions/mean_terminated_length": lengths[stopped].mean().item(),  # NaN, null in the log, when none ended
        "entropy": sum(sum(c.entropies) for c in completions) / max(1.0, lengths.sum().item()),
    }


def demo() -> None:
    """Four problems, two epochs: every problem once a pass, every place once in all."""
    order = DataOrder(4, seed=0)
    for step in range(3):
        print(f"step {step}: place -> problem {order.take(3)}")
    again = DataOrder(4, seed=0)
    again.cursor = 6
    print("resumed at place 6:", again.take(3))


if __name__ == "__main__":
    demo()
