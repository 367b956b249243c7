"""Rollouts on a CPU against the uncached model, transformers' generate, and themselves in other company."""

import gc
import os

import pytest
import torch

from aqn import noisy_norms
from lora import add_adapters, lora_layers
from rollout import Rollout, Sampling

VALID = 259  # ids the tiny tokenizer knows
PROMPTS = [[5, 17, 200, 31, 90], [44], [7, 7, 7, 100, 3, 250, 61, 8, 19], [120, 30], [9, 80, 70, 60, 50, 40, 30]]
CLOSE = {"rtol": 0, "atol": 1e-4}  # fp32 logits of order 10, summed in another order: 1e-5 is usual


@pytest.fixture
def model(tiny_model):
    model = tiny_model("qwen2")
    model.valid_vocab = VALID
    return model


@torch.no_grad()
def uncached_logits(model, tokens, norm_weights=None):
    """The specification: the whole sequence through the model at once. (T, V)."""
    return model.logits(model(torch.tensor(tokens), model.packed([len(tokens)]), norm_weights))


def recorded_logits(rollout: Rollout) -> dict[int, torch.Tensor]:
    """Makes the rollout's decoder keep the logits of every table place: sample * max_new_tokens + token."""
    kept, decoder = {}, rollout.decoder
    advance = decoder.sample_and_advance_

    def record(logits):
        token, position, last, table, done = decoder.state[:, : len(logits)].clone()
        for row in (done == 0).nonzero()[:, 0].tolist():
            kept[int(table[row] + position[row])] = logits[row].clone()
        advance(logits)

    decoder.sample_and_advance_ = record
    return kept


def taken(logp: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """logp (T, V) at the tokens (T,)."""
    return logp.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def flat(groups):
    return [completion for group in groups for completion in group]


def assert_same_samples(ours, theirs):
    assert [c.tokens for c in ours] == [c.tokens for c in theirs]
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.logps, b.logps, rtol=0, atol=1e-4)
        assert a.stopped == b.stopped


