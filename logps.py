"""The log-probability of every sampled token, and the policy's entropy, without ever holding the logits.

With a vocabulary of 152,064 the logits of 16,384 tokens fill 9.3 GiB in fp32, and a plain log-softmax with its backward
wants about three such tensors. Only two numbers a token are needed. So the rows are taken in chunks:

    hidden (T, d)  --chunk-->  z = h W^T / temperature (rows, V) fp32  -->  logp    = z[y] - logsumexp(z)
                                                                      -->  entropy = logsumexp(z) - sum_v p_v z_v
    and z is dropped before the next chunk: at most `max_logits` numbers of that size are alive, stated by the caller.

The backward needs no logits at all. logp is one number a token, so its gradient is one vector a token,

    d logp / d h = (W[y] - sum_v p_v W_v) / temperature = ((onehot(y) - p) W) / temperature        J, (T, d)

which the forward makes while p is at hand: one more GEMM there, J kept (d numbers a token, against V), and the backward
is g * J, elementwise. The usual alternative, making z again in the backward, costs a third GEMM of the model's largest
matrix. onehot - p is subtracted in fp32, then rounded: where p[y] is 0.998, rounding p first would lose the gradient.
The head's own gradient (--full) needs g * (onehot - p) and does recompute.

fp32 is not a luxury: bf16 logits cost 0.03 nats a token at this vocabulary. On CUDA the GEMM is bf16 with fp32 output.
Rows at and beyond `valid_vocab` (padding of the embedding, ids of no text) have probability zero, as in the sampler.

Source: calculus. Logits are scaled by the sampling temperature first, so that the scored policy is the sampled one.
Cost: two GEMMs (one without gradient), on a GPU plus 2.5 reads or writes of the fp32 logits in one fused kernel.
Limits: the entropy carries no gradient (no entropy bonus in QeRL).
Copy along: nothing. Without triton it is plain torch.
"""
from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # then CUDA takes the torch path too
    triton = None

MAX_LOGITS = 2**27  # per chunk: 0.5 GiB of fp32 logits, 0.25 GiB of bf16 coefficients


def plain_logps(hidden: Tensor, head_weight: Tensor, targets: Tensor, temperature: float = 1.0,
                valid_vocab: int | None = None) -> tuple[Tensor, Tensor]:
    """The specification: all logits at once, autograd does the rest."""
    z = hidden @ head_weight[:valid_vocab].T / temperature  # (T, V)
    log_p = z.log_softmax(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1).detach()


def token_logps(hidden: Tensor, head_weight: Tensor, targets: Tensor, temperature: float = 1.0,
                valid_vocab: int | None = None, max_logits: int = MAX_LOGITS) -> tuple[Tensor, Tensor]:
    """log pi(targets) (T,) with gradient, and the entropy (T,) without; fp32 (fp64 for fp64 inputs).

    hidden (T, d) after the final norm; head_weight (V, d); targets (T,) int64 below valid_vocab; temperature > 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} must be positive: greedy decoding (0) has no log-probs")
    valid = head_weight.shape[0] if valid_vocab is None else valid_vocab
    want_grad = torch.is_grad_enabled() and hidden.requires_grad  # inside Function.forward grad mode is always off
    return _TokenLogps.apply(hidden, head_weight, targets, temperature, valid, max_logits, want_grad)


class _TokenLogps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head_weight, targets, temperature, valid, max_logits, want_grad):
        exact = torch.promote_types(hidden.dtype, torch.float32)
        logp = torch.empty(len(hidden), dtype=exact, device=hidden.device)
        entropy = torch.empty_like(logp)
        jacobian = torch.empty_like(hidden) if want_grad else None  # (T, d): d logp / d hidden
        for rows in _chunks(len(hidden), head_weight, max_logits):
            logp[rows], entropy[rows], coefficients = _row_pass(
                hidden[rows], head_weight, targets[rows], temperature, valid, want_grad)
            if want_grad:
                torch.mm(coefficients, head_weight[: coefficients.shape[1]], out=jacobian[rows])
            del coefficients  # before the next chunk is made
        ctx.save_for_backward(jacobian, hidden, head_weight, targets)
        ctx.settings = temperature, valid, max_logits
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx, grad_logp, _):
        jacobian, hidden, head_weight, targets = ctx.saved_tensors
        temperature, valid, max_logits = ctx.settings
        grad_hidden = grad_head = None
        if ctx.needs_input_grad[0]:
            grad_hidden = (jacobian * grad_logp[:, None]).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            grad_head = torch.zeros_like(head_weight)
            for rows in _chunks(len(hidden), head_weight, max_logits):
                coefficients = _row_pass(hidden[rows], head_weight, targets[rows], temperature, valid, True)[2]
                scaled = (hidden[rows] * grad_logp[rows, None]).to(hidden.dtype)
                grad_head[: coefficients.shape[1]].addmm_(coefficients.T, scaled)
                del coefficients
        return grad_hidden, grad_head, None, None, None, None, None


def _chunks(tokens: int, head_weight: Tensor, max_logits: int) -> list[slice]:
    """Slices of rows whose logits, with the second array of that size that a row pass needs, stay within max_logits."""
    vocab = head_weight.shape[0]
    rows = max(1, max_logits // (vocab if _fused(head_weight) else 2 * vocab))
    rows = rows // 128 * 128 or rows  # whole GEMM tiles
    return [slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]


def _row_pass(hidden: Tensor, head_weight: Tensor, targets: Tensor, temperature: float, valid: int,
              want_coefficients: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """logp (rows,), entropy (rows,) and (onehot - p) / temperature (rows, V) of one chunk, in hidden's dtype."""
    if _fused(hidden):
        return _fused_row_pass(hidden, head_weight, targets, temperature, valid, want_coefficients)
    z = (hidden @ head_weight[:valid].T).to(torch.promote_types(hidden.dtype, torch.float32))  # (rows, valid)
    if temperature != 1.0:
        z /= temperature
    z -= z.logsumexp(1, keepdim=True)  # now log p
    logp = z.gather(1, targets[:, None]).squeeze(1)
    p = z.exp()
    entropy = -torch.einsum("tv,tv->t", p, z)
    if not want_coefficients:
        return logp, entropy, None
    p = p.neg_()
    p[torch.arange(len(p), device=p.device), targets] += 1.0
    if temperature != 1.0:
        p /= temperature
    return logp, entropy, p.to(hidden.dtype)


