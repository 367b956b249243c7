"""Attention of one new token a sequence in one Triton launch a layer: rope, cache write, split keys, combine.

The idea: at decode, attention reads the cache once and computes little, so it should be one launch that keeps the memory
busy. A program takes one sequence, one KV head with all query heads that share it (their rows fill one tensor-core
tile), and one split of the cached positions:

    grid (B * Hkv, SPLIT)       positions of one sequence, in blocks of 64

        split 0   |block 0|block 1|  + the new token: rotates and stores its k and v, attends to it
        split 1           |block 2|block 3|
        split 2                   |block 4|5..|                       lengths differ: a split takes an equal share of the
        (split 3: nothing left, ends at once)                         blocks that its own sequence has

Each split keeps the usual running maximum m, sum l and weighted values acc. The last split of a head to finish (a
ticket counter tells, and resets itself) combines them, always in the order of the splits, so that a replay is bit-equal:

    out = sum_s e^(m_s - m) acc_s / sum_s e^(m_s - m) l_s                     m = max m_s

Nobody reads the new position from the cache in this launch, so its write needs no other synchronisation.
Source: flash-decoding (Dao et al., 2023); where we differ: rope and the cache write happen inside, and no second launch
combines. Cost: the bytes of the cached keys and values, once.
Limits: head_dim a power of two, at most 16 query heads a KV head.
Copy along: nothing. Its slow twin is in decoding/attention.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a CPU-only install: attention.DecodeAttention remains
    triton = None

TILE = (64, 4, 3)  # cached positions a step, warps, stages of the load pipeline
PROGRAMS = 264  # two on each multiprocessor of an H200; more splits of a sequence would only add work
ROWS = 16  # rows of a tensor-core tile; query heads of one KV head, padded
MAX_SPLIT = 16

if triton is not None:

    @triton.jit
    def _prefetch_cached(keys, values, start, end, D: tl.constexpr, BLOCK: tl.constexpr):
        """Asks for the first block of cached positions to come into the L2 cache, and does not wait."""
        LINE: tl.constexpr = 1024 // keys.dtype.element_ty.primitive_bitwidth  # elements in 128 bytes
        LINES: tl.constexpr = D // LINE if D > LINE else 1
        at = tl.minimum(start + tl.arange(0, BLOCK), tl.maximum(end - 1, 0))[:, None] * D + tl.arange(0, LINES)[None, :] * LINE
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [keys + at], dtype=tl.int32,
                                  is_pure=False, pack=1)  # fmt: skip
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [values + at], dtype=tl.int32,
                                  is_pure=False, pack=1)  # fmt: skip

    @triton.jit
    def _attend_cached(q, keys, values, start, end, m, l, acc, scale, D: tl.constexpr, BLOCK: tl.constexpr):
        """The running softmax of q (ROWS, D) over the cached positions start .. end - 1."""
        d = tl.arange(0, D)
        for first in range(start, end, BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = (at < end)[:, None]
            k = tl.load(keys + at[:, None] * D + d[None, :], mask=inside, other=0.0)  # (BLOCK, D) cached keys
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), allow_tf32=False) * scale
            scores = tl.where((at < end)[None, :], scores, -1e30)
            m_new = tl.maximum(m, tl.max(scores, axis=1))
            p = tl.exp2(scores - m_new[:, None])
            shrink = tl.exp2(m - m_new)
            v = tl.load(values + at[:, None] * D + d[None, :], mask=inside, other=0.0)  # (BLOCK, D) cached values
            acc = acc * shrink[:, None] + tl.dot(p.to(q.dtype), v.to(q.dtype), allow_tf32=False)
            l = l * shrink + tl.sum(p, axis=1)
            m = m_new
        return m, l, acc

    @triton.jit
    def _combined(acc_ptr, sums_ptr, first, active, ROWS: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr):
        """The result (ROWS, D) of the `active` splits whose partial results begin at slot `first`, in their order."""
        row, d, splits = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, SPLIT)
        at = (first + splits)[:, None] * 2 * ROWS + row[None, :]
        has_work = (splits < active)[:, None]
        m_all = tl.load(sums_ptr + at, mask=has_work, other=-1e30, cache_modifier=".cg")  # (SPLIT, ROWS)
        l_all = tl.load(sums_ptr + at + ROWS, mask=has_work, other=0.0, cache_modifier=".cg")
        m = tl.max(m_all, axis=0)
        l = tl.sum(l_all * tl.exp2(m_all - m[None, :]), axis=0)
        acc = tl.zeros((ROWS, D), tl.float32)
        for s in tl.static_range(SPLIT):  # unrolled, so that the loads overlap
            slot = first + s
            m_s = tl.load(sums_ptr + slot * 2 * ROWS + row, mask=row < tl.where(s < active, ROWS, 0), other=-1e30,
                          cache_modifier=".cg")  # fmt: skip
            part = tl.load(acc_ptr + (slot * ROWS + row)[:, None] * D + d[None, :],
                           mask=(row < tl.where(s < active, ROWS, 0))[:, None], other=0.0, cache_modifier=".cg")  # fmt: skip
            acc += part * tl.exp2(m_s - m)[:, None]
        return acc / l[:, None]

    @triton.jit
    def _decode_attention_kernel(
        q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, position_ptr, cos_ptr, sin_ptr, out_ptr,
        acc_ptr, sums_ptr, ticket_ptr, stride_qt, stride_kt, stride_vt, stride_slot, scale,
        HKV: tl.constexpr, GROUP: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
        SPLIT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        pair, split = tl.program_id(0), tl.program_id(1)  # pair: a sequence and one of its KV heads
        b, h = (pair // HKV).to(tl.int64), pair % HKV
        position = tl.load(position_ptr + b).to(tl.int32)  # cached: 0 .. position - 1
        blocks = tl.cdiv(position, BLOCK)
        share = tl.maximum(tl.cdiv(blocks, SPLIT), 1)  # blocks a split
        active = tl.maximum(tl.cdiv(blocks, share), 1)  # splits that have work
        if split < active:
            start, end = split * share * BLOCK, tl.minimum((split + 1) * share * BLOCK, position)
            keys, values = keys_ptr + b * stride_slot + h * S * D, values_ptr + b * stride_slot + h * S * D
            row, d = tl.arange(0, ROWS), tl.arange(0, D)
            partner = (d + D // 2) % D
            cos = tl.load(cos_ptr + position * (D // 2) + d % (D // 2))  # (D,) fp32
            sin = tl.load(sin_ptr + position * (D // 2) + d % (D // 2)) * tl.where(d < D // 2, -1.0, 1.0)
            if PDL:  # positions and cached keys are of earlier steps, so they need not wait; q, k and v must
                _prefetch_cached(keys, values, start, end, D, BLOCK)
                gdc_wait()
                gdc_launch_dependents()
            is_head = (row < GROUP)[:, None]
            q_row = q_ptr + b * stride_qt + (h * GROUP + row)[:, None] * D
            q = tl.load(q_row + d[None, :], mask=is_head, other=0.0).to(tl.float32)  # (ROWS, D) this group's queries
            q_partner = tl.load(q_row + partner[None, :], mask=is_head, other=0.0).to(tl.float32)
            q = (q * cos[None, :] + q_partner * sin[None, :]).to(q_ptr.dtype.element_ty)

            m = tl.full((ROWS,), -1e30, tl.float32)
            l = tl.zeros((ROWS,), tl.float32)
            acc = tl.zeros((ROWS, D), tl.float32)
            if split == 0:  # the new token
                k_row = k_ptr + b * stride_kt + h * D
                k = tl.load(k_row + d).to(tl.float32) * cos + tl.load(k_row + partner).to(tl.float32) * sin
                k = k.to(k_ptr.dtype.element_ty).to(keys_ptr.dtype.element_ty)  # rounded as the cache rounds
                v = tl.load(v_ptr + b * stride_vt + h * D + d).to(values_ptr.dtype.element_ty)
                tl.store(keys + position * D + d, k)
                tl.store(values + position * D + d, v)
                m = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], axis=1) * scale
                l += 1.0
                acc += v.to(tl.float32)[None, :]
            m, l, acc = _attend_cached(q, keys, values, start, end, m, l, acc, scale, D, BLOCK)

            out = out_ptr + (b * HKV * GROUP + h * GROUP + row)[:, None] * D + d[None, :]
            if SPLIT == 1:
                tl.store(out, (acc / l[:, None]).to(out_ptr.dtype.element_ty), mask=is_head)
            else:
                slot = pair * SPLIT + split
                tl.store(acc_ptr + (slot * ROWS + row)[:, None] * D + d[None, :], acc)
                tl.store(sums_ptr + slot * 2 * ROWS + row, m)
                tl.store(sums_ptr + slot * 2 * ROWS + ROWS + row, l)
                tl.debug_barrier()  # all threads' stores come before the ticket
                if tl.atomic_add(ticket_ptr + pair, 1, sem="acq_rel") == active - 1:
                    tl.store(ticket_ptr + pair, 0)  # ready for the next layer
                    acc = _combined(acc_ptr, sums_ptr, pair * SPLIT, active, ROWS, D, SPLIT)
                    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_head)


def split_for(pairs: int) -> int:
    """Splits of each sequence such that about two programs run on every multiprocessor."""
    split = 1
    while split < MAX_SPLIT and 2 * split * pairs <= PROGRAMS:
        split *= 2
    return split


class FusedDecodeAttention:
    """DecodeAttention on CUDA: attend(layer, q, k, v) for rows 0..B-1, in place of the batch bound by at().

    Owns the scratch that its launches share: one stream at a time.
    """

    def __init__(self, cache, heads: int, cos: Tensor, sin: Tensor):
        _, _, slots, kv_heads, _, dim = cache.kv.shape
        if heads // kv_heads > ROWS or dim & (dim - 1):
            raise ValueError(f"{heads} heads over {kv_heads} KV heads of size {dim}: the decode kernel takes groups of at "
                             f"most {ROWS} and sizes that are powers of two; run on a CPU")  # fmt: skip
        self.cache, self.cos, self.sin = cache, cos, sin
        device = cache.kv.device
        self.acc = torch.empty(PROGRAMS, ROWS, dim, device=device)  # fp32 partial results of the splits
        self.sums = torch.empty(PROGRAMS, 2, ROWS, device=device)
        self.ticket = torch.zeros(slots * kv_heads, dtype=torch.int32, device=device)
        self.is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)

    def at(self, position: Tensor) -> FusedDecodeAttention:
        self.position = position
        return self

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, H, D), k and v (B, Hkv, D), any stride over B -> (B, H, D)."""
        batch, heads, dim = q.shape
        kv_heads, max_len = k.shape[1], self.cache.max_len
        assert q.stride(1) == k.stride(1) == v.stride(1) == dim and q.stride(2) == k.stride(2) == v.stride(2) == 1
        keys, values = self.cache.keys_values(layer)
        out = torch.empty(batch, heads, dim, dtype=q.dtype, device=q.device)
        split = split_for(batch * kv_heads)
        block, warps, stages = TILE
        options = {"launch_pdl": True} if self.is_hopper else {}
        _decode_attention_kernel[(batch * kv_heads, split)](
            q, k, v, keys, values, self.position, self.cos, self.sin, out, self.acc, self.sums, self.ticket,
            q.stride(0), k.stride(0), v.stride(0), keys.stride(0), dim**-0.5 * 1.4426950408889634,
            HKV=kv_heads, GROUP=heads // kv_heads, S=max_len, D=dim, SPLIT=split, BLOCK=block, ROWS=ROWS,
            PDL=self.is_hopper, num_warps=warps, num_stages=stages, **options,
        )  # fmt: skip
        return out


def demo() -> None:
    """How one launch is cut: splits by batch size, and the positions of each split of ragged sequences."""
    for batch in (1, 8, 32, 64):
        split = split_for(batch * 4)
        print(f"{batch:3d} sequences x 4 KV heads: {split:2d} splits, {batch * 4 * split} programs")
    block, split = TILE[0], 8
    for length in (40, 300, 1000):
        blocks = -(-length // block)
        share = -(-blocks // split)
        ranges = [f"{a * block}-{min((a + share) * block, length) - 1}" for a in range(0, blocks, share)]
        print(f"{length:4d} cached positions in 8 splits: {' '.join(ranges)}")


if __name__ == "__main__":
    demo()
