"""The README keeps its word: its commands run, its Python runs, its links lead somewhere, and no file is named that is not there.

Every line of every bash block stands below with what becomes of it here:

    Run(extra)               exactly as printed, with flags appended that make it short
    StandIn(extra, change)   run with a small local model or data set where the README has a large one from the hub
    Parsed(why)              not run here, for this reason; its flags are parsed and checked as the program does

so that a command that nobody ran cannot hide among those that are.
"""

import ast
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import eval as evaluation
from training import config

ROOT = Path(__file__).resolve().parent.parent
RUN_FOLDER = "runs/tiny-arithmetic-grpo-nvfp4-seed0"  # as the README says
SHORT = ["--steps", "3", "--prompts", "2", "--eval-limit", "4"]
TINY = {"Qwen/Qwen2.5-7B": "tiny", "Qwen2.5-7B": "tiny", "runs/...": RUN_FOLDER, "gsm8k": "arithmetic"}  # what stands in for what
GPU = "a model of billions of parameters: needs the hub and a GPU"


@dataclass
class Run:
    extra: list[str] = field(default_factory=list)
    says: str = ""  # part of what it prints
    makes: str = ""  # a file that is there afterwards


@dataclass
class StandIn(Run):
    change: dict[str, str] = field(default_factory=lambda: TINY)


@dataclass
class Parsed:
    why: str


COMMANDS = {
    "bash run.sh": Parsed("makes a virtual environment from the network; then runs `python train.py`, as made_run below does"),
    "bash test.sh": Parsed("it is what runs these tests"),
    f"python eval.py --model tiny --adapter {RUN_FOLDER}/adapter": Run(["--limit", "4"], "difference"),
    "python train.py --model tiny --data my.jsonl --reward my.py:score": Run(SHORT, "done: runs/tiny-my-grpo"),
    "python train.py --model Qwen2.5-7B": Parsed(GPU),
    "python train.py --model Qwen2.5-7B --algo dapo --data math": Parsed(GPU),
    "python train.py --model path/to/folder --data my.jsonl --reward my.py:score":
        StandIn([*SHORT, "--max-new-tokens", "8"], "done: runs/tiny-my-grpo",
                change={"path/to/folder": str(ROOT / "assets" / "tiny")}),
    "python train.py --resume --out runs/...": StandIn(says="resuming"),
    "python eval.py --model Qwen2.5-7B --adapter runs/.../adapter --data gsm8k --samples 4 --temperature 0.6":
        StandIn(["--limit", "2", "--max-new-tokens", "32"], "maj@4"),
    "python nvfp4.py quantize Qwen/Qwen2.5-7B out/": StandIn(makes="out/model.safetensors"),
    "python lora.py merge Qwen/Qwen2.5-7B runs/.../adapter merged/": StandIn(makes="merged/model.safetensors"),
    "python bench/claims.py --model models/qwen-1.5b --data data/gsm8k/train.jsonl.gz --eval-data data/gsm8k/test.jsonl.gz "
    "--name qwen-1.5b --only nvfp4-aqn,nvfp4 --seeds 1 --gpus 0,0 --final-limit 660":
        Run(["--list"], "done  python train.py --model models/qwen-1.5b"),
    "torchrun --nproc-per-node 8 train.py --model Qwen2.5-7B": Parsed(GPU + "; torchrun itself: tests/test_distributed.py"),
    "torchrun --nproc-per-node 8 eval.py --model Qwen2.5-7B --data math500": Parsed(GPU),
}  # fmt: skip


def blocks(language: str, file: str = "README.md") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / file).read_text(), re.MULTILINE | re.DOTALL)


def printed_commands() -> list[str]:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [" ".join(shlex.split(line, comments=True)) for line in lines if line.strip()]


def commands_of(*kinds: type) -> list[str]:
    return [command for command, fate in COMMANDS.items() if isinstance(fate, kinds)]


