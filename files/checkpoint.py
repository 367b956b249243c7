"""Saving a run so that nothing is lost: atomic checkpoints, verified on the way back, one writer a folder.

A run folder holds

    config.json                 what was asked for, versions, GPU
    metrics.jsonl               one line a step          samples.jsonl   prompts, completions, rewards
    adapter/                    the last adapter in PEFT format, for other programs
    checkpoints/step-00000020/  state.safetensors   every tensor: adapter, AdamW moments
                                state.json          every number: step, data cursor, counters
                                complete.json       written last: the sha256 of the other two

The rule that makes a kill -9 harmless is old: write into a temporary folder, fsync each file, write the marker with the
checksums last, fsync, rename the folder, fsync its parent.  A rename is atomic in POSIX, so a reader sees the old state or
the new one, never half of one.  `load_latest` trusts nothing: it checks the checksums, and a damaged checkpoint sends it to
the one before, with a line saying so; that is why two are kept.

What is *not* in a checkpoint: generator states.  Every random draw of a run is a pure function of (seed, step, ...): samples
by (seed, step, prompt, sample), noise by (seed, step), data order by (seed, epoch), the adapter's start by (seed).  So the
step and the data cursor are the whole random state, and resuming is exact without saving any generator.  No pickle is
written or read; tensors are safetensors, numbers are JSON.

Appended logs are cut back to the checkpoint's step on resume, so a step never appears twice.

Source: what file systems promise after a crash, Pillai et al., OSDI 2014. Where we differ from trainers that pickle a whole
state: above.
Cost: the adapter and two AdamW moments, 12 bytes a parameter (0.97 GB at rank 32 of a 7B model).
Limits: one host, one writer (an flock on the folder; on network file systems a lock is as good as their flock).
Copy along: nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

KEEP = 2


def fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces `path` by `data`, so that a reader or a crash sees the old bytes or the new ones.  OSError when full."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def lock_run(folder: Path) -> IO:
    """Claims the run folder for this process; the claim dies with the process.  ValueError when another holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(folder / ".lock", "w")
    except OSError as error:
        raise ValueError(f"run folder {folder}: {error.strerror}; give another --out") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"run folder {folder} is in use by another run; give another --out or wait for it") from None
    return handle


def leave_if_empty(folder: Path) -> None:
    """Removes a run folder that holds nothing but its lock: a start that failed leaves no trace."""
    if [path.name for path in folder.iterdir()] == [".lock"]:
        (folder / ".lock").unlink()
        folder.rmdir()


def step_folders(run: Path) -> list[Path]:
    """Checkpoints of a run that carry their final name, oldest first."""
    return sorted(p for p in (run / "checkpoints").glob("step-*") if p.is_dir() and p.name[5:].isdigit())


def save(run: Path, step: int, tensors: dict[str, torch.Tensor], numbers: dict) -> Path:
    """Writes checkpoints/step-<step> atomically and removes all but the last two.

    tensors: flat name -> tensor, any dtype; numbers: what JSON can hold.  Raises OSError when the disk is full; what was
    saved before is then still there, and the half-written folder is gone.
    """
    parent = run / "checkpoints"
    parent.mkdir(parents=True, exist_ok=True)
    final, temporary = parent / f"step-{step:08d}", parent / f".tmp-step-{step:08d}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()},
                  temporary / "state.safetensors")
        write_atomic(temporary / "state.json", json.dumps({**numbers, "step": step}).encode())
        with open(temporary / "state.safetensors", "rb") as file:
            os.fsync(file.fileno())
        marker = {name: sha256(temporary / name) for name in ("state.safetensors", "state.json")}
        write_atomic(temporary / "complete.json", json.dumps(marker).encode())
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise
        raise OSError(f"checkpoint of step {step} in {parent}: {error}") from error  # safetensors wraps ENOSPC in its own
    fsync_folder(parent)
    for old in step_folders(run)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load_latest(run: Path, say=print) -> tuple[dict[str, torch.Tensor], dict] | None:
    """The newest checkpoint whose checksums hold, as (tensors on the CPU, numbers), or None when there is none.

    A damaged one is passed over with one line through `say`.
    """
    for folder in reversed(step_folders(run)):
        try:
            marker = json.loads((folder / "complete.json").read_text())
            wrong = [name for name in ("state.safetensors", "state.json") if marker[name] != sha256(folder / name)]
            if wrong:
                raise ValueError(f"{wrong[0]} does not match its checksum")
            numbers = json.loads((folder / "state.json").read_text())
            if type(numbers["step"]) is not int or numbers["step"] != int(folder.name[5:]):
                raise ValueError(f"state.json is of step {str(numbers['step'])[:80]}")
            return load_file(folder / "state.safetensors"), numbers
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:200]
            say(f"checkpoint {folder.name} is damaged ({reason}); falling back to the one before")
    return None


