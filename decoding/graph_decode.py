"""The decode step on a GPU: fused kernels, recorded once as a CUDA graph for each batch size, replayed for each token.

The idea: a step of a 28-layer model is about 300 launches of a few microseconds each, faster than Python can launch them.
A CUDA graph launches them all at once, if nothing in the step depends on the host: every tensor keeps its address, and
what changes from step to step lives in the decoder's state, which the last kernel of the step advances itself.

    replay -> [embed | 28 x (norm, qkv, attention, o, norm, gate_up, swiglu, down) | norm, head, sampler] -> state + 1

    fixed addresses        how new values get in
    state, tables          place_(), begin(): copied in; the tables have a capacity and grow by starting over
    norm weights           begin() copies this rollout's noisy (or clean) weights into buffers of our own
    adapters               LoraLinear keeps its stacked operands in place and refreshes them
    temperature, stops     small tensors that the sampler reads

Batch sizes are recorded when first needed; all graphs share one memory pool. Recording runs the step once beforehand, with
every row frozen, so that kernels are compiled and nothing advances.

The slow twin is decode.Decoder: the same state, the same tables, the same tokens up to rounding.
Source: CUDA graphs, as torch.cuda.CUDAGraph records them. Cost: one recording a batch size, kept while the addresses last.
Limits: `can_fuse` says where it runs (a CUDA GPU with Triton, bf16, head sizes that tile); elsewhere decode.Decoder does.
Copy along: lora.py, sampling.py, decoding/attention.py, decoding/decode.py, gpu/decode_attention.py, gpu/fused_sampling.py.
For the demo also layers/shapes.py.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from decoding.attention import KVCache
from decoding.decode import DONE, POSITION, TOKEN, Decoder
from gpu import fused_sampling
from gpu.decode_attention import FusedDecodeAttention
from gpu.fused_sampling import FusedSampler
from lora import lora_layers
from sampling import Sampling, truncate


def can_fuse(model) -> bool:
    """Whether the fused step runs this model: a CUDA GPU with Triton, bf16, head sizes that tile."""
    config = model.config
    tiles = config.head_dim & (config.head_dim - 1) == 0 and config.heads // config.kv_heads <= 16
    return model.device.type == "cuda" and fused_sampling.triton is not None and model.dtype == torch.bfloat16 and tiles


class Look:
    """Flags on their way to the host; numpy() waits for them."""

    def __init__(self, flags: Tensor):
        self.host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
        self.host.copy_(flags, non_blocking=True)
        self.arrived = torch.cuda.Event()
        self.arrived.record()

    def numpy(self) -> np.ndarray:
        self.arrived.synchronize()
        return self.host.numpy()


class GraphDecoder(Decoder):
    """A Decoder whose step is a graph replay."""

    def __init__(self, model, cache: KVCache, cos: Tensor, sin: Tensor, head: str = "16bit"):
        super().__init__(model, cache, cos, sin, head)
        config = model.config
        self.attend = FusedDecodeAttention(cache, config.heads, cos, sin)
        self.sampler = FusedSampler(cache.slots, config.vocab, model.valid_vocab, self.device)
        self.norms = [weight.detach().clone() for weight in model.noisy_norms_targets()]
        self.layers = lora_layers(model)
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.capacity = 0

    def begin(self, uniform: np.ndarray, sampling: Sampling, norm_weights: list[Tensor] | None) -> None:
        self.shape, self.sampling = uniform.shape, sampling
        self._reserve(uniform.size)
        self.uniform[: uniform.size] = torch.from_numpy(uniform).to(self.device).flatten()
        self.tokens.fill_(-1)
        given = self.model.noisy_norms_targets() if norm_weights is None else norm_weights
        torch._foreach_copy_(self.norms, [weight.detach() for weight in given])
        self.norm_weights = self.norms
        for layer in self.layers:
            layer.operands()  # refreshed in place where a master has changed
        self.sampler.begin(sampling, scaled=sampling.truncates)
        self.state[DONE] = 1

    def _reserve(self, size: int) -> None:
        """Tables of at least this size; new ones have new addresses, so the graphs go."""
        if size <= self.capacity:
            return
        self.graphs.clear()
        self.capacity = max(1 << (size - 1).bit_length(), 1 << 18)
        self.uniform, self.logps, self.entropies = torch.zeros(3, self.capacity, device=self.device)
        self.tokens = torch.full((self.capacity,), -1, dtype=torch.int64, device=self.device)

    def step(self, batch: int) -> None:
        s = self.sampling
        truncation = (s.temperature, s.top_k, s.top_p, s.min_p) if s.truncates else None
        key = (batch, s.is_greedy, truncation, self.layers[0].active)
        if key not in self.graphs:
            self.graphs[key] = self._record(batch)
        self.graphs[key].replay()

    def _record(self, batch: int) -> torch.cuda.CUDAGraph:
        before = self.state.clone()
        self.state[DONE] = 1
        self._launch(batch)
        self.state.copy_(before)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):  # not torch.cuda.graph, which collects garbage and empties the cache each time
            graph.capture_begin(pool=self.pool)
            self._launch(batch)
            graph.capture_end()
        return graph

    def _launch(self, batch: int) -> None:
        token, position = self.state[TOKEN, :batch], self.state[POSITION, :batch]
        logits = self._logits(self.model(token, self.attend.at(position), self.norms))
        s = self.sampling
        if s.truncates:
            logits[:, self.model.valid_vocab :] = -torch.inf
            logits = truncate(logits / s.temperature, s.top_k, s.top_p, s.min_p)
        self.sampler(self, logits, s.is_greedy)

    def _logits(self, hidden: Tensor) -> Tensor:
        """(B, V) fp32, ids beyond the tokenizer not masked: the sampler skips them."""
        if self.head is not None:
            return self.head.matmul(hidden).float()
        return torch.mm(hidden, self.model.head.T, out_dtype=torch.float32)

    def done(self, batch: int) -> Look:
        return Look(self.state[DONE, :batch])


def demo() -> None:
    """What one replay launches, for the published shapes; the kernels themselves need a GPU."""
    from layers.shapes import SHAPES

    for name, config in SHAPES.items():
        launches = 8 * config.layers + 5  # 8 a layer; embed, norm, head and the sampler's two
        print(f"{name:13} {config.layers} layers: {launches} launches a token in one graph")
    print("this machine:", "CUDA" if torch.cuda.is_available() else "no GPU, so Rollout takes decode.Decoder")


if __name__ == "__main__":
    demo()
