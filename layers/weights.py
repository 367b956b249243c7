"""One frozen weight matrix, held in one of three ways, behind one small interface.

The idea: the model does not care how a weight is stored. It asks for three things, and each storage answers them
with the fastest code it has:

    matmul(x)         x W^T         forward                       x (M, K)  -> (M, N)
    grad_input(dy)    dy W          backward to the input         dy (M, N) -> (M, K)
    dequantize()      W             for export and for checks     (N, K)

and a fourth, lora_matmul(x, bias, lora), which is the whole adapted layer without autograd, because on a GPU the
adapter's shrink and expand fit into the 4-bit kernel.

    kind      class         bits a weight   stored as                                   GEMM
    "nvfp4"   NVFP4Weight   4.5             CUDA: words in the kernel's own order        marlin_kernel
                                            CPU: the public layout, and a copy in the    torch
                                            compute dtype, made at the first use
    "nf4"     NF4Weight     4.1             bitsandbytes, blocks of 64, double-quantised bitsandbytes
    "bf16"    DenseWeight   16              a plain matrix (fp32 on a CPU)               cuBLAS / MKL

Projections that read the same input are stacked along N into one weight: q,k,v and gate,up.

    W (N, K) = | q_proj |  N_q rows         one GEMM where there were three; the stacked NVFP4 parts share one
               | k_proj |  N_k rows         global scale when they are quantised here, and keep their own when
               | v_proj |  N_v rows         they come from a quantised checkpoint

Source: QeRL (arXiv 2510.11696) for NVFP4, QLoRA (arXiv 2305.14314) for NF4. Where we differ: NF4 is stacked as well, so
that the peer runs at its best. Nothing here is trained except a DenseWeight under full-parameter training.
Cost: NVFP4 0.56 byte a weight on a GPU; on a CPU 4.56, because a CPU has no 4-bit arithmetic to gain from.
Limits: K must be a multiple of 16 for nvfp4; nf4 needs bitsandbytes.
Copy along: nvfp4.py, marlin_kernel.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import marlin_kernel
import nvfp4
from marlin_kernel import LoraOperands, add_lora_
from nvfp4 import NVFP4Tensor

KINDS = ("nvfp4", "nf4", "bf16")


class Weight(nn.Module):
    """What the three storages share. 4-bit tensors are plain attributes: nothing that walks over parameters or
    state_dict() meets them, and nothing writes to them."""

    shape: tuple[int, int]

    def matmul(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def grad_input(self, dy: Tensor) -> Tensor:
        raise NotImplementedError

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        raise NotImplementedError

    def stored(self) -> list[Tensor]:
        """The tensors that hold the weight: what is hashed and counted."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.stored())

    def lora_matmul(self, x: Tensor, bias: Tensor | None, lora: LoraOperands | None) -> Tensor:
        """x W^T + bias + scaling * (x A^T) B^T without autograd; x (M, K) -> (M, N)."""
        y = self.matmul(x)
        if bias is not None:
            y += bias
        return y if lora is None else add_lora_(y, x, lora)


class DenseWeight(Weight):
    """A plain (N, K) matrix; with trainable=True a Parameter that ordinary autograd trains."""

    def __init__(self, tensor: Tensor, trainable: bool = False):
        super().__init__()
        self.tensor = nn.Parameter(tensor, requires_grad=trainable)
        self.compute_dtype = tensor.dtype
        self.shape = tuple(tensor.shape)

    def matmul(self, x: Tensor) -> Tensor:
        return x @ self.tensor.T

    def grad_input(self, dy: Tensor) -> Tensor:
        return dy @ self.tensor

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return self.tensor.detach().to(dtype)

    def stored(self) -> list[Tensor]:
        return [self.tensor]

    def lora_matmul(self, x: Tensor, bias: Tensor | None, lora: LoraOperands | None) -> Tensor:
        y = F.linear(x, self.tensor, bias)
        return y if lora is None else add_lora_(y, x, lora)


class NVFP4Weight(Weight):
    """NVFP4 parts stacked along N; the fast kernel's layout on a GPU that has it, else the public one."""

    def __init__(self, parts: Sequence[NVFP4Tensor], compute_dtype: torch.dtype):
        super().__init__()
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        self.compute_dtype = compute_dtype
        device = parts[0].packed.device
        # The kernel's layout replaces the public one: a card never holds both.
        fast = device.type == "cuda" and not marlin_kernel.supports(device)
        self.marlin = marlin_kernel.pack(parts) if fast else None
        self.parts = list(parts) if self.marlin is None else []
        self._dense: Tensor | None = None

    def _matrix(self) -> Tensor:
        """(N, K) in the compute dtype where there is no 4-bit kernel: kept on a CPU, made anew on an old GPU."""
        if self._dense is not None:
            return self._dense
        matrix = torch.cat([nvfp4.dequantize(part, self.compute_dtype) for part in self.parts])
        if matrix.device.type == "cpu":
            self._dense = matrix
        return matrix

    def matmul(self, x: Tensor) -> Tensor:
        return x @ self._matrix().T if self.marlin is None else marlin_kernel.linear(x, self.marlin)

    def grad_input(self, dy: Tensor) -> Tensor:
        return dy @ self._matrix() if self.marlin is None else marlin_kernel.grad_input(dy, self.marlin)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.cat([nvfp4.dequantize(part, dtype) for part in self.nvfp4_parts()])

    def nvfp4_parts(self) -> list[NVFP4Tensor]:
        """The parts in the public layout, bit for bit as they came."""
        return self.parts if self.marlin is None else list(marlin_kernel.unpack(self.marlin))

    def stored(self) -> list[Tensor]:
        if self.marlin is not None:
            return [self.marlin.words, self.marlin.scales, self.marlin.row_scale]
        return [tensor for part in self.parts for tensor in (part.packed, part.scale, part.global_scale)]

    def lora_matmul(self, x: Tensor, bias: Tensor | None, lora: LoraOperands | None) -> Tensor:
        if self.marlin is not None:
            return marlin_kernel.linear(x, self.marlin, bias, lora)
        y = F.linear(x, self._matrix(), bias)
        return y if lora is None else add_lora_(y, x, lora)


