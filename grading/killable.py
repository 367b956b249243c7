"""A Python function in a process that can be killed: it may hang, crash or eat memory, and the caller goes on.

Idea. Two things in reinforcement learning run what nobody has vetted: algebra on a model's output (9^9^9^9 keeps sympy
busy until the end of days) and a user's own reward function. A timeout by signal works only on the main thread, cannot
interrupt C code, and leaves half a state behind. A process can be killed at any moment, from any thread.

    caller                                   worker: python grading/killable.py '{"target": "my.py:score", ...}'
      | -- stdin:  {name: argument}\\n  ------>  |  one JSON line a call
      | <-- stdout: {"value": ...}\\n  --------  |  one JSON line an answer; the function's own prints go to stderr
      |  no answer in wall_s: kill, start anew, CallFailed("timeout")

The target is "path/to/file.py:function". Nothing else is imported, so a worker costs a Python start (20 ms), not torch.

Two clocks. `wall_s` is the caller's patience: it catches a function that sleeps. `cpu_s` is counted by the kernel in
the worker's own CPU time and ends it there, so that a verdict does not depend on how busy the machine is. A worker
whose caller dies sees the end of its stdin and leaves; one that is computing then is ended by its own timer.

Where we differ from multiprocessing: its spawn imports the caller's main module again (torch, seconds), its fork copies
a CUDA context. Cost: a Python start for each worker, two lines of JSON for each call.
Limits: POSIX. Arguments and values must be JSON; a value is made a float where JSON does not know it (NumPy, torch).
Not a sandbox: a reward function may do whatever its user may.
Copy along: nothing. It needs the standard library alone.
"""
from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

START_S = 60.0      # for Python and the target's own imports


