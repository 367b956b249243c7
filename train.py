"""QeRL from NVFP4 weights to a saved adapter: the whole loop, stage by stage.

    python train.py                                  the main job: a tiny model learns arithmetic in minutes, on a CPU
    python train.py --model Qwen2.5-7B               GSM8K with the paper's settings, on one GPU
    python train.py --resume --out runs/...          go on where a run stopped, bit for bit on a CPU
    torchrun --nproc-per-node 8 train.py ...         the same on eight GPUs: the same prompts a step, dealt to the ranks

One step of the loop, and where each part lives:

    1 prompts ──> 2 noise ──> 3 rollout ──> 4 rewards ──> 5 advantages ──> 6 update ──> 7 report, evaluate, save
      tasks         aqn         rollout       rewards        grpo            learner       report, eval, checkpoint
                     │             │                                           │
              noisy norms ────> sampled with          trained with <── clean norms, the same 4-bit base
                                log-probs kept ────────────────────> truncated importance sampling

There is one copy of the quantised weights in the process; sampler and trainer both read it, so nothing is ever synchronised.
The sampler sees the noise, the trainer does not (QeRL, arXiv 2510.11696, algorithm 1).  Every random draw is a function of
(seed, step, ...), so a step can be repeated and a run resumed without saving a generator (files/checkpoint.py).

Ctrl-C stops at the next safe point (inside a rollout, or after the update that is under way), saves, and says how to go on.

Under torchrun every rank runs this loop on the same groups (training/distributed.py): a `ranks.` below is where they meet
or differ.

Source: QeRL, algorithm 1; GRPO (arXiv 2402.03300), algorithm 1. Where we differ: the README lists it.
Cost: each step's line says what rollout and update took. Limits: one turn a prompt, answers that a program can check, no
critic, the whole model on each GPU.
Copy along: aqn.py, grpo.py, lora.py, rollout.py, eval.py, convert/loader.py, convert/merge.py, problems/tasks.py,
grading/rewards.py, files/checkpoint.py, training/config.py, training/groups.py, training/learner.py,
training/distributed.py, training/report.py. This file is the wiring of them all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch

import aqn
import grpo
from convert.loader import load_model, pick_device
from convert.merge import save_model
from eval import evaluate
from files import checkpoint
from grading import rewards
from lora import add_adapters, freeze_reference, load_adapter, lora_layers, save_adapter
from problems import tasks
from rollout import Rollout, Sampling
from training import config, distributed
from training.config import Config
from training.distributed import ALONE, Ranks
from training.groups import DataOrder, Groups, describe, with_signal
from training.learner import Learner, Sequence
from training.report import Report, Silence, environment, one_line, peak_gib


def stream(seed: int, step: int, purpose: str) -> torch.Generator:
    """The generator of one purpose at one step: its state is a function of its arguments, so none is ever saved."""
    digest = hashlib.sha256(f"{seed}/{step}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


class Trainer:
    """Everything a run holds.  The constructor does all that can fail early, cheapest first; `run` is the loop."""

    def __init__(self, cfg: Config, saved: dict | None, ranks: Ranks = ALONE):
        self.cfg, self.out, self.device, self.ranks = cfg, Path(cfg.out), pick_device(cfg.device), ranks
        self.interrupt = checkpoint.Interrupt()
        ranks.use(self.device, self.interrupt)
        self.inputs = config.input_hashes(cfg, saved)
        self.custom = rewards.CustomReward(cfg.reward, cfg.reward_timeout) if cfg.reward else None
        torch.set_num_threads(cfg.threads or torch.get_num_threads())
        self.problems = tasks.load_problems(cfg.data, "train", seed=cfg.seed, levels=cfg.levels)
        names = [name for name in cfg.eval_data.split(",") if name != "none"] if cfg.eval_every else []
        self.held_out = {name: tasks.load_problems(name, "test", limit=cfg.eval_limit) for name in names}

        self.model, self.tokenizer, self.info = load_model(cfg.model, weights=cfg.weights, device=self.device, full=cfg.full)
        self.model.checkpoint_layers = cfg.recompute if cfg.recompute is not None else self.device == "cuda"
        if cfg.adapter:
            load_adapter(self.model, cfg.adapter)
            freeze_reference(self.model)  # the KL term then holds the policy near the adapter it started from
        elif not cfg.full:
            add_adapters(self.model, cfg.rank, cfg.alpha, set(config.target_names(cfg)),
                         generator=stream(cfg.seed, 0, "adapter"))

        def fits(problems, name):  # prompts over the limit are left out and counted, never cut
            return tasks.fitting(problems, self.tokenizer, cfg.instruction, cfg.max_prompt_tokens, name)

        self.problems, self.encoded = fits(self.problems, cfg.data)
        ranks.check_same("the data", lambda: [self.inputs, len(self.problems), self.encoded[-1]])
        longest = max(map(len, self.encoded))
        for name, problems in self.held_out.items():
            self.held_out[name], ids = fits(problems, name)
            longest = max(longest, *map(len, ids))
        self.order = DataOrder(len(self.problems), cfg.seed)
        self.sampling = Sampling(cfg.max_new_tokens, cfg.temperature, stop_ids=self.info.stop_ids,
                                 stop_strings=(cfg.stop,) if cfg.stop else ())
        self.rollout = Rollout(self.model, max_len=longest + max(cfg.max_new_tokens, cfg.eval_max_new_tokens),
                               slots=cfg.slots, kv_dtype=torch.float8_e4m3fn if cfg.kv_dtype == "fp8" else None,
                               tokenizer=self.tokenizer)
        self.learner = Learner(self.model, cfg, ranks=ranks)
        self.grader = rewards.Grader()
        self.step, self.saved = 0, None  # steps that are complete; those of the last checkpoint
        if cfg.resume:
            self.restore()
        frozen = [tensor for layer in lora_layers(self.model) for tensor in layer.weight.stored()]
        ranks.check_same("the model", lambda: distributed.byte_sums([*frozen, *self.model.parameters()]))
        self.report = Report(self.out, cfg) if ranks.is_first else Silence()
        self.report.rows = ranks.first(lambda: self.report.rows)
        self.num_tokens = self.report.rows[-1].get("num_tokens", 0) if self.report.rows else 0

    # ------------------------------------------------------------------------------------------------ the loop

    def run(self) -> None:  # all steps that are left; a stop at a safe point saves
        try:
            self.loop()
        except checkpoint.SafeStop:
            self.save()
            raise

    def loop(self) -> None:
        cfg, rows = self.cfg, self.report.rows
        if self.step == 0 and not rows:
            self.report.step({"step": 0, **self.evaluate()})
        elif rows and self.is_evaluation_due() and not any(name.startswith("eval/") for name in rows[-1]):
            self.report.complete(self.evaluate())  # Ctrl-C came in the middle of it
        while self.step < cfg.steps:
            started, cursor = time.perf_counter(), self.order.cursor
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            try:
                groups, metrics = self.collect()  # 1-4
            except KeyboardInterrupt:
                self.order.cursor = cursor  # the step did not happen: its prompts come again
                raise
            metrics |= self.learn(groups)  # 5-6
            self.step += 1
            self.num_tokens += int(metrics.pop("tokens"))
            metrics |= {"step": self.step, "step_time": time.perf_counter() - started, "num_tokens": self.num_tokens,
                        "memory/peak_gib": max(self.ranks.gather(peak_gib(self.device)))}
            try:
                metrics |= self.evaluate() if self.is_evaluation_due() else {}
            finally:  # Ctrl-C may come in the middle of it, but the step is complete
                self.report.samples(self.step, [p.prompt for p in groups.problems], groups.texts, groups.rewards,
                                    show=bool(cfg.sample_every) and self.step % cfg.sample_every == 0)
                self.report.step(metrics)  # 7
            if self.step == cfg.steps or self.step % cfg.checkpoint_every == 0:
                self.save()
            self.ranks.together(self.interrupt.check)
        self.export()
        self.report.draw()
        self.report.say(f"done: {self.out / ('model' if cfg.full else 'adapter')}, curves in {self.out / 'curves.png'}")

    def collect(self) -> tuple[Groups, dict]:
        """Stages 1 to 4: prompts, noise, rollout, rewards.  DAPO draws again, in bounds, for groups without a signal."""
        cfg, started = self.cfg, time.perf_counter()
        sigma = aqn.sigma_at(self.step, cfg.steps, cfg.noise, cfg.sigma_start, cfg.sigma_end, cfg.stages)
        clean = self.model.noisy_norms_targets()
        noisy = aqn.noisy_norms(clean, sigma, stream(cfg.seed, self.step, "noise")) if sigma else None
        count, rms = aqn.applied_rms(clean, noisy or [])
        aqn.check_applied(sigma, len(clean), count, rms)

        sampled, seconds = self.sample(self.order.take(cfg.prompts), noisy)
        chosen, rounds = sampled, 1
        if cfg.algo == "dapo":
            chosen = sampled.pick(with_signal(sampled))
            while len(chosen) < cfg.prompts and rounds <= cfg.resample:
                more, more_seconds = self.sample(self.order.take(cfg.prompts), noisy)
                sampled, seconds, rounds = sampled + more, seconds + more_seconds, rounds + 1
                chosen = chosen + more.pick(with_signal(more))
            # Filled up with flat groups when the rounds ran out: they weigh in the denominator and push nothing.
            chosen = chosen + sampled.pick([i for i in range(len(sampled)) if i not in set(with_signal(sampled))])
            chosen = chosen.pick(list(range(min(cfg.prompts, len(chosen)))))
        metrics = describe(sampled) | {
            "noise/sigma": sigma, "noise/norms": count, "noise/applied_rms": rms, "rollout/rounds": rounds,
            "tokens": sampled.tokens, "rollout/tok_per_s": sampled.tokens / seconds,
            "rollout/seconds": time.perf_counter() - started, "rollout/slots": self.rollout.stats["slots"]}
        if self.custom:
            metrics["rewards/failed_total"] = self.custom.check_step(self.ranks.gather)
        return chosen, metrics

    def sample(self, places: dict[int, int], noisy: list[torch.Tensor] | None) -> tuple[Groups, float]:
        """Stages 3 and 4 on all ranks: the groups of these places, in their order, and the seconds of the longest rollout."""
        parts = self.ranks.together(lambda: self.sample_part(dict(self.ranks.deal(list(places.items()))), noisy))
        groups, seconds = zip(*parts)
        return Groups.undeal(groups), max(seconds)

    def sample_part(self, places: dict[int, int], noisy: list[torch.Tensor] | None) -> tuple[Groups, float]:
        """This rank's part: G completions of each problem under the noisy norms, and their rewards."""
        cfg = self.cfg
        problems, prompts = [self.problems[i] for i in places.values()], [self.encoded[i] for i in places.values()]
        with self.report.bar(len(places) * cfg.group, f"rollout of step {self.step + 1}") as bar:
            def progress(done: int, total: int, tokens: int) -> None:
                self.interrupt.check()
                bar.update(done - bar.n)

            completions = self.rollout.generate(prompts, cfg.group, self.sampling, key=(cfg.seed, self.step),
                                                prompt_keys=list(places), norm_weights=noisy, progress=progress)
        texts = [[self.tokenizer.decode(c.tokens, skip_special_tokens=True) for c in group] for group in completions]
        calls = [dict(prompt=p.prompt, completion=text, answer=p.answer)
                 for p, group in zip(problems, texts) for text in group]
        correct = self.grader.grade_many([(call["completion"], call["answer"]) for call in calls])
        values = self.custom.score(calls) if self.custom else [float(c) for c in correct]
        if cfg.overlong_buffer:
            lengths = torch.tensor([len(c.tokens) for group in completions for c in group])
            penalties = grpo.overlong_penalty(lengths, cfg.max_new_tokens, cfg.overlong_buffer).tolist()
            values = [value + penalty for value, penalty in zip(values, penalties)]
        g = cfg.group
        groups = Groups(problems, prompts, completions, texts, [values[i : i + g] for i in range(0, len(values), g)],
                        [correct[i : i + g] for i in range(0, len(correct), g)])
        return groups, self.rollout.stats["seconds"]

    def learn(self, groups: Groups) -> dict:
        """Stages 5 and 6: advantages within each group, then the update on the clean policy."""
        cfg, started = self.cfg, time.perf_counter()
        advantages = grpo.advantages(torch.tensor(groups.rewards), "none" if cfg.algo == "dr_grpo" else "std")
        sequences = [Sequence(p, c.tokens, c.logps, float(a), is_trained=c.stopped or not cfg.mask_truncated)
                     for p, group, row in zip(groups.prompts, groups.completions, advantages) for c, a in zip(group, row)]
        if self.device == "cuda":
            self.rollout.free()  # its memory is the trainer's now
            if not self.learner.planned:
                self.report.say(f"memory: {self.rollout.rows} completions at once; micro-batches of {self.learner.budget():,} "
                                f"tokens, {self.model.kept_layers} of {len(self.model.layers)} layers keep their activations")
        metrics = self.learner.update(sequences, self.is_kl_due())
        metrics["train/entropy"] = metrics.pop("entropy", float("nan"))  # of the groups that train; `entropy` is the sampler's
        metrics["train/seconds"] = time.perf_counter() - started
        return metrics | {"train/tok_per_s": metrics["train/tokens"] / metrics["train/seconds"]}

    def is_kl_due(self) -> bool:  # in the step under way; in the first it is 0 if there is one update
        number, every = self.step + 1, self.cfg.log_kl_every
        return every > 0 and (number in (1, self.cfg.steps) or number % every == 0)

    def is_evaluation_due(self) -> bool:
        return bool(self.held_out) and (self.step == self.cfg.steps or self.step % self.cfg.eval_every == 0)

    def evaluate(self) -> dict:
        """Greedy pass@1 on every held-out set, without noise, under the present adapter."""
        results = {}
        for name, problems in self.held_out.items():
            with self.report.bar(len(self.ranks.deal(problems)), f"eval {name}") as bar:
                def progress(done: int, total: int, tokens: int, bar=bar) -> None:
                    self.interrupt.check()
                    bar.update(done - bar.n)

                found = evaluate(self.rollout, problems, self.tokenizer, self.grader, stop_ids=self.info.stop_ids,
                                 temperature=0.0, max_new_tokens=self.cfg.eval_max_new_tokens,
                                 instruction=self.cfg.instruction, progress=progress, ranks=self.ranks)
            prefix = "eval/" if len(self.held_out) == 1 else f"eval/{name}/"
            results |= {prefix + key: value for key, value in found.items() if isinstance(value, int | float)}
            if name == next(iter(self.held_out)):  # the first set is the one that plots and tools look for
                results |= {"eval/pass@1": found["pass@1"], "eval/pass@1_stderr": found["pass@1_stderr"]}
        return results

    # ------------------------------------------------------------------------------------------------ save, restore

    def save(self) -> None:
        """The checkpoint first (atomic), then the adapter for other programs; from rank 0, whose state is everybody's."""
        if self.saved == self.step:
            return
        self.ranks.check_same("the trained state", lambda: distributed.byte_sums(self.learner.masters.values()))
        self.saved = self.step
        if self.ranks.is_first:
            tensors, numbers = checkpoint.flatten(self.learner.state_dict())
            checkpoint.save(self.out, self.step, tensors, {"cursor": self.order.cursor, "learner": numbers})
        if not self.cfg.full:
            self.export()

    def export(self) -> None:
        """What was trained, for other programs: the adapter in PEFT format, or the whole model."""
        if self.ranks.is_first and self.cfg.full:
            save_model(self.model, self.cfg.model, self.out / "model")
        elif self.ranks.is_first:
            save_adapter(self.model, self.out / "adapter", self.cfg.model)

    def close(self) -> None:
        self.grader.close()
        if self.custom:
            self.custom.close()
        self.interrupt.close()

    def restore(self) -> None:
        """The last checkpoint, read by rank 0 and given to the others, however many there were when it was written."""
        tensors, numbers = (checkpoint.load_latest(self.out) if self.ranks.is_first else None) or (None, None)
        if self.ranks.is_first and numbers is None and checkpoint.step_folders(self.out):
            raise ValueError(f"{self.out} holds no usable checkpoint to resume from; start anew in another --out")
        numbers = self.ranks.first(lambda: numbers)
        if numbers is not None:
            tensors = self.ranks.first_tensors(tensors)
            try:
                self.learner.load_state_dict(checkpoint.unflatten(tensors, numbers["learner"]))
                self.step, self.order.cursor = numbers["step"], int(numbers["cursor"])
            except (LookupError, TypeError, AttributeError, RuntimeError) as error:
                raise ValueError(f"the checkpoint of step {numbers['step']} in {self.out} was not written by this run "
                                 f"({one_line(error)}); start anew in another --out") from None
            self.saved = self.step
        if self.ranks.is_first:
            for name in ("metrics.jsonl", "samples.jsonl"):  # nothing stays of a run that was killed before its first one
                checkpoint.cut_log(self.out / name, -1 if numbers is None else self.step)
        print(f"resuming {self.out} after step {self.step}")


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 the run failed, 2 the request cannot be carried out, 130 interrupted and saved."""
    with distributed.join(os.environ) as ranks:
        return work(argv, ranks)


def work(argv: list[str] | None, ranks: Ranks) -> int:
    """One rank's whole life; rank 0 alone reads the command line, holds the run folder, and writes."""
    lock = None
    try:
        cfg, saved = ranks.first(lambda: config.prepare(config.parse(argv), ranks.size))
        lock = checkpoint.lock_run(Path(cfg.out)) if ranks.is_first else None
        trainer = Trainer(cfg, saved, ranks)
        if saved is None and ranks.is_first:
            record = {"config": dataclasses.asdict(cfg), **trainer.inputs, **environment(trainer.device), "ranks": ranks.size}
            checkpoint.write_atomic(Path(cfg.out) / "config.json", json.dumps(record, indent=1).encode())
    except (ValueError, OSError, MemoryError, torch.OutOfMemoryError) as error:
        if lock:
            checkpoint.leave_if_empty(Path(cfg.out))
        return ranks.end(f"error{ranks.who}: {one_line(error)}", 2)
    except KeyboardInterrupt:
        return ranks.end("stopped before the first step", 130)
    here = "bash run.sh" if Path(sys.prefix).name == ".venv" else "python"  # run.sh's own environment, or another
    how = f"{'torchrun ...' if ranks.size > 1 else here} train.py --resume --out {cfg.out}"
    try:
        trainer.run()
    except checkpoint.SafeStop:
        print(f"stopped after step {trainer.step} of {cfg.steps}, saved; continue with: {how}", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        return ranks.end(f"stopped at once, not saved; the last checkpoint is intact; continue with: {how}", 130)
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        return ranks.end(f"error{ranks.who} after step {trainer.step}: {one_line(error)}; what was saved is intact; "
                         f"continue with: {how}", 1 if isinstance(error, RuntimeError) else 2)
    finally:
        trainer.close()
        if lock:
            lock.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
