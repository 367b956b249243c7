"""Ranks for tests: processes that meet as under torchrun, forked from one that has imported everything already.

    run = Processes(2, check, "argument")      check("argument") in two processes; .wait(60) -> their exit codes
    run.log(1)                                 what rank 1 printed

A fresh Python with torch and transformers costs 5 s of one core, a fork of a prepared server 20 ms.
"""

import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from pathlib import Path

PRELOADED = ["train", "eval", "transformers.models.auto.auto_factory", "matplotlib.backends.backend_agg", "torch._dynamo"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _live(environment: dict, log: str, function, args: tuple) -> None:
    """The life of one process; its exit code is what the function returns."""
    import torch

    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    code = 99
    try:
        code = function(*args) or 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    import sys

    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        stream.flush()
    os._exit(code)


class Processes:
    """`size` processes that run function(*args) with the environment of torchrun; one process without it."""

    def __init__(self, size: int, function, *args):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        self.started, self.processes = time.monotonic(), []
        for rank in range(size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            given = {**shared, **own} if size > 1 else {}
            process = context.Process(target=_live, args=(given, self._path(rank), function, args))
            process.start()
            self.processes.append(process)

    def _path(self, rank: int) -> str:
        return str(self.folder / f"{rank}.log")

    def log(self, rank: int) -> str:
        return Path(self._path(rank)).read_text()

    def wait(self, seconds: float) -> list[int]:
        """Exit codes; a process that still runs after so long is killed and the test fails, with what all have said."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        for rank in hung:
            self.processes[rank].kill()
            self.processes[rank].join()
        assert not hung, f"ranks {hung} hang\n" + self.logs()
        self.seconds = time.monotonic() - self.started
        return [process.exitcode for process in self.processes]

    def logs(self) -> str:
        return "\n".join(f"--- rank {rank}\n{self.log(rank)[-3000:]}" for rank in range(len(self.processes)))

    def succeed(self, seconds: float = 60) -> None:
        assert set(self.wait(seconds)) == {0}, self.logs()
