"""What goes wrong while a run is under way, each for real where that can be had: memory, disk, signals, numbers."""

import gc
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from test_rollout import PROMPTS, assert_same_samples, flat
from test_train import ROOT, adapter_hash, argv, make_job, rows, samples, without_timings

import grpo
import lora
import rollout as rollout_module
import train
from files import checkpoint, peft_files
from rollout import Rollout, Sampling
from training import learner, report

# ------------------------------------------------------------------------------------------------ out of memory


def short_of_memory(monkeypatch, limit: int, where: str) -> None:
    """From here on a decode step of more than `limit` rows, or a cache of more slots, raises what CUDA would."""
    real = getattr(rollout_module, where)

    def check(count: int) -> None:
        if count > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def cache(config, slots, *rest):
        check(slots)
        return real(config, slots, *rest)

    def decoder(*arguments, **options):
        made = real(*arguments, **options)
        step = made.step
        made.step = lambda batch: (check(batch), step(batch))
        return made

    monkeypatch.setattr(rollout_module, where, {"KVCache": cache, "Decoder": decoder}[where])


@pytest.mark.parametrize("where", ["Decoder", "KVCache"])
def test_out_of_memory_in_the_rollout_halves_the_slots_says_so_and_samples_the_same(tiny_model, monkeypatch, capsys, where):
    model, sampling = tiny_model(), Sampling(12)
    whole = Rollout(model, max_len=64, slots=16).generate(PROMPTS, 4, sampling, key=(5, 2))
    short = Rollout(model, max_len=64, slots=16)
    short_of_memory(monkeypatch, 5, where)
    found = short.generate(PROMPTS, 4, sampling, key=(5, 2))
    assert_same_samples(flat(whole), flat(found))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"out of memory in the rollout: trying again with {n} sequences at once" for n in (8, 4)]
    assert short.stats["slots"] == 4
    short.generate(PROMPTS, 4, sampling, key=(5, 3))
    assert capsys.readouterr().out == ""  # the lower number stays


def test_a_rollout_that_does_not_fit_at_all_is_one_line_with_a_remedy(tiny_model, monkeypatch):
    rollout = Rollout(tiny_model(), max_len=64, slots=2)
    short_of_memory(monkeypatch, 0, "Decoder")
    with pytest.raises(RuntimeError, match="out of memory with one sequence of max_len=64.*--max-new-tokens") as error:
        rollout.generate(PROMPTS, 2, Sampling(4))
    assert "\n" not in str(error.value)


def test_the_cache_is_really_gone_after_free(tiny_model):
    """On a GPU its memory is the trainer's then: nothing may still hold it."""
    rollout = Rollout(tiny_model(), max_len=64)
    rollout.generate(PROMPTS, 2, Sampling(4))
    cache = weakref.ref(rollout.decoder.cache)
    rollout.free()
    gc.collect()
    assert cache() is None


# ------------------------------------------------------------------------------------------------ Ctrl-C and kill


def same_run(one: Path, other: Path) -> None:
    """Weights, optimiser, samples and every number but the timings, bit for bit."""
    assert adapter_hash(one) == adapter_hash(other) and samples(one) == samples(other)
    assert list(map(without_timings, rows(one))) == list(map(without_timings, rows(other)))
    a, b = (checkpoint.load_latest(folder) for folder in (one, other))
    assert a[1] == b[1] and a[0].keys() == b[0].keys() and all(torch.equal(a[0][name], b[0][name]) for name in a[0])


def resume(folder: Path) -> int:
    return train.main(["--resume", "--out", str(folder)])


def evaluated_job(folder: Path, model: Path):
    """Four steps with a checkpoint and an evaluation after every second one."""
    job = make_job(folder, model)
    job.flags.update(steps=4, eval_data=job.flags["data"], eval_every=2, eval_limit=3, eval_max_new_tokens=6)
    return job