def _bitsandbytes():
    try:
        import bitsandbytes
    except ImportError as error:
        raise ValueError(
            f"--weights nf4 needs bitsandbytes, which cannot be imported ({error}); "
            "pip install bitsandbytes, or take --weights nvfp4"
        ) from error
    return bitsandbytes


class NF4Weight(Weight):
    """QLoRA's storage: 4-bit NormalFloat in blocks of 64 with double-quantised block scales, by bitsandbytes."""

    def __init__(self, matrix: Tensor, compute_dtype: torch.dtype):
        super().__init__()
        self.bnb = _bitsandbytes()
        self.shape = tuple(matrix.shape)
        self.compute_dtype = compute_dtype
        self.packed, self.state = self.bnb.functional.quantize_4bit(
            matrix.to(compute_dtype).contiguous(), blocksize=64, compress_statistics=True, quant_type="nf4"
        )

    def matmul(self, x: Tensor) -> Tensor:
        return self.lora_matmul(x, None, None)

    def grad_input(self, dy: Tensor) -> Tensor:
        return dy @ self.dequantize(dy.dtype)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return self.bnb.functional.dequantize_4bit(self.packed, self.state).to(dtype)

    def stored(self) -> list[Tensor]:
        return [self.packed, self.state.absmax, self.state.offset, self.state.state2.absmax]

    def lora_matmul(self, x: Tensor, bias: Tensor | None, lora: LoraOperands | None) -> Tensor:
        with torch.no_grad():  # its 4-bit GEMMs are taken only where no gradient is asked for
            y = self.bnb.matmul_4bit(x, self.packed, self.state, bias=bias)
        return y if lora is None else add_lora_(y, x, lora)


def _own(q: NVFP4Tensor) -> NVFP4Tensor:
    """A copy: a tensor read on a CPU may still lie in the mapped checkpoint file, which may be replaced."""
    return NVFP4Tensor(q.packed.clone(), q.scale.clone(), q.global_scale.clone())


def make_weight(
    kind: str,
    parts: Sequence[Tensor | NVFP4Tensor],
    device: torch.device | str,
    compute_dtype: torch.dtype,
    trainable: bool = False,
) -> Weight:
    """Stacks parts (N_p, K) along N and stores them as `kind` on `device`.

    Float parts are quantised on the device with one shared global scale; parts that already are NVFP4 stay as they
    are (nvfp4) or are dequantised (bf16). ValueError for an unknown kind or a combination that would quantise twice.
    """
    if kind not in KINDS:
        raise ValueError(f"weights={kind!r} is not one of {', '.join(KINDS)}")
    already = [isinstance(part, NVFP4Tensor) for part in parts]
    if kind == "nf4" and any(already):
        raise ValueError("this checkpoint is NVFP4 already; nf4 would quantise it twice: take --weights nvfp4 or bf16")
    parts = [part.to(device) for part in parts]
    if kind == "nvfp4":
        floats = [part for part in parts if not isinstance(part, NVFP4Tensor)]
        g = nvfp4.global_scale(*floats) if floats else None
        quantised = [_own(p) if isinstance(p, NVFP4Tensor) else nvfp4.quantize(p, g) for p in parts]
        return NVFP4Weight(quantised, compute_dtype)
    matrix = torch.cat(
        [nvfp4.dequantize(p, compute_dtype) if isinstance(p, NVFP4Tensor) else p.to(compute_dtype) for p in parts]
    )
    return NF4Weight(matrix, compute_dtype) if kind == "nf4" else DenseWeight(matrix, trainable)


def fingerprint(tensors: Sequence[Tensor]) -> str:
    """sha256 over shapes, dtypes and bytes: equal before and after training for everything that is frozen."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def demo() -> None:
    """The same matrix held two ways (nf4 would import bitsandbytes): bytes, error of the weights, error of a product."""
    generator = torch.Generator().manual_seed(0)
    w, x = torch.randn(384, 256, generator=generator), torch.randn(8, 256, generator=generator)
    exact = x @ w.T
    print("kind    bits a weight   error of W   error of x W^T")
    for kind in ("nvfp4", "bf16"):
        weight = make_weight(kind, [w[:256], w[256:]], "cpu", torch.float32)
        bits = 8 * weight.nbytes / w.numel()
        weight_error = (weight.dequantize(torch.float32) - w).norm() / w.norm()
        product_error = (weight.matmul(x) - exact).norm() / exact.norm()
        print(f"{kind:7} {bits:13.2f} {weight_error:12.4f} {product_error:16.4f}")


if __name__ == "__main__":
    demo()
