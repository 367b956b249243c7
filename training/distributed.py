"""Several processes train as one: every rank knows all that was sampled, only the work is shared.

    torchrun --nproc-per-node 8 train.py --model Qwen2.5-7B          8 GPUs; add --nnodes and --rdzv-endpoint for more hosts

A step on two ranks, four prompts, G completions each:

    rank 0   prompts 0, 2 ─ rollout ─ rewards ─┐          ┌─ decisions, metrics ─ gradients of its share ─┐        ┌─ AdamW
                                               ├─ gather ─┤                                               ├─ sum ──┤
    rank 1   prompts 1, 3 ─ rollout ─ rewards ─┘          └─ decisions, metrics ─ gradients of its share ─┘        └─ AdamW

After the gather all ranks hold the same groups in the order of the prompts, so each works out what one process would
have: which groups have a signal and whether to draw again, advantages, the weight of every token (grpo.token_weights,
over the whole mini-batch), the mean of every metric. Nobody has to be asked, so nobody can disagree, and a rank cannot
wait for one that decided otherwise. What costs time is divided: rollouts by prompt, gradients by tokens in consecutive
runs of about equal length, whoever sampled them. Weights that belong to the whole batch make the gradients simply add:

    g = sum over all tokens of w_t dl_t = sum over ranks of (sum over the rank's tokens)        no average, no rescaling

Samples do not depend on the number of ranks, because a random stream is named by the place of its prompt in the data
order, and the data order belongs to the run: a run can be resumed on another number of ranks.

When a rank fails or dies the others must not wait for it: training/watch.py. Objects go over gloo, gradients over NCCL.

Where we differ from DistributedDataParallel (arXiv 2006.15704): gradients are summed, not averaged, and once an update.
Cost: the gather moves 25 bytes a sampled token to each rank, the sum 4 bytes a parameter of the adapter (0.3 GB at rank
32 of 7B). Limits: data parallel only, the whole model on each GPU; a rank that hangs but lives is noticed after an hour;
messages between ranks are pickled, as always in torch.distributed: run it on a network that you trust.
`Ranks()` is a single process: every method is then the plain thing, and no group is made.
Copy along: training/watch.py. For the demo also lora.py, model.py, training/learner.py.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from training.watch import PATIENCE_S, SHORT_PATIENCE_S, Watch

TIMEOUT = timedelta(hours=1)  # for a rank that lives and does not come; longer than any rollout waits for another
BUCKET = 2**28  # numbers summed at once: 1 GiB of fp32, more than an adapter has


def undeal(parts: Sequence[Sequence]) -> list:
    """What Ranks.deal gave to the ranks, in the original order.

    >>> undeal([["a", "c", "e"], ["b", "d"]])
    ['a', 'b', 'c', 'd', 'e']
    """
    nothing = object()
    return [item for row in zip_longest(*parts, fillvalue=nothing) for item in row if item is not nothing]


def share(costs: Sequence[float], rank: int, size: int) -> list[int]:
    """Indices of a rank's part: consecutive runs of about equal cost, so that few groups (and prompts) are cut.

    >>> [share([5, 5, 1, 1, 8], rank, 2) for rank in (0, 1)]
    [[0, 1], [2, 3, 4]]
    """
    total = sum(costs)
    middles = [end - cost / 2 for end, cost in zip(accumulate(costs), costs)]
    return [i for i, middle in enumerate(middles) if int(size * middle / total) == rank]


def byte_sums(tensors: Iterable[Tensor]) -> list[int]:
    """The sum of the bytes of each tensor: equal where tensors are, and a differing last bit shows."""
    sums = [tensor.detach().flatten().view(torch.uint8).sum(dtype=torch.int64) for tensor in tensors]
    return torch.stack(sums).tolist()


class Ranks:
    """The processes of this run and what they do together. Ranks() is one process, and every method the plain thing."""

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, store=None):
        self.rank, self.size, self.local_rank, self.is_first = rank, size, local_rank, rank == 0
        self.data_group = None  # of gradients: NCCL on GPUs, else the default group, which is gloo
        self.who = "" if rank == 0 else f" on rank {rank} ({socket.gethostname()})"  # for messages
        self.watch = Watch(store, rank, size) if size > 1 else None
        self.shown = None if rank == 0 else sys.__stdout__  # where `say` writes; None: sys.stdout

    def use(self, device: str, interrupt=None) -> None:
        """Takes this rank's GPU ("cuda" then means it); ValueError when there is none, or ranks differ in kind.

        interrupt: a checkpoint.Interrupt; from here on a request to one rank is one to all.
        """
        if self.size == 1:
            return
        self.watch.interrupt = interrupt
        if device == "cuda" and self.local_rank >= torch.cuda.device_count():
            raise ValueError(f"rank {self.rank} is number {self.local_rank + 1} on a host with {torch.cuda.device_count()} GPUs; "
                             f"start torchrun with --nproc-per-node {torch.cuda.device_count()}")
        self.check_same("the kind of device", lambda: device)
        if device == "cuda":
            torch.cuda.set_device(self.local_rank)
            self.data_group = dist.new_group(backend="nccl", timeout=TIMEOUT)
            self.sum_([torch.zeros(1, device="cuda")])  # NCCL takes its memory now, before anyone plans with what is free

    # ------------------------------------------------------------------------------------------------ telling each other

    def gather(self, value) -> list:
        """Every rank's value, in the order of ranks, on every rank."""
        values = [value] * self.size
        if self.size > 1:
            self._with_peers(dist.all_gather_object, values, value)
        return values

    def together(self, work: Callable) -> list:
        """work() of every rank, on every rank; a KeyboardInterrupt that ends one of them is raised in all."""
        try:
            part = work()
        except KeyboardInterrupt as stop:
            part = stop
        parts = self.gather(part)
        for stop in parts:
            if isinstance(stop, KeyboardInterrupt):
                raise stop
        return parts

    def first(self, make: Callable):
        """make() as rank 0 alone calls it, on every rank."""
        box = [make() if self.is_first else None]
        if self.size > 1:
            self._with_peers(dist.broadcast_object_list, box, 0)
        return box[0]

    def first_tensors(self, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Rank 0's tensors (on the CPU) on every rank."""
        kinds = self.first(lambda: {name: (t.shape, t.dtype) for name, t in tensors.items()})
        held = tensors if self.is_first else {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kinds.items()}
        if self.size > 1:
            for name in kinds:
                self._with_peers(dist.broadcast, held[name].view(-1).view(torch.uint8), 0)
        return dict(held)

    def check_same(self, what: str, make: Callable) -> None:
        """ValueError unless make() is the same on every rank."""
        if self.size > 1:
            values = self.gather(make())
            for rank, value in enumerate(values):
                if value != values[0]:
                    raise ValueError(f"{what} on rank {rank} differs from rank 0's; all ranks need the same files and hardware")

    def say(self, text: str) -> None:
        """One line for the user from any rank."""
        print(f"rank {self.rank}: {text}" if self.size > 1 else text, file=self.shown, flush=True)

    # ------------------------------------------------------------------------------------------------ sharing work

    def deal(self, items: Sequence) -> list:
        """This rank's items, dealt like cards; undeal is the inverse."""
        return list(items[self.rank :: self.size])

    def share(self, costs: Sequence[float]) -> list[int]:
        """Indices that are this rank's."""
        return share(costs, self.rank, self.size)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes its sum over the ranks, bit for bit the same on all of them. In place, in flat buckets."""
        while tensors and self.size > 1:
            fits = max(1, sum(end <= BUCKET for end in accumulate(t.numel() for t in tensors)))
            bucket, tensors = tensors[:fits], tensors[fits:]
            flat = torch.cat([t.flatten() for t in bucket])
            self._with_peers(dist.all_reduce, flat, group=self.data_group)
            for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket])):
                tensor.copy_(part.view_as(tensor))

    def sum_gradients_(self, parameters: Iterable[Tensor], loss: Tensor) -> None:
        """Gradients and loss of all shares, summed in place. What is not finite on one rank is so on all: all skip alike."""
        if self.size > 1:
            parameters = list(parameters)
            for parameter in parameters:  # a rank whose share is empty has no gradient
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self.sum_([*(parameter.grad for parameter in parameters), loss])

    def merge(self, metrics: Mapping[str, float], weight: float, sums: Sequence[str] = ()) -> dict[str, float]:
        """Metrics of parts -> of the whole: names in `sums` add up, .../max and .../min are that, others means by weight."""
        if self.size == 1:
            return dict(metrics)
        parts, merged = self.gather((metrics, weight)), {}
        for name in dict.fromkeys(name for part, _ in parts for name in part):
            values, weights = zip(*((part[name], weight) for part, weight in parts if name in part))
            if name in sums:
                merged[name] = sum(values)
            elif name.endswith(("/max", "/min")):
                merged[name] = max(values) if name.endswith("max") else min(values)
            else:
                merged[name] = sum(v * w for v, w in zip(values, weights)) / max(sum(weights), 1e-9)
        return merged

    # ------------------------------------------------------------------------------------------------ beginning and end

    def _with_peers(self, collective: Callable, *args, **kwargs) -> None:
        try:
            collective(*args, **kwargs)
        except RuntimeError:
            # Somebody is gone. The watch is about to learn who, and why, and ends this process; else the error stands.
            self.watch.patience_s = SHORT_PATIENCE_S
            self.watch.join(PATIENCE_S)
            raise

    def end(self, message: str, code: int) -> int:
        """The run cannot go on: all ranks end with this line and exit code. Returns only where there is one process."""
        if self.watch is None or self.watch.closed.is_set():
            print(message, file=sys.stderr if self.is_first else sys.__stderr__)
            return code
        time.sleep(0 if self.is_first else self.watch.period_s)  # what fails on all ranks alike is for rank 0 to say
        self.watch.fail(message, code)
        self.watch.join()
        raise AssertionError("the watch has ended the process")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if self.size == 1:
            return
        if isinstance(error, SystemExit):  # argparse has said why
            self.end("", error.code if isinstance(error.code, int) else 1)
        if error is not None:
            traceback.print_exception(error, file=sys.__stderr__)
            self.end(f"{kind.__name__}{self.who}: {error}", 1)
        self.watch.leave()
        with suppress(RuntimeError):  # nobody is waited for any more who has died since
            dist.barrier()  # rank 0 may hold the store, so it goes when all have left
        dist.destroy_process_group()


ALONE = Ranks()


def join(environment: Mapping[str, str]) -> Ranks:
    """The ranks that torchrun (or whoever sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) started; ALONE without.

    Ranks other than 0 become silent: their stdout and stderr lead nowhere, except for Ranks.say and the reason of an end.
    """
    size = int(environment.get("WORLD_SIZE", "1"))
    if size == 1:
        return ALONE
    store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=TIMEOUT)
    ranks = Ranks(rank, size, int(environment.get("LOCAL_RANK", rank)), dist.PrefixStore("watch", store.clone()))
    dist.barrier()  # every heartbeat has begun
    ranks.watch.start()
    if rank > 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")
    return ranks


def _demo_rank(rank: int, port: int) -> None:
    """One of two processes: three updates of a single process, then the same three of both."""
    from lora import add_adapters
    from model import ModelConfig, random_model
    from training.learner import Learner, Sequence, Settings

    os.environ |= dict(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    config, draw = ModelConfig("qwen2", 64, 2, 4, 2, 16, 128, 200, qkv_bias=True, tied=True), torch.Generator().manual_seed(1)
    step = [Sequence([1 + i // 4] * 9, torch.randint(200, (3 + 5 * i % 17,), generator=draw).tolist(), [], (-1.0) ** i)
            for i in range(8)]
    with join(os.environ) as ranks:
        trained = []
        for who in (ALONE, ranks):
            model = random_model(config, "nvfp4")
            add_adapters(model, 8, 8, generator=torch.Generator().manual_seed(0))
            learner = Learner(model, Settings(lr=1e-3, warmup=0), ranks=who)
            norms = ", ".join(f"{learner.update(step)['grad_norm']:.6f}" for _ in range(3))
            trained.append(torch.cat([master.detach().flatten() for master in learner.masters.values()]))
            answers = ", ".join(map(str, who.gather(len(who.share([len(s.completion) for s in step])))))
            print(f"processes: {who.size}   gradient norms of three updates: {norms}   answers a rank: {answers}")
        print(f"largest difference of a weight: {(trained[0] - trained[1]).abs().max():.1e}")


def demo() -> None:
    """Two processes on this machine, over gloo."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = [multiprocessing.get_context("fork").Process(target=_demo_rank, args=(rank, port)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    demo()
