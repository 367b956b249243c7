"""One GRPO step on random weights, in the same code for NVFP4, NF4 (bitsandbytes), bf16 LoRA and full bf16.

    python bench/step.py --models 7B,32B --weights nvfp4,nf4,bf16 --cap-gib 79
    python bench/step.py --models 7B --prompts 1 --completion-tokens 512 --cap-gib 12

A step is a rollout of forced length (nothing stops), then a complete update: log-probs, backward, AdamW. The model has the
shape of a published Qwen2.5 and random weights made on the device, so no checkpoint is needed; times do not depend on the
values, log-probs and their mismatch do, so take those from a real model. Answers get alternating advantages: every one
of them is forwarded and differentiated.

    rollout_s     prefill and decoding            backward_s    recomputed forward, dX and the adapters' gradients
    logprob_s     forward, log-probs, entropy     optimiser_s   clipping, AdamW, refreshed adapters
    share         of the peak of 989 TFLOP/s dense bf16 in log-probs + backward: 2 * tokens * weights of the seven projections
                  as often as they are multiplied (forward, dX, dW under full, and recomputed layers without `down`); the
                  head, attention and the adapters are not counted as work
    share_of_3    the same as if every layer were recomputed whole: tokens/s in the unit of trainers that do
    tokens        distinct tokens forwarded in training: a group's prompt counts once
    joules        of the card, by its own counter (NVML), a thousand generated tokens
    gib           peak that torch reserved, the process's context included; --cap-gib holds all of it under a limit

A short first step compiles and is not counted; the fastest of the others is reported, for in the first of them kernels
for these lengths are still loaded. Results are merged into bench/results/step.json by case.
"""
from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.machine import machine  # noqa: E402
from layers.shapes import ModelConfig  # noqa: E402
from lora import add_adapters, lora_layers  # noqa: E402
from model import SHAPES, random_model  # noqa: E402
from rollout import Rollout, Sampling  # noqa: E402
from training.learner import Learner, Sequence, Settings  # noqa: E402

PEAK_FLOPS = 989e12  # dense bf16 of an H100 or H200 SXM, by the datasheet
RESULTS = Path(__file__).resolve().parent / "results" / "step.json"
TINY = ModelConfig("qwen2", 64, 2, 4, 2, 16, 128, 500, qkv_bias=True, tied=True)  # to try the bench itself on a CPU
COLUMNS = ("model", "weights", "prompts", "completion", "rollout_s", "logprob_s", "backward_s", "optimiser_s", "step_s",
           "rollout_tok_per_s", "train_tok_per_s", "share", "share_of_3", "joules_per_1k", "gib_rollout", "gib_train")


class TimedLearner(Learner):
    """A Learner that waits for the device at the borders of its phases, to tell them apart."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.full = any(layer.trainable for layer in lora_layers(self.model))
        self.seconds = {"logprob_s": 0.0, "train_s": 0.0, "optimiser_s": 0.0}

    def _timed(self, name, function, *args):
        started = now(self.model.device)
        result = function(*args)
        self.seconds[name] += now(self.model.device) - started
        return result

    def forward(self, batch):
        return self._timed("logprob_s", super().forward, batch)

    def _accumulate(self, *args):
        return self._timed("train_s", super()._accumulate, *args)

    def _step(self, *args):
        return self._timed("optimiser_s", super()._step, *args)


class Energy:
    """Joules that the card has used so far; None where NVML cannot tell."""

    def __init__(self, device: torch.device):
        self.handle = None
        if device.type == "cuda":
            try:
                import pynvml

                pynvml.nvmlInit()
                self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(device.index or 0)
                self.joules()
            except Exception as error:  # a missing package, an old driver, a card without the counter
                print(f"no energy readings: {error}")
                self.handle = None

    def joules(self) -> float | None:
        return self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1000 if self.handle else None


def size(layer) -> int:
    return layer.weight.shape[0] * layer.weight.shape[1]


def passes_over_weights(model, full: bool) -> tuple[float, float]:
    """How often the projections are multiplied in an update: really, and with every layer recomputed whole."""
    necessary = 3 if full else 2  # forward, dX; dW
    recomputed = 0
    for layer in model.layers[: len(model.layers) - model.kept_layers] if model.checkpoint_layers else []:
        recomputed += size(layer.qkv) + size(layer.o) + size(layer.gate_up) + (size(layer.down) if full else 0)
    return necessary + recomputed / sum(map(size, lora_layers(model))), necessary + 1


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_gib(device: torch.device, context: int) -> float | None:
    """Peak since the last call that torch held of the card, the CUDA context added; then starts anew."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_reserved() + context
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return peak / 2**30


