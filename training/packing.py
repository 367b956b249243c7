"""Sequences of a training step, packed without padding into micro-batches; a group's prompt is forwarded once.

The model sees a flat row of tokens. Positions and attention say which of them belong together:

    tokens     | prompt of group 0 | answer 0 | answer 1 | ... | prompt of group 1 | answer 0 | ...
    positions    0 .. P-1            P ..       P ..             0 .. P-1            P ..
    segments     prompt: sees itself (causal)      answer: sees its prompt and itself (causal)

An answer of C tokens brings C-1 of them: the last one predicts nothing that is trained. Its C log-probs are read at the
prompt's last token and at its own first C-1.

Cost: projections, MLPs and norms, nearly all of the work, run on distinct tokens: P + G*C in place of G*(P + C). Attention is
exact and needs no special kernel: queries stay as they are, keys and values are gathered into prompt + answer for every
segment (2 * kv_heads * head_size numbers a token, 3% of a layer's activations), and causality is aligned to the end:

              keys:  p p p p a a a
    answer's a_0     x x x x x . .        x: sees
             a_1     x x x x x x .

Micro-batches are bounded by tokens, not by count. Groups are taken in order, longest answers first; a group that does
not fit is cut, and its prompt is forwarded once in each piece. The cut has no effect on the result: the loss weighs
every token for the whole step (grpo.token_weights).

Source: prefix sharing as in unsloth's and verl's trainers, by attention over ranges of keys; ours gathers keys instead.
Limits: causal attention, rotary positions. The gathered keys are materialised: with G = 8 and answers much shorter than
the prompt they outgrow the rest; then a kernel that takes ranges would pay.
Copy along: layers/rope.py.
"""
from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from layers.rope import apply_rope


@dataclass(frozen=True)
class Sequence:
    """One answer to one prompt, as the rollout made it: token ids in, token ids out."""

    prompt: list[int]
    completion: list[int]  # its end token included, if it ended
    rollout_logps: list[float] = field(default_factory=list)  # of the sampler, one a completion token
    advantage: float = 0.0
    is_trained: bool = True  # False: truncated and masked; it leaves the loss and its denominators


def pack(sequences: list[Sequence], token_budget: int) -> list[list[int]]:
    """Indices of `sequences`, cut into micro-batches of at most token_budget distinct tokens (or one sequence).

    As few as the budget allows, and of about one size: a small remainder would run at a fraction of the speed.

    >>> pack([Sequence([1, 2], [3] * 4)] * 4, token_budget=11)   # 2 + 3 + 3 + 3 would fit, and leave 2 + 3
    [[0, 1], [2, 3]]
    """
    fewest, low = len(_cut(sequences, token_budget)), 1
    while low < token_budget:  # bisect for the smallest budget that needs no further micro-batch
        middle = (low + token_budget) // 2
        if len(_cut(sequences, middle)) > fewest:
            low = middle + 1
        else:
            token_budget = middle
    return _cut(sequences, token_budget)


def _cut(sequences: list[Sequence], token_budget: int) -> list[list[int]]:
    """Greedy: groups in order, the longest answers of each first."""
    group_of: dict[tuple[int, ...], int] = {}
    groups = [group_of.setdefault(tuple(s.prompt), len(group_of)) for s in sequences]
    order = sorted(range(len(sequences)), key=lambda i: (groups[i], -len(sequences[i].completion)))
    batches: list[list[int]] = []
    used, last_group = 0, -1
    for i in order:
        own, prompt = len(sequences[i].completion) - 1, len(sequences[i].prompt)
        cost = own + (prompt if groups[i] != last_group else 0)
        if not batches or used + cost > token_budget:
            batches.append([])
            used, cost = 0, own + prompt
        batches[-1].append(i)
        used, last_group = used + cost, groups[i]
    return batches


