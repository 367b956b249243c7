"""One optimiser step from one rollout: packed log-probs, loss, exact accumulation, AdamW on the adapters.

    sequences (prompt, completion, rollout log-probs, advantage)
        |  split into `updates` mini-batches by group                  (the paper: 4 for GSM8K)
        |  if there are several: pi_old of the later ones, scored before the first update
        v
    each mini-batch:   token weights of the whole mini-batch            grpo.token_weights
        on several ranks: each takes a share of the mini-batch           distributed
        micro-batches of at most `token_budget` tokens                  packing
            one forward of prompt + completion -> hidden at the completion's positions only
            log-probs and entropy in chunks -> loss -> backward         logps, grpo
        gradients summed over ranks; their norm, clipped; AdamW with a warmed-up rate; adapters refreshed

pi_old is the clean policy (no noise) that the rollout started from. With one update per rollout it is the very policy
that is differentiated: pi_old = logp.detach(), no extra pass, and the ratio is exactly 1 while its gradient is not 0.
The sampler's own log-probs serve truncated importance sampling and the mismatch that is logged at every step.

What is left out: answers with an advantage of exactly 0 and no KL term have no gradient. They are not forwarded, but
keep their place in the denominators. A step in which nothing has a gradient changes nothing (not even by momentum).

Faults. A non-finite loss or gradient, on any rank: the update is skipped and counted; `max_bad_steps` in a row end the
run. Out of memory: gradients are dropped, kept activations given up, then the budget halved; one line says so, and the
share starts again, to the same result, without other ranks. What is kept is planned from memory (packing.plan_memory).

Optimiser: AdamW, betas 0.9 / 0.99 as in the authors' scripts (they use its 8-bit form; adapters are 1% of a model, so
fp32 moments cost little). Trainable tensors below fp32 (--full in bf16) get fp32 masters: at a rate of 1e-6 a bf16
weight of 0.02 would never move, its spacing being 1e-4.

Source: QeRL, arXiv 2510.11696, table 4 and algorithm 1; the loss is grpo.py's.
Cost: forward, dX, the recomputed forward of layers that keep nothing, the small GEMMs of the adapters; a KL, one forward.
Limits: the whole model on each device; a model is what has forward(tokens, attend).
Copy along: grpo.py, logps.py, lora.py, training/packing.py, training/distributed.py. For the demo also model.py.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import grpo
from logps import MAX_LOGITS, token_logps
from lora import adapters, sync_adapters
from training.distributed import ALONE, Ranks
from training.packing import MicroBatch, Sequence, SharedPromptAttention, pack, plan_memory

__all__ = ["Learner", "Sequence", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What a Learner reads of its settings; config.Config has all of these fields and serves as well."""

    algo: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    beta: float = 0.0
    tis: bool = True
    tis_cap: float = 2.0
    temperature: float = 1.0
    max_new_tokens: int = 4096  # Dr. GRPO's constant
    lr: float = 1e-5
    lr_schedule: str = "constant"
    warmup: float = 0.1  # share of the run, or a number of updates if 1 or more
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    steps: int = 200
    updates: int = 1  # a step
    token_budget: int | None = None
    recompute: bool | None = None  # False: keep all activations; None: on a GPU keep what memory allows
    max_bad_steps: int = 5


