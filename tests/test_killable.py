"""A function in a killable process: hangs, crashes and orphans, for real."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from grading.killable import CallFailed, Killable, Pool, demo, load_function

REPO = Path(__file__).resolve().parent.parent
WORK = """
import os, sys, time
def work(what, value=None):
    print("this is not an answer")
    if what == "echo": return value
    if what == "sleep": time.sleep(60)
    if what == "spin":
        while True: pass
    if what == "power": return 9 ** 9 ** 9 ** 9
    if what == "exit": os._exit(3)
    if what == "sys.exit": sys.exit(3)
    if what == "raise": raise KeyError("two\\nlines")
    if what == "memory": return len(bytearray(2 ** 33))
    if what == "recursion": return work(what, value)
    if what == "nan": return float("nan")
    if what == "object": return object()
    if what == "modules": return "torch" in sys.modules
    if what == "pid": return os.getpid()
not_a_function = 3
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    file = tmp_path_factory.mktemp("killable") / "work.py"
    file.write_text(WORK)
    return f"{file}:work"


@pytest.fixture
def work(target):
    killable = Killable(target, wall_s=20.0, cpu_s=0.3, memory_gib=1.0, quiet=True)
    yield killable
    killable.close()


@pytest.mark.parametrize("what, reason", [
    ("spin", "timeout"), ("power", "timeout"), ("exit", "died"), ("sys.exit", "raised"), ("raise", "raised"),
    ("memory", "raised"), ("recursion", "raised"), ("object", "raised"),
])  # fmt: skip
def test_whatever_a_call_does_the_next_one_is_answered(work, what, reason):
    with pytest.raises(CallFailed) as failure:
        work(what=what)
    assert failure.value.reason == reason and "\n" not in str(failure.value)
    assert work(what="echo", value={"a": [1, None, "ü\ud800"]}) == {"a": [1, None, "ü\ud800"]}


def test_a_call_that_sleeps_is_killed_by_the_wall_clock(target):
    sleepy, started = Killable(target, wall_s=0.5, quiet=True), time.monotonic()
    with pytest.raises(CallFailed, match="0.5 s"):
        sleepy(what="sleep")
    assert time.monotonic() - started < 30
    sleepy.close()


def test_a_call_longer_than_a_pipe_goes_through(work):
    assert len(work(what="echo", value="x" * 3_000_000)) == 3_000_000


def test_calls_work_from_any_thread_and_do_not_mix(target):
    pool, found = Pool(target, workers=2, wall_s=30.0, quiet=True), {}

    def ask(start):
        found[start] = pool.map([{"what": "echo", "value": start + i} for i in range(20)])

    threads = [threading.Thread(target=ask, args=(start,)) for start in (0, 100, 200)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert found == {start: list(range(start, start + 20)) for start in (0, 100, 200)}
    assert pool.map([]) == []
    pool.close()


def test_the_worker_does_not_import_torch(work):
    """A start costs a Python start, not seconds."""
    assert work(what="modules") is False


def test_a_worker_does_not_outlive_a_caller_that_is_killed(target):
    """kill -9 of the caller while the worker computes: the worker's own timer ends it."""
    script = (f"import sys; sys.path.insert(0, {str(REPO)!r})\nfrom grading.killable import Killable\n"
              f"work = Killable({target!r}, wall_s=1.0, quiet=True)\n"
              "print(work(what='pid'), flush=True)\nwork(what='spin')")
    caller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    worker = int(caller.stdout.readline())
    time.sleep(0.2)
    caller.kill()
    caller.wait()
    for _ in range(200):
        if not is_alive(worker):
            break
        time.sleep(0.1)
    assert not is_alive(worker)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return not Path("/proc/self").exists()


@pytest.mark.parametrize("bad, message", [
    ("work", "file.py:function"), ("work.py:", "file.py:function"), ("nowhere.py:work", "no file"),
    ("FILE:absent", "no function"), ("FILE:not_a_function", "no function"),
])  # fmt: skip
def test_a_target_that_cannot_be_loaded_is_named(target, bad, message):
    with pytest.raises(ValueError, match=message):
        load_function(bad.replace("FILE", target.rpartition(":")[0]))


@pytest.mark.parametrize("text", ["def work(:", "import no_such_module", "raise RuntimeError('no')",
                                  "import sys; sys.exit(1)", "import os; os._exit(1)"])
def test_a_file_that_fails_at_import_is_one_line(tmp_path, text):
    file = tmp_path / "broken.py"
    file.write_text(text)
    problem = Pool(f"{file}:work", workers=1, wall_s=5.0, quiet=True).check()
    assert "could not be loaded" in problem and "\n" not in problem


def test_demo(capsys):
    demo()
    assert "timeout" in capsys.readouterr().out
