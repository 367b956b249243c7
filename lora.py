"""A frozen linear layer with a LoRA adapter beside it: forward, hand-written backward, PEFT files in and out.

The idea: W stays as it is, in 4 bits; what is learnt is a low-rank correction that is never added into it.

    y = x W^T + bias + s (x A^T) B^T         s = alpha / R,  A (R, K) ~ U(-1/sqrt K, 1/sqrt K),  B (N, R) = 0

Projections that share their input are one layer with several parts. For q, k, v with R = 2:

    x (M, K) --- W (N_q + N_k + N_v, K) ----------------------------> | y_q | y_k | y_v |
       \\                                                                 +     +     +
        `-- A stacked (3R, K) --> h = |h_q|h_k|h_v| (M, 3R) --> s (h_q B_q^T | h_k B_k^T | h_v B_v^T)

Backward, given dy. Only x is kept (and the adapter, which exists anyway); h is cheaper to make again than to store:

    h    = x A^T                     dB_p = s dy_p^T h_p             (N_p, R)
    dh_p = s dy_p B_p                dA   = dh^T x                   (3R, K), all parts in one GEMM
                                     dx   = dy W + dh A              W dequantised for the moment, in a buffer for all layers

autograd would keep h, the scaled h and, with a dequantised W, a 16-bit copy of every weight.

Why never merged: 4-bit levels are far apart (0.5, 1, 1.5, 2, 3, 4, 6), BA is usually a percent of W, and W + BA rounded to 4
bits is then W again (`python -m convert.merge`); a larger BA survives in part.
Merging into bf16 and out again drifts. To hand a finished model to other programs, `merge` adds BA to the *dequantised*
W, the weights that were trained beside; added to the original 16-bit weights it would be another model.

Masters A and B are fp32 Parameters (lora_A["q_proj"], lora_B["q_proj"]); the GEMMs read stacked copies in the compute
dtype, refreshed whenever a master has changed (its version counter tells), or at once by sync_().

Source: LoRA (arXiv 2106.09685), QLoRA (2305.14314), QeRL (2510.11696). File format: peft's.
Cost: R (K + N_p) fp32 numbers a part, 1% of a 7B model at rank 32; beside W's GEMM two thin ones forward, five backward.
Limits: one rank and alpha for all targets, no dropout, no DoRA; an adapter file that wants more is refused by name.
Copy along: layers/weights.py, files/peft_files.py. For the command below also convert/merge.py.

    python lora.py                              demo: the backward against autograd
    python lora.py merge MODEL ADAPTER OUT      a merged bf16 model that transformers loads
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from files.peft_files import Adapter, read_adapter, write_adapter
from layers.weights import LoraOperands, Weight

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for a gradient: bf16 factors give an fp32 result without a rounding in between (on a GPU)."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b


class _LoraFunction(torch.autograd.Function):
    """The layer under autograd. `trained`: indices of the parts whose masters (all A, then all B) follow as arguments,
    so that their gradients have somewhere to go; none for the frozen reference."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Weight, bias: Tensor | None, lora: LoraOperands | None, save_only: bool,
                trained: tuple, *_):  # fmt: skip
        ctx.weight, ctx.lora, ctx.trained = weight, lora, trained
        ctx.save_for_backward(x, *(() if lora is None else (lora.a, lora.b)))
        if save_only:
            return x.new_empty(1, 1).expand(x.shape[0], weight.shape[0])
        return weight.lora_matmul(x, bias, lora)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, *operands = ctx.saved_tensors
        lora, dy = ctx.lora, dy.contiguous()
        dx = ctx.weight.grad_input(dy) if ctx.needs_input_grad[0] else None
        if lora is None:
            return (dx, *[None] * 5)
        a, b = operands
        rank, d_b, dh = b.shape[1], [], x.new_empty(x.shape[0], a.shape[0])  # dh (M, P*R)
        h = x @ a.T if ctx.trained else None
        start = 0
        for part, rows in enumerate(lora.parts):
            columns = slice(part * rank, (part + 1) * rank)
            dy_part = dy[:, start : start + rows]
            dh[:, columns] = (dy_part @ b[start : start + rows]) * lora.scaling
            if part in ctx.trained:
                d_b.append(_mm(dy_part.T, h[:, columns]).mul_(lora.scaling))  # dB_p
            start += rows
        if dx is not None:
            dx.addmm_(dh, a)
        d_a = _mm(dh.T, x).split(rank) if ctx.trained else ()
        return (dx, *[None] * 5, *(d_a[part] for part in ctx.trained), *d_b)


