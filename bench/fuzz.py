"""Everything that reads a file of somebody else's, fed with mutations of good files: a result, or one line. Never more.

    python bench/fuzz.py [TARGET ...] [--minutes 3] [--seed 0]        all targets: half an hour

Hypothesis draws the mutations (fields replaced by JSON of any kind, removed, doubled; bytes flipped, cut, inserted, in
headers above all) and shrinks what fails. Right is: the loader gives its result, or raises ValueError with one line of
bounded length. Anything else is a find: it is printed with its seed, and belongs into the tests once it is mended.

    config        config.json of a model folder      run           config.json of a run that is resumed
    generation    generation_config.json             checkpoint    state.json, complete.json and tensors, checksums made good
    tokenizer     tokenizer.json, its config         adapter       adapter_config.json and adapter_model.safetensors
    nvfp4         a quantised checkpoint, its index  data          a .jsonl file
    grader        completions against answers: within its time, and no reward for a text without the answer

Found so far, and mended (tests/test_hostile.py): a tokenizer_config.json whose model_max_length is a list ended in a
traceback at the first prompt; rope parameters that cannot be computed passed the loader and failed in the first rollout;
names and values of hostile files reached the terminal as they were, escape sequences included; a head size of a billion
made the loader allocate tables for it (these two came from a coverage-guided run of the same parsers under atheris); an
unknown setting of a run was quoted whole; option names of added tokens were printed, as they are, by the tokenizers package.
"""
from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from convert.loader import load_model, resolve_model  # noqa: E402
from files import checkpoint  # noqa: E402
from files.shards import quantize_checkpoint  # noqa: E402
from grading.rewards import Grader  # noqa: E402
from lora import load_adapter  # noqa: E402
from problems.sources import read_file  # noqa: E402
from train import Trainer  # noqa: E402
from training import config  # noqa: E402

EDITS = st.sampled_from([1, 1, 1, 2, 4])  # of one file
BATCH = 300  # examples between two looks at the clock
ODD = ["\x1b[2J\r\x85", None, True, -1, 0, 1, 2, 16, 2**31, 2**63, 10**30, 1e308, float("nan"), float("inf"), "", "x", "nan",
       "\ud800", "\x00", [], {}]  # fmt: skip
SCALARS = st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
                    max_leaves=5)  # fmt: skip


# ------------------------------------------------------------------------------------------------ mutations


def places(tree, path: tuple = ()) -> list[tuple]:
    """Paths of all nodes but the root."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [found for key, value in items for found in ((*path, key), *places(value, (*path, key)))]


@st.composite
def mutated_json(draw, document) -> bytes:
    """The document's text with up to four nodes replaced, removed or renamed; now and then with broken syntax."""
    tree = copy.deepcopy(document)
    for _ in range(draw(EDITS)):
        found = places(tree)
        if not found:
            break
        *path, last = draw(st.sampled_from(found))
        node = tree
        for key in path:
            node = node[key]
        action = draw(st.sampled_from(["replace", "replace", "remove", "rename", "double"]))
        if action == "replace":
            node[last] = draw(JSON)
        elif action == "double":
            node[last] = [node[last], node[last]]
        else:
            value = node.pop(last)
            if action == "rename" and isinstance(node, dict):
                node[draw(st.text(max_size=6))] = value
    text = json.dumps(tree).encode()
    return draw(mutated_bytes(text)) if draw(st.integers(0, 9)) == 0 else text


@st.composite
def mutated_bytes(draw, data: bytes, head: int = 0) -> bytes:
    """Up to four edits; positions below `head` (where a header lies) are twice as likely as all others together."""
    raw = bytearray(data)
    anywhere = st.integers(0, max(len(raw) - 1, 0))
    position = st.one_of(st.integers(0, head), st.integers(0, head), anywhere) if head else anywhere
    for _ in range(draw(EDITS)):
        at, action = draw(position), draw(st.sampled_from(["set", "set", "cut", "insert", "digits", "splice"]))
        if action == "set" and raw:
            raw[at % len(raw)] = draw(st.integers(0, 255))
        elif action == "cut":
            del raw[at : at + draw(st.integers(1, 64))]
        elif action == "insert":
            raw[at:at] = draw(st.binary(max_size=16) | st.sampled_from([b"[" * 3000, b'"', b"\n", b"\xff\xfe", b"}"]))
        elif action == "digits":  # a number in a header becomes another
            raw[at : at + 2] = str(draw(st.sampled_from([0, 1, 99, 2**31, 2**64 - 1]))).encode()
        elif action == "splice" and raw:
            start = draw(anywhere)
            raw[at:at] = raw[start : start + 32]
    return bytes(raw)


