"""The promises of the house: one idea a file, small, importable in an order a reader can guess, each file runs alone."""

import ast
import doctest
import importlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(p.parent.name for p in ROOT.glob("*/__init__.py"))
CORE = sorted(p.stem for p in ROOT.glob("*.py"))
# "nvfp4", "gpu.marlin_layout": as they are imported.
MODULES = CORE + sorted(f"{p.parent.name}.{p.stem}" for package in PACKAGES for p in (ROOT / package).glob("[!_]*.py"))
# Their demo is the program itself, which reads a command line.
PROGRAMS = {"train", "eval"}


def source(name: str) -> str:
    return (ROOT / f"{name.replace('.', '/')}.py").read_text()


def tree(name: str) -> ast.Module:
    return ast.parse(source(name))


def imports(name: str, top_level_only: bool = False) -> set[str]:
    """What a module imports: ours in full ("gpu.marlin_layout"), others by their first name ("torch")."""
    nodes = tree(name).body if top_level_only else ast.walk(tree(name))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            found |= {node.module} if node.module not in PACKAGES else {f"{node.module}.{alias.name}" for alias in node.names}
    return {one if one in MODULES else one.split(".")[0] for one in found}


def load_code_map():
    """bench/code_map.py as a module; bench/ itself stays off sys.path, where its rollout.py would hide ours."""
    spec = importlib.util.spec_from_file_location("code_map", ROOT / "bench" / "code_map.py")
    code_map = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code_map)
    return code_map


def assert_is_dag(edges: dict[str, set[str]]) -> None:
    done: set[str] = set()
    while len(done) < len(edges):
        ready = {name for name in edges if name not in done and edges[name] <= done}
        assert ready, f"a cycle among {sorted(set(edges) - done)}"
        done |= ready


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_at_most_350_lines_and_a_function_60(name):
    assert len(source(name).splitlines()) <= 350
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno + 1 <= 60, f"{name}.{node.name}"


@pytest.mark.parametrize("name", MODULES)
def test_a_header_says_what_it_costs_where_it_ends_and_where_it_comes_from(name):
    header = ast.get_docstring(tree(name)) or ""
    assert 12 <= len(header.splitlines()) <= 60, f"{name}: {len(header.splitlines())} lines"
    for topic in (r"\bCosts?\b", r"\bLimits?\b", r"\bSource|[Dd]iffer"):
        assert re.search(topic, header), f"{name}: nothing about {topic}"


@pytest.mark.parametrize("name", MODULES)
def test_every_public_function_and_class_has_a_docstring(name):
    for node in tree(name).body:
        is_public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if is_public and node.name not in ("demo", "main"):
            assert ast.get_docstring(node) or node.end_lineno - node.lineno < 12, f"{name}.{node.name}"


def test_the_core_is_read_in_an_afternoon():
    """A further file at top level needs a further idea of the method; everything else belongs into a package."""
    assert sum(len(source(name).splitlines()) for name in CORE) <= 2850


def test_imports_form_a_dag():
    assert_is_dag({name: imports(name, top_level_only=True) & set(MODULES) for name in MODULES})


def test_packages_form_a_dag_with_the_core():
    """A package is one thing: what it stands on does not stand on it, whichever of its files are meant."""
    edges: dict[str, set[str]] = {}
    for name in MODULES:
        unit = name.split(".")[0]
        used = {one.split(".")[0] for one in imports(name, top_level_only=True) & set(MODULES)}
        edges.setdefault(unit, set()).update(used - {unit})
    assert_is_dag(edges)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_its_docstring_and_lists_its_files(package):
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    assert ast.get_docstring(tree) and len(tree.body) == 1
    code_map = load_code_map()
    assert sorted(code_map.listed(package)) == [name.split(".")[1] for name in MODULES if name.startswith(f"{package}.")]
    assert package in dict(code_map.PACKAGES)


def test_no_name_of_ours_hides_an_installed_package():
    """A folder called kernels/ would be taken by transformers for the package of that name."""
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() not in (ROOT, ROOT / "tests")]
    for name in CORE + PACKAGES:
        assert importlib.machinery.PathFinder.find_spec(name, elsewhere) is None, name


@pytest.mark.parametrize("name", ["grpo", "aqn"])
def test_the_maths_imports_only_torch(name):
    assert imports(name) - set(sys.stdlib_module_names) <= {"torch"}


def test_nothing_unpickles_and_nothing_runs_remote_code():
    for name in MODULES:
        text = source(name)
        assert "torch.load" not in text and "import pickle" not in text and "trust_remote_code=True" not in text, name


def companions(name: str) -> dict[str, set[str]]:
    """What the header says must come along: {"": always, "demo": for the demo, "command": for a command}, as paths.

    Copy along: nvfp4.py, gpu/marlin_layout.py. For the demo also assets/tiny/.
    """
    header = ast.get_docstring(tree(name))
    found = {}
    for purpose, start in (("", r"^Copy along:"), ("demo", "For the demo also"), ("command", r"For the command(?: below)? also")):
        said = re.search(rf"{start}\s(nothing|(?:[\w/]+(?:\.py|/)(?:,\s)?)+)", header, re.MULTILINE)
        found[purpose] = set(re.split(r",\s", said[1])) - {"nothing", ""} if said else set()
        assert said or purpose, f"{name}: the header has no line that begins with 'Copy along:' and a list of files"
    return found


def with_theirs(paths: set[str]) -> set[str]:
    """The files and folders, and what the headers of the files say must come along with them."""
    every, new = set(), paths
    while new:
        every |= new
        new = set().union(*(companions(module_of(path))[""] for path in new if path.endswith(".py"))) - every
    return every


def module_of(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def path_of(name: str) -> str:
    return name.replace(".", "/") + ".py"


@pytest.mark.parametrize("name", MODULES)
def test_the_companions_in_the_header_are_the_imports(name):
    """Neither more nor less: what is imported on top always, what is imported inside a function at least for something."""
    said = {purpose: {path for path in paths if path.endswith(".py")} for purpose, paths in companions(name).items()}
    assert {path_of(one) for one in imports(name, top_level_only=True) & set(MODULES)} <= said[""]
    assert {path_of(one) for one in imports(name) & set(MODULES)} == said[""] | said["demo"] | said["command"]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_runs_in_an_empty_folder_with_its_companions_and_shows_something(name, tmp_path):
    said = companions(name)
    for path in with_theirs({path_of(name)} | said["demo"]):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(ROOT / path, tmp_path / path) if path.endswith("/") else shutil.copy(ROOT / path, tmp_path / path)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *([f"{name}.py"] if name in CORE else ["-m", name]), *(["--help"] if name in PROGRAMS else [])]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    assert len(result.stdout.strip()) > 20


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_are_true(name):
    failures, _ = doctest.testmod(importlib.import_module(name))
    assert failures == 0


def test_the_code_map_in_the_readme_is_what_its_script_prints():
    """Line counts included: `python bench/code_map.py --write` after a change."""
    code_map = load_code_map()
    assert code_map.in_readme() == code_map.table()
