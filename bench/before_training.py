"""What 4 bits and noise do to a policy before any training: entropy, KL, logits, LoRA gradients, pass@1 of the base.

    python bench/before_training.py                                             the embedded model, a minute of one core
    python bench/before_training.py --model MODELS/smollm2 --data gsm8k/test.jsonl.gz --prompts 8 --tokens 32 --draws 2
    python bench/before_training.py --model MODELS/qwen-1.5b --data gsm8k/test.jsonl.gz --prompts 32 --tokens 128 --pass-at 512 \\
        --eval-tokens 512

The 16-bit model samples one completion (temperature 1) of each prompt; then every variant scores those same tokens:

    entropy      of the next token, nats, mean over the tokens; its difference from 16-bit with the standard error over prompts
    kl           KL(16-bit || variant), mean over the tokens, in nats
    logits       relative error of the logits, each row centred (a constant shifts nothing)
    gradient     cosine to the 16-bit gradient and relative error, of the LoRA gradients of one policy-gradient step with
                 alternating advantages at the start of training (B = 0, so the gradients are those of all the B); none where
                 columns were rescaled, because the adapter then reads other inputs
    weight       relative error of all projections; none where columns were rescaled
    nats         of the data set's worked solutions, a token;  pass@1: greedy, on --pass-at problems

Noise: sigma on the norm weights of the NVFP4 model and of the 16-bit one, several draws. `mismatch` is the mean
|log p_noisy - log p_clean| of the tokens, between sampler and trainer, `tis` the smallest and largest weight
pi_clean / pi_noisy before the cap.

The calibrated variants (convert/calibrate.py) see --calibrate other problems, none of those that are measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # instead of this folder, whose rollout.py would hide ours

import aqn  # noqa: E402
from convert import calibrate  # noqa: E402
from convert.loader import load_model  # noqa: E402
from eval import evaluate, standard_error  # noqa: E402
from grading.rewards import Grader  # noqa: E402
from logps import token_logps  # noqa: E402
from lora import add_adapters, lora_layers  # noqa: E402
from model import Transformer  # noqa: E402
from problems.tasks import default_instruction, encode_prompts, load_problems  # noqa: E402
from rollout import Rollout, Sampling  # noqa: E402
from training.packing import MicroBatch, Sequence, SharedPromptAttention  # noqa: E402

SIGMAS = (1e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2)
CALIBRATED = {  # name -> options of calibrate.calibrated
    "nvfp4 4/6": dict(columns=False, importance=False, multiples=calibrate.FOUR_OVER_SIX),
    "nvfp4 search": dict(columns=False, importance=False),
    "nvfp4 search E[x^2]": dict(columns=False, importance=True),
    "nvfp4 AWQ": dict(columns=True, importance=False, multiples=(1.0,)),
    "nvfp4 AWQ search E[x^2]": dict(columns=True, importance=True),
}


def sample(model, info, tokenizer, prompts: list[list[int]], tokens: int, seed: int) -> list[Sequence]:
    """One completion of each prompt at temperature 1, with advantages +1 and -1 in turn."""
    rollout = Rollout(model, max_len=max(map(len, prompts)) + tokens, tokenizer=tokenizer)
    groups = rollout.generate(prompts, 1, Sampling(tokens, stop_ids=info.stop_ids), key=(seed, 0))
    rollout.free()
    return [Sequence(prompt, group[0].tokens, advantage=1.0 - 2 * (i % 2))
            for i, (prompt, group) in enumerate(zip(prompts, groups))]


def hidden_of(model, batch: MicroBatch, norms=None):
    attend = SharedPromptAttention(batch, *model.rope(batch.longest))
    return model(batch.tokens, attend, norms).index_select(0, batch.rows)


@torch.no_grad()
def scored(model, batch: MicroBatch, norms=None) -> torch.Tensor:
    """log-probs of the whole vocabulary at each completion token, fp32 (N, V)."""
    return model.logits(hidden_of(model, batch, norms)).log_softmax(-1)


def entropy(logp: torch.Tensor) -> torch.Tensor:
    return torch.special.entr(logp.exp()).sum(-1)


def by_prompt(values: torch.Tensor, batch: MicroBatch) -> list[float]:
    return [part.mean().item() for part in values.split(batch.lengths)]


def distance(logp: torch.Tensor, base: torch.Tensor, batch: MicroBatch) -> dict:
    """Entropy, KL and centred logits of a variant against the 16-bit model, on the same tokens."""
    finite = torch.isfinite(base[0])  # ids beyond the tokenizer are -inf in both
    p, q = base[:, finite], logp[:, finite]
    difference, centred = q - p, p - p.mean(-1, keepdim=True)
    difference = difference - difference.mean(-1, keepdim=True)
    change = by_prompt(entropy(q) - entropy(p), batch)
    return {"entropy": entropy(q).mean().item(), "entropy_change": statistics.fmean(change),
            "entropy_change_stderr": standard_error(change), "kl": (p.exp() * (p - q)).sum(-1).mean().item(),
            "logits_error": (difference.norm() / centred.norm()).item()}


def gradients(model, batch: MicroBatch, sequences: list[Sequence]) -> torch.Tensor:
    """The gradients of all adapters of one policy-gradient step, as one vector."""
    add_adapters(model, 32, 32.0, generator=torch.Generator().manual_seed(0))
    logp, _ = token_logps(hidden_of(model, batch), model.head, batch.targets, 1.0, model.valid_vocab)
    advantages = batch.per_token(torch.tensor([s.advantage for s in sequences]))
    (-(advantages * logp).mean()).backward()
    found = [b.grad.flatten().cpu() for layer in lora_layers(model) for b in layer.lora_B.values()]
    for layer in lora_layers(model):
        for parameter in layer.parameters():
            parameter.grad = None
        layer.active = "off"
    return torch.cat(found)


@torch.no_grad()
def weight_error(model, base) -> float:
    """Relative error of all projections together."""
    wrong = right = 0.0
    for a, b in zip(lora_layers(model), lora_layers(base)):
        exact = b.weight.dequantize(torch.float32)
        wrong += (a.weight.dequantize(torch.float32) - exact).square().sum().item()
        right += exact.square().sum().item()
    return (wrong / right) ** 0.5


def variants(options, base, inputs):
    """(name, model) of every way to hold the weights, one in memory at a time."""
    yield "bf16", base
    for weights in ("nf4", "nvfp4"):
        yield weights, load_model(options.model, weights=weights, device=options.device)[0]
    for name, choice in {} if options.no_calibrated else CALIBRATED.items():
        tensors = calibrate.calibrated(base, inputs, **choice)
        model = Transformer(base.config, lambda key, shape, tensors=tensors: tensors[key], weights="nvfp4", device=options.device)
        model.valid_vocab = base.valid_vocab
        yield name, model


def noise_rows(model, batch: MicroBatch, base: torch.Tensor, draws: int) -> list[dict]:
    """One row a sigma: entropy and distance from the 16-bit model, mismatch with its own clean self."""
    clean = scored(model, batch)
    targets, rows = batch.targets[:, None], []
    for sigma in SIGMAS:
        found = []
        for draw in range(draws):
            norms = aqn.noisy_norms(model.noisy_norms_targets(), sigma, torch.Generator().manual_seed(draw))
            noisy = scored(model, batch, norms)
            ratio = (clean.gather(1, targets) - noisy.gather(1, targets)).squeeze(1)
            own = by_prompt(entropy(noisy) - entropy(clean), batch)
            found.append(distance(noisy, base, batch) | {
                "change_from_clean": statistics.fmean(own), "mismatch": ratio.abs().mean().item(),
                "tis_min": ratio.min().exp().item(), "tis_max": ratio.max().exp().item()})
        mean = {key: statistics.fmean(one[key] for one in found) for key in found[0] if found[0][key] is not None}
        spread = statistics.stdev(one["change_from_clean"] for one in found) if draws > 1 else None
        rows.append({"sigma": sigma, **mean, "change_from_clean_sd": spread})
    return rows


def norm_sizes(model) -> dict:
    """Sigma is absolute; what it is next to is the size of these weights."""
    medians = [weight.detach().abs().median().item() for weight in model.noisy_norms_targets()]
    return {"median": statistics.median(medians), "smallest": min(medians), "largest": max(medians)}


def nats(model, tokenizer, problems, prompts, tokens: int) -> float | None:
    """Mean negative log-prob of the worked solutions' tokens; None for data without solutions."""
    if not all(problem.solution for problem in problems):
        return None
    ids = [tokenizer(problem.solution, add_special_tokens=False)["input_ids"][:tokens] for problem in problems]
    batch = MicroBatch([Sequence(p, c) for p, c in zip(prompts, ids)], list(range(len(prompts))), model.device)
    return -scored(model, batch).gather(1, batch.targets[:, None]).mean().item()