class MicroBatch:
    """The flat tensors of some sequences; `attention` and the rows at which each completion token is predicted."""

    def __init__(self, sequences: list[Sequence], indices: list[int], device):
        self.indices = indices
        self.lengths = [len(sequences[i].completion) for i in indices]
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []  # of `tokens`, whose hidden state predicts a completion token
        segments: list[tuple[range, range]] = []  # (own rows, rows of the prompt before them)
        prompt_rows, last_prompt = range(0), None
        for i in indices:
            prompt, completion = sequences[i].prompt, sequences[i].completion
            if not prompt or not completion:
                raise ValueError(f"sequence {i} is {len(prompt)} + {len(completion)} tokens; both need at least 1")
            if prompt != last_prompt:
                prompt_rows, last_prompt = range(len(tokens), len(tokens) + len(prompt)), prompt
                tokens += prompt
                positions += range(len(prompt))
                segments.append((prompt_rows, range(0)))
            own = range(len(tokens), len(tokens) + len(completion) - 1)
            tokens += completion[:-1]
            positions += range(len(prompt), len(prompt) + len(own))
            if own:
                segments.append((own, prompt_rows))
            rows += [prompt_rows[-1], *own]
        self.longest = max(positions) + 1
        self.tokens = torch.tensor(tokens).to(device)  # (T,) int64
        self.positions = torch.tensor(positions).to(device)  # (T,)
        self.rows = torch.tensor(rows).to(device)  # (N,) N = sum of completion lengths
        self.targets = torch.tensor([t for i in indices for t in sequences[i].completion]).to(device)  # (N,)
        self.owner = torch.repeat_interleave(torch.arange(len(indices)), torch.tensor(self.lengths)).to(device)  # (N,)
        self.segments = segments

    def per_token(self, values: Tensor) -> Tensor:
        """One value a sequence of the step -> one a completion token (N,)."""
        return values[torch.tensor(self.indices)].to(self.owner.device)[self.owner]


class SharedPromptAttention:
    """attend(layer, q, k, v) for a MicroBatch: rotates, then every segment attends to its prompt and to itself."""

    def __init__(self, batch: MicroBatch, cos: Tensor, sin: Tensor):
        self.cos, self.sin, self.positions = cos, sin, batch.positions
        device, tokens = batch.tokens.device, len(batch.tokens)
        q_lengths = [len(rows) for rows, _ in batch.segments]
        k_lengths = [len(prompt) + len(rows) for rows, prompt in batch.segments]
        self.q_max, self.k_max = max(q_lengths), max(k_lengths)
        key_rows = torch.tensor([row for rows, prompt in batch.segments for row in (*prompt, *rows)])
        q_lengths, k_lengths = torch.tensor(q_lengths), torch.tensor(k_lengths)
        if device.type == "cuda":
            self.keys = Gather(key_rows, tokens, device)
            self.q_starts, self.k_starts = (
                F.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32) for lengths in (q_lengths, k_lengths))
        else:
            self._plan_padding(q_lengths, k_lengths, key_rows, tokens)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = apply_rope(q, k, self.cos, self.sin, self.positions)
        if q.is_cuda:
            # What torch.nn.attention.varlen wraps; that one's arguments changed between torch 2.11 and 2.13.
            flash = torch.ops.aten._flash_attention_forward
            limits = self.q_starts, self.k_starts, self.q_max, self.k_max
            return flash(q, self.keys(k), self.keys(v), *limits, 0.0, True, False)[0]
        q, k, v = self.queries(q), self.keys(k), self.keys(v)  # (S * length, heads, D)
        q, k, v = (x.view(len(self.sees), -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.sees, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self.valid)

    def _plan_padding(self, q_lengths: Tensor, k_lengths: Tensor, key_rows: Tensor, tokens: int) -> None:
        """For the CPU, where segments are right-padded into one batch for SDPA; planned once, used by every layer."""
        q_at, k_at = torch.arange(self.q_max), torch.arange(self.k_max)
        q_len, k_len = q_lengths[:, None], k_lengths[:, None]  # (S, 1)
        # Padding repeats the segment's last entry: finite numbers that nobody reads.
        q_place = (q_lengths.cumsum(0) - q_lengths)[:, None] + torch.minimum(q_at, q_len - 1)  # (S, q_max)
        k_place = (k_lengths.cumsum(0) - k_lengths)[:, None] + torch.minimum(k_at, k_len - 1)  # (S, k_max)
        self.queries = Gather(q_place.flatten(), tokens, "cpu", is_real=(q_at < q_len).flatten())
        self.keys = Gather(key_rows[k_place.flatten()], tokens, "cpu", is_real=(k_at < k_len).flatten())
        self.valid = (q_at < q_len).flatten().nonzero().squeeze(1)  # (T,) where the real queries sit
        sees = k_at <= (k_len - q_len)[:, None] + q_at[:, None]  # causal, aligned to the end
        self.sees = (sees & (k_at < k_len)[:, None])[:, None]  # (S, 1, q_max, k_max), True = may look


class Gather:
    """x (T, heads, D) -> x[rows], with a backward that gathers too: no atomics, so that equal runs give equal bits.

    is_real marks the rows whose gradient counts; padding has none. Every one of the T tokens is among the real rows.
    """

    def __init__(self, rows: Tensor, tokens: int, device, is_real: Tensor | None = None):
        places = torch.arange(len(rows)) if is_real is None else is_real.nonzero().squeeze(1)
        by_token = places[rows[places].argsort(stable=True)]  # places of token 0, then those of token 1, ...
        counts = torch.bincount(rows[places], minlength=tokens)
        starts = counts.cumsum(0) - counts
        shared = (counts > 1).nonzero().squeeze(1)  # tokens of shared prompts
        nth = torch.arange(int(counts.max()))
        table = by_token[(starts[shared, None] + nth).clamp(max=len(by_token) - 1)]  # (shared, most copies)
        table = table.masked_fill(nth >= counts[shared, None], len(rows))  # len(rows): a row of zeros
        self.rows, self.first, self.shared, self.table = (t.to(device) for t in (rows, by_token[starts], shared, table))

    def __call__(self, x: Tensor) -> Tensor:
        return _GatherFunction.apply(x, self)


class _GatherFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, plan: Gather) -> Tensor:
        ctx.plan = plan
        return x.index_select(0, plan.rows)

    @staticmethod
    def backward(ctx, grad: Tensor):
        plan = ctx.plan
        out = grad.index_select(0, plan.first)
        if len(plan.shared):
            padded = torch.cat([grad, grad.new_zeros(1, *grad.shape[1:])])
            exact = torch.promote_types(grad.dtype, torch.float32)
            out[plan.shared] = padded[plan.table].sum(1, dtype=exact).to(grad.dtype)
        return out, None