def flatten(tree, path: str = "", tensors: dict | None = None) -> tuple[dict[str, torch.Tensor], object]:
    """Splits nested dicts and lists into their tensors, by path, and the rest, which JSON can hold.

    >>> tensors, rest = flatten({"lr": 0.1, "state": {0: {"m": torch.ones(2)}}})
    >>> list(tensors), rest
    (['/state/0/m'], {'lr': 0.1, 'state': {'0': {'m': {'tensor': '/state/0/m'}}}})
    """
    tensors = {} if tensors is None else tensors
    if isinstance(tree, torch.Tensor):
        tensors[path] = tree
        return tensors, {"tensor": path}
    if isinstance(tree, dict):
        return tensors, {str(key): flatten(value, f"{path}/{key}", tensors)[1] for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return tensors, [flatten(value, f"{path}/{i}", tensors)[1] for i, value in enumerate(tree)]
    return tensors, tree


def unflatten(tensors: dict[str, torch.Tensor], rest):
    """Inverse of flatten (tuples come back as lists; keys made of digits come back as int)."""
    if isinstance(rest, dict):
        if set(rest) == {"tensor"}:
            return tensors[rest["tensor"]]
        return {int(key) if key.isdigit() else key: unflatten(tensors, value) for key, value in rest.items()}
    return [unflatten(tensors, value) for value in rest] if isinstance(rest, list) else rest


def cut_log(path: Path, last_step: int) -> None:
    """Drops the lines of a jsonl log that belong to later steps than the checkpoint, and a half-written last line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            if json.loads(line)["step"] > last_step:
                break
        except (ValueError, KeyError, TypeError):
            break
        kept.append(line + "\n")
    write_atomic(path, "".join(kept).encode())


class SafeStop(KeyboardInterrupt):
    """A stop at a safe point: the state is that of a whole number of steps and may be saved."""


class Interrupt:
    """Turns the first Ctrl-C (or SIGTERM) into a request that is honoured at the next safe point; the second one kills.

    Where a run has several processes the request also comes from the others (training/watch.py sets `requested`).
    """

    def __init__(self):
        self.requested = self.signalled = False
        self._before = {number: signal.signal(number, self._request) for number in (signal.SIGINT, signal.SIGTERM)}

    def _request(self, number, frame) -> None:
        if self.signalled:
            raise KeyboardInterrupt
        if not self.requested:
            print("\nstopping at the next safe point or the end, saved (once more: stop at once)", file=sys.stderr, flush=True)
        self.requested = self.signalled = True

    def check(self) -> None:
        """At a safe point: raises SafeStop if a stop was asked for."""
        if self.requested:
            raise SafeStop

    def close(self) -> None:
        """Puts the process's own handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def demo() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        run = Path(name)
        for step in (10, 20, 30):
            save(run, step, {"weight": torch.full((4,), float(step))}, {"cursor": step * 16})
        print("kept:", [p.name for p in step_folders(run)])
        with open(run / "checkpoints/step-00000030/state.safetensors", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")  # a flipped bit, as a dying disk would
        tensors, numbers = load_latest(run)
        print("loaded:", tensors["weight"].tolist(), numbers)


if __name__ == "__main__":
    demo()