class LoraLinear(nn.Module):
    """A frozen weight (N, K), its bias, and an optional adapter on some of its stacked parts.

    parts: name -> rows, in the order in which they are stacked; path: where the parts sit in the checkpoint's names
    ("model.layers.3.self_attn"). `active` is "policy", "reference" or "off"; see adapters().
    """

    def __init__(self, weight: Weight, parts: dict[str, int], bias: Tensor | None = None, path: str = ""):
        super().__init__()
        if sum(parts.values()) != weight.shape[0]:
            raise ValueError(f"parts {parts} have {sum(parts.values())} rows, the weight {weight.shape[0]}")
        self.weight, self.parts, self.path = weight, dict(parts), path
        trainable = any(p.requires_grad for p in weight.parameters())
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=trainable)
        self.trainable = trainable  # full-parameter training: ordinary autograd, no adapter
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        self.rank, self.alpha, self.active = 0, 0.0, "policy"
        self._masters: tuple[Tensor, ...] = ()  # every A, then every B; as autograd wants them
        self._trained: tuple[int, ...] = ()  # indices of the parts they belong to
        self._policy: LoraOperands | None = None
        self._reference: LoraOperands | None = None
        self._synced: tuple = ()

    def add_adapter(self, rank: int, alpha: float, targets: set[str], generator: torch.Generator) -> None:
        """Gives each part named in targets an adapter: A Kaiming-uniform, B zero, so that the layer is unchanged."""
        if self.trainable:
            raise ValueError("full-parameter training has no adapter; drop --full or the adapter")
        (rows, columns), device = self.weight.shape, self.weight.stored()[0].device
        self.rank, self.alpha, self._policy, self._masters = rank, float(alpha), None, ()
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        for name in (name for name in self.parts if name in targets):
            bound = 1 / math.sqrt(columns)  # kaiming_uniform_(a=sqrt(5)), as peft and torch's Linear begin
            uniform = torch.rand(rank, columns, generator=generator, device=generator.device)
            self.lora_A[name] = nn.Parameter(((uniform * 2 - 1) * bound).to(device))
            self.lora_B[name] = nn.Parameter(torch.zeros(self.parts[name], rank, device=device))
        if not len(self.lora_A):
            return
        self._masters = (*self.lora_A.values(), *self.lora_B.values())
        self._trained = tuple(part for part, name in enumerate(self.parts) if name in self.lora_A)
        dtype = self.weight.compute_dtype
        a = torch.zeros(len(self.parts) * rank, columns, dtype=dtype, device=device)
        b = torch.zeros(rows, rank, dtype=dtype, device=device)
        self._policy = LoraOperands(a, b, tuple(self.parts.values()), self.alpha / rank)
        self.sync_()

    @torch.no_grad()
    def sync_(self) -> None:
        """Copies the fp32 masters into the stacked operands, in place: a captured CUDA graph sees the new values."""
        if self._policy is None:
            return
        start = 0
        for part, (name, rows) in enumerate(self.parts.items()):
            if name in self.lora_A:  # a part without an adapter keeps its zeros
                self._policy.a[part * self.rank : (part + 1) * self.rank].copy_(self.lora_A[name])
                self._policy.b[start : start + rows].copy_(self.lora_B[name])
            start += rows
        self._synced = tuple((id(p), p._version) for p in self._masters)

    def operands(self) -> LoraOperands | None:
        """The adapter that is active now, up to date; None when there is none."""
        if self.active == "policy" and self._policy is not None:
            if self._synced != tuple((id(p), p._version) for p in self._masters):
                self.sync_()
            return self._policy
        return self._reference if self.active == "reference" else None

    def forward(self, x: Tensor, save_only: bool = False) -> Tensor:
        """x (..., K) -> (..., N) in the compute dtype.

        save_only: for recomputation under a checkpoint, where the backward needs what this layer saves and nobody
        reads its output: no product is made, and the output's values are undefined.
        """
        flat = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        if self.trainable:
            y = nn.functional.linear(flat, self.weight.tensor, self.bias)
        else:
            lora = self.operands()
            trains = lora is not None and lora is self._policy
            if torch.is_grad_enabled() and (trains or flat.requires_grad):
                masters = (self._trained, *self._masters) if trains else ((),)
                y = _LoraFunction.apply(flat, self.weight, self.bias, lora, save_only, *masters)
            else:
                y = self.weight.lora_matmul(flat, self.bias, lora)
        return y if x.ndim == 2 else y.view(*x.shape[:-1], -1)


# ------------------------------------------------------------------------------------------------- whole models


def lora_layers(model: nn.Module) -> list[LoraLinear]:
    return [module for module in model.modules() if isinstance(module, LoraLinear)]


def add_adapters(
    model: nn.Module, rank: int, alpha: float, targets: set[str] | None = None, *, generator: torch.Generator
) -> None:
    """An adapter on every target of the model (None: all seven projections). ValueError for an unknown target."""
    targets = set(TARGETS if targets is None else targets)
    if unknown := sorted(targets - set(TARGETS)):
        raise ValueError(f"target {unknown[0]!r} is not a projection of these models; choose from {', '.join(TARGETS)}")
    if rank < 1 or not targets:
        raise ValueError(f"rank={rank} with {len(targets)} targets trains nothing; take rank >= 1 and a target")
    for layer in lora_layers(model):
        layer.add_adapter(rank, alpha, targets, generator)


def sync_adapters(model: nn.Module) -> None:
    """After an optimiser step, before a captured graph is replayed."""
    for layer in lora_layers(model):
        layer.sync_()


