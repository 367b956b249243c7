"""The promises of the house: one idea a file, small, importable in an order a reader can guess, each file runs alone."""

import ast
import doctest
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(p.stem for p in ROOT.glob("*.py"))
# Their demo is the program itself, which reads a command line.
PROGRAMS = {"train", "eval"}


def tree(name: str) -> ast.Module:
    return ast.parse((ROOT / f"{name}.py").read_text())


def imports(name: str, top_level_only: bool = False) -> set[str]:
    nodes = tree(name).body if top_level_only else ast.walk(tree(name))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_at_most_350_lines_and_a_function_60(name):
    assert len((ROOT / f"{name}.py").read_text().splitlines()) <= 350
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno + 1 <= 60, f"{name}.{node.name}"


@pytest.mark.parametrize("name", MODULES)
def test_a_header_teaches_and_says_what_to_copy(name):
    header = ast.get_docstring(tree(name)) or ""
    assert 12 <= len(header.splitlines()) <= 60, f"{name}: {len(header.splitlines())} lines"
    assert "copy" in header.lower() or name in PROGRAMS


@pytest.mark.parametrize("name", MODULES)
def test_every_public_function_and_class_has_a_docstring(name):
    for node in tree(name).body:
        is_public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if is_public and node.name not in ("demo", "main"):
            assert ast.get_docstring(node) or node.end_lineno - node.lineno < 12, f"{name}.{node.name}"


def test_imports_form_a_dag():
    edges = {name: imports(name, top_level_only=True) & set(MODULES) for name in MODULES}
    done: set[str] = set()
    while len(done) < len(MODULES):
        ready = {name for name in MODULES if name not in done and edges[name] <= done}
        assert ready, f"a cycle among {sorted(set(MODULES) - done)}"
        done |= ready


@pytest.mark.parametrize("name", ["grpo", "aqn"])
def test_the_maths_imports_only_torch(name):
    assert imports(name) - set(sys.stdlib_module_names) <= {"torch"}


def test_nothing_unpickles_and_nothing_runs_remote_code():
    for name in MODULES:
        text = (ROOT / f"{name}.py").read_text()
        assert "torch.load" not in text and "import pickle" not in text and "trust_remote_code=True" not in text, name


@pytest.mark.parametrize("name", sorted(set(MODULES) - PROGRAMS))
def test_a_module_runs_alone_and_shows_something(name):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, f"{name}.py"], cwd=ROOT, capture_output=True, text=True, timeout=60, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    assert len(result.stdout.strip()) > 20


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_are_true(name):
    failures, _ = doctest.testmod(importlib.import_module(name))
    assert failures == 0


def test_the_code_map_in_the_readme_is_what_its_script_prints():
    """Line counts included: `python bench/code_map.py --write` after a change."""
    sys.path.insert(0, str(ROOT / "bench"))
    import code_map

    assert code_map.in_readme() == code_map.table()