def _fused(like: Tensor) -> bool:
    return triton is not None and like.is_cuda and like.dtype == torch.bfloat16


def _fused_row_pass(hidden, head_weight, targets, temperature, valid, want_coefficients):
    """The same on a GPU: one GEMM with fp32 output, then one kernel over its rows."""
    z = torch.mm(hidden, head_weight.T, out_dtype=torch.float32)  # (rows, V)
    logp = torch.empty(len(z), dtype=torch.float32, device=z.device)
    entropy = torch.empty_like(logp)
    coefficients = torch.empty_like(z, dtype=hidden.dtype) if want_coefficients else z  # z: not written to
    launch_rows(z, targets, logp, entropy, coefficients, temperature, valid, want_coefficients)
    return logp, entropy, coefficients if want_coefficients else None


def launch_rows(z, targets, logp, entropy, coefficients, temperature, valid, want_coefficients) -> None:
    """Launch one program a row of z (rows, V), fp32 contiguous."""
    _row_kernel[(len(z),)](z, targets, logp, entropy, coefficients, 1.0 / temperature, z.shape[1], valid,
                           WRITE=want_coefficients, BLOCK=4096, num_warps=8)


if triton is not None:

    @triton.jit
    def _row_kernel(z_ptr, target_ptr, logp_ptr, entropy_ptr, coefficient_ptr, inv_temperature, vocab, valid,
                    WRITE: tl.constexpr, BLOCK: tl.constexpr):
        """logp and entropy of one row in one read; with WRITE a second read leaves (onehot - p) / temperature."""
        row = tl.program_id(0).to(tl.int64)
        z_ptr += row * vocab
        offs = tl.arange(0, BLOCK)
        top = -float("inf")  # running maximum of z
        mass = 0.0  # sum of e^(z - top)
        moment = 0.0  # sum of e^(z - top) * (z - top)
        for start in range(0, valid, BLOCK):
            inside = start + offs < valid
            z = tl.load(z_ptr + start + offs, mask=inside, other=-float("inf")) * inv_temperature  # a tile of logits
            new_top = tl.maximum(top, tl.max(z, 0))
            shift = tl.where(top == -float("inf"), 0.0, top - new_top)  # the first tile has nothing to rescale
            rescale = tl.exp(shift)
            moment = (moment + mass * shift) * rescale
            mass = mass * rescale
            centred = tl.where(inside, z - new_top, 0.0)
            e = tl.where(inside, tl.exp(centred), 0.0)
            mass += tl.sum(e, 0)
            moment += tl.sum(e * centred, 0)
            top = new_top
        target = tl.load(target_ptr + row)
        log_mass = tl.log(mass)
        tl.store(logp_ptr + row, tl.load(z_ptr + target) * inv_temperature - top - log_mass)
        tl.store(entropy_ptr + row, log_mass - moment / mass)
        if WRITE:
            coefficient_ptr += row * vocab
            for start in range(0, vocab, BLOCK):
                cols = start + offs
                z = tl.load(z_ptr + cols, mask=cols < valid, other=-float("inf")) * inv_temperature  # the same tile
                p = tl.exp(z - top - log_mass)
                c = (tl.where(cols == target, 1.0, 0.0) - p) * inv_temperature
                tl.store(coefficient_ptr + cols, c.to(coefficient_ptr.dtype.element_ty), mask=cols < vocab)


def demo() -> None:
    """Chunked equals plain, in fp64, gradient included."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(1000, 16, generator=generator, dtype=torch.float64)
    targets = torch.randint(990, (50,), generator=generator)
    outputs = []
    for function, extra in ((plain_logps, ()), (token_logps, (8000,))):
        logp, entropy = function(hidden, head, targets, 0.7, 990, *extra)
        outputs.append((logp, entropy, torch.autograd.grad(logp.square().sum(), hidden)[0]))
    for name, a, b in zip(("logp", "entropy", "d/d hidden"), *outputs):
        print(f"{name:<11} largest difference, 8,000 logits at a time against all 50,000: {(a - b).abs().max():.1e}")


if __name__ == "__main__":
    demo()
