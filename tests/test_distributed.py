"""Several processes against one: the same update, the same samples, the same run; and nobody waits for the dead."""

import dataclasses
import os

import pytest
import torch
from processes import Processes

import distributed
import grpo
from learner import Learner, Sequence, Settings
from lora import add_adapters, lora_layers
from model import ModelConfig, random_model

SHAPE = ModelConfig("qwen2", 64, 2, 4, 2, 16, 128, 200, qkv_bias=True, tied=True)


def adapted():
    """A model whose adapters already do something."""
    model = random_model(SHAPE, "nvfp4")
    generator = torch.Generator().manual_seed(1)
    add_adapters(model, 4, 8, generator=generator)
    with torch.no_grad():
        for layer in lora_layers(model):
            for matrix in layer.lora_B.values():
                matrix.copy_(0.05 * torch.randn(matrix.shape, generator=generator))
            layer.sync_()
    return model


def ragged(groups=4, flat=(), truncated=(), lengths=(9, 1, 14, 4)):
    """Groups of ragged answers whose sampler differed a little."""
    generator = torch.Generator().manual_seed(2)
    sequences = []
    for g in range(groups):
        prompt = torch.randint(200, (3 + 5 * g,), generator=generator).tolist()
        rewards = torch.full((1, 4), 0.1) if g in flat else torch.rand(1, 4, generator=generator)
        for a, length in zip(grpo.advantages(rewards)[0].tolist(), lengths):
            completion = torch.randint(200, (length + 3 * g,), generator=generator).tolist()
            sequences.append(Sequence(prompt, completion, [], a, is_trained=len(sequences) not in truncated))
    clean = Learner(adapted(), Settings()).score(sequences)
    return [dataclasses.replace(s, rollout_logps=(logp + 0.1 * torch.randn(len(logp), generator=generator)).tolist())
            for s, logp in zip(sequences, clean)]


class Recorder(Learner):
    """Keeps the (unclipped) gradient of every update."""

    def _publish(self):
        self.__dict__.setdefault("gradients", []).append(torch.cat([m.grad.flatten() for m in self.masters.values()]))
        super()._publish()


def updates_are_those_of_one_process(cases: list[tuple[dict, dict]]) -> None:
    """In every rank: an update of one process and the same update of all; gradients of each mini-batch, weights, metrics.

    fp32 sums in another order differ by some 1e-7 of the largest. AdamW divides by the gradient's own size and makes more
    of it: later updates of a step start from weights that differ by 1e-8, and weights are compared at a small rate.
    """
    with distributed.join(os.environ) as ranks:
        for settings, data in cases:
            sequences, found = ragged(**data), []
            for who in (distributed.ALONE, ranks):
                learner = Recorder(adapted(), Settings(max_grad_norm=1e9, lr=1e-4, **settings), ranks=who)
                metrics = learner.update(sequences)
                found.append((learner.gradients, torch.cat([p.detach().flatten() for p in learner.masters.values()]), metrics))
            (alone, weights, metrics), (together, same_weights, same_metrics) = found
            assert len(alone) == len(together) == settings.get("updates", 1)
            for update, (a, b) in enumerate(zip(alone, together)):
                off = ((a - b).abs().max() / a.abs().max()).item()
                assert off <= (5e-6 if update else 1e-6), (settings, update, off)
            assert (weights - same_weights).abs().max() <= 1e-6
            assert metrics.keys() == same_metrics.keys()
            for name in metrics.keys() - {"train/micro_batches", "train/tokens"}:  # a prompt that is cut counts twice
                assert metrics[name] == pytest.approx(same_metrics[name], rel=1e-4, abs=1e-6), name
            ranks.check_same("weights", lambda w=same_weights: w.tolist())
            ranks.check_same("metrics", lambda m=same_metrics: m)


@pytest.mark.parametrize("size", [2, 4])
def test_an_update_is_that_of_one_process(size):
    """Ragged lengths, flat and truncated answers, several mini-batches, KL; and answers for fewer ranks than there are."""
    Processes(size, updates_are_those_of_one_process, [
        (dict(algo="grpo"), dict(flat=(1,), truncated=(2, 9))),
        (dict(algo="dapo", updates=2, beta=0.05), dict(truncated=(0,))),
        (dict(algo="dr_grpo", token_budget=20, tis=False), dict(flat=(0,))),
        (dict(algo="grpo", updates=4), dict()),
        (dict(algo="dapo"), dict(groups=1, truncated=(0, 1, 2))),  # one answer trains: the other ranks have nothing
    ]).succeed()


def nothing_to_train_and_faults() -> None:
    with distributed.join(os.environ) as ranks:
        def fresh(**settings):
            learner = Recorder(adapted(), Settings(lr=1e-2, **settings), ranks=ranks)
            return learner, distributed.byte_sums(learner.masters.values())

        learner, before = fresh()
        metrics = learner.update(ragged(groups=2, flat=(0, 1)))  # nobody has a gradient: nothing moves, nobody waits
        assert metrics["train/updates"] == 0 and distributed.byte_sums(learner.masters.values()) == before
        assert metrics["sampling/sampling_logp_difference/mean"] > 0

        learner, before = fresh(max_bad_steps=2)
        bad = ragged()
        bad[0] = dataclasses.replace(bad[0], advantage=float("nan"))  # is rank 0's alone
        assert learner.update(bad)["train/skipped_total"] == 1 and distributed.byte_sums(learner.masters.values()) == before
        try:
            learner.update(bad)
            raise AssertionError("no error after two bad updates")
        except RuntimeError as error:
            assert "non-finite" in str(error)

        plain, _ = fresh()
        plain.update(ragged())
        starved, _ = fresh()
        forward, calls = starved.forward, []

        def forward_without_memory(batch):
            calls.append(len(batch.tokens))
            if ranks.rank == ranks.size - 1 and len(calls) == 1:
                raise torch.OutOfMemoryError("injected")
            return forward(batch)

        starved.forward = forward_without_memory  # one rank tries again; the others do not hear of it
        starved.update(ragged())
        assert (plain.gradients[0] - starved.gradients[0]).abs().max() <= 1e-6 * plain.gradients[0].abs().max()


def test_what_is_not_finite_or_does_not_fit_on_one_rank_stops_nobody():
    run = Processes(2, nothing_to_train_and_faults)
    run.succeed()
    assert "rank 1: out of memory" in run.log(1) and "out of memory" not in run.log(0)