def is_refused(work: Callable) -> bool:
    """What is tested: any exception but a ValueError of one bounded line goes through."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            work()
            return False
    except ValueError as error:
        if not str(error).isprintable() or len(str(error)) > 1500:
            raise AssertionError(f"not one printable line of bounded length: {str(error)[:300]!r}") from error
        return True


# ------------------------------------------------------------------------------------------------ targets
# Each takes an empty folder and gives (strategy of cases, what to do with one).


def of_files(folder: Path, files: dict[str, st.SearchStrategy], load: Callable) -> tuple[st.SearchStrategy, Callable]:
    """Cases are (name, new bytes) of one of the files, which is put back afterwards."""
    good = {name: (folder / name).read_bytes() for name in files}

    def check(case: tuple[str, bytes]) -> bool:
        name, data = case
        (folder / name).write_bytes(data)
        try:
            return is_refused(load)
        finally:
            (folder / name).write_bytes(good[name])

    return st.one_of(*(st.tuples(st.just(name), strategy) for name, strategy in files.items())), check


def read(path: Path):
    return json.loads(path.read_text())


def header_end(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[:8], "little") + 8


def model_folder(scratch: Path) -> Path:
    return shutil.copytree(resolve_model("tiny"), scratch / "model")


def forward(folder: Path, weights: str) -> None:
    """What loads must also run."""
    model, *_ = load_model(str(folder), weights=weights)
    with torch.no_grad():
        model.logits(model(torch.tensor([1, 2, 3]), model.packed([3])))


def fuzz_config(scratch: Path):
    folder = model_folder(scratch)
    return of_files(folder, {"config.json": mutated_json(read(folder / "config.json"))}, lambda: forward(folder, "bf16"))


def fuzz_generation(scratch: Path):
    folder = model_folder(scratch)
    return of_files(folder, {"generation_config.json": mutated_json(read(folder / "generation_config.json"))},
                    lambda: load_model(str(folder), weights="bf16"))


def fuzz_tokenizer(scratch: Path):
    from files.hub import generation_info, load_tokenizer, read_config
    from problems.tasks import Problem, encode_prompts

    folder = model_folder(scratch)
    raw, problems = read_config(folder), [Problem("p", "Tom has 27 apples. \U0001f600 \x00", "1")]

    def load() -> None:
        tokenizer = load_tokenizer(folder)
        tokenizer.chat_template = None  # problems/templates.py has its own tests, and its own process
        generation_info(folder, raw, tokenizer)
        for ids in encode_prompts(problems, tokenizer):
            tokenizer.decode(ids, skip_special_tokens=True)

    names = ("tokenizer.json", "tokenizer_config.json")
    files = {name: mutated_json(read(folder / name)) for name in names}
    files["tokenizer.json"] |= mutated_bytes((folder / "tokenizer.json").read_bytes())
    return of_files(folder, files, load)


def fuzz_nvfp4(scratch: Path):
    folder = scratch / "nvfp4"
    quantize_checkpoint("tiny", str(folder), device="cpu", shard_bytes=100_000)
    shard = sorted(folder.glob("*.safetensors"))[0]
    names = ("config.json", "model.safetensors.index.json")
    files = {name: mutated_json(read(folder / name)) for name in names}
    files[shard.name] = mutated_bytes(shard.read_bytes(), header_end(shard))
    return of_files(folder, files, lambda: forward(folder, "nvfp4"))


def fuzz_run(scratch: Path):
    flags = ["--model", "tiny", "--steps", "4", "--stages", "3", "--out", str(scratch / "run")]
    cfg = config.resolve(config.parse(flags))
    (scratch / "run").mkdir()
    record = {"config": vars(cfg), "data_sha256": "0" * 64, "adapter_sha256": None, "versions": {}}
    (scratch / "run/config.json").write_text(json.dumps(record))
    return of_files(scratch / "run", {"config.json": mutated_json(record)},
                    lambda: config.prepare({"resume": True, "out": str(scratch / "run")}))


def tiny_run(scratch: Path) -> Trainer:
    """A run of two steps, finished, with its trainer."""
    flags = ["--model", "tiny", "--data", "arithmetic", "--eval-data", "none", "--steps", "2", "--noise", "none", "--prompts",
             "2", "--group", "2", "--max-new-tokens", "8", "--rank", "2", "--out", str(scratch / "run"), "--device", "cpu",
             "--checkpoint-every", "1", "--no-mask-truncated", "--targets", "q,down"]  # fmt: skip
    (scratch / "run").mkdir()
    trainer = Trainer(config.prepare(config.parse(flags))[0], None)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.run()
    return trainer


def fuzz_checkpoint(scratch: Path):
    trainer = tiny_run(scratch)
    folder = checkpoint.step_folders(scratch / "run")[-1]
    shutil.rmtree(checkpoint.step_folders(scratch / "run")[0])  # nothing to fall back to
    tensors = (folder / "state.safetensors").read_bytes()
    numbers, marker = read(folder / "state.json"), read(folder / "complete.json")

    def load() -> None:
        if (folder / "complete.json").read_bytes() == json.dumps(marker).encode():  # another file's turn: true checksums
            sums = {name: checkpoint.sha256(folder / name) for name in ("state.safetensors", "state.json")}
            (folder / "complete.json").write_text(json.dumps(sums))
        try:
            trainer.restore()
        finally:
            (folder / "complete.json").write_text(json.dumps(marker))

    files = {"state.json": mutated_json(numbers), "complete.json": mutated_json(marker)}
    files["state.safetensors"] = mutated_bytes(tensors, header_end(folder / "state.safetensors"))
    return of_files(folder, files, load)


def fuzz_adapter(scratch: Path):
    trainer = tiny_run(scratch)
    folder = scratch / "run/adapter"
    weights = folder / "adapter_model.safetensors"
    files = {"adapter_config.json": mutated_json(read(folder / "adapter_config.json")),
             weights.name: mutated_bytes(weights.read_bytes(), header_end(weights))}
    return of_files(folder, files, lambda: load_adapter(trainer.model, folder))


def fuzz_data(scratch: Path):
    rows = [{"question": "Tom has 2 pens.", "answer": "2 + 3 = 5\n#### 5"}, {"prompt": "2 + 2 =", "answer": 4},
            {"problem": "Half of 1?", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "answer": None}]
    plain = b"\n".join(json.dumps(row).encode() for row in rows)
    (scratch / "data.jsonl").write_bytes(plain)
    lines = st.lists(st.one_of(*map(mutated_json, rows)), max_size=4).map(b"\n".join)
    return of_files(scratch, {"data.jsonl": lines | mutated_bytes(plain)}, lambda: read_file(scratch / "data.jsonl"))


PIECES = ["\\boxed{", "}", "{", "\\frac", "\\sqrt", "\\sqrt[3]", "^", "_", "#### ", "\n", "<answer>", "</answer>", "<think>",
          "</think>", "the answer is ", "7", "12", "0.5", "1/2", "-", "+", "=", ",", "(", ")", "[", "]", "\\pi", "x", "\\text{",
          "or ", "and ", "\\%", "e9999", "\\le", "\\infty", "\\cup", "9^9^9^9", "!", "\\binom", "\\begin{pmatrix}", "&",
          "\\\\", "\\end{pmatrix}", "|", "$", "."]  # fmt: skip
GOLDS = ["7", "1/2", "\\frac{1}{2}", "x + 1", "\\sqrt{12}", "(1, 2)", "[0, 1)", "\\pi/4", "12\\%", "\\text{Tuesday}", "{1, 2}",
         "0.5"]  # fmt: skip


def fuzz_grader(scratch: Path):
    grader = Grader(workers=1, log=lambda line: None, cpu_s=1.0)
    texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=14).map("".join)

    def check(case: tuple[str, str]) -> bool:
        text, gold = case
        began = time.process_time()
        verdict = grader.grade(text, gold)
        spent = time.process_time() - began
        assert verdict in (True, False) and spent < 1, spent
        assert not verdict or any(c.isalnum() for c in text)
        return not verdict

    return st.tuples(texts, st.sampled_from(GOLDS) | texts.filter(str.strip)), check


TARGETS = {name.removeprefix("fuzz_"): work for name, work in list(globals().items()) if name.startswith("fuzz_")}


# ------------------------------------------------------------------------------------------------ the clock


def fuzz(name: str, minutes: float, first_seed: int, batch: int = BATCH) -> dict:
    """Batches of examples, a seed each, one at least and until the time is over; the finds of all of them."""
    began, number, examples, refused, finds = time.monotonic(), first_seed, 0, 0, []
    with tempfile.TemporaryDirectory() as scratch:
        cases, check = TARGETS[name](Path(scratch))
        while number == first_seed or time.monotonic() - began < 60 * minutes:
            def test(case):
                nonlocal examples, refused
                examples += 1
                refused += check(case)

            phases = (Phase.generate, Phase.shrink) if len(finds) < 20 else (Phase.generate,)
            run = settings(max_examples=batch, deadline=None, database=None, phases=phases, report_multiple_bugs=True,
                           suppress_health_check=list(HealthCheck), print_blob=False)(given(cases)(test))
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    seed(number)(run)()
            except BaseException as error:  # a Rust panic is no Exception
                if isinstance(error, KeyboardInterrupt):
                    raise
                text = "".join(traceback.format_exception(error))
                finds.append({"seed": number, "error": f"{type(error).__name__}: {error}"[:300]})
                print(f"--- {name}, seed {number}\n{text[-3000:]}", flush=True)
            number += 1
    row = {"target": name, "seeds": [first_seed, number - 1], "examples": examples, "refused": refused,
           "seconds": round(time.monotonic() - began), "finds": finds}
    print(f"{name:12} seeds {first_seed}-{number - 1}  {examples:7d} examples, {refused:7d} refused, in {row['seconds']} s  "
          f"{len(finds)} finds",
          flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)} [all]")
    parser.add_argument("--minutes", type=float, default=3.0, help="for each target [3]")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if unknown := set(options.targets) - TARGETS.keys():
        parser.error(f"{sorted(unknown)[0]} is no target; choose from {', '.join(TARGETS)}")
    results, finds = ROOT / "bench/results/fuzz.json", 0
    for name in options.targets or TARGETS:
        row = fuzz(name, options.minutes, options.seed)
        finds += len(row["finds"])
        old = {row["target"]: row for row in json.loads(results.read_text())} if results.exists() else {}
        results.write_text("[\n  " + ",\n  ".join(json.dumps(row) for row in (old | {name: row}).values()) + "\n]\n")
    return int(finds > 0)


if __name__ == "__main__":
    sys.exit(main())
