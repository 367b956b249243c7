"""bench/all.py: what is done is skipped, what does not fit is left, what fails is told. No GPU: its items are replaced."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "bench" / "all.py"


@pytest.fixture
def all_benches(monkeypatch):
    spec = importlib.util.spec_from_file_location("all_benches", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    items = {"good": (1, "-c pass"), "bad": (1, "-c 'raise SystemExit(3)'"), "long": (1000, "-c pass"), "tune": (1, "-c pass")}
    monkeypatch.setattr(module, "ITEMS", items)
    return module


def test_what_is_done_is_skipped_and_what_failed_is_tried_again(all_benches, tmp_path, capsys):
    assert all_benches.main(["--seconds", "60", "--log", str(tmp_path)]) == 1
    first = capsys.readouterr().out
    assert "good: ok" in first and "bad: exit code 3" in first and "left for the next call: long" in first
    assert "tune" not in first, "it changes the kernel, so only when it is named"
    assert all_benches.main(["--seconds", "60", "--log", str(tmp_path), "--only", "good"]) == 0
    assert "done  good" in capsys.readouterr().out
    assert (tmp_path / "bad.log").exists()


def test_an_unknown_item_is_named(all_benches, tmp_path, capsys):
    with pytest.raises(SystemExit):
        all_benches.main(["--only", "nothing", "--log", str(tmp_path)])
    assert "nothing" in capsys.readouterr().err


def test_a_checkpoint_made_on_the_spot_is_trained_on(tmp_path):
    """Its coin makes rewards differ, so the step has a gradient; the model is a layer of the smallest shape."""
    command = [sys.executable, SCRIPT.with_name("big_checkpoint.py"), tmp_path, "--shape", "Qwen2.5-0.5B", "--layers", "1",
               "--flags", "--steps 1 --prompts 2 --group 4 --max-new-tokens 4"]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-1000:]
    assert "1 steps, exit code 0" in result.stdout
    assert (tmp_path / "model" / "model.safetensors").exists() and list(tmp_path.glob("run-*/adapter/adapter_model.safetensors"))
