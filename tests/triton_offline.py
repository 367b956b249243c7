"""Triton without a GPU: run kernels in the interpreter, compile them for Hopper."""

import pytest
import torch


def interpret_kernels(monkeypatch, *modules):
    """Until the test ends, every `*_kernel` of these modules runs in Triton's interpreter, on CPU tensors.

    Setting TRITON_INTERPRET would have to come before the first import of triton, and would rule out compiling in the
    same process. Triton's own library (tl.sum, tl.sigmoid) is made of jitted functions too: they are interpreted when called.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    from triton.runtime.jit import JITFunction

    if torch.cuda.is_available():
        pytest.skip("the kernels themselves are tested on this GPU")

    def call_interpreted(self, *args, **options):
        scope = interpreter._patch_lang(self.fn)
        try:
            return interpreter.InterpretedFunction(self.fn).rewrite()(*args, **options)
        finally:
            scope.restore()  # left patched, the compiler would see the interpreter's language

    monkeypatch.setattr(JITFunction, "__call__", call_interpreted)
    for module in modules:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, interpreter.InterpretedFunction(vars(module)[name].fn))


def compile_for_hopper(kernel, signature: dict, constants: dict, **options):
    """The compiled kernel for sm_90, pointers aligned as torch's are; what only the interpreter accepts fails here."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = signature | {name: "constexpr" for name in constants}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if types[name][0] == "*" or name.startswith("stride")
    }
    signature = {name: types[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