@pytest.fixture(autouse=True)
def no_pictures():
    """Half a second each; full_disk.py has them, in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:  # not monkeypatch: tests undo that half-way
        patch.setattr(report, "draw_curves", lambda *_: None)
        yield


@pytest.fixture
def job(tmp_path, tiny_hf_folder):
    return evaluated_job(tmp_path, tiny_hf_folder("qwen2-tied"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_hf_folder) -> Path:
    """The run that nothing happens to; to be copied, not to be changed."""
    job = evaluated_job(tmp_path_factory.mktemp("whole"), tiny_hf_folder("qwen2-tied"))
    assert job("run") == 0
    return job.folder / "run"


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "copy")


def signal_at(monkeypatch, owner, name: str, call: int, signals: int = 1, before: bool = True) -> None:
    """Ctrl-C comes in the call-th call of owner.name, so many times: at its beginning, or when it has done its work."""
    real, calls = getattr(owner, name), itertools.count(1)

    def interrupted(*arguments, **options):
        is_now = next(calls) == call
        value = None if is_now and before else real(*arguments, **options)
        for _ in range(signals if is_now else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments, **options) if is_now and before else value

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("owner, name, call, saved", [
    (Rollout, "_end", 9, None),  # in a rollout: that step did not happen
    (learner.Learner, "_accumulate", 3, 3),  # in an update: honoured when the step is complete
    (checkpoint, "save_file", 1, 2),  # while a checkpoint is written
    (checkpoint, "sha256", 3, 4),  # before its marker is
    (peft_files, "write_adapter", 1, 2),  # after a checkpoint, in the adapter's files
    (report.Report, "samples", 3, 3), (report.Report, "step", 4, 3),  # in the logs
    (train, "evaluate", 1, 0), (train, "evaluate", 2, 2), (train, "evaluate", 3, 4),  # in the evaluations of steps 0, 2, 4
], ids=str)  # fmt: skip
def test_ctrl_c_stops_saves_and_the_resumed_run_is_the_uninterrupted_one(job, whole, monkeypatch, capsys, owner, name, call,
                                                                         saved):  # fmt: skip
    owner = lora if owner is peft_files else owner  # where it is called from
    signal_at(monkeypatch, owner, name, call)
    assert job("cut") == 130
    monkeypatch.undo()
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 2 and said[0].startswith("stopping at the next safe point") and "--resume --out" in said[1]
    found = checkpoint.load_latest(job.folder / "cut", say=pytest.fail)
    assert saved is None or found[1]["step"] == saved
    assert resume(job.folder / "cut") == 0
    same_run(whole, job.folder / "cut")


def test_ctrl_c_does_not_wait_for_a_long_completion_to_end(tiny_model):
    """Thousands of tokens may pass before the first sample of a rollout is over."""
    rollout, interrupt = Rollout(tiny_model(), max_len=400), checkpoint.Interrupt()

    def progress(done: int, total: int, tokens: int) -> None:
        assert done == 0
        interrupt.requested = tokens >= 20
        interrupt.check()

    with pytest.raises(checkpoint.SafeStop):
        rollout.generate([[1, 2, 3]], 2, Sampling(300), progress=progress)
    interrupt.close()
    assert 10 <= rollout.stats["decode_steps"] <= 14


@pytest.mark.parametrize("owner, name", [
    (learner.Learner, "_step"), (learner.Learner, "_publish"), (checkpoint, "save_file")], ids=str)  # fmt: skip
def test_a_second_ctrl_c_stops_at_once_and_saves_nothing_that_is_half_done(job, whole, monkeypatch, capsys, owner, name):
    """In the middle of an optimiser step the weights belong to no step: saving them would spoil the run for good."""
    signal_at(monkeypatch, owner, name, 3 if owner is learner.Learner else 2, signals=2, before=False)
    assert job("cut") == 130
    monkeypatch.undo()
    assert "stopped at once, not saved; the last checkpoint is intact" in capsys.readouterr().err
    assert checkpoint.load_latest(job.folder / "cut", say=pytest.fail)[1]["step"] == 2
    assert resume(job.folder / "cut") == 0
    same_run(whole, job.folder / "cut")


def test_a_run_killed_before_its_first_checkpoint_begins_again(job, whole, monkeypatch, capsys):
    def killed(*_, **__):
        raise SystemExit  # the process is gone: nothing is written any more

    monkeypatch.setattr(train.Trainer, "save", killed)
    with pytest.raises(SystemExit):
        job("killed")
    assert len(rows(job.folder / "killed")) == 3 and not (job.folder / "killed/checkpoints").exists()
    monkeypatch.undo()
    assert resume(job.folder / "killed") == 0
    same_run(whole, job.folder / "killed")


def test_two_processes_cannot_run_in_one_folder(job, capsys):
    command = [sys.executable, "train.py", *argv({**job.flags, "steps": 5000, "out": job.folder / "run"})]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    # Loading says things too; after these lines the folder is written.
    next(line for line in process.stdout if "eval/" in line or line.startswith("step "))
    try:
        assert resume(job.folder / "run") == 2
        assert "in use by another run" in capsys.readouterr().err
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert train.main(["--resume", "--out", str(job.folder / "run"), "--lr", "1"]) == 2  # the dead leave no lock
    assert "lr=1.0 differs" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ damaged checkpoints


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a flipped bit": lambda folder: flip(folder / "state.safetensors"),
    "half a file": lambda folder: os.truncate(folder / "state.safetensors", 1000),
    "no marker": lambda folder: (folder / "complete.json").unlink(),
    "zeros, as after a power cut": lambda folder: (folder / "state.json").write_bytes(bytes(500)),
    "an empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
    "another step's": lambda folder: (folder.rename(folder.with_name("step-00000099"))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_latest_checkpoint_costs_a_few_steps_and_one_line(whole, copy, capsys, damage):
    DAMAGES[damage](checkpoint.step_folders(copy)[-1])
    assert resume(copy) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("checkpoint", "resuming"))]
    assert len(said) == 2 and "falling back to the one before" in said[0] and said[1].endswith("after step 2")
    same_run(whole, copy)


def test_when_every_checkpoint_is_damaged_the_run_says_so_and_nothing_is_lost(copy, capsys):
    for folder in checkpoint.step_folders(copy):
        flip(folder / "state.json")
    before = (copy / "metrics.jsonl").read_bytes()
    assert resume(copy) == 2
    assert "holds no usable checkpoint" in capsys.readouterr().err
    assert (copy / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("change", [
    lambda state: state.update(learner=7), lambda state: state.pop("cursor"), lambda state: state.update(cursor="x"),
    lambda state: state["learner"].pop("counters"), lambda state: state["learner"]["counters"].pop("skipped"),
    lambda state: state["learner"].update(optimiser={"state": [], "param_groups": 3}),
    lambda state: state["learner"].update(parameters={"x": {"tensor": "/nowhere"}}), lambda state: state.update(step=[5]),
    lambda state: state["learner"]["optimiser"].update(state={"0": {"step": {"tensor": ["a"]}}}),
    lambda state: state["learner"]["counters"].update(token_budget="many"),
], ids=range(10))  # fmt: skip
def test_a_checkpoint_of_something_else_with_true_checksums_is_one_line(copy, capsys, change):
    for folder in checkpoint.step_folders(copy):
        state = json.loads((folder / "state.json").read_text())
        change(state)
        (folder / "state.json").write_text(json.dumps(state))
        marker = {name: checkpoint.sha256(folder / name) for name in ("state.safetensors", "state.json")}
        (folder / "complete.json").write_text(json.dumps(marker))
    capsys.readouterr()
    assert resume(copy) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


# ------------------------------------------------------------------------------------------------ a full disk


def in_a_small_disk(folder: Path, *arguments: str) -> list[dict]:
    """tests/full_disk.py on a tmpfs of 24 MB, in a mount namespace of its own; needs no root, but a kernel that lets users."""
    folder.mkdir()
    mount = f"mount -t tmpfs -o size=24m tmpfs {folder}"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no small disk can be mounted here; test_checkpoint.py has a limit on file sizes instead")
    command = " ".join(map(shlex.quote, [sys.executable, str(ROOT / "tests/full_disk.py"), str(folder), *arguments]))
    command = f"{mount} && exec {command}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_disk_that_is_full_for_real_costs_one_line_and_nothing_that_was_saved(tmp_path, tiny_hf_folder):
    """Some of the moments; bench/faults.py has them all."""
    moments = ("metrics", "checkpoint, tensors", "curves", "nvfp4.py quantize")
    found = in_a_small_disk(tmp_path / "disk", str(tiny_hf_folder("qwen2-tied")), *moments)
    assert [row["full"] for row in found] == list(moments)
    for row in found:
        assert row["code"] == 2 and len(row["said"]) == 1 and "No space left" in row["said"][0], row
        assert row["left_behind"] == [] and row.get("resumed", 0) == 0 and row.get("same", True), row
    saved = [row.get("saved") for row in found]  # a slow machine draws its curves before the end, so meets the full disk there
    assert saved[:2] == [None, 2] and saved[2] in (2, 4, 6) and saved[3] is None


# ------------------------------------------------------------------------------------------------ numbers and rewards


def test_a_non_finite_loss_skips_its_step_is_counted_and_several_in_a_row_end_the_run(job, monkeypatch, capsys):
    real, calls = grpo.policy_loss, itertools.count(1)

    def poisoned(bad):
        def policy_loss(*arguments, **options):
            loss, part = real(*arguments, **options)
            return (loss * float("nan") if next(calls) in bad else loss), part
        return policy_loss

    monkeypatch.setattr(grpo, "policy_loss", poisoned({2, 4, 5}))
    assert job("some", steps=6, eval_every=0, max_bad_steps=3) == 0
    assert [row["train/skipped_total"] for row in rows(job.folder / "some") if "reward" in row] == [0, 1, 1, 2, 3, 3]
    assert [row["train/updates"] for row in rows(job.folder / "some") if "reward" in row] == [1, 0, 1, 0, 0, 1]
    monkeypatch.setattr(grpo, "policy_loss", poisoned(range(1000)))
    capsys.readouterr()
    assert job("all", eval_every=0, max_bad_steps=3) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "3 updates in a row had a non-finite loss" in said[0]
    assert checkpoint.load_latest(job.folder / "all")[1]["step"] == 2


def test_a_policy_that_blows_up_is_one_line_not_a_traceback(job, capsys):
    assert job(lr=1e30, max_grad_norm=1e30) in (1, 2)
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "after step" in said[0] and ("NaN" in said[0] or "non-finite" in said[0])


def test_a_reward_that_hangs_raises_or_dies_costs_its_completion_and_a_line_a_step(job, capsys):
    code = """
