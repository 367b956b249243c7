"""Settings: one source, and nothing impossible gets past it."""

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import aqn
import grpo
from layers.weights import KINDS
from training import config

ROOT = Path(__file__).parent.parent


def test_every_field_has_a_comment_that_is_its_help():
    notes = config.comments()
    assert list(notes) == [field.name for field in dataclasses.fields(config.Config)]
    assert all(len(note) > 8 for note in notes.values())


def test_every_setting_is_read_somewhere():
    """A flag that no code reads is a promise that nobody keeps."""
    folders = [ROOT, *(path.parent for path in ROOT.glob("*/__init__.py"))]
    sources = "".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    unread = [f.name for f in dataclasses.fields(config.Config) if not re.search(rf"\.{f.name}\b", sources)]
    assert not unread


def test_the_choices_are_those_of_the_modules_behind_them():
    """The settings do not import the maths, so that a mistyped flag is answered without loading torch."""
    assert config.CHOICES["algo"] == grpo.ALGORITHMS
    assert config.CHOICES["noise"] == aqn.SCHEDULES
    assert config.CHOICES["weights"] == KINDS


def test_defaults_follow_the_paper():
    """QeRL, table 4: 128 completions a step, lr 1e-5 for 4-bit and 5e-6 for 16-bit LoRA, clip 0.2/0.28, no KL, sigma."""
    cfg = config.resolve({"model": "Qwen2.5-7B"})
    assert (cfg.data, cfg.prompts * cfg.group, cfg.group, cfg.updates) == ("gsm8k", 128, 8, 4)
    assert (cfg.lr, cfg.clip_low, cfg.clip_high, cfg.beta, cfg.temperature) == (1e-5, 0.2, 0.28, 0.0, 1.0)
    assert (cfg.sigma_start, cfg.sigma_end, cfg.stages, cfg.rank) == (1e-2, 5e-4, 10, 32)
    assert config.resolve({"model": "Qwen2.5-7B", "weights": "bf16"}).lr == 5e-6
    dapo = config.resolve({"model": "Qwen2.5-32B", "data": "bigmath", "algo": "dapo"})
    assert (dapo.group, dapo.prompts, dapo.levels, dapo.updates) == (16, 8, "4-5", 1)
    assert not dapo.mask_truncated and dapo.overlong_buffer == 2048


def test_a_flag_beats_the_preset_and_the_preset_beats_the_default():
    tiny = config.resolve({})
    assert tiny.data == "arithmetic" and tiny.lr == config.TINY_PRESET["lr"]
    assert config.resolve({"lr": 1e-4}).lr == 1e-4
    assert config.resolve({"model": "Qwen2.5-7B"}).lr == 1e-5
    own = config.resolve({"data": "mine.jsonl"})  # the tiny model keeps its recipe on one's own data
    assert (own.instruction, own.max_new_tokens, own.lr) == ("", 48, config.TINY_PRESET["lr"])
    assert config.resolve({"full": True, "weights": "bf16"}).lr == 1e-6
    assert config.resolve({"steps": 3}).stages == 3


@pytest.mark.parametrize("given, told", [
    ({"full": True}, "--weights bf16"),
    ({"full": True, "weights": "bf16", "adapter": "x"}, "--adapter"),
    ({"full": True, "weights": "bf16", "beta": 0.1}, "--beta"),
    ({"full": True, "weights": "bf16", "log_kl_every": 1}, "--log-kl-every"),
    ({"prompts": 6, "updates": 4}, "--prompts 8"),
    ({"group": 1}, "2 or more"),
    ({"temperature": 0.0}, "temperature=0.0"),
    ({"temperature": float("nan")}, "positive"),
    ({"lr": -1.0}, "lr=-1.0"),
    ({"stages": 2}, "below 3"),
    ({"stages": 50, "steps": 10}, "--stages 10"),
    ({"steps": 2, "noise": "linear"}, "give --steps 3 or more, or --noise none"),
    ({"steps": 2, "stages": 3}, "--noise none"),
    ({"steps": 0}, "steps=0"),
    ({"sigma_start": 1e-4, "sigma_end": 1e-2}, "sigma_end <= sigma_start"),
    ({"targets": "q_proj,lm_head"}, "lm_head"),
    ({"targets": ""}, "nothing"),
    ({"algo": "dapo", "max_new_tokens": 10, "overlong_buffer": 11}, "exceeds"),
    ({"overlong_buffer": 8}, "DAPO"),
    ({"levels": "hard"}, "3-5"),
    ({"reward": "mine.py"}, "file.py:function"),
    ({"weights": "int4"}, "nvfp4"),
    ({"max_new_tokens": 0}, "below 1"),
    ({"out": ""}, "runs/mine"),
])
def test_an_impossible_combination_is_one_line_that_names_value_and_remedy(given, told):
    with pytest.raises(ValueError) as caught:
        config.resolve(given)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_the_prompts_of_a_step_are_dealt_evenly_or_not_at_all():
    config.check_ranks(config.resolve({"prompts": 12}), 4)
    with pytest.raises(ValueError, match="prompts=12 of a step cannot be dealt evenly to 8 ranks; take 6 ranks, .*--prompts 16"):
        config.check_ranks(config.resolve({"prompts": 12}), 8)


@pytest.mark.parametrize("argv, told", [
    (["--modle", "x"], "did you mean --model"),
    (["--algo", "ppo"], "grpo"),
    (["--steps", "many"], "steps"),
    (["--top-p", "0.9"], "--top-p"),  # pitfall 3: a truncated sampler is not the policy that is scored
])
def test_a_wrong_flag_ends_at_once_with_code_2(argv, told, capsys):
    with pytest.raises(SystemExit) as caught:
        config.parse(argv)
    message = capsys.readouterr().err
    assert caught.value.code == 2 and told in message and message.count("\n") == 1


def test_flags_can_be_switched_on_and_off():
    assert config.parse(["--no-tis", "--full"]) == {"tis": False, "full": True}
    assert config.parse([]) == {}


def test_help_names_every_flag():
    command = [sys.executable, "-c", "from training import config; config.parse(['--help'])"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert text.returncode == 0 and "--sigma-start" in text.stdout and "--no-tis" in text.stdout


@pytest.mark.parametrize("given, runs", [
    ([], ["train.py"]), (["--help"], ["train.py", "--help"]), (["--steps", "5"], ["train.py", "--steps", "5"]),
    (["eval.py", "--data", "gsm8k"], ["eval.py", "--data", "gsm8k"]), (["train.py"], ["train.py"]),
], ids=str)
def test_run_sh_takes_flags_alone_for_those_of_train(given, runs, tmp_path):
    """`bash run.sh --help` was the Python interpreter's help."""
    shutil.copy(ROOT / "run.sh", tmp_path)
    (tmp_path / "setup.sh").write_text("")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(["bash", str(tmp_path / "run.sh"), *given], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == runs


def test_a_run_too_short_for_the_noise_schedule_has_none_and_says_so(capsys):
    """`--steps 2` was refused for its stages, of which nobody had spoken; 3 steps have 3 stages."""
    assert [config.resolve({"steps": steps}).noise for steps in (1, 2, 3)] == ["none", "none", "exponential"]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and said[1] == "steps=2 is too short for a noise schedule, which has 3 stages or more: no noise"
    assert config.resolve(vars(config.resolve({"steps": 2}))).noise == "none"  # as a resumed run reads it
    assert len(capsys.readouterr().out.splitlines()) == 1