@contextmanager
def adapters(model: nn.Module, which: str) -> Iterator[None]:
    """Inside, the model computes with its "policy" adapter, with the frozen "reference" (else none), or with "off"."""
    if which not in ("policy", "reference", "off"):
        raise ValueError(f"adapters: {which!r} is not policy, reference or off")
    layers = lora_layers(model)
    before = [layer.active for layer in layers]
    for layer in layers:
        layer.active = which
    try:
        yield
    finally:
        for layer, active in zip(layers, before):
            layer.active = active


def freeze_reference(model: nn.Module) -> None:
    """The present adapter becomes the reference: the KL of a run that starts from it is then 0 at step 0."""
    for layer in lora_layers(model):
        if layer._policy is not None:
            layer.sync_()
            now = layer._policy
            layer._reference = LoraOperands(now.a.clone(), now.b.clone(), now.parts, now.scaling)


def adapter_pairs(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """The fp32 masters (A, B) of every adapted projection, by its path in the checkpoint. Not copies."""
    pairs = {}
    for layer in lora_layers(model):
        pairs |= {f"{layer.path}.{name}": (layer.lora_A[name], layer.lora_B[name]) for name in layer.lora_A}
    return pairs


def save_adapter(model: nn.Module, folder: Path | str, base_model_name: str) -> None:
    """The adapter in peft's format, fp32, so that loading it back gives the same logits bit for bit."""
    pairs, layers = adapter_pairs(model), [layer for layer in lora_layers(model) if len(layer.lora_A)]
    if not pairs:
        raise ValueError("the model has no adapter to save; full-parameter training saves the model instead")
    write_adapter(Adapter(layers[0].rank, layers[0].alpha, pairs, base_model_name), folder)


def check_fit(adapter: Adapter, shapes: dict[str, tuple[int, int]], folder: Path | str) -> None:
    """ValueError unless the adapter has each of its targets for every layer of a model with these (N, K), and no more."""
    wanted = {path for path in shapes if path.rpartition(".")[2] in adapter.targets}
    maker = repr(adapter.base[:80]) if adapter.base else "another model"  # escaped: it is a stranger's
    for problem, paths in (("lacks", wanted - adapter.pairs.keys()), ("has unknown", adapter.pairs.keys() - wanted)):
        if paths:
            raise ValueError(f"adapter {folder} {problem} {sorted(paths)[0]} ({len(paths)} in all): it was made for "
                             f"{maker}, or for some layers only")  # fmt: skip
    for path, (a, b) in adapter.pairs.items():
        if (b.shape[0], a.shape[1]) != shapes[path]:
            raise ValueError(f"adapter {folder}: {path} is {b.shape[0]} x {a.shape[1]}, the model's {shapes[path]}; "
                             f"it was made for {maker}")  # fmt: skip


def load_adapter(model: nn.Module, folder: Path | str) -> Adapter:
    """Puts the adapter of a peft folder into the model, replacing the present one; ValueError unless it fits exactly."""
    adapter, shapes = read_adapter(folder), {}
    for layer in lora_layers(model):
        shapes |= {f"{layer.path}.{name}": (rows, layer.weight.shape[1]) for name, rows in layer.parts.items()}
    check_fit(adapter, shapes, folder)
    add_adapters(model, adapter.rank, adapter.alpha, adapter.targets, generator=torch.Generator())
    with torch.no_grad():
        for path, pair in adapter_pairs(model).items():
            for master, value in zip(pair, adapter.pairs[path]):
                master.copy_(value)
    sync_adapters(model)
    return adapter


def demo() -> None:
    """The hand-written backward against autograd through a dense copy, in float64."""
    from layers.weights import make_weight

    generator = torch.Generator().manual_seed(0)
    w = torch.randn(48, 32, generator=generator, dtype=torch.float64)
    layer = LoraLinear(make_weight("bf16", [w], "cpu", torch.float64), {"q_proj": 32, "k_proj": 16})
    layer.add_adapter(4, 8, {"q_proj", "k_proj"}, generator)
    layer.double()
    with torch.no_grad():
        for b in layer.lora_B.values():
            b.normal_(generator=generator)
    x = torch.randn(10, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    leaves = [x, *layer.lora_A.values(), *layer.lora_B.values()]
    plain = x @ w.T + 2 * torch.cat([x @ a.T @ b.T for a, b in zip(layer.lora_A.values(), layer.lora_B.values())], 1)
    dy = torch.randn_like(plain)
    expected, got = torch.autograd.grad(plain, leaves, dy), torch.autograd.grad(layer(x), leaves, dy)
    names = ["x", *(f"A[{n}]" for n in layer.lora_A), *(f"B[{n}]" for n in layer.lora_B)]
    for name, e, g in zip(names, expected, got):
        print(f"d{name:10} largest difference {(e - g).abs().max():.1e}")


def main(arguments: list[str]) -> int:
    if not arguments:
        demo()
        return 0
    parser = argparse.ArgumentParser(prog="lora.py", description="without a command: a demo of the backward")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("merge", add_help=False, help="a merged 16-bit model that transformers loads (merge --help)")
    parser.parse_args(arguments[:1])  # what follows is the command's
    from convert import merge

    return merge.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
