"""A packed micro-batch with shared prompts gives every sequence what it gets alone, forward and backward."""
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.packing import Gather, MicroBatch, Sequence, SharedPromptAttention, _cut, pack

LENGTHS = [[5, 1, 12], [3], [1, 1], [7, 20, 2, 9]]  # completions of each group; 1 = only the end token


def ragged(vocab=259, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(n):
        return torch.randint(vocab, (n,), generator=generator).tolist()

    prompts = [draw(n) for n in (6, 1, 17, 4)]
    return [Sequence(p, draw(n)) for p, group in zip(prompts, LENGTHS) for n in group]


def hidden_of(model, batch):
    return model(batch.tokens, SharedPromptAttention(batch, *model.rope(batch.longest)))[batch.rows]


def alone(model, s):
    """The plain path: prompt + completion as one sequence, the hidden states that predict the completion."""
    tokens = torch.tensor(s.prompt + s.completion, device=model.device)
    return model(tokens, model.packed([len(tokens)]))[len(s.prompt) - 1 : -1]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("budget", [1, 40, 10**6])
def test_packed_equals_alone(tiny_model, kind, budget):
    """Different order of summation in attention and GEMMs: 1e-5 of values around 1."""
    model, sequences = tiny_model(kind), ragged()
    with torch.no_grad():
        for indices in pack(sequences, budget):
            batch = MicroBatch(sequences, indices, "cpu")
            for i, hidden in zip(indices, hidden_of(model, batch).split(batch.lengths)):
                torch.testing.assert_close(hidden, alone(model, sequences[i]), rtol=1e-4, atol=2e-5)


def test_gradients_of_packed_equal_alone(tiny_model):
    """Through the shared prompt flow the gradients of all its answers. Relative 1e-5 in fp32."""
    model, sequences = tiny_model("qwen2", full=True), ragged()
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(len(s.completion), 64, generator=generator) for s in sequences]
    leaves = [model.embed, model.layers[0].qkv.weight.tensor, model.layers[1].down.weight.tensor]
    total = sum((alone(model, s) * g).sum() for s, g in zip(sequences, upstream))
    expected = torch.autograd.grad(total, leaves)
    batch = MicroBatch(sequences, pack(sequences, 10**6)[0], "cpu")
    packed = (hidden_of(model, batch) * torch.cat([upstream[i] for i in batch.indices])).sum()
    for e, g in zip(expected, torch.autograd.grad(packed, leaves)):
        assert (g - e).norm() / e.norm() < 1e-5


def test_answers_do_not_see_each_other(tiny_model):
    """Changing one answer leaves its siblings' hidden states bit for bit."""
    model, sequences = tiny_model("qwen2"), ragged()
    other = [Sequence(s.prompt, [7] * len(s.completion)) if i == 2 else s for i, s in enumerate(sequences)]
    results = []
    with torch.no_grad():
        for batch_of in (sequences, other):
            batch = MicroBatch(batch_of, list(range(len(batch_of))), "cpu")
            results.append(hidden_of(model, batch).split(batch.lengths))
    for i, (a, b) in enumerate(zip(*results)):
        # The first state of an answer belongs to the prompt, so for answer 2 only what follows its first token differs.
        assert torch.equal(a, b) == (i != 2)


def test_a_groups_prompt_is_forwarded_once():
    group = [Sequence([1, 2, 3], [4, 5, 6, 7]) for _ in range(8)]
    batch = MicroBatch(group, pack(group, 1000)[0], "cpu")
    assert len(batch.tokens) == 3 + 8 * 3  # the last token of an answer predicts nothing
    assert batch.positions.tolist() == [0, 1, 2] + [3, 4, 5] * 8
    assert batch.rows.tolist()[:5] == [2, 3, 4, 5, 2]
    assert batch.targets.tolist() == [4, 5, 6, 7] * 8
    assert batch.per_token(torch.arange(8.0)).tolist() == [float(i) for i in range(8) for _ in range(4)]


