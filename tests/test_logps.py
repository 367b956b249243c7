"""Chunked log-probs against all logits at once in fp64, and the promise about what is alive."""
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton_offline import compile_for_hopper, interpret_kernels

import logps
from logps import MAX_LOGITS, plain_logps, token_logps

T, D, V = 37, 24, 203


def inputs(dtype=torch.float64, device="cpu", tokens=T, width=D, vocab=V, valid=None, sharp=1.0):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator) * sharp
    head = torch.randn(vocab, width, generator=generator) * width**-0.5
    targets = torch.randint(valid or vocab, (tokens,), generator=generator)
    grad = torch.randn(tokens, generator=generator)
    return hidden.to(device, dtype), head.to(device, dtype), targets.to(device), grad.to(device)


def run(function, hidden, head, targets, grad, *arguments, head_grad=True):
    hidden, head = hidden.clone().requires_grad_(), head.clone().requires_grad_(head_grad)
    logp, entropy = function(hidden, head, targets, *arguments)
    leaves = [hidden, head] if head_grad else [hidden]
    return [logp.detach(), entropy, *torch.autograd.grad(logp, leaves, grad.to(logp.dtype))]


@pytest.mark.parametrize("max_logits", [1, 2 * V * 5, 2 * V * 36, 10**9])
@pytest.mark.parametrize("temperature, valid", [(1.0, None), (0.6, 190), (1.7, 1)])
def test_any_chunk_size_gives_the_plain_result_and_gradients(max_logits, temperature, valid):
    arguments = inputs(valid=valid)
    expected = run(plain_logps, *arguments, temperature, valid)
    got = run(token_logps, *arguments, temperature, valid, max_logits)
    for name, e, g in zip(("logp", "entropy", "d hidden", "d head"), expected, got):
        torch.testing.assert_close(g, e, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def test_the_hand_written_backward_agrees_with_numerical_derivatives():
    hidden, head, targets, _ = inputs(tokens=5, width=4, vocab=11)
    leaves = hidden.requires_grad_(), head.requires_grad_()
    assert torch.autograd.gradcheck(lambda h, w: token_logps(h, w, targets, 0.7, 10, 44)[0], leaves)


@pytest.mark.parametrize("sharp", [1e-3, 1.0, 30.0])
def test_entropy_is_the_distributions(sharp):
    """From flat to one-hot; its gradient is not asked for."""
    hidden, head, targets, _ = inputs(sharp=sharp)
    entropy = token_logps(hidden.requires_grad_(), head, targets, 0.8)[1]
    categorical = torch.distributions.Categorical(logits=hidden @ head.T / 0.8)
    torch.testing.assert_close(entropy, categorical.entropy().detach(), rtol=1e-9, atol=1e-9)
    assert not entropy.requires_grad


def test_fp32_stays_close_to_fp64():
    """Pitfall 5: bf16 logits cost 1e-2 nats; fp32 at this size rounds at 1e-6 of logits up to 10."""
    arguments = inputs(sharp=3.0)
    expected = run(plain_logps, *arguments, 1.0, None)
    got = run(token_logps, *(a.float() if a.is_floating_point() else a for a in arguments), 1.0, None)
    for e, g in zip(expected, got):
        torch.testing.assert_close(g.double(), e, rtol=1e-4, atol=2e-5)


def test_ids_beyond_the_tokenizer_have_no_probability_and_no_gradient():
    """Pitfall 10: the sampler never draws padded ids, so the scored policy must not spend mass on them."""
    hidden, head, targets, grad = inputs(valid=190)
    every = torch.stack([token_logps(hidden, head, torch.full((T,), y), 1.0, 190)[0] for y in range(190)])
    torch.testing.assert_close(every.exp().sum(0), torch.ones(T, dtype=torch.float64))
    assert run(token_logps, hidden, head, targets, grad, 1.0, 190)[3][190:].count_nonzero() == 0


def test_temperature_scales_the_scored_policy():
    """Pitfalls 1 and 2: a sampler at 0.6 and a trainer at 1 give a ratio that is not 1."""
    hidden, head, targets, _ = inputs()
    expected = (hidden @ head.T / 0.6).log_softmax(-1)[torch.arange(T), targets]
    torch.testing.assert_close(token_logps(hidden, head, targets, 0.6)[0], expected)
    with pytest.raises(ValueError, match="temperature"):
        token_logps(hidden, head, targets, 0.0)


def test_never_more_than_the_stated_logits_are_alive():
    """Pitfall 33. Every tensor that any operation makes is counted while it lives."""
    class Alive(TorchDispatchMode):
        now, most = 0, 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            aliases = any(r.alias_info for r in function._schema.returns)  # a view, or written in place
            for tensor in () if aliases else out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.numel() >= V:
                    Alive.now += tensor.numel()
                    weakref.finalize(tensor, self.drop, tensor.numel())
                    Alive.most = max(Alive.most, Alive.now)
            return out

        def drop(self, size):
            Alive.now -= size

    hidden, head, targets, grad = inputs(torch.float32, tokens=200, valid=190)
    hidden.requires_grad_()
    for limit in (2 * V * 4, 2 * V * 20):
        Alive.now = Alive.most = 0
        with Alive():
            logp, _ = token_logps(hidden, head, targets, 0.7, 190, limit)
            logp.backward(grad[:1].expand(200))
        others = 3 * 200 * D  # the Jacobian and the gradient of hidden, which are no logits
        assert 190 * limit / (2 * V) < Alive.most <= limit + others, (limit, Alive.most)


@pytest.mark.parametrize("vocab, valid, temperature", [(5000, 4990, 1.0), (4096, 4096, 0.6), (70, 50, 1.5)])
def test_the_row_kernel_in_tritons_interpreter(monkeypatch, vocab, valid, temperature):
    """Tile edges (4096 + 904 columns), one tile exactly, less than a tile; padded columns get a coefficient of 0."""
    interpret_kernels(monkeypatch, logps)
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(3, vocab, generator=generator) * 8
    targets = torch.randint(valid, (3,), generator=generator)
    logp, entropy, c = torch.empty(3), torch.empty(3), torch.empty(3, vocab)
    exact = (z[:, :valid].double() / temperature).log_softmax(1)
    for write in (False, True):
        logps.launch_rows(z, targets, logp, entropy, c, temperature, valid, write)
        torch.testing.assert_close(logp.double(), exact.gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(1), rtol=1e-4, atol=1e-5)
    expected = -exact.exp()
    expected[torch.arange(3), targets] += 1
    torch.testing.assert_close(c[:, :valid].double(), expected / temperature, rtol=1e-4, atol=1e-6)
    assert c[:, valid:].count_nonzero() == 0


def test_the_row_kernel_compiles_for_hopper():
    pytest.importorskip("triton")
    signature = {"z_ptr": "*fp32", "target_ptr": "*i64", "logp_ptr": "*fp32", "entropy_ptr": "*fp32",
                 "coefficient_ptr": "*bf16", "inv_temperature": "fp32", "vocab": "i32", "valid": "i32"}
    for write in (False, True):
        compile_for_hopper(logps._row_kernel, signature, {"WRITE": write, "BLOCK": 4096}, num_warps=8)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature, valid", [(1.0, None), (0.7, 151665)])
def test_on_a_gpu_bf16_agrees_with_fp64(temperature, valid):
    """Inputs are the same bf16 numbers, so only the GEMM's fp32 accumulation and the bf16 gradient round (2^-8)."""
    arguments = inputs(torch.bfloat16, "cuda", tokens=300, width=896, vocab=151936, valid=valid, sharp=3.0)
    exact = run(plain_logps, *(a.double() if a.is_floating_point() else a for a in arguments), temperature, valid,
                head_grad=False)
    got = run(token_logps, *arguments, temperature, valid, 2**24, head_grad=False)
    assert (got[0].double() - exact[0]).abs().max() < 2e-4
    assert (got[1].double() - exact[1]).abs().max() < 2e-4
    assert (got[2].double() - exact[2]).norm() / exact[2].norm() < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("max_logits", [2**24, 2**26, MAX_LOGITS])
def test_on_a_gpu_peak_memory_follows_the_stated_budget(max_logits):
    """16,384 tokens at a vocabulary of 152,064: 9.3 GiB of logits never exist; the bar is 2.5 GiB of extra peak."""
    head = torch.randn(152064, 1024, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(16384, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(152064, (16384,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logp, _ = token_logps(hidden, head, targets, max_logits=max_logits)
    logp.sum().backward()
    extra = torch.cuda.max_memory_allocated() - before
    # fp32 logits and bf16 coefficients of one chunk; J, d hidden and the product before it
    assert extra <= 6 * max_logits + 3 * hidden.nbytes + 2**20 and extra < 2.5 * 2**30, extra / 2**30