def measure(options) -> dict:
    torch.manual_seed(0)
    base, tokenizer, info = load_model(options.model, weights="bf16", device=options.device)
    data = options.data or ("arithmetic" if options.model == "tiny" else "gsm8k")
    instruction = default_instruction(data)
    problems = load_problems(data, "test", limit=options.prompts + options.calibrate + options.pass_at)
    measured, others = problems[: options.prompts], problems[options.prompts : options.prompts + options.calibrate]
    prompts = encode_prompts(measured, tokenizer, instruction)
    sequences = sample(base, info, tokenizer, prompts, options.tokens, 0)
    other = sample(base, info, tokenizer, encode_prompts(others, tokenizer, instruction), options.tokens, 1)
    inputs = calibrate.record_inputs(base, [s.prompt + s.completion for s in other])
    batch = MicroBatch(sequences, list(range(len(sequences))), base.device)
    reference, exact = scored(base, batch), gradients(base, batch, sequences)
    rows, noise = [], []
    for name, model in variants(options, base, inputs):
        started = time.monotonic()
        rescaled = "AWQ" in name
        logp = scored(model, batch)
        found = exact if model is base else None if rescaled else gradients(model, batch, sequences)
        row = {"weights": name, **distance(logp, reference, batch),
               "weight_error": None if rescaled else weight_error(model, base),
               "gradient_cosine": None if rescaled else torch.cosine_similarity(found, exact, 0).item(),
               "gradient_error": None if rescaled else ((found - exact).norm() / exact.norm()).item(),
               "nats": nats(model, tokenizer, measured, prompts, options.tokens)}
        if options.pass_at:
            row |= passes(model, tokenizer, info, problems[-options.pass_at :], options, instruction)
        rows.append(row)
        if name in options.noise_on.split(","):
            noise += [{"weights": name, **one} for one in noise_rows(model, batch, reference, options.draws)]
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    return {"command": "python bench/before_training.py " + " ".join(sys.argv[1:]), "prompts": len(prompts),
            "tokens": len(batch.targets), "draws": options.draws, "norms": norm_sizes(base),
            "weights": rows, "noise": noise}