import os, time
def moody(prompt, completion, answer):
    kind = sum(map(ord, completion)) % 5
    if kind == 0: time.sleep(100)
    if kind == 1: raise KeyError("two\\nlines")
    if kind == 2: os._exit(1)
    if kind == 3: return float("nan")
    return 1.0
"""
    (job.folder / "moody.py").write_text(code)
    assert job(steps=3, reward=f"{job.folder / 'moody.py'}:moody", reward_timeout=0.2) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "completions got 0" in line]
    assert len(said) == 3 and all(kind in "".join(said) for kind in ("timeout", "raised", "died", "not a finite number"))
    failed = sum(int(line.split(": ")[1].split(" of ")[0]) for line in said)
    assert rows(job.folder / "run")[-1]["rewards/failed_total"] == failed
    values = [(text, value) for row in samples(job.folder / "run") for text, value in zip(row["completions"], row["rewards"])]
    assert all(value == (sum(map(ord, text)) % 5 == 4) for text, value in values) and 0 < failed < len(values) == 48


def test_a_run_short_of_memory_in_its_rollouts_is_the_same_run(job, whole, monkeypatch, capsys):
    short_of_memory(monkeypatch, 4, "KVCache")
    assert job("short") == 0
    assert "trying again with 4 sequences at once" in capsys.readouterr().out
    assert samples(whole) == samples(job.folder / "short")