def cap_memory(cap_gib: float | None) -> int:
    """Bytes of the CUDA context; holds torch to the rest of the cap, so that the process as a whole stays under it."""
    torch.empty(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    if cap_gib is not None:
        torch.cuda.set_per_process_memory_fraction(max(0.0, (cap_gib * 2**30 - context) / total))
    return context


def one_step(model, rollout, learner, args, tokens: int, step: int, context: int, energy: Energy) -> dict:
    """A rollout and an update, timed."""
    device, vocab = model.device, model.config.vocab
    generator = torch.Generator().manual_seed(step)
    prompts = torch.randint(vocab, (args.prompts, args.prompt_tokens), generator=generator).tolist()
    before, started = energy.joules(), now(device)
    groups = rollout.generate(prompts, args.group, Sampling(tokens), key=(0, step))
    sampled = now(device)
    rollout.free()
    gib_rollout = peak_gib(device, context)
    sequences = [Sequence(prompt, c.tokens, c.logps, (-1.0) ** i)
                 for prompt, group in zip(prompts, groups) for i, c in enumerate(group)]
    learner.seconds = dict.fromkeys(learner.seconds, 0.0)
    updating = now(device)
    metrics = learner.update(sequences)
    ended = now(device)
    seconds, generated = learner.seconds, args.prompts * args.group * tokens
    passes, passes_of_3 = passes_over_weights(model, learner.full)
    flops = 2 * metrics["train/tokens"] * sum(map(size, lora_layers(model)))
    row = {
        "rollout_s": sampled - started, "logprob_s": seconds["logprob_s"],
        "backward_s": seconds["train_s"] - seconds["logprob_s"], "optimiser_s": seconds["optimiser_s"],
        "train_s": ended - updating, "step_s": ended - updating + sampled - started,
        "rollout_tok_per_s": generated / (sampled - started),
        "train_tok_per_s": metrics["train/tokens"] / (ended - updating), "train_tokens": metrics["train/tokens"],
        "token_budget": learner.token_budget, "kept_layers": model.kept_layers, "slots": rollout.stats.get("slots"),
        "share": passes * flops / PEAK_FLOPS / seconds["train_s"],
        "share_of_3": passes_of_3 * flops / PEAK_FLOPS / seconds["train_s"],
        "joules_per_1k": None if before is None else (energy.joules() - before) / generated * 1000,
        "gib_rollout": gib_rollout, "gib_train": peak_gib(device, context),
        "logp_difference_mean": metrics["sampling/sampling_logp_difference/mean"],
        "logp_difference_max": metrics["sampling/sampling_logp_difference/max"], "grad_norm": metrics["grad_norm"],
    }
    return row


def run_case(name: str, weights: str, args, context: int) -> dict:
    """A model made, stepped and dropped; what does not fit is a row that says so."""
    device = torch.device(args.device)
    case = {"model": name, "weights": weights, "prompts": args.prompts, "group": args.group,
            "prompt": args.prompt_tokens, "completion": args.completion_tokens, "rank": args.rank,
            "cap_gib": args.cap_gib}
    try:
        full = weights == "full"
        config = TINY if name == "tiny" else SHAPES[f"Qwen2.5-{name}"]
        model = random_model(config, "bf16" if full else weights, device, full=full)
        if not full:
            add_adapters(model, args.rank, args.rank, generator=torch.Generator().manual_seed(0))
        learner = TimedLearner(model, Settings(algo="dapo", token_budget=args.token_budget))
        rollout = Rollout(model, max_len=args.prompt_tokens + args.completion_tokens, slots=args.slots)
        energy = Energy(device)
        one_step(model, rollout, learner, args, args.warmup_tokens, 0, context, energy)
        rows = [one_step(model, rollout, learner, args, args.completion_tokens, s + 1, context, energy)
                for s in range(args.steps)]
        best = min(rows, key=lambda row: row["step_s"])
        return case | best | {"steps_s": [row["step_s"] for row in rows]}
    except (torch.OutOfMemoryError, ValueError, RuntimeError) as error:
        return case | {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


def shown(value) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) and value < 100 else (
        f"{value:.0f}" if isinstance(value, float) else str(value))


def save(rows: list[dict], out: Path, device: torch.device) -> None:
    """Merges rows into the file: the newest result of a case replaces the one before."""
    known = json.loads(out.read_text()) if out.exists() else []
    keys = ("model", "weights", "prompts", "group", "prompt", "completion", "rank", "cap_gib", "gpu")
    merged = {tuple(row.get(key) for key in keys): row for row in known}
    for row in rows:
        row = row | machine(device.type)
        merged[tuple(row.get(key) for key in keys)] = row
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(list(merged.values()), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="7B", help="tiny,0.5B,1.5B,3B,7B,14B,32B")
    parser.add_argument("--weights", default="nvfp4,nf4,bf16", help="nvfp4,nf4,bf16,full")
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--completion-tokens", type=int, default=1024)
    parser.add_argument("--warmup-tokens", type=int, default=64)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=2, help="counted steps; the fastest is reported, all are kept")
    parser.add_argument("--slots", type=int, help="sequences decoded at once (planned from memory)")
    parser.add_argument("--token-budget", type=int, help="tokens of a micro-batch (planned from memory)")
    parser.add_argument("--cap-gib", type=float, help="memory that the whole process may use")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    context = cap_memory(args.cap_gib) if args.device != "cpu" else 0
    print("  ".join(f"{column:>11}" for column in COLUMNS), flush=True)
    for name in args.models.split(","):
        for weights in args.weights.split(","):
            row = run_case(name, weights, args, context)
            gc.collect()  # the model of this case, before the next is made
            cells = [shown(row.get(column)) for column in COLUMNS]
            print("  ".join(f"{cell:>11}" for cell in cells) + f"  {row.get('failed', '')}", flush=True)
            save([row], args.out, torch.device(args.device))


if __name__ == "__main__":
    main()
