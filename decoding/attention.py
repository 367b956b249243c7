"""The KV cache of a rollout, and attention of one new token a sequence against it.

One tensor holds everything, one contiguous (S, D) block for each layer, slot and KV head:

    kv (layer, 2, slot, kv head, S, D)      kv[l, 0] keys (already rotated), kv[l, 1] values

         slot 0   |k k k k k k . . . . .|     a slot is one running sequence: `position` is where its newest token
         slot 1   |k k k . . . . . . . .|     goes, everything before it is attended to, everything behind it is
         slot 2   |k k k k k k k k k . .|     garbage that nobody reads

No pages and no block table: a rollout knows its longest sequence beforehand, slots are refilled in place, and a whole
group's prompt moves between slots with one copy a layer.
Cost: bytes a slot = 2 * layers * kv_heads * head_dim * S * bytes(dtype).

A decode step for one layer: rotate q and k by their positions, write k and v at `position`, attend to 0..position.
Rows of one batch have different lengths; the reference masks them.

Where we differ from paged caches (vLLM, arXiv 2309.06180): above. Limits: every slot is as long as the longest sequence may
get, so that short ones leave the rest of theirs unused.
Copy along: model.py, layers/rope.py.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from layers.rope import apply_rope
from model import PackedAttention, _flash_varlen

MEMORY_SHARE = 0.8  # of the free memory, for the cache; the rest holds activations and logits


class KVCache:
    """Keys and values of `slots` sequences of at most `max_len` tokens."""

    def __init__(self, config, slots: int, max_len: int, dtype: torch.dtype, device):
        shape = (config.layers, 2, slots, config.kv_heads, max_len, config.head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.slots, self.max_len, self.dtype = slots, max_len, dtype

    @staticmethod
    def slot_bytes(config, max_len: int, dtype: torch.dtype) -> int:
        return 2 * config.layers * config.kv_heads * config.head_dim * max_len * dtype.itemsize

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views (slots, Hkv, S, D) of one layer's keys and values."""
        return self.kv[layer, 0], self.kv[layer, 1]

    def write_(self, layer: int, slot: Tensor, position: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v (T, Hkv, D) of T tokens at their slots and positions (T,)."""
        for cached, new in zip(self.keys_values(layer), (k, v)):
            new = to_cache_dtype(new, self.dtype)
            if self.dtype.itemsize == 1:  # not every fp8 has index kernels
                cached, new = cached.view(torch.uint8), new.view(torch.uint8)
            cached[slot, :, position] = new

    def copy_(self, source: list[int], target: list[int], length: int) -> None:
        """Copy the first `length` positions of slots `source` over slots `target`; reads come before writes."""
        if not source or not length:
            return
        source, target = (to_device(slots, self.kv.device) for slots in (source, target))
        raw = self.kv.view(torch.uint8) if self.dtype.itemsize == 1 else self.kv
        for layer in raw:  # layer by layer, so that the copy in flight stays small
            layer[:, target, :, :length] = layer[:, source, :, :length]


def free_bytes(device: torch.device) -> int:
    """Memory that a new tensor could have."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def slots_that_fit(config, max_len: int, dtype: torch.dtype, device: torch.device) -> int:
    """The memory rule: slots in MEMORY_SHARE of what is free now. ValueError when not even one fits."""
    slot_bytes, free = KVCache.slot_bytes(config, max_len, dtype), free_bytes(device)
    slots = int(free * MEMORY_SHARE) // slot_bytes
    if slots < 1:
        raise ValueError(
            f"one sequence of max_len={max_len} needs {slot_bytes / 2**30:.2f} GiB of cache and {free / 2**30:.2f} GiB "
            "are free; shorten max_len, or use an 8-bit cache"
        )
    return slots


def to_device(values, device: torch.device) -> Tensor:
    """A small tensor of these integers, sent without making the host wait for the GPU."""
    tensor = torch.tensor(values, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def to_cache_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast for the cache; FP8 E4M3 saturates at 448 (torch's own cast would make it NaN)."""
    return x.clamp(-448, 448).to(dtype) if dtype.itemsize == 1 else x.to(dtype)


class PrefillAttention(PackedAttention):
    """attend() for prompts laid end to end, prompt i going to slots[i]: PackedAttention that also fills the cache."""

    def __init__(self, cache: KVCache, slots: list[int], lengths: list[int], cos: Tensor, sin: Tensor):
        super().__init__(lengths, cos, sin)
        self.cache = cache
        self.slot = torch.repeat_interleave(torch.tensor(slots), torch.tensor(lengths)).to(cos.device)  # (T,)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = apply_rope(q, k, self.cos, self.sin, self.positions)
        self.cache.write_(layer, self.slot, self.positions, k, v)
        if q.is_cuda and q.dtype != torch.float32:
            return _flash_varlen(q, k, v, self.starts, self.longest)
        return self._padded(q, k, v)


class DecodeAttention:
    """attend(layer, q, k, v) for one new token in each of rows 0..B-1, at `position` (B,) of its slot.

    The slow twin: what depends on the positions alone is prepared once a step, not once a layer.
    """

    def __init__(self, cache: KVCache, position: Tensor, cos: Tensor, sin: Tensor):
        self.cache, self.position = cache, position
        self.row = torch.arange(len(position), device=position.device)
        cos, sin = cos[position].unsqueeze(1), sin[position].unsqueeze(1)  # (B, 1, D/2)
        self.cos = torch.cat((cos, cos), dim=-1)
        self.sin = torch.cat((-sin, sin), dim=-1)
        self.length = int(position.max()) + 1  # the longest row of the batch
        is_ahead = torch.arange(self.length, device=position.device) > position.unsqueeze(1)  # (B, L)
        bias = torch.zeros(is_ahead.shape, device=position.device).masked_fill_(is_ahead, -torch.inf)
        self.bias = bias[:, None, None]  # (B, 1, 1, L)

    def rotate(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return torch.addcmul(x32 * self.cos, x32.roll(x.shape[-1] // 2, -1), self.sin).to(x.dtype)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, H, D), k and v (B, Hkv, D) -> (B, H, D)."""
        batch, heads, dim = q.shape
        kv_heads = k.shape[1]
        self.cache.write_(layer, self.row, self.position, self.rotate(k), v)
        flat = (x[:batch].view(batch * kv_heads, -1, dim) for x in self.cache.keys_values(layer))
        keys, values = (x[:, : self.length].to(q.dtype) for x in flat)
        grouped = self.rotate(q).view(batch * kv_heads, heads // kv_heads, dim)  # query heads of one KV head together
        scores = torch.bmm(grouped, keys.transpose(1, 2)).float().mul_(dim**-0.5)
        scores.view(batch, kv_heads, -1, self.length).add_(self.bias)
        return torch.bmm(scores.softmax(-1).to(q.dtype), values).view(batch, heads, dim)


def demo() -> None:
    """Seven tokens at once, and the last four of them one by one against the cache: the same numbers."""
    from types import SimpleNamespace

    from layers.rope import rope_tables

    config = SimpleNamespace(layers=1, kv_heads=2, head_dim=16, rope_theta=1e4, rope_scaling=None)
    cos, sin = rope_tables(config, 8, "cpu")
    cache = KVCache(config, 1, 8, torch.float32, "cpu")
    q, k, v = torch.randn(7, 8, 16, generator=torch.Generator().manual_seed(0)).split((4, 2, 2), dim=1)
    whole = PackedAttention([7], cos, sin)(0, q, k, v)
    PrefillAttention(cache, [0], [3], cos, sin)(0, q[:3], k[:3], v[:3])
    for t in range(3, 7):
        alone = DecodeAttention(cache, torch.tensor([t]), cos, sin)(0, q[t : t + 1], k[t : t + 1], v[t : t + 1])
        print(f"position {t}: cached - uncached, largest difference {(alone - whole[t]).abs().max():.1e}")
    print(f"one slot of Qwen2.5-7B and 2304 tokens: {2 * 28 * 4 * 128 * 2304 * 2 / 2**20:.0f} MiB in bf16")


if __name__ == "__main__":
    demo()
