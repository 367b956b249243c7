"""The decoder-only transformer (Qwen2 and 2.5, Qwen3, Llama): one definition for training, prefill and decoding.

The idea: the layers see a flat list of tokens (T,), no batch axis and no padding. Whatever knows about sequences, that
is positions, rope, masks and the KV cache, lives behind one call:

    attend(layer index, q (T, H, D), k (T, Hkv, D), v (T, Hkv, D)) -> (T, H, D)

Training and prefill pass a PackedAttention (causal within each sequence of a packed batch); the rollout passes its own,
which writes k and v into a cache. Nothing else differs between the sampled and the trained model.

    tokens (T,)
      |  embed                                      x, the residual stream, (T, d)
      +--> [norm] -> qkv -> [q, k norm: Qwen3] -> attend -> o ----> + x
      |      `- noisy under AQN                                     |
      +--> [norm] -> gate_up -> silu(gate) * up -> down ----------> + x      ... L layers
      |      `- noisy under AQN
      `--> [final norm] -> hidden (T, d) -> head -> logits (T, V)

The four linears of a layer are LoraLinear: q,k,v stacked in one, gate,up in another. Norm weights are fp32 and the
norm is computed in fp32; under AQN the caller hands in noisy copies (norm_weights): noise never touches the model.

    y = x / sqrt(mean x^2 + eps) * w        Qwen3: also on each head of q and k, over D, before rope

Source: Qwen2.5 (arXiv 2412.15115), Qwen3 (2505.09388), Llama 3 (2407.21783), as transformers computes them; layers that
are recomputed, arXiv 1604.06174.
Where we differ from transformers: no batch axis, the fp32 norm weight multiplies before the cast to bf16, stacked
projections, logits in fp32 with ids beyond the tokenizer at -inf (checkpoints pad the vocabulary with rows of noise).
Cost: with checkpoint_layers, one (T, d) tensor is kept a layer and the layer, but for `down`, is recomputed in the
backward pass; the last kept_layers are spared that, where memory allows.
Limits: full attention only (a sliding window is refused), silu, no mixture of experts.
Copy along: nvfp4.py, lora.py, layers/shapes.py, layers/rope.py, layers/weights.py, gpu/fused_ops.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpu.fused_ops import add_rms_norm, swiglu
from layers.rope import apply_rope, rope_tables
from layers.shapes import SHAPES, ModelConfig
from layers.weights import make_weight
from lora import LoraLinear
from nvfp4 import NVFP4Tensor

__all__ = ["SHAPES", "ModelConfig", "PackedAttention", "Transformer", "random_model"]

# source(name, shape) gives one tensor of the checkpoint under its Hugging Face name, checked against shape.
Source = Callable[[str, tuple[int, ...]], "Tensor | NVFP4Tensor"]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """One transformer block, built from the checkpoint's tensors as they come."""

    def __init__(self, config: ModelConfig, index: int, make: Builder):
        super().__init__()
        self.config, self.index = config, index
        d, q_rows, kv_rows = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.splits = (config.heads, config.kv_heads, config.kv_heads)
        path = f"model.layers.{index}"
        attention, mlp = f"{path}.self_attn", f"{path}.mlp"
        qkv = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        self.input_norm = make.norm(f"{path}.input_layernorm.weight", d)
        self.qkv = make.linear(attention, qkv, d, config.qkv_bias)
        if config.qk_norm:
            self.q_norm = make.norm(f"{attention}.q_norm.weight", config.head_dim)
            self.k_norm = make.norm(f"{attention}.k_norm.weight", config.head_dim)
        self.o = make.linear(attention, {"o_proj": d}, q_rows, config.o_bias)
        self.post_norm = make.norm(f"{path}.post_attention_layernorm.weight", d)
        self.gate_up = make.linear(mlp, {"gate_proj": config.ffn, "up_proj": config.ffn}, d, False)
        self.down = make.linear(mlp, {"down_proj": d}, config.ffn, False)

    def forward(
        self, x: Tensor, delta: Tensor | None, attend: Attend, input_norm: Tensor, post_norm: Tensor, *,
        save_only: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """x (T, d) and what the block before still has to add to it -> the same pair for the next block.

        The pending sum is fused with the next norm, which reads both anyway. save_only: see LoraLinear.forward.
        """
        config = self.config
        normed, x = add_rms_norm(x, delta, input_norm, config.eps)
        qkv = self.qkv(normed).view(-1, sum(self.splits), config.head_dim)
        q, k, v = qkv.split(self.splits, dim=1)  # (T, H, D), (T, Hkv, D), (T, Hkv, D): views
        if config.qk_norm:
            q = add_rms_norm(q.reshape(-1, config.head_dim), None, self.q_norm, config.eps)[0].view(q.shape)
            k = add_rms_norm(k.reshape(-1, config.head_dim), None, self.k_norm, config.eps)[0].view(k.shape)
        delta = self.o(attend(self.index, q, k, v).flatten(1))
        normed, x = add_rms_norm(x, delta, post_norm, config.eps)
        return x, self.down(swiglu(self.gate_up(normed)), save_only)


@dataclass(frozen=True)
class Builder:
    """Turns named tensors of a source into the parts of a model, one at a time, so that none is held twice."""

    source: Source
    weights: str
    device: torch.device
    dtype: torch.dtype
    full: bool

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
        copy = self.device.type == "cpu"  # where the source's tensor may lie in the mapped checkpoint file
        return nn.Parameter(self.source(name, shape).to(self.device, dtype, copy=copy), requires_grad=self.full)

    def norm(self, name: str, size: int) -> nn.Parameter:
        return self.tensor(name, (size,), torch.float32)

    def linear(self, path: str, parts: dict[str, int], columns: int, bias: bool) -> LoraLinear:
        tensors = [self.source(f"{path}.{name}.weight", (rows, columns)) for name, rows in parts.items()]
        weight = make_weight(self.weights, tensors, self.device, self.dtype, trainable=self.full)
        biases = [self.source(f"{path}.{name}.bias", (rows,)) for name, rows in parts.items()] if bias else None
        stacked = torch.cat([b.to(self.device, self.dtype) for b in biases]) if bias else None
        return LoraLinear(weight, parts, stacked, path)


class Transformer(nn.Module):
    """The whole model. Built layer by layer from `source`, so that the 16-bit weights are never in memory at once.

    weights: "nvfp4", "nf4" or "bf16"; full=True makes every parameter trainable (bf16 only).
    valid_vocab: ids from here on are padding of the vocabulary; the loader sets it to len(tokenizer).
    """

    def __init__(
        self,
        config: ModelConfig,
        source: Source,
        *,
        weights: str = "nvfp4",
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        full: bool = False,
    ):
        super().__init__()
        if full and weights != "bf16":
            raise ValueError(f"--full trains the weights themselves, which {weights} freezes; add --weights bf16")
        device = torch.device(device)
        self.config, self.device = config, device
        self.dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        make = Builder(source, weights, device, self.dtype, full)
        self.embed = make.tensor("model.embed_tokens.weight", (config.vocab, config.hidden), self.dtype)
        self.layers = nn.ModuleList(Layer(config, i, make) for i in range(config.layers))
        self.final_norm = make.norm("model.norm.weight", config.hidden)
        head = None if config.tied else make.tensor("lm_head.weight", (config.vocab, config.hidden), self.dtype)
        self.untied_head = head
        self.valid_vocab = config.vocab
        self.checkpoint_layers = False
        self.kept_layers = 0  # under checkpoint_layers: the last layers, that keep their activations all the same
        self._rope: tuple[Tensor, Tensor] | None = None

    @property
    def head(self) -> Tensor:
        """(V, d); the embedding itself where the checkpoint ties them."""
        return self.embed if self.untied_head is None else self.untied_head

    def rope(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin, fp32 (S, D/2) with S >= length; made once and grown by doubling."""
        if self._rope is None or self._rope[0].shape[0] < length:
            size = max(length, 1024, 0 if self._rope is None else 2 * self._rope[0].shape[0])
            self._rope = rope_tables(self.config, size, self.device)
        return self._rope

    def noisy_norms_targets(self) -> list[Tensor]:
        """The norm weights that AQN perturbs, fp32, in the order of forward's norm_weights; not the final norm."""
        return [weight for layer in self.layers for weight in (layer.input_norm, layer.post_norm)]

    def forward(self, tokens: Tensor, attend: Attend, norm_weights: Sequence[Tensor] | None = None) -> Tensor:
        """tokens (T,) int64 -> hidden (T, d), final norm applied. norm_weights: noisy_norms_targets() with noise."""
        norms = self.noisy_norms_targets() if norm_weights is None else norm_weights
        if len(norms) != 2 * len(self.layers):
            raise ValueError(f"norm_weights has {len(norms)} tensors; the model has {2 * len(self.layers)} noisy norms")
        recompute = self.checkpoint_layers and torch.is_grad_enabled()
        x, delta = F.embedding(tokens, self.embed), None
        for i, layer in enumerate(self.layers):
            arguments = (attend, norms[2 * i], norms[2 * i + 1])
            if recompute and i < len(self.layers) - self.kept_layers:
                x = _recomputed(layer, x, *arguments)
            else:
                x, delta = layer(x, delta, *arguments)
        return add_rms_norm(x, delta, self.final_norm, self.config.eps)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (T, d) -> fp32 logits (T, V); -inf for ids that the tokenizer does not know.

        bf16 logits on a 152k vocabulary cost 0.01-0.03 nats a log-prob, so the GEMM must not round to bf16.
        """
        if hidden.dtype == torch.float32:
            logits = hidden @ self.head.T
        elif hidden.is_cuda and not torch.is_grad_enabled():
            logits = torch.mm(hidden, self.head.T, out_dtype=torch.float32)
        else:
            logits = hidden.float() @ self.head.float().T
        if self.valid_vocab < self.config.vocab:
            unknown = torch.arange(self.config.vocab, device=logits.device) >= self.valid_vocab
            logits = logits.masked_fill(unknown, float("-inf"))
        return logits

    def packed(self, lengths: Sequence[int]) -> PackedAttention:
        return PackedAttention(lengths, *self.rope(max(lengths)))


def _recomputed(layer: Layer, x: Tensor, attend: Attend, input_norm: Tensor, post_norm: Tensor) -> Tensor:
    """A layer as one checkpoint. The pending sum is done, so that one (T, d) tensor is kept, not two.

    The second run only serves what the backward reads, and it does not read the output of `down`, a quarter to a third
    of a layer's weights: there the product is left out.
    """
    runs = itertools.count()

    def run(x: Tensor) -> Tensor:
        x, delta = layer(x, None, attend, input_norm, post_norm, save_only=next(runs) > 0)
        return x + delta

    # No dropout, so no random state to keep.
    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)


def _flash_varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Causal attention within the sequences of a packed batch: the FlashAttention-2 of torch, autograd included.

    torch.nn.attention.varlen wraps this very operator, but its arguments changed between 2.11 and 2.13; these did not.
    """
    attention = torch.ops.aten._flash_attention_forward
    return attention(q, k, v, starts, starts, longest, longest, 0.0, True, False)[0]


class PackedAttention:
    """attend() for sequences laid end to end: causal inside each, blind to the others. For training and prefill.

    lengths: tokens of each sequence, in order; positions begin at 0 in each. cos, sin: rope tables of at least the
    longest. On a GPU the packed batch goes to the varlen kernel as it is. On a CPU the sequences are padded on the
    right to the longest: a causal query never sees what lies to its right, so no mask is needed.
    """

    def __init__(self, lengths: Sequence[int], cos: Tensor, sin: Tensor):
        if not lengths or min(lengths) < 1:
            raise ValueError(f"every packed sequence needs a token; lengths are {list(lengths)[:8]}")
        self.cos, self.sin, device = cos, sin, cos.device
        self.batch, self.longest, self.ragged = len(lengths), max(lengths), min(lengths) < max(lengths)
        sizes = torch.tensor(lengths)
        starts = F.pad(sizes.cumsum(0), (1, 0))  # (B + 1,)
        offsets = torch.repeat_interleave(starts[:-1], sizes)  # (T,) where a token's sequence begins
        positions = torch.arange(int(starts[-1])) - offsets
        row = torch.repeat_interleave(torch.arange(self.batch), sizes)
        self.lengths, self.positions = list(lengths), positions.to(device)  # (T,)
        self.starts = starts.to(device, torch.int32)
        self.padded_index = (row * self.longest + positions).to(device)  # (T,) place of each token among B * S

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = apply_rope(q, k, self.cos, self.sin, self.positions)
        if q.is_cuda and q.dtype != torch.float32:
            return _flash_varlen(q, k, v, self.starts, self.longest)
        return self._padded(q, k, v)

    def _padded(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (self._pad(t).transpose(1, 2) for t in (q, k, v))  # (B, H, S, D)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        out = out.transpose(1, 2).reshape(-1, *out.shape[1::2])  # (B * S, H, D)
        return out[self.padded_index] if self.ragged else out

    def _pad(self, t: Tensor) -> Tensor:
        if self.ragged:
            padded = t.new_zeros(self.batch * self.longest, *t.shape[1:])
            t = padded.index_copy(0, self.padded_index, t)
        return t.view(self.batch, self.longest, *t.shape[1:])


def random_model(
    config: ModelConfig, weights: str = "nvfp4", device: torch.device | str = "cpu", seed: int = 0, **options
) -> Transformer:
    """A model of this shape with random weights, made (and quantised) matrix by matrix on the device.

    Weights are N(0, 1/K), so that activations stay of order one; norms are 1 and biases small.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def source(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=device)
        scale = 0.02 if len(shape) == 1 or "embed" in name else shape[1] ** -0.5
        dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
        return torch.empty(shape, device=device, dtype=dtype).normal_(0, scale, generator=generator)

    return Transformer(config, source, weights=weights, device=device, **options)


def demo() -> None:
    """Three sequences packed together give what each gives alone."""
    config = ModelConfig("qwen3", 64, 2, 4, 2, 16, 128, 100, qk_norm=True, tied=True)
    model = random_model(config)
    sequences = [torch.arange(start, start + length) for start, length in ((3, 5), (40, 1), (60, 17))]
    lengths = [len(sequence) for sequence in sequences]
    with torch.no_grad():
        packed = model(torch.cat(sequences), model.packed(lengths)).split(lengths)
        for sequence, hidden in zip(sequences, packed):
            alone = model(sequence, model.packed([len(sequence)]))
            print(f"{len(sequence):3d} tokens: packed - alone, largest difference {(hidden - alone).abs().max():.1e}")
    stored = sum(layer.weight.nbytes for layer in model.modules() if isinstance(layer, LoraLinear))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in 16 or 32 bits, {stored:,} bytes of NVFP4")


if __name__ == "__main__":
    demo()
