"""Nobody waits for the dead: when one process of a run fails or dies, all end within a minute, with its reason.

A collective waits for all ranks, for an hour if need be: a rollout may take long, and longer on one rank than on another.
So a rank that is gone must be noticed by other means than a timeout. torchrun keeps a small key-value store for each run
(without torchrun, rank 0 does), and every rank has a thread that looks into it once a second:

    failed     the first failure of any rank, as a line, an exit code and the rank that prints it
                   seen by all: each ends its own process, whatever its main thread hangs in
    beat/3     a number that rank 3 raises every second, "left" once it is through
                   seen by rank 2: stands still for 45 s (15 s if there is other evidence) -> "failed: rank 3 ..."
    stop       somebody pressed Ctrl-C: seen by all, acted upon at the next safe point (checkpoint.Interrupt)

A ring of neighbours is enough, and costs the same on 2 ranks and on 200: when a whole host is lost, one of its ranks had a
neighbour elsewhere. To end a process by os._exit in the middle of anything is safe, because a kill at any moment is
(files/checkpoint.py), and it is the only way out of an NCCL call whose peer is gone. A process that fails ends the same way:
it writes `failed` and waits for its own thread.

Where we differ: torch's monitored barriers and NCCL's watchdog know that somebody is missing, minutes later and not why;
torchrun ends the processes of a host when one of them ends, but passes no reason on.
Cost: four small messages a second and rank. Limits: a process that hangs but lives keeps its heartbeat.
Copy along: nothing. Any store with set, get, check and compare_set will do.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from datetime import timedelta

PERIOD_S = 1.0  # between two looks
PATIENCE_S, SHORT_PATIENCE_S = 45.0, 15.0  # without a heartbeat; where a connection has broken or a stop was requested


class Watch(threading.Thread):
    """Ends this process with a reason when any rank has failed or died; carries a request to stop to all ranks."""

    def __init__(self, store, rank: int, size: int):
        super().__init__(daemon=True)
        self.store, self.rank, self.next = store, rank, (rank + 1) % size
        self.interrupt = None  # checkpoint.Interrupt, once there is one
        self.period_s, self.patience_s, self.closed = PERIOD_S, PATIENCE_S, threading.Event()
        store.set_timeout(timedelta(seconds=PATIENCE_S))
        store.set(f"beat/{rank}", "0")

    def run(self) -> None:
        beats, last, since = 0, b"", time.monotonic()
        try:
            while not self.closed.wait(self.period_s):
                beats += 1
                self.store.set(f"beat/{self.rank}", str(beats))
                if self.store.check(["failed"]):
                    self._end(**json.loads(self.store.get("failed")))
                self._pass_on_interrupt()
                beat = self.store.get(f"beat/{self.next}")  # of one neighbour: the cost does not grow with the ranks
                if beat not in (last, b"left"):
                    last, since = beat, time.monotonic()
                elif beat != b"left" and time.monotonic() - since > self.patience_s:
                    self.fail(f"rank {self.next} has given no sign of life for {time.monotonic() - since:.0f} s: killed, out "
                              "of host memory, or its host is gone; the last checkpoint is intact", 1,
                              speaker=self.rank if self.next == 0 else 0)
        except RuntimeError as error:  # the store's errors are RuntimeErrors
            if not self.closed.is_set():
                self._end(f"rank {self.rank}: the store of the run cannot be reached ({str(error).splitlines()[0]}); the "
                          "host of rank 0 is gone", 1, self.rank)

    def _pass_on_interrupt(self) -> None:
        if self.interrupt is not None:
            if self.interrupt.requested:
                self.store.set("stop", "1")
                self.patience_s = SHORT_PATIENCE_S  # torchrun interrupts all when one dies, and kills them after 30 s
            self.interrupt.requested |= self.store.check(["stop"])

    def fail(self, message: str, code: int, speaker: int = 0) -> None:
        """Tells all ranks, this one included, to end with this exit code; the first to fail is heard."""
        self.store.compare_set("failed", "", json.dumps(dict(message=message, code=code, speaker=speaker)))

    def _end(self, message: str, code: int, speaker: int) -> None:
        if self.interrupt is not None:
            self.interrupt.requested = True  # what torchrun sends now has no need to be announced
        if self.rank == speaker and message:
            print(message, file=sys.__stderr__, flush=True)
        # Rank 0 speaks before torchrun ends everybody, and, where it holds the store, stays until all have read it.
        time.sleep(self.period_s * (2 if self.rank else 4))
        sys.__stdout__.flush()
        os._exit(code)

    def leave(self) -> None:
        """From here on this rank may be silent."""
        if not self.closed.is_set():
            self.closed.set()
            self.join()
            self.store.set(f"beat/{self.rank}", "left")


def demo() -> None:
    """Three threads stand for three ranks; the second falls silent, and the first, its neighbour, says so."""
    from torch.distributed import HashStore

    class Shown(Watch):
        def _end(self, message: str, code: int, speaker: int) -> None:
            if self.rank == speaker:
                print(f"rank {self.rank} says: {message}\nall ranks exit with code {code}")
            self.closed.set()

    store = HashStore()
    watches = [Shown(store, rank, 3) for rank in range(3)]
    for watch in watches:
        watch.period_s, watch.patience_s = 0.05, 0.5
        watch.start()
    time.sleep(0.3)
    watches[1].closed.set()  # as a kill would
    for watch in watches:
        watch.join()


if __name__ == "__main__":
    demo()
