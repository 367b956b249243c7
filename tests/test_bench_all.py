"""bench/all.py: what is done is skipped, what does not fit is left, what fails is told. No GPU: its items are replaced."""

import importlib.util
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