def execute(command: str, folder: Path) -> str:
    """A command line as a reader would type it, in a folder of its own with the programs of this one."""
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    words = [str(ROOT / word) if word.endswith(".py") and (ROOT / word).exists() else word for word in words]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def made_run(tmp_path_factory) -> Path:
    """A folder after the main job (three steps of it), with the README's reward and some problems of one's own."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "my.py").write_text(blocks("python")[0])
    lines = [{"prompt": f"{a} + 2 =", "answer": a + 2} for a in range(10)]
    (folder / "my.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert f"done: {RUN_FOLDER}/adapter" in execute(shlex.join(["python", "train.py", *SHORT]), folder)
    return folder


def test_every_printed_command_is_accounted_for():
    assert sorted(set(printed_commands())) == sorted(COMMANDS)


@pytest.mark.parametrize("command", commands_of(Run, StandIn))
def test_a_printed_command_runs(command, made_run):
    """As it is, or with a small model in place of a large one."""
    fate, words = COMMANDS[command], command
    for large, small in getattr(fate, "change", {}).items():
        words = words.replace(large, small)
    assert (words != command) == isinstance(fate, StandIn)
    said = execute(shlex.join([*shlex.split(words), *fate.extra]), made_run)
    assert fate.says in said and (made_run / fate.makes).exists()


@pytest.mark.parametrize("command", commands_of(Parsed))
def test_a_printed_command_that_cannot_run_here_has_flags_that_are_understood(command):
    first, *words = shlex.split(command)
    ranks = int(words[1]) if first == "torchrun" else 1
    program, flags = (words[2], words[3:]) if first == "torchrun" else (words[0], words[1:])
    if first == "bash":
        assert subprocess.run(["bash", "-n", program], cwd=ROOT).returncode == 0
    elif program == "train.py":
        assert config.prepare(config.parse(flags), ranks)[0].model == "Qwen2.5-7B"
    else:
        assert program == "eval.py" and evaluation.parse(flags).model == "Qwen2.5-7B"


def test_the_reward_of_the_readme_tells_right_from_wrong():
    names: dict = {}
    (block,) = blocks("python")
    exec(compile(block, "README.md", "exec"), names)
    score = names["score"]  # `answer in completion` would pay the first of the hacks
    assert score("2 + 2 =", "2 + 2 = 4\n#### 4", "4") == 1.0 and score("2 + 2 =", "#### 5", "4") == 0.0
    for hack in ("it was 4 on the way\n#### 74", "4", "#### 4 or 5", "#### 4\n#### 5", ""):
        assert score("2 + 2 =", hack, "4") == 0.0, hack


DOCUMENTS = sorted(path for folder in (".", "bench", "bench/results/claims") for path in (ROOT / folder).glob("*.md"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#\s]+)\)", document.read_text()):
        assert re.match(r"https?://", target) or (document.parent / target).exists(), target


EXAMPLES = {"my.py", "my_rewards.py", "file.py", "path/to/file.py", "work.py", "__init__.py"}  # a reader's own files


def prose(path: Path) -> str:
    """All of a document; of a module its docstrings and comments."""
    text = path.read_text()
    if path.suffix != ".py":
        return text
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    return "\n".join([ast.get_docstring(node) or "" for node in nodes] + re.findall(r"#.*", text))


def test_every_file_that_is_named_exists():
    """Files move; what headers, comments and documents say about them has to move along."""
    documents = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]  # which tells of what was
    for path in [*documents, *ROOT.glob("*.py"), *ROOT.glob("*/*.py")]:
        for name in re.findall(r"(?<![\w./-])[\w/]+\.py\b", prose(path)):
            assert name in EXAMPLES or (ROOT / name).exists() or (path.parent / name).exists(), f"{path}: {name}"


@pytest.mark.parametrize(("page", "command"), [
    ("README.md", ["bench/rollout.py", "--table"]), ("bench/gemm.md", ["bench/gemm.py", "--tables"])])  # fmt: skip
def test_measured_tables_are_what_their_script_prints(page, command):
    printed = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed in (ROOT / page).read_text(), f"python {' '.join(command)}"
