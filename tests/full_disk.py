"""Fills a real disk at one moment of a run after another; test_faults.py and bench/faults.py run it on a small tmpfs.

    unshare -rm sh -c 'mount -t tmpfs -o size=24m tmpfs DISK && python tests/full_disk.py DISK MODEL [MOMENT ...]'

Prints a JSON line for each moment: exit code and messages of the run, what the disk held then, and whether the run that
was resumed after space had been made ends as the one that nothing happened to.
"""

import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from test_train import adapter_hash, argv, make_job, samples  # noqa: E402

import eval as evaluation  # noqa: E402
import lora  # noqa: E402
import nvfp4  # noqa: E402
import train  # noqa: E402
from convert import merge  # noqa: E402
from files import checkpoint  # noqa: E402
from training import report  # noqa: E402

DISK, MODEL, WANTED = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
BALLAST = DISK / "ballast"
# What is about to be written when the disk is full: where, which function's which call, and flags of the run.
MOMENTS = {
    "config.json": (checkpoint, "write_atomic", 1, {}),
    "metrics": (report.Report, "step", 1, {"checkpoint_every": 100}),
    "samples": (report.Report, "samples", 2, {}),
    "checkpoint, tensors": (checkpoint, "save_file", 2, {}),
    "checkpoint, marker": (checkpoint, "sha256", 3, {}),
    "adapter": (lora, "write_adapter", 2, {}),
    "curves": (report, "draw_curves", 1, {}),
}


def fill() -> None:
    with open(BALLAST, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass


def quietly(work, *arguments, **options) -> tuple[int, list[str]]:
    """Exit code and the lines of stderr."""
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        code = work(*arguments, **options)
    return code, error.getvalue().strip().splitlines()


@contextlib.contextmanager
def full_at(owner, name: str, call: int, silent: bool = False):
    """The disk is full from the call-th call of owner.name on; silent: the samples' log then takes no room at all."""
    real, left = getattr(owner, name), call

    def filling(*arguments, **options):
        nonlocal left
        left -= 1
        if left == 0:
            fill()
        return real(*arguments, **options)

    setattr(owner, name, filling)
    log = report.Report.samples
    if silent:  # so that it is the metrics' log that meets the end of the disk
        report.Report.samples = lambda *_, **__: None
    try:
        yield
    finally:
        setattr(owner, name, real)
        report.Report.samples = log
        BALLAST.unlink(missing_ok=True)


def main() -> None:
    job = make_job(DISK, MODEL)
    job.flags.update(prompts=8, group=8, max_new_tokens=32, checkpoint_every=2)  # logs of more than a page a step
    assert quietly(job, "whole")[0] == 0
    for what, (owner, name, call, flags) in MOMENTS.items():
        if WANTED and what not in WANTED:
            continue
        with full_at(owner, name, call, silent=what == "metrics"):
            code, said = quietly(job, "run", **flags)
            left = sorted(str(p.relative_to(DISK / "run")) for p in (DISK / "run").rglob("*") if p.name.startswith(".")
                          and p.name != ".lock")
            found = checkpoint.load_latest(DISK / "run", say=said.append)
        command = ["--resume", "--out", str(DISK / "run")]
        if what == "config.json":  # nothing had begun: the same command again
            command = argv({**job.flags, "out": DISK / "run"})
        again, said_again = quietly(train.main, command)
        same = adapter_hash(DISK / "whole") == adapter_hash(DISK / "run") and samples(DISK / "whole") == samples(DISK / "run")
        print(json.dumps({"full": what, "code": code, "said": said, "left_behind": left, "saved": found and found[1]["step"],
                          "resumed": again, "said_again": said_again, "same": same}), flush=True)
        shutil.rmtree(DISK / "run")
    programs = {
        "nvfp4.py quantize": lambda: nvfp4.main(["quantize", str(MODEL), str(DISK / "out")]),
        "lora.py merge": lambda: merge.main([str(MODEL), str(DISK / "whole/adapter"), str(DISK / "out")]),
        "eval.py": lambda: evaluation.main(["--model", str(MODEL), "--data", str(job.flags["data"]), "--device", "cpu",
                                            "--max-new-tokens", "400", "--out", str(DISK / "out.jsonl")]),
        "resume": lambda: train.main(["--resume", "--out", str(DISK / "whole")]),
    }
    for what, program in programs.items():
        if WANTED and what not in WANTED:
            continue
        fill()
        code, said = quietly(program)
        BALLAST.unlink()
        print(json.dumps({"full": what, "code": code, "said": said, "left_behind": sorted(p.name for p in DISK.glob("*out*"))}),
              flush=True)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main()