@pytest.mark.parametrize("kind", ["qwen2", "qwen3-tied", "llama"])
@pytest.mark.parametrize("slots", [1, 3, 16])
def test_cached_logits_equal_uncached_at_every_position_to_the_end_of_the_cache(tiny_model, kind, slots):
    """Ragged prompts, refills in mid-flight, reused slots; an off-by-one in a position or at the end shows here."""
    model, max_len = tiny_model(kind), 24
    model.valid_vocab = VALID
    rollout = Rollout(model, max_len=max_len, slots=slots)
    rollout._allocate(2 * len(PROMPTS))
    kept = recorded_logits(rollout)
    sampling = Sampling(max_new_tokens=max_len, stop_ids=range(0, 12))  # some stop early, some fill the cache
    groups = rollout.generate(PROMPTS, 2, sampling, key=(3, 1))
    lengths = [len(p) + len(c.tokens) for p, g in zip(PROMPTS, groups) for c in g]
    assert max(lengths) == max_len and min(lengths) < max_len
    for s, completion in enumerate(flat(groups)):
        prompt = PROMPTS[s // 2]
        expected = uncached_logits(model, prompt + completion.tokens)[len(prompt) - 1 : -1]
        got = torch.stack([kept[s * max_len + t] for t in range(len(completion.tokens))])
        torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_reported_logps_and_entropies_are_those_of_the_scaled_softmax(model, temperature):
    """A sampler that stores raw log-probs while it samples scaled ones makes every importance ratio wrong."""
    sampling = Sampling(max_new_tokens=10, temperature=temperature)
    for prompt, group in zip(PROMPTS, Rollout(model, max_len=32).generate(PROMPTS, 2, sampling)):
        for c in group:
            logp = (uncached_logits(model, prompt + c.tokens)[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
            torch.testing.assert_close(torch.tensor(c.logps), taken(logp, c.tokens), **CLOSE)
            entropy = torch.special.entr(logp.exp()).sum(-1)
            torch.testing.assert_close(torch.tensor(c.entropies), entropy, **CLOSE)


def test_a_sample_depends_on_nothing_around_it(model):
    """Other slots, other neighbours, another order, alone: the same tokens. (Rounding could flip one, but seldom.)"""
    sampling = Sampling(max_new_tokens=14, stop_ids=range(0, 30))
    whole = Rollout(model, max_len=32).generate(PROMPTS, 4, sampling, key=(1, 9))
    for slots in (1, 3, 7):
        assert_same_samples(flat(whole), flat(Rollout(model, max_len=48, slots=slots).generate(
            PROMPTS, 4, sampling, key=(1, 9))))  # fmt: skip
    backwards = Rollout(model, max_len=32, slots=5).generate(PROMPTS[::-1], 4, sampling, key=(1, 9), prompt_keys=[4, 3, 2, 1, 0])
    assert_same_samples(flat(whole), flat(backwards[::-1]))
    alone = Rollout(model, max_len=32).generate([PROMPTS[2]], 1, sampling, key=(1, 9), prompt_keys=[2])
    assert_same_samples(whole[2][:1], alone[0])


def test_members_of_a_group_differ_and_steps_and_seeds_differ(model):
    sampling = Sampling(max_new_tokens=8)
    rollout = Rollout(model, max_len=32)
    calls = [rollout.generate(PROMPTS, 4, sampling, key=key) for key in [(0, 0), (0, 1), (1, 0)]]
    seen = [tuple(c.tokens) for groups in calls for c in flat(groups)]
    assert len(set(seen)) == len(seen) == 60


def test_the_same_call_twice_is_bit_equal(model):
    rollout = Rollout(model, max_len=32, slots=3)
    first, second = (rollout.generate(PROMPTS, 2, Sampling(9), key=(5, 5)) for _ in range(2))
    assert first == second


def test_greedy_equals_transformers_generate(tiny_hf_folder, tiny_model):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tiny_hf_folder("qwen2"), dtype=torch.float32).eval()
    sampling = Sampling(max_new_tokens=20, temperature=0, stop_ids=(258, 256))
    ours = Rollout(tiny_model("qwen2"), max_len=40, slots=2).generate(PROMPTS, 1, sampling)
    for prompt, (completion,) in zip(PROMPTS, ours):
        expected = theirs.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                                   max_new_tokens=20, do_sample=False)[0, len(prompt) :]  # fmt: skip
        assert completion.tokens == expected.tolist()


def test_ids_beyond_the_tokenizer_are_never_sampled(model):
    completions = flat(Rollout(model, max_len=72).generate(PROMPTS, 8, Sampling(60, temperature=5.0)))
    assert max(max(c.tokens) for c in completions) < VALID


def test_eos_at_once_and_eos_never(model):
    at_once = flat(Rollout(model, max_len=32, slots=2).generate(PROMPTS, 3, Sampling(9, stop_ids=range(VALID))))
    assert all(len(c.tokens) == 1 and c.stopped for c in at_once)
    never = flat(Rollout(model, max_len=32, slots=2).generate(PROMPTS, 3, Sampling(9)))
    assert all(len(c.tokens) == 9 and not c.stopped for c in never)


@pytest.mark.parametrize("slots", [2, 64])
def test_any_of_several_stop_ids_ends_a_completion_and_is_its_last_token(model, slots):
    """Checking one of Qwen's two end ids leaves completions that never end."""
    free = flat(Rollout(model, max_len=64).generate(PROMPTS, 4, Sampling(40), key=(2, 2)))
    stops = {free[0].tokens[4], free[7].tokens[11], free[9].tokens[2]}
    sampling = Sampling(40, stop_ids=tuple(stops))
    stopped = flat(Rollout(model, max_len=64, slots=slots).generate(PROMPTS, 4, sampling, key=(2, 2)))
    for a, b in zip(free, stopped):
        first = next((i for i, token in enumerate(a.tokens) if token in stops), None)
        assert b.tokens == (a.tokens if first is None else a.tokens[: first + 1])
        assert b.stopped == (first is not None)


def test_no_prompts_one_token_prompts_and_a_prompt_that_fills_the_cache(model):
    rollout = Rollout(model, max_len=16, slots=1)
    assert rollout.generate([], 4, Sampling(5)) == []
    groups = rollout.generate([[3], list(range(15))], 2, Sampling(5))
    assert [len(c.tokens) for c in flat(groups)] == [5, 5, 1, 1]
    logits = uncached_logits(model, list(range(15)))[-1]
    token = groups[1][0].tokens[0]
    torch.testing.assert_close(groups[1][0].logps[0], logits.log_softmax(-1)[token].item(), **CLOSE)


def test_noise_reaches_the_norms_and_nothing_else(model):
    """Logits follow the noisy norms; weights stay bit-identical; the next rollout without noise is the clean one."""
    before = [p.clone() for p in model.parameters()]
    noisy = noisy_norms(model.noisy_norms_targets(), 0.2, torch.Generator().manual_seed(0))
    rollout = Rollout(model, max_len=32)
    clean = flat(rollout.generate(PROMPTS, 1, Sampling(8)))
    shaken = flat(rollout.generate(PROMPTS, 1, Sampling(8), norm_weights=noisy))
    again = flat(rollout.generate(PROMPTS, 1, Sampling(8)))
    assert clean == again and clean != shaken
    for prompt, c in zip(PROMPTS, shaken):
        logp = uncached_logits(model, prompt + c.tokens, noisy)[len(prompt) - 1 : -1].log_softmax(-1)
        torch.testing.assert_close(torch.tensor(c.logps), taken(logp, c.tokens), **CLOSE)
    assert all(a.equal(b) for a, b in zip(before, model.parameters()))


def test_the_rollout_follows_an_adapter_that_has_learnt(tiny_model):
    """The reward stays flat and plausible when the sampler never sees the adapter."""
    model = tiny_model("qwen2", weights="nvfp4")
    rollout = Rollout(model, max_len=32)
    add_adapters(model, 4, 8.0, generator=torch.Generator().manual_seed(0))
    base = flat(rollout.generate(PROMPTS, 1, Sampling(8)))
    with torch.no_grad():
        for layer in lora_layers(model):
            for b in layer.lora_B.values():
                b.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    adapted = flat(rollout.generate(PROMPTS, 1, Sampling(8)))
    assert [c.tokens for c in base] != [c.tokens for c in adapted]
    for prompt, c in zip(PROMPTS, adapted):
        logp = uncached_logits(model, prompt + c.tokens)[len(prompt) - 1 : -1].log_softmax(-1)
        torch.testing.assert_close(torch.tensor(c.logps), taken(logp, c.tokens), **CLOSE)


def test_training_still_works_after_a_rollout_that_touched_the_weights_first(tiny_model):
    """Under inference_mode the copies that a weight caches on first use could not be saved for backward."""
    model = tiny_model("qwen2", weights="nvfp4")
    add_adapters(model, 4, 8.0, generator=torch.Generator().manual_seed(0))
    Rollout(model, max_len=16).generate([[1, 2, 3]], 2, Sampling(4))
    model.logits(model(torch.tensor([1, 2, 3]), model.packed([3])))[:, :VALID].sum().backward()
    assert all(p.grad is not None for layer in lora_layers(model) for p in layer.lora_A.values())


def test_stop_strings_cut_at_the_token_that_completes_them(model, tiny_tokenizer):
    """Token-exact, though they span tokens, begin anywhere, and ids need not survive decode and encode."""
    free = flat(Rollout(model, max_len=80).generate(PROMPTS, 4, Sampling(60), key=(4, 0)))
    decode = tiny_tokenizer.decode
    strings = [decode(free[0].tokens[20:22]), decode(free[6].tokens[30:33]), decode(free[9].tokens[:1])]
    strings = [s for s in strings if s and "\ufffd" not in s] or [decode(free[2].tokens)[7:9]]
    rollout = Rollout(model, max_len=80, slots=6, tokenizer=tiny_tokenizer)
    cut = flat(rollout.generate(PROMPTS, 4, Sampling(60, stop_strings=strings), key=(4, 0)))
    assert any(c.stopped for c in cut)
    assert any(tiny_tokenizer.encode(decode(c.tokens)) != c.tokens for c in free), "the case would prove nothing"
    for a, b in zip(free, cut):
        sizes = (n for n in range(1, 61) if any(s in decode(a.tokens[:n]) for s in strings))
        size = next(sizes, None)
        assert b.stopped == (size is not None)
        assert b.tokens == a.tokens[:size] and len(b.logps) == len(b.tokens)


def test_each_prompt_is_prefilled_once_even_when_its_group_starts_late(model):
    rollout = Rollout(model, max_len=48, slots=2)
    rollout.generate(PROMPTS, 8, Sampling(20, stop_ids=range(60)))
    assert rollout.stats["prefill_tokens"] == sum(len(p) - 1 for p in PROMPTS)


def test_prompts_ahead_save_passes_and_change_nothing(model):
    """32 slots have two spare ones: a pass for a new prompt takes the next two along."""
    prompts = [[i, 2 * i, 3 * i, i + 1][: 2 + i % 3] for i in range(1, 41)]
    plain, ahead = Rollout(model, max_len=32, slots=15), Rollout(model, max_len=32, slots=32)
    sampling = Sampling(12, stop_ids=range(60))
    assert_same_samples(flat(plain.generate(prompts, 4, sampling)), flat(ahead.generate(prompts, 4, sampling)))
    tokens = sum(len(p) - 1 for p in prompts)
    assert plain.stats["prefill_tokens"] == ahead.stats["prefill_tokens"] == tokens
    assert plain.decoder.cache.slots == 15 and ahead.decoder.cache.slots == 34
    assert ahead.keys.passes < plain.keys.passes


def test_prefill_in_small_packs_gives_the_same_samples(model):
    whole = Rollout(model, max_len=32).generate(PROMPTS, 1, Sampling(6))
    packs = Rollout(model, max_len=32, prefill_tokens=4).generate(PROMPTS, 1, Sampling(6))
    assert_same_samples(flat(whole), flat(packs))


def test_the_tail_runs_in_smaller_batches(model):
    """64 samples of which most stop early: far fewer rows are computed than 64 for every step."""
    rollout = Rollout(model, max_len=128)
    rows = []
    rollout._allocate(64)
    step = rollout.decoder.step
    rollout.decoder.step = lambda batch: (rows.append(batch), step(batch))
    completions = flat(rollout.generate(PROMPTS[:4], 16, Sampling(100, stop_ids=range(20))))
    assert rows[0] == 64 and rows[-1] < 16 and sum(rows) < 2 * sum(len(c.tokens) for c in completions)


def test_ten_thousand_refills_leak_nothing(tiny_model):
    model = tiny_model("llama-tied")
    rollout = Rollout(model, max_len=8, slots=128)

    def live_tensors():
        gc.collect()
        return sum(type(o) is torch.Tensor for o in gc.get_objects())

    rollout.generate([[1]] * 300, 1, Sampling(1))
    before = live_tensors()
    groups = rollout.generate([[i % 250] for i in range(1250)], 8, Sampling(1))
    assert sum(len(g) for g in groups) == 10_000
    assert live_tensors() <= before + 2


def test_the_cache_is_as_large_as_planned_and_goes_back(model):
    rollout = Rollout(model, max_len=32, kv_dtype=torch.float32)
    rollout.generate(PROMPTS, 1, Sampling(4))
    config, slots = model.config, rollout.stats["slots"]
    assert rollout.decoder.cache.kv.nbytes == slots * 2 * config.layers * config.kv_heads * 32 * config.head_dim * 4
    before = rollout.generate(PROMPTS, 1, Sampling(4))
    rollout.free()
    assert rollout.decoder is None
    assert rollout.generate(PROMPTS, 1, Sampling(4)) == before


def test_slots_are_planned_from_free_memory_and_the_rest_waits(model, monkeypatch):
    from decoding import attention

    rollout = Rollout(model, max_len=32)
    slot_bytes = attention.KVCache.slot_bytes(model.config, 32, model.dtype)
    monkeypatch.setattr(attention, "free_bytes", lambda device: 4 * slot_bytes)
    whole = Rollout(model, max_len=32, slots=20).generate(PROMPTS, 4, Sampling(6))
    assert_same_samples(flat(whole), flat(rollout.generate(PROMPTS, 4, Sampling(6))))
    assert rollout.stats["slots"] == 3
    monkeypatch.setattr(attention, "free_bytes", lambda device: 100)
    with pytest.raises(ValueError, match="shorten max_len"):
        Rollout(model, max_len=32).generate(PROMPTS, 1, Sampling(6))


def test_an_fp8_cache_costs_little_and_never_overflows(model):
    """E4M3 keeps 3 bits of mantissa; values beyond 448 saturate where torch's cast would give NaN."""
    from decoding.attention import to_cache_dtype

    assert to_cache_dtype(torch.tensor([1e4, -1e4]), torch.float8_e4m3fn).float().tolist() == [448.0, -448.0]
    rollout = Rollout(model, max_len=32, slots=3, kv_dtype=torch.float8_e4m3fn)
    for prompt, (c,) in zip(PROMPTS, rollout.generate(PROMPTS, 1, Sampling(12))):
        logp = uncached_logits(model, prompt + c.tokens)[len(prompt) - 1 : -1].log_softmax(-1)
        gap = torch.tensor(c.logps) - taken(logp, c.tokens)
        assert 0 < gap.abs().mean() < 0.5  # nats; these random weights (std 0.3) make attention and softmax very sharp


def test_an_nvfp4_head_samples_and_reports_its_own_distribution(model):
    from nvfp4 import dequantize, quantize

    rollout = Rollout(model, max_len=32, head="nvfp4")
    head = dequantize(quantize(model.head.detach()), torch.float32)
    for prompt, (c,) in zip(PROMPTS, rollout.generate(PROMPTS, 1, Sampling(12))):
        tokens = torch.tensor(prompt + c.tokens)
        logits = (model(tokens, model.packed([len(tokens)])) @ head.T)[len(prompt) - 1 : -1, :VALID]
        torch.testing.assert_close(torch.tensor(c.logps), taken(logits.log_softmax(-1), c.tokens), **CLOSE)
    with pytest.raises(ValueError, match="head='fp8'"):
        Rollout(model, max_len=32, head="fp8").generate(PROMPTS, 1, Sampling(12))


def test_progress_and_stats_count_what_happened(model):
    calls = []
    rollout = Rollout(model, max_len=32, slots=4)
    sampling = Sampling(10, stop_ids=range(40))
    completions = flat(rollout.generate(PROMPTS, 4, sampling, progress=lambda *a: calls.append(a)))
    done, total, tokens = zip(*calls)
    assert list(done) == sorted(done) and done[-1] == 20 and set(total) == {20}
    assert tokens[-1] == rollout.stats["tokens"] == sum(len(c.tokens) for c in completions)
    assert rollout.stats["seconds"] > rollout.stats["prefill_seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [[1], []]}, "prompt 1 has 0 tokens"),
        ({"prompts": [list(range(32))]}, "prompt 0 has 32 tokens.*max_len=32"),
        ({"group": 0}, "group=0"),
        ({"prompt_keys": [1]}, "1 prompt_keys for 5 prompts"),
        ({"sampling": Sampling(4, stop_strings=("x",))}, "need a tokenizer"),
    ],
)
def test_bad_input_is_refused_in_one_line(model, arguments, message):
    call = {"prompts": PROMPTS, "group": 1, "sampling": Sampling(4)} | arguments
    with pytest.raises(ValueError, match=message):
        Rollout(model, max_len=32).generate(call.pop("prompts"), call.pop("group"), call.pop("sampling"), **call)


