"""The fused sampler against decode.Decoder's own step: interpreter, sm_90 compile, GPU."""

import numpy as np
import pytest
import torch
from triton_offline import compile_for_hopper, interpret_kernels

from decoding.attention import KVCache
from decoding.decode import DONE, POSITION, TABLE, Decoder
from gpu import fused_sampling
from gpu.fused_sampling import FusedSampler
from model import ModelConfig
from sampling import Sampling, truncate

CONFIG = ModelConfig("qwen2", 16, 1, 2, 1, 8, 32, 300)


def decoders(rows, sampling, device, seed=0):
    """Two decoders in the same state: row r is frozen for r = 2, at its last token for r = 1."""
    uniform = np.random.default_rng(seed).random((rows, 8), dtype=np.float32)
    pair = []
    for _ in range(2):
        decoder = Decoder(None, KVCache(CONFIG, rows + 1, 8, torch.float32, device), torch.zeros(8, 4), torch.zeros(8, 4))
        decoder.begin(uniform, sampling, None)
        states = [(7, r % 4, r % 4 if r == 1 else 7, r * 8, int(r == 2)) for r in range(rows)]
        decoder.place_(range(rows), states)
        pair.append(decoder)
    return pair


def assert_samplers_agree(rows, vocab, valid, sampling, device, scale=3.0):
    fused_decoder, slow_decoder = decoders(rows, sampling, device)
    generator = torch.Generator().manual_seed(1)
    sampler = FusedSampler(rows + 1, vocab, valid, device)
    sampler.begin(sampling, scaled=sampling.truncates)
    for _ in range(3):
        logits = (torch.randn(rows, vocab, generator=generator) * scale).to(device)
        masked = logits.clone()
        masked[:, valid:] = -torch.inf
        slow_decoder.sample_and_advance_(masked)
        if sampling.truncates:
            logits = truncate(masked / sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        sampler(fused_decoder, logits, sampling.is_greedy)
        assert fused_decoder.state.equal(slow_decoder.state)
    for ours, theirs in zip(fused_decoder.results(), slow_decoder.results()):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 if vocab < 10_000 else 1e-4)
    return slow_decoder


SAMPLINGS = [
    Sampling(8, stop_ids=range(0, 30)),
    Sampling(8, temperature=0.5),
    Sampling(8, temperature=0, stop_ids=(5,)),
    Sampling(8, temperature=0.8, top_p=0.7, top_k=9, min_p=0.05),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("vocab", "valid"), [(300, 300), (300, 257), (64, 60)])
def test_fused_sampler_equals_its_twin(monkeypatch, sampling, vocab, valid):
    """Several chunks, the last one partly or wholly beyond the tokenizer, frozen and last rows, stop ids."""
    interpret_kernels(monkeypatch, fused_sampling)
    monkeypatch.setattr(fused_sampling, "CHUNK", 64)
    decoder = assert_samplers_agree(6, vocab, valid, sampling, "cpu")
    assert decoder.state[DONE, 1] == 1 and (decoder.tokens[16:24] == -1).all()


def test_ends_of_the_unit_interval_stay_inside_the_vocabulary(monkeypatch):
    interpret_kernels(monkeypatch, fused_sampling)
    monkeypatch.setattr(fused_sampling, "CHUNK", 64)
    decoder = decoders(2, Sampling(8), "cpu")[0]
    decoder.state[:, 1] = torch.tensor([7, 1, 7, 8, 0])
    decoder.uniform[0], decoder.uniform[9] = 0.0, 1 - 2**-24
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    logits[:, :70] = logits[:, 200:] = -torch.inf
    sampler = FusedSampler(3, 300, 280, "cpu")
    sampler.begin(Sampling(8), scaled=False)
    sampler(decoder, logits, False)
    assert decoder.tokens[0] == 70 and decoder.tokens[9] == 199
    assert decoder.logps[[0, 9]].isfinite().all() and decoder.entropies[[0, 9]].isfinite().all()


def test_too_many_stop_ids_are_refused():
    with pytest.raises(ValueError, match="33 stop ids"):
        FusedSampler(1, 64, 64, "cpu").begin(Sampling(1, stop_ids=range(33)), scaled=False)


def test_kernels_compile_for_sm_90():
    f, i, n = "*fp32", "i32", "*i64"
    shared = {"logits_ptr": f, "chunks_ptr": f, "inv_temperature_ptr": f, "stride_b": i, "valid": i}
    compile_for_hopper(fused_sampling._vocabulary_kernel, shared, {"CHUNK": 4096, "PDL": True}, num_warps=8)
    pick = shared | {"state_ptr": n, "stops_ptr": n, "uniform_ptr": f, "tokens_ptr": n, "logps_ptr": f,
                     "entropies_ptr": f, "chunks": i, "slots": i}  # fmt: skip
    constants = {"GREEDY": False, "CHUNK": 4096, "CHUNKS": 64, "STOPS": 32, "PDL": True}
    compile_for_hopper(fused_sampling._pick_kernel, pick, constants, num_warps=8)
    compile_for_hopper(fused_sampling._pick_kernel, pick, constants | {"GREEDY": True}, num_warps=8)


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", SAMPLINGS[:3])
@pytest.mark.parametrize("rows", [1, 5, 130])
def test_on_a_gpu_draws_invert_the_exact_distribution_of_a_large_vocabulary(sampling, rows):
    """In fp64: u lies in the drawn token's interval, give or take 1e-5 of fp32 sums; log-prob and entropy are its own."""
    decoder, valid = decoders(rows, sampling, "cuda")[0], 151_665
    logits = torch.randn(rows, 152_064, generator=torch.Generator().manual_seed(1)).cuda() * 3
    sampler = FusedSampler(rows + 1, 152_064, valid, "cuda")
    sampler.begin(sampling, scaled=False)
    place = (decoder.state[TABLE] + decoder.state[POSITION])[:rows].clone()
    sampler(decoder, logits, sampling.is_greedy)
    live = torch.arange(rows, device="cuda") != 2
    token, logp, entropy, u = (t[place][live] for t in (decoder.tokens, decoder.logps, decoder.entropies, decoder.uniform))
    logp_exact = (logits[live, :valid].double() / (sampling.temperature or 1)).log_softmax(-1)
    p = logp_exact.exp()
    torch.testing.assert_close(logp.double(), logp_exact.gather(1, token[:, None])[:, 0], rtol=0, atol=1e-4)
    torch.testing.assert_close(entropy.double(), -(p * logp_exact).sum(-1), rtol=0, atol=1e-4)
    if sampling.is_greedy:
        assert token.equal(logits[live, :valid].argmax(-1))
    else:
        upper = p.cumsum(-1).gather(1, token[:, None])[:, 0]
        lower = upper - p.gather(1, token[:, None])[:, 0]
        assert (u >= lower - 1e-5).all() and (u <= upper + 1e-5).all()


@pytest.mark.gpu
def test_on_a_gpu_truncated_and_small_vocabularies_equal_the_twin():
    for sampling in SAMPLINGS:
        assert_samplers_agree(6, 300, 257, sampling, "cuda")