class CallFailed(Exception):
    """`reason` is "timeout", "died" (crashed, out of memory) or "raised"; the message is one line."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class Killable:
    """Calls `target` ("file.py:function") in a process of its own, started when needed and again after a failure."""

    def __init__(self, target: str, wall_s: float, cpu_s: float = 0.0, memory_gib: float = 0.0, quiet: bool = False):
        self.wall_s, self.cpu_s = wall_s, cpu_s
        self._command = [sys.executable, str(Path(__file__).resolve()), json.dumps(
            {"target": target, "wall_s": wall_s, "cpu_s": cpu_s, "memory_gib": memory_gib})]
        self._stderr = subprocess.DEVNULL if quiet else None
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def __call__(self, **arguments):
        """The function's value; raises CallFailed when there is none."""
        with self._lock:
            try:
                if self._process is None:
                    self._start()
                return self._exchange(json.dumps(arguments).encode() + b"\n", self.wall_s)
            except BaseException as error:
                if not isinstance(error, CallFailed) or error.reason != "raised":
                    self._kill()      # also after Ctrl-C: an answer that comes later must not meet the next question
                raise

    def start(self) -> None:
        """Start the worker now and not at the first call; raises CallFailed when the target cannot be loaded."""
        with self._lock:
            if self._process is None:
                self._start()

    def interrupt(self) -> None:
        """End the call that is running, from another thread: its caller gets CallFailed."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        with self._lock:
            self._kill()

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=self._stderr, start_new_session=True)    # Ctrl-C is the caller's
        os.set_blocking(self._process.stdin.fileno(), False)
        try:
            self._exchange(b"", START_S)
        except CallFailed as error:
            self._kill()
            raise CallFailed("died", f"it could not be loaded: {error}") from None

    def _exchange(self, question: bytes, patience_s: float):
        """Write the whole question, read one line; neither can block for longer than the patience."""
        deadline = time.monotonic() + patience_s
        inlet, outlet = self._process.stdin.fileno(), self._process.stdout.fileno()
        answer = b""
        while question or not answer.endswith(b"\n"):
            poll = select.poll()
            poll.register(*((inlet, select.POLLOUT) if question else (outlet, select.POLLIN)))
            if not poll.poll(max(0, deadline - time.monotonic()) * 1000):
                raise CallFailed("timeout", f"no answer in {patience_s:g} s")
            try:
                if question:
                    question = question[os.write(inlet, question):]
                    continue
                chunk = os.read(outlet, 1 << 16)
            except BrokenPipeError:
                chunk = b""
            if not chunk:
                raise self._post_mortem()
            answer += chunk
        answer = json.loads(answer)
        if "error" in answer:
            raise CallFailed("raised", answer["error"])
        return answer["value"]

    def _post_mortem(self) -> CallFailed:
        code = self._process.wait(timeout=10)
        if code in (-signal.SIGPROF, -signal.SIGALRM):
            return CallFailed("timeout", f"no answer in {self.cpu_s or self.wall_s:g} s of computing")
        return CallFailed("died", f"its process ended with exit code {code}")

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)       # whatever it started itself goes with it
        except ProcessLookupError:
            pass
        process.wait()
        process.stdout.close()
        try:
            process.stdin.close()
        except BrokenPipeError:
            pass


class Pool:
    """Several workers for one target; a worker is started when there is work for it."""

    def __init__(self, target: str, workers: int, **limits):
        self._workers = [Killable(target, **limits) for _ in range(workers)]

    def map(self, calls: Sequence[dict]) -> list:
        """The value of each call, in order; in place of a value that could not be had, its CallFailed.

        A call is a dict of the function's arguments by name.
        """
        if not calls:
            return []
        idle: SimpleQueue[Killable] = SimpleQueue()
        for worker in self._workers:
            idle.put(worker)

        def call(arguments: dict):
            worker = idle.get()
            try:
                return worker(**arguments)
            except CallFailed as error:
                return error
            finally:
                idle.put(worker)

        with ThreadPoolExecutor(min(len(calls), len(self._workers))) as threads:
            try:
                return list(threads.map(call, calls))
            except BaseException:                        # Ctrl-C: do not wait for the calls that are left
                threads.shutdown(wait=False, cancel_futures=True)
                for worker in self._workers:
                    worker.interrupt()
                raise

    def check(self) -> str:
        """Why the target cannot be loaded, in one line; empty when it can."""
        try:
            self._workers[0].start()
        except CallFailed as error:
            return str(error)
        return ""

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def load_function(target: str):
    """The function that "path/to/file.py:function" names; ValueError with one line where there is none."""
    path, separator, name = target.rpartition(":")
    if not separator or not path.endswith(".py") or not name.isidentifier():
        raise ValueError(f"{target!r} does not name a function; write path/to/file.py:function")
    if not Path(path).is_file():
        raise ValueError(f"{target!r}: there is no file {path}")
    import importlib.util
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{target!r}: {path} has no function {name}")
    return function


def serve(options: dict) -> None:
    """The worker: answers questions from stdin until it ends."""
    sys.path[0] = str(Path(__file__).resolve().parent.parent)      # a target of this house imports as its caller does
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                                         # a print in the function must not be taken for an answer
    sys.stdout = sys.stderr

    def answer(function, arguments) -> None:
        try:
            line = json.dumps({"value": function(**arguments)}, default=float)
        except (Exception, SystemExit) as error:          # e.g. RecursionError, MemoryError: the caller is told
            line = json.dumps({"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]})
        print(line, file=answers, flush=True)

    if options["memory_gib"]:
        import resource
        limit = int(options["memory_gib"] * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    loaded = []
    answer(lambda: loaded.append(load_function(options["target"])), {})
    for question in sys.stdin if loaded else ():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)     # the kernel's own action, which no C loop can hold up
        signal.setitimer(signal.ITIMER_REAL, options["wall_s"] + 1)
        signal.setitimer(signal.ITIMER_PROF, options["cpu_s"])
        answer(loaded[0], json.loads(question))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def demo() -> None:
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "work.py"
        file.write_text("import os\ndef work(n):\n    if n == 3: os._exit(1)\n    return n ** n ** n ** n % 10\n")
        work = Killable(f"{file}:work", wall_s=5.0, cpu_s=0.5)
        for n in (2, 9, 3, 2):
            start = time.monotonic()
            try:
                outcome = f"last digit {work(n=n)}"
            except CallFailed as error:
                outcome = f"{error.reason}: {error}"
            print(f"{n}^{n}^{n}^{n}  {outcome}  ({time.monotonic() - start:.2f} s)")
        work.close()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1])) if len(sys.argv) > 1 else demo()
