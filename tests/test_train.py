"""The loop as a user runs it: it learns, stops, resumes exactly, and refuses what cannot work in one line."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from files import checkpoint
from training import groups

ROOT = Path(__file__).parent.parent
REWARD = "def low_letters(prompt, completion, answer):\n    return sum(c < 'n' for c in completion) / (len(completion) + 1)\n"


@pytest.fixture
def job(tmp_path, tiny_hf_folder):
    return make_job(tmp_path, tiny_hf_folder("qwen2-tied"))


def make_job(tmp_path: Path, model: Path):
    """A run of seconds: two layers, ten problems, a reward that differs within every group."""
    (tmp_path / "mine.py").write_text(REWARD)
    lines = [json.dumps({"prompt": f"{i} + {i} =", "answer": 2 * i}) for i in range(10)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    flags = dict(model=model, data=tmp_path / "data.jsonl", reward=f"{tmp_path / 'mine.py'}:low_letters",
                 eval_data="none", instruction="", steps=6, prompts=4, group=4, max_new_tokens=8, lr=1e-2, stages=3,
                 warmup=0, rank=4, checkpoint_every=2, sample_every=0, device="cpu", mask_truncated=False)

    def run(out: str = "run", *extra: str, **changes) -> int:
        wanted = {**flags, **changes, "out": tmp_path / out}
        return train.main(argv(wanted) + list(extra))

    run.flags, run.folder = flags, tmp_path
    return run


def argv(flags: dict) -> list[str]:
    words = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return words


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def adapter_hash(folder: Path) -> str:
    return hashlib.sha256((folder / "adapter/adapter_model.safetensors").read_bytes()).hexdigest()


def samples(folder: Path) -> list:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


TIMINGS = ("step_time", "/seconds", "tok_per_s", "peak_gib")


def without_timings(row: dict) -> dict:
    return {k: v for k, v in row.items() if not any(t in k for t in TIMINGS)}


def test_a_run_learns_and_leaves_everything_behind(job):
    assert job(steps=20, noise="none", lr=5e-2, prompts=8, group=8) == 0
    out = job.folder / "run"
    metrics = [row for row in rows(out) if "reward" in row]
    assert [row["step"] for row in metrics] == list(range(1, 21))
    first, last = (sum(row["reward"] for row in part) / 3 for part in (metrics[:3], metrics[-3:]))
    assert last > first + 0.1, (first, last)
    assert metrics[0]["ratio/mean"] == 1.0  # pitfall 1: noise off, step one
    for row in metrics:  # sampler and trainer are one policy
        assert row["sampling/sampling_logp_difference/mean"] < 5e-3 and row["sampling/sampling_logp_difference/max"] < 0.3
    record = json.loads((out / "config.json").read_text())
    assert record["config"]["lr"] == 5e-2 and record["versions"]["torch"] == torch.__version__
    assert all(len(s["completions"]) == len(s["rewards"]) == 8 for s in samples(out)) and len(samples(out)) == 160
    assert (out / "curves.png").stat().st_size > 10_000


def test_the_same_seed_gives_the_same_run_and_another_seed_another(job):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert job(name, seed=seed, steps=4) == 0
    a, b, c = (job.folder / name for name in "abc")
    assert adapter_hash(a) == adapter_hash(b) != adapter_hash(c)
    assert samples(a) == samples(b)
    assert list(map(without_timings, rows(a))) == list(map(without_timings, rows(b)))


def test_six_steps_are_three_and_a_resume_and_three_bit_for_bit(job, monkeypatch):
    """Pitfall 35: weights, optimiser, random streams, data cursor and noise stage all continue."""
    assert job("whole") == 0
    take, taken = groups.DataOrder.take, []

    def interrupted(self, count):
        taken.append(count)
        if len(taken) == 4:
            os.kill(os.getpid(), signal.SIGINT)  # honoured inside the rollout of step 4
        return take(self, count)

    monkeypatch.setattr(groups.DataOrder, "take", interrupted)
    assert job("cut") == 130
    assert checkpoint.load_latest(job.folder / "cut")[1]["step"] == 3
    monkeypatch.undo()
    assert train.main(["--resume", "--out", str(job.folder / "cut")]) == 0
    whole, cut = job.folder / "whole", job.folder / "cut"
    assert adapter_hash(whole) == adapter_hash(cut) and samples(whole) == samples(cut)
    assert list(map(without_timings, rows(whole))) == list(map(without_timings, rows(cut)))
    a, b = (checkpoint.load_latest(folder)[0] for folder in (whole, cut))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_kill_9_at_random_moments_then_resume_gives_the_uninterrupted_run(job):
    assert job("whole", steps=8) == 0
    command = [sys.executable, "train.py", *argv({**job.flags, "steps": 8, "out": job.folder / "killed"})]
    for seen, patience in (("step 3/", 0.1), ("step", 0.3)):  # the first checkpoint is that of step 2
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        while process.poll() is None and not process.stdout.readline().startswith(seen):
            pass
        time.sleep(patience)
        process.kill()
        process.wait()
        command = [sys.executable, "train.py", "--resume", "--out", str(job.folder / "killed")]
    if checkpoint.load_latest(job.folder / "killed") is None:  # killed before the first checkpoint: nothing to resume yet
        pytest.fail("no checkpoint after two starts")
    assert train.main(command[2:]) == 0
    assert adapter_hash(job.folder / "whole") == adapter_hash(job.folder / "killed")
    assert samples(job.folder / "whole") == samples(job.folder / "killed")


@pytest.mark.parametrize("flags", [
    {"algo": "dapo"}, {"algo": "dr_grpo"}, {"beta": 0.1}, {"updates": 2}, {"tis": False}, {"temperature": 0.7},
    {"weights": "bf16"}, {"weights": "bf16", "full": True, "lr": 1e-3}, {"noise": "cosine"}, {"targets": "q,v"},
    {"slots": 3}, {"token_budget": 20}, {"stop": "a"}, {"recompute": True}, {"lr_schedule": "cosine"}, {"mask_truncated": True},
], ids=str)
def test_every_way_to_train_runs(job, flags):
    assert job(steps=3, **flags) == 0
    assert all(row["sampling/sampling_logp_difference/max"] < 0.3 for row in rows(job.folder / "run")
               if row.get("noise/sigma") == 0 and row.get("sampling/sampling_logp_difference/max") is not None)


def test_nf4_trains_where_bitsandbytes_is_installed(job):
    pytest.importorskip("bitsandbytes")
    assert job(steps=2, weights="nf4", stages=3, noise="none") == 0


def test_noise_is_logged_as_applied_and_is_gone_in_stage_0(job):
    """Two norms in each of two layers; stage 0 of three is silent."""
    assert job(steps=6, sigma_start=5e-2, sigma_end=1e-2) == 0
    names = ("noise/norms", "noise/sigma", "noise/applied_rms")
    got = [tuple(row[name] for name in names) for row in rows(job.folder / "run") if "reward" in row]
    assert [norms for norms, _, _ in got] == [0, 0, 4, 4, 4, 4]
    for norms, sigma, rms in got:
        assert rms == sigma == 0 if norms == 0 else abs(rms / sigma - 1) < 0.3


def test_the_adapter_of_a_run_starts_another_and_is_its_reference(job):
    """Pitfall 21: KL is 0 at the first step, because the reference is the adapter and not the base."""
    assert job("first", steps=3) == 0
    assert job("second", steps=2, adapter=job.folder / "first/adapter", beta=0.1, noise="none") == 0
    assert abs(rows(job.folder / "second")[-2]["kl"]) < 1e-6
    (job.folder / "first/adapter/adapter_model.safetensors").write_bytes(b"changed")
    assert train.main(["--resume", "--out", str(job.folder / "second")]) == 2


def test_the_kl_is_measured_when_asked_and_the_run_stays_the_same(job):
    """At the first step, where it is 0, at every third and at the last; the adapter is that of a run without it, bit for bit."""
    assert job("plain", steps=7) == 0 and job("measured", steps=7, log_kl_every=3) == 0
    plain, measured = ([row for row in rows(job.folder / name) if "reward" in row] for name in ("plain", "measured"))
    assert [row["step"] for row in measured if "kl" in row] == [1, 3, 6, 7]
    assert measured[0]["kl"] == 0 and measured[-1]["kl"] > 0
    assert adapter_hash(job.folder / "plain") == adapter_hash(job.folder / "measured")
    for row, other in zip(plain, measured):
        assert without_timings(row) == {name: value for name, value in without_timings(other).items() if name != "kl"}


def test_full_training_leaves_a_model_that_transformers_loads(job):
    from transformers import AutoModelForCausalLM

    assert job(steps=2, weights="bf16", full=True, lr=1e-3, noise="none") == 0
    model = AutoModelForCausalLM.from_pretrained(job.folder / "run/model")
    before = AutoModelForCausalLM.from_pretrained(job.flags["model"])
    assert not torch.equal(model.lm_head.weight, before.lm_head.weight)


def test_the_frozen_base_is_bit_identical_after_training(job, tiny_hf_folder):
    """Pitfall 16."""
    from convert.loader import load_model
    from lora import lora_layers

    before, *_ = load_model(str(tiny_hf_folder("qwen2-tied")))
    cfg, _ = train.config.prepare(train.config.parse(argv({**job.flags, "steps": 3, "out": job.folder / "run"})))
    with checkpoint.lock_run(job.folder / "run"):
        trainer = train.Trainer(cfg, None)
        trainer.run()
        trainer.close()

    def frozen(model):
        return [t for layer in lora_layers(model) for t in layer.weight.stored()] + [model.embed, model.final_norm]

    pairs = list(zip(frozen(before), frozen(trainer.model), strict=True))
    assert any(t.dtype == torch.uint8 for t, _ in pairs)  # the 4-bit codes are among them
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    adapter = load_file(job.folder / "run/adapter/adapter_model.safetensors")
    assert all(t.abs().sum() > 0 for name, t in adapter.items() if "lora_B" in name)  # pitfall 23


def test_dynamic_sampling_is_bounded_and_trains_on_what_exists(job):
    """Pitfall 28: when no group ever has a signal, the step ends after its rounds and changes nothing."""
    (job.folder / "flat.py").write_text("def flat(prompt, completion, answer): return 0.5\n")
    assert job("flat", steps=3, algo="dapo", resample=2, reward=f"{job.folder / 'flat.py'}:flat", noise="none") == 0
    metrics = [row for row in rows(job.folder / "flat") if "reward" in row]
    assert len(metrics) == 3 and all(row["rollout/rounds"] <= 3 for row in metrics)


def test_a_reward_that_raises_or_returns_nan_earns_zero_and_the_run_goes_on(job, capsys):
    code = "def bad(prompt, completion, answer):\n    return [1, float('nan')][len(completion) % 3] * 0\n"  # or an IndexError
    (job.folder / "bad.py").write_text(code)
    assert job(steps=3, reward=f"{job.folder / 'bad.py'}:bad") == 0
    assert rows(job.folder / "run")[-1]["reward"] == 0 and 0 < rows(job.folder / "run")[-1]["rewards/failed_total"] < 48


def test_a_step_in_which_every_call_of_the_reward_fails_ends_the_run_and_keeps_what_was_saved(job, capsys):
    """128 of 128 calls raised a NameError, step after step, and the run ended with "done" and an untrained adapter."""
    marker = job.folder / "broken"
    code = f"import os\ndef bad(prompt, completion, answer):\n    assert not os.path.exists({str(marker)!r})\n"
    code += "    return len(completion)\n"
    (job.folder / "bad.py").write_text(code)
    flags = dict(steps=6, reward=f"{job.folder / 'bad.py'}:bad")
    marker.touch()
    assert job("at-once", **flags) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "gave none of the step's 16 completions a reward" in said[0] and "after step 0" in said[0]
    assert not (job.folder / "at-once/adapter").exists()
    marker.unlink()
    collect = train.Trainer.collect

    def breaks(self):
        if self.step == 3:
            marker.touch()
        return collect(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Trainer, "collect", breaks)
        assert job("later", **flags) == 2
    assert "after step 3" in capsys.readouterr().err and checkpoint.load_latest(job.folder / "later")[1]["step"] == 2
    marker.unlink()  # a fault outside the function, such as a service that was down
    assert train.main(["--resume", "--out", str(job.folder / "later")]) == 0 and job("whole", **flags) == 0
    assert adapter_hash(job.folder / "later") == adapter_hash(job.folder / "whole")


def refused(job, capsys, told: str, *extra: str, **changes) -> None:
    assert job("refused", *extra, **changes) == 2
    message = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in message if line.startswith("error:")]
    assert len(errors) == 1 and told in errors[0], message


def test_bad_input_is_one_line_and_exit_code_2(job, capsys, tmp_path):
    refused(job, capsys, "does not exist", model=tmp_path / "nowhere")
    refused(job, capsys, "nope.jsonl", data=tmp_path / "nope.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    refused(job, capsys, "empty", data=tmp_path / "empty.jsonl")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a", "answer": 1}\n{"prompt": ')
    refused(job, capsys, "line 2", data=tmp_path / "broken.jsonl")
    refused(job, capsys, "at most 3 tokens", max_prompt_tokens=3)
    refused(job, capsys, "updates=3", updates=3)
    refused(job, capsys, "mine.py", reward=f"{tmp_path / 'mine.py'}:missing")
    refused(job, capsys, "adapter", adapter=tmp_path / "no-adapter")
    assert train.main(["--resume"]) == 2 and "--out" in capsys.readouterr().err
    assert train.main(["--resume", "--out", str(tmp_path / "void")]) == 2 and "no run" in capsys.readouterr().err


def test_a_run_folder_is_not_overwritten_shared_or_resumed_with_other_settings_or_data(job, capsys):
    assert job(steps=3) == 0
    capsys.readouterr()
    assert job(steps=3) == 2 and "already holds a run" in capsys.readouterr().err
    run = ["--resume", "--out", str(job.folder / "run")]
    assert train.main([*run, "--lr", "0.5"]) == 2 and "lr=0.5" in capsys.readouterr().err
    held = checkpoint.lock_run(job.folder / "run")
    assert train.main(run) == 2 and "in use" in capsys.readouterr().err
    held.close()
    reward = (job.folder / "mine.py").read_text()
    (job.folder / "mine.py").write_text("# another\n" + reward)
    assert train.main(run) == 2 and "the reward that" in capsys.readouterr().err
    (job.folder / "mine.py").write_text(reward)
    with open(job.folder / "data.jsonl", "a") as file:
        file.write('\n{"prompt": "new", "answer": 0}')
    assert train.main(run) == 2 and "the data that" in capsys.readouterr().err


def test_an_evaluation_set_that_has_changed_is_refused_too(job, capsys):
    """Its curve would go on with other problems."""
    (job.folder / "held-out.jsonl").write_text('{"prompt": "1 + 1 =", "answer": 2}\n')
    assert job(steps=3, eval_data=job.folder / "held-out.jsonl", eval_every=2, eval_max_new_tokens=2) == 0
    (job.folder / "held-out.jsonl").write_text('{"prompt": "1 + 2 =", "answer": 3}\n')
    assert train.main(["--resume", "--out", str(job.folder / "run")]) == 2
    assert "the eval_data that" in capsys.readouterr().err


def test_a_full_disk_ends_the_run_with_one_line_and_keeps_the_last_checkpoint(job, monkeypatch, capsys):
    save = checkpoint.save_file

    def full(tensors, path, *rest):
        if checkpoint.step_folders(job.folder / "run"):  # the second checkpoint meets the full disk
            raise OSError(28, "No space left on device")
        return save(tensors, path, *rest)

    monkeypatch.setattr(checkpoint, "save_file", full)
    assert job() == 2
    message = capsys.readouterr().err
    assert "No space left" in message and "--resume" in message
    monkeypatch.undo()
    assert checkpoint.load_latest(job.folder / "run")[1]["step"] == 2
    assert train.main(["--resume", "--out", str(job.folder / "run")]) == 0
