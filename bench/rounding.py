"""How far apart rounding to bf16 alone puts the log-probs of sampler and trainer: one model, three orders of summation, on a CPU.

    python bench/rounding.py --model models/qwen-1.5b --data gsm8k/train.jsonl.gz       five minutes on one core, 9 GiB

Sampler and trainer compute log p of the same tokens by different kernels. Both are right, both round activations to bf16, and
yet they differ: fp32 sums come out in another order and differ in their last bits, a value that lies between two bf16 numbers
then falls on the other side, by one part in 128 to 256, and every layer behind it sees another input. This is what no care in
a kernel removes. A gap of this size is no sign of an error; a larger one may be.

The forward pass of a Qwen2 or Llama below is fp32 arithmetic, rounded to bf16 where kernels write bf16. The passes of one text
differ in what stands for the order of summation, drawn from a seed:

    every product x W^T    gets 1e-6 of its standard deviation as noise, before it is rounded
    attention weights      exp(s - m) is rounded with m up to 0.4 below the row's maximum, as in flash attention, where m is
                           the maximum of the keys seen so far; the sum divides it out again, but the rounding is another

    x ---- norm -> bf16 -- q, k, v -> bf16 -- exp(s - m) -> bf16? -- o -> bf16 --+-- -> bf16? ----- norm -> bf16 -- MLP ...
     \\_______________________ residual ________________________________________/

The two question marks are the variants: attention weights and residual stream, each rounded (as kernels do) or kept in fp32.
Every variant is measured on the same tokens with the same three seeds; the gap is |log p of one pass - log p of another| of the
token that comes next, over prompt and worked solution in the chat template. Mean and rms are much alike from pair to pair; the
largest gap hangs on a token or two and is told for each pair, so that nobody takes it for a property of the variant.

Differs from a training run: 16-bit weights, not NVFP4; no adapter; solutions of the data set instead of the model's own
completions, whose tokens are more probable and therefore closer. Limits: no norm on q and k (Qwen3), no quantised checkpoint; the
noise is a guess at what another order does, and it only has to be small beside a bf16 step. Writes bench/results/rounding.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # bench/ itself has files named as modules are
from bench.machine import machine  # noqa: E402
from files.hub import load_tokenizer, quantised_layout, read_config, resolve_model  # noqa: E402
from files.shards import ShardReader  # noqa: E402
from layers.rope import apply_rope_reference, rope_tables  # noqa: E402
from layers.shapes import ModelConfig  # noqa: E402
from problems.sources import read_file  # noqa: E402

RESULT = Path(__file__).resolve().parent / "results" / "rounding.json"
SUM_NOISE = 1e-6  # of a product's standard deviation: some units in the last place of an fp32 sum
MAX_SHIFT = 0.4  # nats by which the running maximum of flash attention may differ
SEEDS = (1, 2, 3)  # a pass each


@dataclass(frozen=True)
class Variant:
    """What is kept in fp32 besides the sums."""

    residual_fp32: bool
    attention_fp32: bool


VARIANTS = tuple(Variant(*fp32) for fp32 in itertools.product((False, True), repeat=2))


def bf16(x: Tensor) -> Tensor:
    """x rounded to bf16, in fp32 again.

    >>> bf16(torch.tensor([1.0, 1.0039, 1.0040])).tolist()      # a step is 1/128 here; the two last lie beside its middle
    [1.0, 1.0, 1.0078125]
    """
    return x.to(torch.bfloat16).float()


def read_model(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Shape and fp32 tensors of a 16-bit checkpoint; ValueError for what the pass below does not compute."""
    raw = read_config(folder)
    config, layout = ModelConfig.from_hf(raw), quantised_layout(folder, raw)
    if config.qk_norm or layout:
        raise ValueError(f"{folder} is {layout or config.model_type}; this takes 16-bit checkpoints of Qwen2 and Llama")
    reader = ShardReader(folder)
    return config, {name: reader.get(name).float() for name in reader.names()}