def test_a_model_with_nan_weights_is_reported_not_sampled(model):
    with torch.no_grad():
        model.final_norm[0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        Rollout(model, max_len=32).generate(PROMPTS, 1, Sampling(4))


@pytest.mark.pretrained
@pytest.mark.skipif("NANOQERL_MODEL" not in os.environ, reason="NANOQERL_MODEL names no pretrained model")
def test_on_a_pretrained_model_sampler_and_trainer_agree_to_5e_3_nats():
    from convert.loader import load_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer, info = load_model(os.environ["NANOQERL_MODEL"], weights="nvfp4", device=device)
    prompts = [tokenizer.encode(text) for text in ("The capital of France is", "def fibonacci(n):\n", "1 + 2 =")]
    rollout = Rollout(model, max_len=64, tokenizer=tokenizer)
    groups = rollout.generate(prompts, 2, Sampling(32, stop_ids=info.stop_ids))
    gap = gaps(model, prompts, groups)
    assert gap.mean() <= 5e-3 and gap.max() <= 0.3


# ------------------------------------------------------------------------------------------------ on a GPU

GPU_PROMPTS = [[(7 * i + j * j) % 990 for j in range(n)] for i, n in enumerate([5, 1, 70, 200, 33, 64, 65, 12])]


@pytest.fixture
def gpu_model():
    from model import ModelConfig, random_model

    config = ModelConfig("qwen2", 512, 3, 8, 2, 64, 1024, 1008, qkv_bias=True)
    model = random_model(config, "nvfp4", "cuda")
    model.valid_vocab = 990
    add_adapters(model, 16, 16.0, generator=torch.Generator().manual_seed(0))
    return model


def shake_adapters_(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in lora_layers(model):
            for b in layer.lora_B.values():
                b.copy_(torch.randn(b.shape, generator=generator) * 0.05)


@torch.no_grad()
def gaps(model, prompts, groups, norm_weights=None):
    """|sampler's log-prob - the trainer's| for every token: packed forward, flash attention, other GEMM tiles."""
    found = []
    for prompt, group in zip(prompts, groups):
        for c in group:
            tokens = torch.tensor(prompt + c.tokens, device=model.device)
            hidden = model(tokens, model.packed([len(tokens)]), norm_weights)
            logp = model.logits(hidden)[len(prompt) - 1 : -1].log_softmax(-1).cpu()
            found.append((taken(logp, c.tokens) - torch.tensor(c.logps)).abs())
    return torch.cat(found)


@pytest.mark.gpu
def test_on_a_gpu_the_graph_samples_the_policy_that_the_trainer_scores(gpu_model):
    """Refills, ragged prompts, shrinking batches, adapters that move between calls, noise: all through one set of graphs."""
    rollout = Rollout(gpu_model, max_len=256, slots=16)
    sampling = Sampling(56, stop_ids=range(0, 20))
    noisy = noisy_norms(gpu_model.noisy_norms_targets(), 0.05, torch.Generator("cuda").manual_seed(0))
    before, seen = None, []
    for step, norms in enumerate([None, None, noisy, None]):
        if step == 1:
            shake_adapters_(gpu_model, 1)
        groups = rollout.generate(GPU_PROMPTS, 4, sampling, key=(0, 0), norm_weights=norms)
        assert len({len(c.tokens) for c in flat(groups)}) > 3 and all(c.tokens[-1] < 20 for c in flat(groups) if c.stopped)
        assert all(t >= 20 for c in flat(groups) for t in c.tokens[:-1]) and max(t for c in flat(groups) for t in c.tokens) < 990
        gap = gaps(gpu_model, GPU_PROMPTS, groups, norms)
        assert gap.mean() < 1e-2 and gap.max() < 0.1, f"call {step}: {gap.mean():.4f} {gap.max():.4f}"
        graphs = dict(rollout.decoder.graphs)
        assert before is None or before.items() <= graphs.items(), "a graph was recorded anew"
        before = graphs
        seen.append([c.tokens for c in flat(groups)])
    assert seen[0] != seen[1] != seen[2] and seen[1] == seen[3]


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [Sampling(20, temperature=0), Sampling(20, temperature=0.7, top_p=0.9, top_k=50)])
def test_on_a_gpu_replays_are_bit_equal_and_survive_free(gpu_model, sampling):
    rollout = Rollout(gpu_model, max_len=256, slots=8)
    first = rollout.generate(GPU_PROMPTS, 4, sampling, key=(1, 2))
    assert rollout.generate(GPU_PROMPTS, 4, sampling, key=(1, 2)) == first
    held = torch.cuda.memory_allocated()
    rollout.free()
    assert torch.cuda.memory_allocated() < held - rollout_bytes(gpu_model, 8, 256) * 0.99
    assert rollout.generate(GPU_PROMPTS, 4, sampling, key=(1, 2)) == first


def rollout_bytes(model, slots, max_len):
    c = model.config
    return slots * 2 * c.layers * c.kv_heads * max_len * c.head_dim * 2


@pytest.mark.gpu
@pytest.mark.parametrize("option", [{"kv_dtype": torch.float8_e4m3fn}, {"head": "nvfp4"}])
def test_on_a_gpu_cheaper_caches_and_heads_cost_what_they_should(gpu_model, option):
    groups = Rollout(gpu_model, max_len=256, slots=16, **option).generate(GPU_PROMPTS, 2, Sampling(40))
    gap = gaps(gpu_model, GPU_PROMPTS, groups)
    assert gap.mean() < 0.15 and gap.max() < 1.0


@pytest.mark.gpu
def test_on_a_gpu_a_sample_alone_is_the_sample_in_a_full_batch(gpu_model):
    """Tiles differ with the batch, so logits differ in bf16's last bits; a draw that falls on a boundary may then flip, and
    this model, flat over 990 tokens, has many. Up to there log-probs agree to those bits."""
    full = flat(Rollout(gpu_model, max_len=256).generate(GPU_PROMPTS, 16, Sampling(8), key=(0, 3)))
    alone = flat(Rollout(gpu_model, max_len=256, slots=1).generate(GPU_PROMPTS, 16, Sampling(8), key=(0, 3)))
    assert sum(a.tokens[0] == b.tokens[0] for a, b in zip(full, alone)) > 0.9 * len(full)
    for a, b in zip(full, alone):
        same = next((i for i, pair in enumerate(zip(a.tokens, b.tokens)) if pair[0] != pair[1]), 8)
        torch.testing.assert_close(a.logps[:same], b.logps[:same], rtol=0, atol=0.05)