def passes(model, tokenizer, info, problems, options, instruction) -> dict:
    limit = max(len(p) for p in encode_prompts(problems, tokenizer, instruction))
    with Grader() as grader:
        found = evaluate(Rollout(model, max_len=limit + options.eval_tokens, tokenizer=tokenizer), problems, tokenizer, grader,
                         stop_ids=info.stop_ids, max_new_tokens=options.eval_tokens, instruction=instruction)
    return {"pass@1": found["pass@1"], "pass@1_stderr": found["pass@1_stderr"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--name", help="of the results folder [the model's last name]")
    parser.add_argument("--data")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=48, help="of the sampled completions, at most")
    parser.add_argument("--calibrate", type=int, default=32, help="problems that the calibrated variants see")
    parser.add_argument("--no-calibrated", action="store_true")
    parser.add_argument("--pass-at", type=int, default=0, help="problems for pass@1 of each base [none]")
    parser.add_argument("--eval-tokens", type=int, default=48)
    parser.add_argument("--draws", type=int, default=5, help="of the noise at each sigma")
    parser.add_argument("--noise-on", default="bf16,nvfp4", help="which weights are also measured under noise")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    found = measure(options)
    path = ROOT / "bench" / "results" / "claims" / (options.name or options.model.rstrip("/").split("/")[-1]) / "before.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