class Learner:
    """Owns the optimiser of a model's trainable parameters (adapters, or everything under --full)."""

    def __init__(self, model: nn.Module, settings, max_logits: int | None = None, ranks: Ranks = ALONE):
        self.model, self.settings, self.ranks = model, settings, ranks
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("the model has nothing to train; add adapters, or load it with full=True")
        # Tensors that AdamW steps: the parameter itself, or an fp32 master of a 16-bit one.
        self.masters = {name: p if p.dtype.itemsize >= 4 else p.detach().float() for name, p in self.parameters.items()}
        self.optimiser = torch.optim.AdamW(
            self.masters.values(), lr=settings.lr, betas=(0.9, 0.99), weight_decay=settings.weight_decay, fused=True)
        on_gpu = model.device.type == "cuda"
        model.checkpoint_layers = on_gpu if settings.recompute is None else settings.recompute
        self.max_logits = max_logits or (MAX_LOGITS if on_gpu else 2**21)  # a CPU's chunks should fit its caches
        self.token_budget, self.planned = settings.token_budget, False  # at the first use: the rollout's cache is gone then
        self.updates_done = 0  # attempted ones, skipped included: what the learning rate follows
        self.skipped = 0
        self.bad_in_row = 0

    # ---------------------------------------------------------------------------------------------- log-probs

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """log-probs (N,) and entropies (N,) of the completion tokens of a micro-batch."""
        attend = SharedPromptAttention(batch, *self.model.rope(batch.longest))
        hidden = self.model(batch.tokens, attend).index_select(0, batch.rows)  # (N, d): prompts are not scored
        return token_logps(hidden, self.model.head, batch.targets, self.settings.temperature, self.model.valid_vocab,
                           self.max_logits)

    @torch.no_grad()
    def score(self, sequences: list[Sequence], which: str = "policy") -> list[Tensor]:
        """fp32 log-probs of each completion under the "policy", "reference" or "off" adapter, without noise."""
        def attempt() -> list[Tensor]:
            scored: list[Tensor | None] = [None] * len(sequences)
            with adapters(self.model, which):
                for indices in pack(sequences, self.budget()):
                    batch = MicroBatch(sequences, indices, self.model.device)
                    for i, logp in zip(indices, self.forward(batch)[0].split(batch.lengths)):
                        scored[i] = logp
            return scored

        return self._with_memory(attempt, sequences)

    # ---------------------------------------------------------------------------------------------- updates

    def update(self, sequences: list[Sequence], measure_kl: bool = False) -> dict[str, float]:
        """All updates of one rollout, alike on all ranks; TRL's metrics, `kl` if asked. RuntimeError after too many bad ones."""
        minibatches = self._minibatches(sequences)
        shares = [self._share(minibatch) for minibatch in minibatches]
        # pi_old of the first mini-batch is what its own forward gives; the later ones are scored before anything moves.
        old = [None] + [self.score([m[i] for i in share]) for m, share in zip(minibatches[1:], shares[1:])]
        outcomes = [self._update_once(m, share, o, measure_kl) for m, share, o in zip(minibatches, shares, old)]
        parts = [part for outcome in outcomes for part in outcome["parts"]]
        if not any(map(self._has_gradient, sequences)):
            parts = [self._mismatch_only(sequences[:8])]
        counts = {name: sum(outcome[name] for outcome in outcomes) for name in ("train/tokens", "train/micro_batches")}
        trained = sum(len(part["entropy"]) for part in parts if "entropy" in part)  # tokens, all of them, not distinct ones
        metrics = self.ranks.merge(grpo.summarise(parts) | counts, weight=trained or 1, sums=tuple(counts))
        for name in ("loss", "grad_norm"):
            values = [outcome[name] for outcome in outcomes if name in outcome]
            if values:
                metrics[name] = sum(values) / len(values)
        metrics.update({
            "learning_rate": outcomes[-1]["learning_rate"],
            "train/updates": sum(outcome["moved"] for outcome in outcomes),
            "train/skipped_total": self.skipped,
        })
        return metrics

    def _mismatch_only(self, sequences: list[Sequence]) -> dict[str, Tensor]:
        """The sampler against the trainer, in a step where nothing is trained: it is logged at every step."""
        scored = [(s, logp) for s, logp in zip(sequences, self.score(sequences)) if len(s.rollout_logps) == len(logp)]
        if not scored:
            return {}
        sampled = torch.tensor([value for s, _ in scored for value in s.rollout_logps], device=self.model.device)
        return grpo.mismatch(torch.cat([logp for _, logp in scored]), sampled)

    def _minibatches(self, sequences: list[Sequence]) -> list[list[Sequence]]:
        """Consecutive parts of about equal size; a group stays whole if there are at least as many groups as parts."""
        updates = self.settings.updates
        if updates == 1:
            return [sequences]
        groups: list[list[Sequence]] = []
        for s in sequences:
            if not groups or groups[-1][0].prompt != s.prompt:
                groups.append([])
            groups[-1].append(s)
        units = groups if len(groups) >= updates else [[s] for s in sequences]
        count = min(updates, len(units))
        bounds = [len(units) * i // count for i in range(count + 1)]
        return [[s for unit in units[a:b] for s in unit] for a, b in zip(bounds, bounds[1:])]

    def _has_gradient(self, s: Sequence) -> bool:
        return s.is_trained and len(s.completion) > 0 and (s.advantage != 0.0 or self.settings.beta > 0)

    def _share(self, minibatch: list[Sequence]) -> list[int]:
        """Indices of the sequences that have a gradient and are this rank's to differentiate."""
        active = [i for i, s in enumerate(minibatch) if self._has_gradient(s)]
        return [active[i] for i in self.ranks.share([len(minibatch[i].completion) for i in active])]

    def _update_once(self, minibatch: list[Sequence], share: list[int], old: list[Tensor] | None, measure_kl: bool) -> dict:
        """One optimiser step; this rank differentiates its share, the denominators are those of the whole mini-batch."""
        settings = self.settings
        rate = self.learning_rate(self.updates_done)
        self.updates_done += 1
        outcome = {"parts": [], "learning_rate": rate, "train/tokens": 0, "train/micro_batches": 0, "moved": 0}
        if not any(map(self._has_gradient, minibatch)):
            return outcome
        lengths = torch.tensor([len(s.completion) for s in minibatch])
        trained = torch.tensor([s.is_trained for s in minibatch])
        weights = grpo.token_weights(lengths, trained, settings.algo, settings.max_new_tokens)
        active, weights = [minibatch[i] for i in share], weights[share]
        reference = self.score(active, "reference") if settings.beta > 0 or measure_kl else None
        outcome.update(self._with_memory(lambda: self._accumulate(active, weights, old, reference), active))
        return self._step(outcome, rate)

    def _accumulate(self, active: list[Sequence], weights: Tensor, old: list[Tensor] | None,
                    reference: list[Tensor] | None) -> dict:
        """Forward and backward of every micro-batch; gradients add up to those of the whole mini-batch."""
        settings = self.settings
        self._zero_grad()
        advantages = torch.tensor([s.advantage for s in active], dtype=torch.float32)
        total, parts, tokens = torch.zeros((), device=self.model.device), [], 0
        batches = pack(active, self.budget())
        for indices in batches:
            batch = MicroBatch(active, indices, self.model.device)
            logp, entropy = self.forward(batch)
            old_logp = logp.detach() if old is None else torch.cat([old[i] for i in indices])
            sampled = [value for i in indices for value in active[i].rollout_logps]
            extra, tis = {}, None
            if len(sampled) == len(logp):  # a batch made by hand may have none
                rollout_logp = torch.tensor(sampled, dtype=logp.dtype).to(logp.device)
                extra = grpo.mismatch(old_logp, rollout_logp)
                tis = grpo.tis_weight(old_logp, rollout_logp, settings.tis_cap) if settings.tis else None
            ref_logp = None if reference is None else torch.cat([reference[i] for i in indices])
            loss, part = grpo.policy_loss(
                logp, old_logp, batch.per_token(advantages), batch.per_token(weights), clip_low=settings.clip_low,
                clip_high=settings.clip_high, tis=tis, ref_logp=ref_logp, beta=settings.beta)
            loss.backward()
            total = total + loss.detach()
            tokens += len(batch.tokens)
            parts.append({**part, **extra, "entropy": entropy})
        return {"parts": parts, "loss": total, "train/tokens": tokens, "train/micro_batches": len(batches)}

    def _step(self, outcome: dict, rate: float) -> dict:
        """Sum over ranks, clip, check, step; a bad gradient leaves parameters and optimiser state as they were."""
        for name, master in self.masters.items():
            parameter = self.parameters[name]
            if master is not parameter and parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
        self.ranks.sum_gradients_(self.masters.values(), outcome["loss"])
        with_grad = [m for m in self.masters.values() if m.grad is not None]
        norm = nn.utils.clip_grad_norm_(with_grad, self.settings.max_grad_norm)
        outcome["loss"], outcome["grad_norm"] = torch.stack([outcome["loss"].float(), norm.float()]).tolist()
        if math.isfinite(outcome["loss"]) and math.isfinite(outcome["grad_norm"]):
            self.bad_in_row = 0
            for group in self.optimiser.param_groups:
                group["lr"] = rate
            self.optimiser.step()
            self._publish()
            outcome["moved"] = 1
        else:
            self.skipped += 1
            self.bad_in_row += 1
            if self.bad_in_row >= self.settings.max_bad_steps:
                raise RuntimeError(
                    f"{self.bad_in_row} updates in a row had a non-finite loss ({outcome['loss']}) or gradient "
                    f"({outcome['grad_norm']}); lower the learning rate {self.settings.lr:g}, or look at the rewards")
        self._zero_grad()
        return outcome

    def _publish(self) -> None:
        """Masters -> 16-bit parameters, fp32 adapters -> the operands that the kernels read."""
        with torch.no_grad():
            for name, master in self.masters.items():
                if master is not self.parameters[name]:
                    self.parameters[name].copy_(master)
        sync_adapters(self.model)

    def _zero_grad(self) -> None:
        for tensor in (*self.parameters.values(), *self.masters.values()):
            tensor.grad = None

    def learning_rate(self, update: int) -> float:
        """Of the 0-based update: linear warm-up, then constant or a half cosine to 0 at the end of the run."""
        s = self.settings
        total = s.steps * s.updates
        warmup = int(s.warmup) if s.warmup >= 1 else round(s.warmup * total)
        if update < warmup:
            return s.lr * (update + 1) / warmup
        if s.lr_schedule == "constant":
            return s.lr
        progress = min((update - warmup) / max(total - warmup, 1), 1.0)
        return s.lr * (1 + math.cos(math.pi * progress)) / 2

    # ---------------------------------------------------------------------------------------------- memory

    def budget(self) -> int:
        if not self.planned:
            # A chunk of logits with its coefficients; gradients, their bucket, and moments, which the first update allocates.
            reserve = 7 * self.max_logits + (12 if self.ranks.size == 1 else 16) * sum(m.numel() for m in self.masters.values())
            self.token_budget, kept = plan_memory(self.model, reserve, self.token_budget)
            self.model.kept_layers, self.planned = kept if self.settings.recompute is None else 0, True
        return self.token_budget

    def _with_memory(self, attempt, sequences: list[Sequence]):
        """attempt(); whenever memory runs out, again with every layer recomputed, then with half the token budget."""
        while True:
            try:
                return attempt()
            except torch.OutOfMemoryError:
                longest = max(len(s.prompt) + len(s.completion) for s in sequences)
                if self.budget() <= longest and not self.model.kept_layers:  # one sequence at a time already
                    raise RuntimeError(f"out of memory with a single sequence of {longest} tokens; lower "
                                       "--max-new-tokens or --max-prompt-tokens, or take a smaller model") from None
            # Here, not in the handler: there the traceback still holds the failed attempt's tensors.
            self._zero_grad()
            if self.model.kept_layers:
                self.model.kept_layers = 0
            else:
                self.token_budget = self.budget() // 2
            self.ranks.say(f"out of memory: trying again with micro-batches of {self.token_budget} tokens"
                           f"{', every layer recomputed' * self.model.checkpoint_layers}")
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()

    # ---------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict:
        """What a bit-exact continuation needs; the tensors are the live ones, so save before the next update."""
        return {
            "parameters": {name: master.detach() for name, master in self.masters.items()},
            "optimiser": self.optimiser.state_dict(),
            "counters": {"updates_done": self.updates_done, "skipped": self.skipped, "bad_in_row": self.bad_in_row,
                         "token_budget": self.token_budget},
        }

    def load_state_dict(self, state: dict) -> None:
        """Inverse of state_dict; ValueError if the state belongs to a model with other trainable tensors."""
        saved = state["parameters"]
        wrong = sorted(set(saved) ^ set(self.masters))
        wrong += [n for n in saved if n in self.masters and saved[n].shape != self.masters[n].shape]
        if wrong:
            raise ValueError(f"the saved optimiser state does not fit this model: {wrong[0]} and {len(wrong) - 1} more "
                             "differ; resume with the rank, targets and model of the run")
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(saved[name])
        self.optimiser.load_state_dict(state["optimiser"])
        for name in ("updates_done", "skipped", "bad_in_row", "token_budget"):
            setattr(self, name, None if state["counters"][name] is None else int(state["counters"][name]))
        self._publish()


def demo() -> None:
    """The same three updates in micro-batches of three sizes: the cut does not show."""
    from lora import add_adapters
    from model import ModelConfig, random_model

    config = ModelConfig("qwen2", 64, 2, 4, 2, 16, 128, 200, qkv_bias=True, tied=True)
    draw = torch.Generator().manual_seed(1)
    groups = [[torch.randint(200, (n,), generator=draw).tolist() for n in (12, 3, 20, 7)] for _ in range(4)]
    prompts = [torch.randint(200, (n,), generator=draw).tolist() for n in (9, 4, 15, 6)]
    scores = grpo.advantages(torch.rand(4, 4, generator=draw))
    step = [Sequence(prompt, completion, advantage=float(a))
            for prompt, group, row in zip(prompts, groups, scores) for completion, a in zip(group, row)]
    for budget in (1000, 60, 1):
        model = random_model(config, "nvfp4")
        add_adapters(model, 8, 8, generator=torch.Generator().manual_seed(0))
        learner = Learner(model, Settings(algo="dapo", lr=1e-2, warmup=0, token_budget=budget))
        norms = [learner.update(step)["grad_norm"] for _ in range(3)]
        print(f"budget {budget:4d} tokens: gradient norms of three updates " + ", ".join(f"{n:.6f}" for n in norms))


if __name__ == "__main__":
    demo()
