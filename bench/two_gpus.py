"""The same global batch on one GPU and on two: losses, speed-up of rollout and training, share of the all-reduce.

    python bench/two_gpus.py                                          Qwen2.5-7B's shape, random weights, two GPUs of one host
    python bench/two_gpus.py --ranks 1,2,4,8 --prompts 32
    python bench/two_gpus.py --model tiny --device cpu --completion-tokens 16 --slots 8     tries the bench itself, over gloo

Starts itself under torchrun once for each number of ranks. A step is what train.py does: every rank samples its prompts
(of forced length: nothing stops), all gather all samples, and an update in four mini-batches follows. The update is made
on sequences that are drawn, not sampled, so that it is the same one on any number of GPUs (a token sampled in bf16 may
differ with the batch around it); their sampler's log-probs are set to -log V, so that the loss, through the importance
weights, depends on the model's log-probs and not on the advantages alone.

    rollout_s   until the slowest rank is done     gather_s   all samples to all ranks, as Python objects over gloo
    update_s    log-probs, backward, AdamW         sum_s      of it: the flat bucket of gradients, once all have arrived
    loss_off, grad_norm_off                        largest difference from the first row over all steps: absolute (weights of
                                                   tokens add up to 1 and advantages are 1, so losses are sums of order 1),
                                                   and relative

A first step compiles and is not counted; of the others the mean is reported. Written to bench/results/two_gpus.json.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.machine import machine  # noqa: E402
from layers.shapes import SHAPES, ModelConfig  # noqa: E402
from lora import add_adapters  # noqa: E402
from model import random_model  # noqa: E402
from rollout import Rollout, Sampling  # noqa: E402
from training.distributed import Ranks, join, undeal  # noqa: E402
from training.learner import Learner, Sequence, Settings  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "two_gpus.json"
TINY = ModelConfig("qwen2", 64, 2, 4, 2, 16, 128, 500, qkv_bias=True, tied=True)
TIMES = ("rollout_s", "gather_s", "update_s", "sum_s", "step_s")


class Clock:
    """Seconds since the last look, once the device is idle; with `ranks`, once all are."""

    def __init__(self, device: str, ranks: Ranks):
        self.device, self.ranks, self.last = device, ranks, 0.0

    def look(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        if self.ranks.size > 1:
            dist.barrier()
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        return seconds


def drawn_batch(prompts: list[list[int]], group: int, tokens: int, vocab: int, generator: torch.Generator) -> list[Sequence]:
    """Answers that do not depend on a sampler; alternating advantages, so that every one is differentiated."""
    answers = torch.randint(vocab, (len(prompts) * group, tokens), generator=generator).tolist()
    return [Sequence(prompts[i // group], answer, [-math.log(vocab)] * tokens, (-1.0) ** i) for i, answer in enumerate(answers)]


def measure(args, ranks: Ranks) -> dict:
    """All steps on this number of ranks; the row is the same on every rank."""
    ranks.use(args.device)
    config = TINY if args.model == "tiny" else SHAPES[f"Qwen2.5-{args.model}"]
    model = random_model(config, "nvfp4", args.device)
    add_adapters(model, args.rank, args.rank, generator=torch.Generator().manual_seed(0))
    learner = Learner(model, Settings(algo="dapo", updates=4, warmup=0, lr=1e-5), ranks=ranks)
    rollout = Rollout(model, max_len=args.prompt_tokens + args.completion_tokens, slots=args.slots)
    clock, summed = Clock(args.device, ranks), []
    plain_sum = ranks.sum_

    def timed_sum(tensors):
        started = Clock(args.device, ranks)
        started.look()
        plain_sum(tensors)
        summed.append(started.look())

    ranks.sum_ = timed_sum
    rows, losses = [], []
    for step in range(args.steps + 1):
        generator = torch.Generator().manual_seed(step)
        prompts = torch.randint(config.vocab, (args.prompts, args.prompt_tokens), generator=generator).tolist()
        batch = drawn_batch(prompts, args.group, args.completion_tokens, config.vocab, generator)
        summed.clear()
        clock.look()
        groups = rollout.generate(ranks.deal(prompts), args.group, Sampling(args.completion_tokens), key=(0, step),
                                  prompt_keys=ranks.deal(range(args.prompts)))
        row = {"rollout_s": clock.look()}
        gathered = undeal(ranks.gather(groups))
        row["gather_s"] = clock.look()
        assert len(gathered) == args.prompts
        if args.device == "cuda":
            rollout.free()
        metrics = learner.update(batch)
        row |= {"update_s": clock.look(), "sum_s": sum(summed)}
        rows.append(row | {"step_s": row["rollout_s"] + row["gather_s"] + row["update_s"]})
        losses.append((metrics["loss"], metrics["grad_norm"]))
    means = {name: sum(row[name] for row in rows[1:]) / args.steps for name in TIMES}
    return {"ranks": ranks.size, **means, "loss": [loss for loss, _ in losses], "grad_norm": [norm for _, norm in losses],
            "peak_gib": max(ranks.gather(torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else 0.0))}


def compare(rows: list[dict]) -> list[dict]:
    """Speed-ups and differences against the first row."""
    first = rows[0]
    for row in rows:
        losses, norms = (list(zip(first[name], row[name])) for name in ("loss", "grad_norm"))
        row |= {"speed_up": first["step_s"] / row["step_s"], "speed_up_rollout": first["rollout_s"] / row["rollout_s"],
                "speed_up_update": first["update_s"] / row["update_s"], "sum_share": row["sum_s"] / row["step_s"],
                "loss_off": max(abs(a - b) for a, b in losses), "grad_norm_off": max(abs(a - b) / a for a, b in norms)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2", help="numbers of GPUs, the first is compared with")
    parser.add_argument("--model", default="7B", help="tiny,0.5B,1.5B,3B,7B,14B,32B")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--completion-tokens", type=int, default=512)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3, help="counted steps")
    parser.add_argument("--slots", type=int, help="sequences decoded at once on a GPU (planned from memory)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if "RANK" in os.environ:
        with join(os.environ) as ranks:
            row = measure(args, ranks)
            if ranks.is_first:
                print(json.dumps(row))
        return
    rows = []
    for count in args.ranks.split(","):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
        output = subprocess.run([*launcher, __file__, *sys.argv[1:]], stdout=subprocess.PIPE, text=True, check=True).stdout
        rows.append(json.loads(output.strip().splitlines()[-1]))
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "ranks")}
    result = settings | machine(args.device) | {"rows": compare(rows)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    shown = ("ranks", *TIMES, "speed_up", "speed_up_rollout", "speed_up_update", "sum_share", "loss_off", "grad_norm_off")
    print("  ".join(f"{name:>16}" for name in shown))
    for row in result["rows"]:
        print("  ".join(f"{row[name]:16.4g}" for name in shown))


if __name__ == "__main__":
    main()