def plan_memory(model, reserve: int, token_budget: int | None = None) -> tuple[int, int]:
    """(tokens of a micro-batch, layers that keep their activations) that fit in memory and should be fastest.

    reserve: bytes to leave for what does not grow with the tokens. token_budget: fixed by the user.

    On a GPU a pass over T tokens costs about T + 500 (reading and decoding the weights), and there are 2 of them, forward
    and dX, and a third, without `down`, for every layer that is recomputed. Few tokens leave room to keep more layers.
    """
    c, on_gpu = model.config, model.device.type == "cuda"
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    working = 6 * c.hidden + 3 * (q + 2 * kv) + 6 * c.ffn + 4 * c.hidden  # numbers a token: one layer's pass, the head
    kept = 4 * c.hidden + 2 * q + 3 * kv + 3 * c.ffn  # of a layer that is not recomputed
    recompute = model.checkpoint_layers
    always = working + c.layers * (c.hidden if recompute else kept)
    free = int(0.85 * (free_bytes(model.device) - reserve)) // model.dtype.itemsize  # numbers
    if not (on_gpu and recompute):
        return token_budget or max(512, min(16384 if on_gpu else 4096, free // always // 512 * 512)), 0
    plans = []
    for tokens in (token_budget,) if token_budget else (16384, 8192, 4096, 2048, 1024):
        layers = min(c.layers, (free - tokens * always) // (tokens * (kept - c.hidden)))
        down = c.ffn * c.hidden / (c.hidden * (2 * q + 2 * kv + 3 * c.ffn))  # its share of a layer's weights
        passes = 2 + (1 - down) * (1 - max(layers, 0) / c.layers)
        cost = passes * (1 + 500 / tokens) if layers >= 0 else 1000 + tokens  # none fits: then the smallest
        plans.append((cost, tokens, max(layers, 0)))
    return min(plans)[1:]


def free_bytes(device: torch.device) -> int:
    """What this process may still allocate; on a GPU torch's unused cache counts, and so does the process's cap.

    On a CPU a fixed quarter of the memory, so that the cut, and the last bit of a sum, is the same in every run.
    """
    if device.type != "cuda":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    cap = torch.cuda.get_per_process_memory_fraction(torch.cuda.current_device()) * total
    return int(min(free + reserved - allocated, cap - allocated))


def demo() -> None:
    """What sharing a prompt saves, for groups of 8."""
    print("prompt  answer   tokens unshared   shared   saved")
    for prompt, answer in ((40, 60), (256, 512), (256, 1024), (1024, 1024)):
        group = [Sequence(list(range(prompt)), list(range(answer))) for _ in range(8)]
        shared = len(MicroBatch(group, pack(group, 10**9)[0], "cpu").tokens)
        unshared = sum(len(MicroBatch([s], [0], "cpu").tokens) for s in group)
        print(f"{prompt:6d}  {answer:6d}  {unshared:16,d} {shared:8,d}  {1 - shared / unshared:6.0%}")


if __name__ == "__main__":
    demo()
