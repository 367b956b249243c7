"""A few mutations of every file that somebody else may have written; bench/fuzz.py does the same for minutes."""

import importlib.util
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("fuzz", Path(__file__).parent.parent / "bench/fuzz.py")
fuzz = importlib.util.module_from_spec(SPEC)  # not by sys.path: other benches have the names of modules
SPEC.loader.exec_module(fuzz)


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_a_mutated_file_is_read_or_refused_in_one_line(target, capsys):
    row = fuzz.fuzz(target, minutes=0, first_seed=0, batch=20)
    assert row["finds"] == [], capsys.readouterr().out
    assert row["examples"] >= 20 and 0 < row["refused"]
