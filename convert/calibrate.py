"""Better NVFP4 than plain rounding: block scales chosen by squared error, and columns rescaled by what flows through them.

The idea: NVFP4 has two freedoms that plain rounding (nvfp4.quantize) leaves unused, and neither costs anything at run time.

1. Which scale a block of 16 gets.  Plain rounding sends the largest weight to 6.  The levels 0 .5 1 1.5 2 3 4 6 are coarse
   at the top, so that a block may fit better when its largest weight goes to 4 ("four over six": scale x 1.5), a little
   above 6 (saturating it), or in between.  Every candidate is tried, the smallest squared error wins:

       s = e4m3(g * amax / 6 * m),   m in MULTIPLES          error = sum_k h_k (w_k - dequantised w_k)^2,  h_k = E[x_k^2] or 1

   A scale above the plain one needs room below E4M3's 448, so g is made with 256 where the format allows 448.

2. What the columns look like (AWQ).  If channel k of the input is large, errors of column k hurt most.  Columns are
   multiplied by c_k before rounding and the norm that feeds them is divided by it: the same function in exact arithmetic,

       norm(x; w) W^T = norm(x; w / c) (W diag c)^T         c = (mean |x_k|)^alpha, geometric mean 1, alpha by output error

   for q,k,v and gate,up (fed by a norm), and for down (fed by silu(gate) * up: the rows of up are divided). o is left alone.

       norm / c --> q,k,v * c          norm / c --> gate,up * c          up rows / c --> down * c

The result is an ordinary NVFP4 checkpoint: every reader and kernel takes it as it is.

Source: AWQ (arXiv 2306.00978); QeRL (arXiv 2510.11696) says that its NVFP4 weights are AWQ-calibrated, its code rounds plainly.
Where we differ: c is powers of the mean magnitude only, shared by fused projections; no clipping search besides the scales.
Cost: 1 is eleven times plain rounding, 2 five more; the 16-bit model is held whole, unlike convert/loader.py.
Limits: 2 moves the scale of the noise: Z of AQN is added to w / c, so its relative size changes by c in each channel. Whether
either is worth having is measured in bench/before_training.py.
Copy along: nvfp4.py. For the command also convert/loader.py, convert/merge.py, files/hub.py,
files/layouts.py, files/shards.py, problems/tasks.py.

    python -m convert.calibrate                                                     plain rounding and the searches on one matrix
    python -m convert.calibrate MODEL OUT --data problems.jsonl [--no-columns]      an NVFP4 checkpoint of a 16-bit model
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import nvfp4
from nvfp4 import BLOCK, E2M1_MAX, E4M3_MAX, LEVELS, NVFP4Tensor

FOUR_OVER_SIX = (1.0, 1.5)
MULTIPLES = (1.0, 0.75, 0.8125, 0.875, 0.9375, 1.0625, 1.125, 1.1875, 1.25, 1.375, 1.5)  # about E4M3's own steps
ROOM = 256.0  # the largest plain block scale, so that 1.5 times it stays below 448
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)


@torch.no_grad()
def search(w: Tensor, g: Tensor | None = None, importance: Tensor | None = None,
           multiples: Sequence[float] = MULTIPLES) -> NVFP4Tensor:
    """(N, K) weights -> NVFP4 with the block scales of least squared error; importance (K,) weighs the columns.

    g: a global scale shared with other matrices; None leaves room for larger scales. Never worse than the first multiple.
    """
    plain = nvfp4.quantize(w[:1])  # checks type and shape; NaN of other rows is found by global_scale
    values = torch.tensor(LEVELS, device=w.device)
    values = torch.cat((values, -values))  # by code
    g = global_scale(w) if g is None else g.to(w.device, torch.float32).reshape(1)
    blocks = w.float().unflatten(1, (-1, BLOCK))  # (N, K/16, 16)
    h = torch.ones(1, device=w.device) if importance is None else importance.float().to(w.device).view(-1, BLOCK)
    best_error = best_scale = best_codes = None
    for m in multiples:
        s = (g * (blocks.abs().amax(-1) / E2M1_MAX) * m).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
        s = torch.where(s.float() == 0, nvfp4.ZERO_BLOCK_SCALE, s.float())
        step = (s / g)[..., None]
        codes = nvfp4.encode_e2m1(blocks / step)
        error = ((values[codes.int()] * step - blocks).square() * h).sum(-1)  # (N, K/16)
        if best_error is None:
            best_error, best_scale, best_codes = error, s, codes
            continue
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, s, best_scale)
        best_codes = torch.where(better[..., None], codes, best_codes)
    return NVFP4Tensor(nvfp4.pack_codes(best_codes.flatten(1)), best_scale.to(plain.scale.dtype), g)


def global_scale(*weights: Tensor) -> Tensor:
    """nvfp4.global_scale with room for block scales 1.5 times as large."""
    return nvfp4.global_scale(*weights) * (ROOM / E4M3_MAX)


@torch.no_grad()
def column_scale(weights: Sequence[Tensor], x: Tensor) -> tuple[Tensor, float]:
    """(c (K,), alpha) for matrices that read the same x (n, K): least squared error of their outputs under plain rounding."""
    magnitude = x.float().abs().mean(0).clamp(min=1e-8)
    exact = [w.float() for w in weights]
    best = (float("inf"), torch.ones_like(magnitude), 0.0)
    for alpha in ALPHAS:
        c = magnitude.pow(alpha)
        c = (c / c.log().mean().exp()).clamp(1 / 32, 32)
        g = nvfp4.global_scale(*(w * c for w in exact))
        error = sum(float((x.float() @ (nvfp4.dequantize(nvfp4.quantize(w * c, g), torch.float32) / c - w).T).square().sum())
                    for w in exact)
        best = min(best, (error, c, alpha), key=lambda found: found[0])
    return best[1], best[2]


# ------------------------------------------------------------------------------------------------------- whole models


@dataclass
class Inputs:
    """What flowed into one linear: up to `rows` rows, and the mean square of each channel."""

    x: Tensor
    square: Tensor


@torch.no_grad()
def record_inputs(model, sequences: list[list[int]], rows: int = 256) -> list[dict[str, Inputs]]:
    """Runs the model on token sequences; for each layer, the inputs of its "qkv", "o", "gate_up" and "down"."""
    found: list[dict[str, Inputs]] = [{} for _ in model.layers]
    hooks = []
    for layer, slots in zip(model.layers, found):
        for part in ("qkv", "o", "gate_up", "down"):
            def keep(_, arguments, part=part, slots=slots):
                x = arguments[0].float()
                slots[part] = Inputs(x[:: max(1, len(x) // rows)].clone(), x.square().mean(0))
            hooks.append(getattr(layer, part).register_forward_pre_hook(keep))
    lengths = [len(s) for s in sequences]
    model(torch.tensor([token for s in sequences for token in s], device=model.device), model.packed(lengths))
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def calibrated(model, inputs: list[dict[str, Inputs]], *, columns: bool = True, importance: bool = True,
               multiples: Sequence[float] = MULTIPLES) -> dict[str, Tensor | NVFP4Tensor]:
    """Hugging Face names -> tensors of a 16-bit model in memory, its projections quantised; the model stays as it is."""
    from convert.merge import live_tensors

    tensors = dict(live_tensors(model, torch.float32))
    for i, slots in enumerate(inputs):
        path = f"model.layers.{i}"
        groups = {"down": ("mlp.down_proj",), "gate_up": ("mlp.gate_proj", "mlp.up_proj"), "o": ("self_attn.o_proj",),
                  "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
        for part, names in groups.items():  # down first: it rescales the rows of up, which is quantised after it
            names = [f"{path}.{name}.weight" for name in names]
            weights, square = [tensors[name] for name in names], slots[part].square
            if columns and part != "o":
                c, _ = column_scale(weights, slots[part].x)
                weights, square = [w * c for w in weights], square / c.square()
                fed_by = {"down": "mlp.up_proj", "gate_up": "post_attention_layernorm", "qkv": "input_layernorm"}[part]
                feeder = tensors[f"{path}.{fed_by}.weight"]
                tensors[f"{path}.{fed_by}.weight"] = feeder / (c[:, None] if feeder.ndim == 2 else c)
            g = global_scale(*weights) if len(multiples) > 1 else nvfp4.global_scale(*weights)
            for name, w in zip(names, weights):
                tensors[name] = search(w, g, square if importance else None, multiples)
    return tensors


def write(tensors: dict[str, Tensor | NVFP4Tensor], source: Path, out: Path) -> None:
    """The checkpoint in the compressed-tensors layout, with the tokenizer and config of the model it came from."""
    from files import layouts
    from files.hub import read_config
    from files.shards import copy_side_files, whole_folder, write_shards

    def stored():
        for name, tensor in tensors.items():
            if isinstance(tensor, NVFP4Tensor):
                for part, value in layouts.to_layout(tensor, "compressed-tensors").items():
                    yield f"{name.removesuffix('.weight')}.{part}", value
            else:
                yield name, tensor.bfloat16()

    with whole_folder(out) as partial:
        write_shards(stored(), partial)
        copy_side_files(source, partial)
        config = read_config(source) | {"quantization_config": layouts.quantization_config("compressed-tensors", ["lm_head"])}
        (partial / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}, indent=1))


def demo() -> None:
    """Relative error of one Gaussian matrix, and of a product whose input has a few large channels."""
    draw = torch.Generator().manual_seed(0)
    w, x = torch.randn(256, 512, generator=draw), torch.randn(512, 512, generator=draw)
    x[:, ::64] *= 20  # channels as real models have them
    c, alpha = column_scale([w], x)
    square = x.square().mean(0)
    kinds = {
        "plain rounding": nvfp4.dequantize(nvfp4.quantize(w), torch.float32),
        "four over six": nvfp4.dequantize(search(w, multiples=FOUR_OVER_SIX), torch.float32),
        "scale search": nvfp4.dequantize(search(w), torch.float32),
        "... weighted by E[x^2]": nvfp4.dequantize(search(w, importance=square), torch.float32),
        f"columns (alpha {alpha:g}) + search": nvfp4.dequantize(search(w * c, importance=square / c**2), torch.float32) / c,
    }
    print("                                error of W   error of x W^T")
    for name, got in kinds.items():
        product = (x @ (got - w).T).norm() / (x @ w.T).norm()
        print(f"{name:30}  {(got - w).norm() / w.norm():10.4f}   {product:14.4f}")


def main(arguments: list[str]) -> int:
    if not arguments:
        demo()
        return 0
    parser = argparse.ArgumentParser(prog="python -m convert.calibrate",
                                     description="a calibrated NVFP4 checkpoint of a 16-bit model")
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", required=True, help="problems that flow through the model, with their solutions")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--no-columns", action="store_true", help="scale search only: AQN then acts as on plain rounding")
    options = parser.parse_args(arguments)
    from convert.loader import load_model, resolve_model
    from problems.tasks import encode_prompts, load_problems

    try:
        model, tokenizer, _ = load_model(options.model, weights="bf16", device="cuda" if torch.cuda.is_available() else "cpu")
        problems = load_problems(options.data, "train", limit=options.prompts)
        solutions = [tokenizer(problem.solution, add_special_tokens=False)["input_ids"] for problem in problems]
        prompts = [prompt + solution for prompt, solution in zip(encode_prompts(problems, tokenizer), solutions)]
        tensors = calibrated(model, record_inputs(model, prompts), columns=not options.no_columns)
        write(tensors, resolve_model(options.model), options.out)
    except (ValueError, OSError) as error:
        print(f"convert/calibrate.py: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: NVFP4, calibrated on {len(prompts)} prompts of {options.data}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