class Pass:
    """One forward pass with its own order of summation, which `seed` draws."""

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor], variant: Variant, seed: int):
        self.config, self.tensors, self.variant = config, tensors, variant
        self.generator = torch.Generator().manual_seed(seed)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """x (T, K) -> (T, N), bf16."""
        y = x @ self.tensors[f"{name}.weight"].T
        if (bias := self.tensors.get(f"{name}.bias")) is not None:
            y = y + bias
        return bf16(y + SUM_NOISE * y.std() * torch.randn(y.shape, generator=self.generator))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return bf16(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.eps) * self.tensors[f"{name}.weight"])

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention; q (T, H, D), k and v (T, Hkv, D) -> (T, H * D), bf16."""
        tokens, heads, size = q.shape
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))  # (T, H, D)
        future = torch.triu(torch.full((tokens, tokens), -math.inf), 1)
        scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(size) + future  # (H, T, T)
        shift = MAX_SHIFT * torch.rand((heads, tokens, 1), generator=self.generator)
        weights = (scores - (scores.amax(-1, keepdim=True) - shift)).exp()
        total = weights.sum(-1).T[..., None]  # (T, H, 1), of the weights before they are rounded
        rounded = weights if self.variant.attention_fp32 else bf16(weights)
        return bf16(torch.einsum("hts,shd->thd", rounded, v) / total).reshape(tokens, -1)

    def add(self, x: Tensor, delta: Tensor) -> Tensor:
        return x + delta if self.variant.residual_fp32 else bf16(x + delta)

    def layer(self, x: Tensor, path: str, cos: Tensor, sin: Tensor) -> Tensor:
        config, attention, positions = self.config, f"{path}.self_attn", torch.arange(len(x))
        normed = self.norm(x, f"{path}.input_layernorm")
        q, k, v = (self.linear(normed, f"{attention}.{name}_proj").view(len(x), -1, config.head_dim) for name in "qkv")
        q, k = map(bf16, apply_rope_reference(q, k, cos, sin, positions))
        x = self.add(x, self.linear(self.attend(q, k, v), f"{attention}.o_proj"))
        normed = self.norm(x, f"{path}.post_attention_layernorm")
        gate, up = (self.linear(normed, f"{path}.mlp.{name}_proj") for name in ("gate", "up"))
        return self.add(x, self.linear(bf16(gate * torch.sigmoid(gate) * up), f"{path}.mlp.down_proj"))

    def logps(self, ids: list[int]) -> Tensor:
        """log p of ids[1:], each after what stands before it: (T - 1,) fp32."""
        cos, sin = rope_tables(self.config, len(ids), "cpu")
        embed = self.tensors["model.embed_tokens.weight"]
        x = embed[ids]
        for index in range(self.config.layers):
            x = self.layer(x, f"model.layers.{index}", cos, sin)
        logits = self.norm(x, "model.norm")[:-1] @ self.tensors.get("lm_head.weight", embed).T  # fp32, as sampler and trainer
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@torch.no_grad()
def compare(config: ModelConfig, tensors: dict[str, Tensor], variant: Variant, texts: list[list[int]]) -> dict:
    """The gaps between passes, over all tokens of all texts and all pairs of seeds; the largest, pair by pair."""
    passes = [torch.cat([Pass(config, tensors, variant, seed).logps(ids) for ids in texts]) for seed in SEEDS]
    gaps = torch.stack([(a - b).abs() for a, b in itertools.combinations(passes, 2)])  # (pairs, tokens)
    found = {"mean": gaps.mean(), "rms": gaps.pow(2).mean().sqrt(), "p99": gaps.quantile(0.99), "nats": -passes[0].mean()}
    return {"residual": "fp32" if variant.residual_fp32 else "bf16",
            "attention weights": "fp32" if variant.attention_fp32 else "bf16",
            **{name: float(f"{value.item():.3g}") for name, value in found.items()},
            "largest": [float(f"{value:.3g}") for value in gaps.amax(1).tolist()]}


def chats(folder: Path, data: Path, problems: int) -> list[list[int]]:
    """The first problems of a file with their worked solutions, in the model's chat template, as ids."""
    tokenizer = load_tokenizer(folder)
    turns = [[{"role": "user", "content": one.prompt}, {"role": "assistant", "content": one.solution}]
             for one in read_file(data)[:problems]]
    return [tokenizer.apply_chat_template(turn, tokenize=True, return_dict=False) for turn in turns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="16-bit Qwen2 or Llama with a chat template: folder or hub id")
    parser.add_argument("--data", type=Path, required=True, help="problems with worked solutions, .jsonl or .jsonl.gz")
    parser.add_argument("--problems", type=int, default=4, help="the first so many of them [4]")
    options = parser.parse_args()
    started = time.monotonic()
    try:
        if options.problems < 1:
            raise ValueError(f"--problems {options.problems} leaves nothing to measure; take 1 or more")
        folder = resolve_model(options.model)
        texts, (config, tensors) = chats(folder, options.data, options.problems), read_model(folder)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    rows = []
    for variant in VARIANTS:
        rows.append(compare(config, tensors, variant, texts))
        print(json.dumps(rows[-1]), flush=True)
    found = {"model": Path(options.model).name, "data": "/".join(options.data.parts[-2:]), "problems": len(texts),
             "tokens": sum(len(ids) - 1 for ids in texts), "seconds": round(time.monotonic() - started),
             "threads": torch.get_num_threads(), "machine": machine("cpu"), "rows": rows}
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