sequence_lists = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(sequence_lists, st.integers(1, 120))
def test_pack_takes_every_sequence_once_and_keeps_its_budget(made, budget):
    sequences = [Sequence([group] * (group + 1), [1] * n) for group, n in made]
    batches = pack(sequences, budget)
    assert sorted(i for indices in batches for i in indices) == list(range(len(sequences)))
    for indices in batches:
        tokens = len(MicroBatch(sequences, indices, "cpu").tokens)
        assert tokens <= budget or len(indices) == 1


@settings(max_examples=40, deadline=None)
@given(sequence_lists, st.integers(1, 120))
def test_micro_batches_are_as_few_as_greedy_cutting_and_no_larger_than_they_must(made, budget):
    sequences = [Sequence([group] * (group + 1), [1] * n) for group, n in made]
    batches = pack(sequences, budget)
    assert len(batches) == len(_cut(sequences, budget))
    largest, members = max((len(MicroBatch(sequences, indices, "cpu").tokens), -len(indices)) for indices in batches)
    assert len(_cut(sequences, largest - 1)) > len(batches) or members == -1  # one sequence may exceed any budget


@pytest.mark.parametrize("free_gib, name, tokens, layers", [
    (72, "7B", 8192, 28),  # all 28 layers keep their activations
    (5, "7B", 8192, 0), (2, "7B", 2048, 0), (17, "32B", 8192, 0), (0.5, "32B", 1024, 0),
])
def test_memory_is_planned_from_what_is_free(monkeypatch, free_gib, name, tokens, layers):
    """More memory never means more recomputation, and what is planned fits its own estimate."""
    from layers.shapes import SHAPES
    from training import packing

    monkeypatch.setattr(packing, "free_bytes", lambda device: int(free_gib * 2**30))
    model = SimpleNamespace(config=SHAPES[f"Qwen2.5-{name}"], device=torch.device("cuda"), dtype=torch.bfloat16,
                            checkpoint_layers=True)
    planned, kept = packing.plan_memory(model, reserve=2**28)
    assert planned == tokens and kept >= layers
    fixed, fewer = packing.plan_memory(model, 2**28, token_budget=16384)
    assert fixed == 16384 and fewer <= kept
    model.checkpoint_layers = False
    assert packing.plan_memory(model, 2**28)[1] == 0
    model.device = torch.device("cpu")
    assert packing.plan_memory(model, 0)[0] <= 4096


def test_an_empty_prompt_or_completion_is_refused():
    for s in (Sequence([], [1]), Sequence([1], [])):
        with pytest.raises(ValueError, match="at least 1"):
            MicroBatch([s], [0], "cpu")


def test_gather_has_the_gradient_of_indexing_and_the_same_bits_twice():
    rows = torch.tensor([0, 1, 2, 0, 1, 3, 3, 0, 1, 4])
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    gather = Gather(rows, 5, "cpu")
    grad = torch.randn(10, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(gather(x), x, grad), torch.autograd.grad(x[rows], x, grad))
    assert torch.autograd.gradcheck(gather, x)
    assert torch.equal(torch.autograd.grad(gather(x), x, grad)[0], torch.autograd.grad(gather(x), x, grad)[0])


@pytest.mark.gpu
def test_on_a_gpu_packed_equals_alone_in_bf16(tiny_model):
    """Relative 1e-2 in bf16: the same numbers through other tiles. Ragged, with answers of one token."""
    model = tiny_model("qwen2", device="cuda")
    sequences = ragged()
    with torch.no_grad():
        batch = MicroBatch(sequences, pack(sequences, 10**6)[0], "cuda")
        packed = hidden_of(model, batch).split(batch.lengths)
        for i, hidden in zip(batch.indices, packed):
            expected = alone(model, sequences[i])
            assert (hidden - expected).float().norm() / expected.float().norm() < 1e-2
