"""Checkpoints: a kill at any moment, a full disk or a flipped bit never costs what was saved before."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from files import checkpoint

ROOT = Path(__file__).parent.parent


def state(value: float) -> dict:
    return {"a": torch.full((64, 8), value), "b": torch.arange(5), "half": torch.ones(3, dtype=torch.bfloat16)}


def test_what_is_loaded_is_what_was_saved_bit_for_bit(tmp_path):
    checkpoint.save(tmp_path, 7, state(1.5), {"cursor": 112})
    tensors, numbers = checkpoint.load_latest(tmp_path)
    assert numbers == {"cursor": 112, "step": 7}
    for name, tensor in state(1.5).items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor)


def test_the_last_two_are_kept(tmp_path):
    for step in range(5):
        checkpoint.save(tmp_path, step, state(step), {})
    assert [p.name for p in checkpoint.step_folders(tmp_path)] == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("name", ["state.safetensors", "state.json", "complete.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path, name, harm):
    """Pitfall 36: a half-written checkpoint that looks like the latest one."""
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state(step), {})
    victim = tmp_path / "checkpoints/step-00000002" / name
    data = victim.read_bytes()
    if harm == "remove":
        victim.unlink()
    else:
        victim.write_bytes(data[:-1] if harm == "cut" else data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
    said = []
    tensors, numbers = checkpoint.load_latest(tmp_path, said.append)
    assert numbers["step"] == 1 and tensors["a"][0, 0] == 1
    assert len(said) == 1 and "step-00000002 is damaged" in said[0]


def test_nothing_saved_is_none(tmp_path):
    assert checkpoint.load_latest(tmp_path) is None


def test_two_runs_on_one_folder_are_refused_and_a_dead_one_leaves_no_lock(tmp_path):
    held = checkpoint.lock_run(tmp_path)
    with pytest.raises(ValueError, match="in use"):
        checkpoint.lock_run(tmp_path)
    held.close()
    checkpoint.lock_run(tmp_path).close()


WRITER = """
import sys, torch
from files import checkpoint
from pathlib import Path
for step in range(1, 10_000):
    checkpoint.save(Path(sys.argv[1]), step, {"a": torch.full((256, 64), float(step))}, {"cursor": step})
    print(step, flush=True)
"""


def test_kill_9_at_any_moment_of_saving_leaves_a_usable_checkpoint(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    process.stdout.readline()  # the first one is on disk; from here on every moment is inside some save
    for trial in range(5):
        time.sleep(0.013 * (trial + 1))
        os.kill(process.pid, signal.SIGSTOP)  # frozen: what a kill here would leave behind
        tensors, numbers = checkpoint.load_latest(tmp_path, say=lambda line: pytest.fail(line))
        assert float(tensors["a"][0, 0]) == numbers["cursor"] == numbers["step"] >= 1
        os.kill(process.pid, signal.SIGCONT)
    process.kill()
    process.wait()
    assert checkpoint.load_latest(tmp_path, say=lambda line: pytest.fail(line))
    checkpoint.save(tmp_path, 99_999, state(0), {})  # what the kill left lying about is no obstacle


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path):
    """The disk is full for real: a file-size limit makes every write beyond 64 KiB fail, as ENOSPC does."""
    checkpoint.save(tmp_path, 1, state(1), {})
    code = (
        "import resource, signal, torch; from files import checkpoint; from pathlib import Path\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        f"try: checkpoint.save(Path({str(tmp_path)!r}), 2, {{'a': torch.zeros(100_000)}}, {{}})\n"
        "except OSError as error: print('OSError', error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "OSError" in result.stdout, result.stderr
    assert checkpoint.load_latest(tmp_path)[1]["step"] == 1
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_logs_are_cut_back_to_the_checkpoint(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(json.dumps({"step": s}) + "\n" for s in range(6)) + '{"step": 6, "rew')
    checkpoint.cut_log(log, 3)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [0, 1, 2, 3]
