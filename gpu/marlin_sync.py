"""Waiting, in Triton: for another program, for the tensor cores, for memory; and sums that do not depend on who came first.

The idea: programs of one launch run at the same time in no known order. Where one needs what another makes, the maker stores
it, passes a barrier so that all its threads have stored, and adds to a counter with release; the other spins on the counter
with acquire. Who then adds up what several have left does so in their fixed order, never as they come, and never by atomic
additions of numbers, so that a replay is equal bit for bit:

    maker   store piece -> barrier -> counter += 1 (release)          reader   counter >= pieces (acquire) -> load -> add in order

A counter is lowered to 0 again by its last reader, so a launch leaves all of them as it found them, and a CUDA graph can
repeat it. A program may only wait for others that are certain to run: those with lower numbers, which start earlier, or all,
if the launch is no larger than what the GPU holds at a time.

Source: PTX ISA, memory consistency model; triton issue 9433 and pull request 9610 for settle().
Cost: about 0.7 us for one look at a counter, and as much for what is loaded after it. Limits: one GPU.
Copy along: nothing.
"""

import triton
import triton.language as tl


@triton.jit
def prefetch(ptrs):
    """Asks for the 128-byte lines at ptrs to come into the L2 cache, and does not wait."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for(flag_ptr, value):
    while tl.atomic_add(flag_ptr, 0, sem="acquire") < value:
        pass


@triton.jit
def settle(step):
    """Waits until the products in flight have ended, and the tensor cores can see what was copied for the next ones.

    Triton 3.6 and 3.7 reuse the registers of decoded weights while a product may still read them (triton issue 9433), and 3.6
    reads copies through another path than they came by, without a fence (its pull request 9610). Now and then a tile was wrong.
    """
    tl.inline_asm_elementwise("wgmma.wait_group.sync.aligned 0; fence.proxy.async.shared::cta; mov.b32 $0, $1;", "=r,r", [step],
                              dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip


@triton.jit
def fence_copies(step):
    """The second half of settle(), for loops in which products stay in flight."""
    tl.inline_asm_elementwise("fence.proxy.async.shared::cta; mov.b32 $0, $1;", "=r,r", [step], dtype=tl.int32, is_pure=False,
                              pack=1)  # fmt: skip


# Groups into which Triton puts the products of a k-step: 3.6 one for 16 columns, 3.7 two in all. The hardware counts to 7.
GROUPS = [min(bk // 16, 7) if triton.__version__.startswith("3.6") else 2 for bk in (64, 128, 256)]
PASS = "mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7;"
WAITS = tuple(tl.constexpr(f"wgmma.wait_group.sync.aligned {n}; {PASS}") for n in GROUPS)
WAIT_64, WAIT_128, WAIT_256 = WAITS


@triton.jit
def after_products(words, BK: tl.constexpr):
    """words, once no more products are in flight than those of one k-step, so that the ones before have ended.

    Four words a thread and more. Whatever is made of the words comes later, since the instruction hands them on.
    """
    asm: tl.constexpr = WAIT_64 if BK == 64 else WAIT_128 if BK == 128 else WAIT_256
    return tl.inline_asm_elementwise(asm, "=&r,=&r,=&r,=&r,r,r,r,r", [words], dtype=tl.int32, is_pure=False, pack=4)


@triton.jit
def add_in_order(acc, ptrs, first, last, stride, BATCH: tl.constexpr):
    """acc + blocks first .. last - 1, `stride` numbers apart, in this order; BATCH loads in flight hide latency."""
    for i in range(first, last, BATCH):
        acc += tl.load(ptrs + i * stride, cache_modifier=".cg")
        for j in tl.static_range(1, BATCH):
            acc += tl.load(ptrs + (i + j) * stride, mask=i + j < last, other=0.0, cache_modifier=".cg")
    return acc


def demo() -> None:
    """Three fp32 pieces of a sum, added as they come and in the order of their numbers."""
    import torch

    pieces = torch.tensor([1.0, 1e8, -1e8])
    in_order = (pieces[0] + pieces[1]) + pieces[2]
    for order in ((0, 1, 2), (1, 2, 0)):
        first, second, third = (pieces[i] for i in order)
        print(f"pieces that come as {order}: added as they come {(first + second) + third}, in their order {in_order}")


if __name__ == "__main__":
    demo()
