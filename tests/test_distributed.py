"""Several processes against one: the same update, the same samples, the same run; and nobody waits for the dead."""

import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import Processes
from test_train import argv

import eval as evaluation
import grpo
from files import checkpoint
from lora import add_adapters, lora_layers
from model import ModelConfig, random_model
from training import distributed, watch
from training.learner import Learner, Sequence, Settings

ROOT = Path(__file__).parent.parent
SHAPE = ModelConfig("qwen2", 64, 2, 4, 2, 16, 128, 200, qkv_bias=True, tied=True)


@functools.cache
def base():
    return random_model(SHAPE, "nvfp4")


def adapted():
    """The model of this process with adapters that are new and already do something."""
    model = base()
    generator = torch.Generator().manual_seed(1)
    add_adapters(model, 4, 8, generator=generator)
    with torch.no_grad():
        for layer in lora_layers(model):
            for matrix in layer.lora_B.values():
                matrix.copy_(0.05 * torch.randn(matrix.shape, generator=generator))
            layer.sync_()
    return model


def ragged(groups=4, flat=(), truncated=(), lengths=(9, 1, 14, 4)):
    """Groups of ragged answers whose sampler differed a little."""
    generator = torch.Generator().manual_seed(2)
    sequences = []
    for g in range(groups):
        prompt = torch.randint(200, (3 + 5 * g,), generator=generator).tolist()
        rewards = torch.full((1, 4), 0.1) if g in flat else torch.rand(1, 4, generator=generator)
        for a, length in zip(grpo.advantages(rewards)[0].tolist(), lengths):
            completion = torch.randint(200, (length + 3 * g,), generator=generator).tolist()
            sequences.append(Sequence(prompt, completion, [], a, is_trained=len(sequences) not in truncated))
    clean = Learner(adapted(), Settings()).score(sequences)
    return [dataclasses.replace(s, rollout_logps=(logp + 0.1 * torch.randn(len(logp), generator=generator)).tolist())
            for s, logp in zip(sequences, clean)]


class Recorder(Learner):
    """Keeps the (unclipped) gradient of every update."""

    def _publish(self):
        self.__dict__.setdefault("gradients", []).append(torch.cat([m.grad.flatten() for m in self.masters.values()]))
        super()._publish()


def updates_are_those_of_one_process(cases: list[tuple[dict, dict]]) -> None:
    """In every rank: an update of one process and the same update of all; gradients of each mini-batch, weights, metrics.

    fp32 sums in another order differ by some 1e-7 of the largest. AdamW divides by the gradient's own size and makes more
    of it: later updates of a step start from weights that differ by 1e-8, and weights are compared at a small rate.
    """
    with distributed.join(os.environ) as ranks:
        for settings, data in cases:
            sequences, found = ragged(**data), []
            for who in (distributed.ALONE, ranks):
                learner = Recorder(adapted(), Settings(max_grad_norm=1e9, lr=1e-4, **settings), ranks=who)
                metrics = learner.update(sequences)
                found.append((learner.gradients, torch.cat([p.detach().flatten() for p in learner.masters.values()]), metrics))
            (alone, weights, metrics), (together, same_weights, same_metrics) = found
            assert len(alone) == len(together) == settings.get("updates", 1)
            for update, (a, b) in enumerate(zip(alone, together)):
                off = ((a - b).abs().max() / a.abs().max()).item()
                assert off <= (5e-6 if update else 1e-6), (settings, update, off)
            assert (weights - same_weights).abs().max() <= 1e-6
            assert metrics.keys() == same_metrics.keys()
            for name in metrics.keys() - {"train/micro_batches", "train/tokens"}:  # a prompt that is cut counts twice
                assert metrics[name] == pytest.approx(same_metrics[name], rel=1e-4, abs=1e-6), name
            ranks.check_same("weights", lambda w=same_weights: w.tolist())
            ranks.check_same("metrics", lambda m=same_metrics: m)


@pytest.mark.parametrize("size", [2, 4])
def test_an_update_is_that_of_one_process(size):
    """Ragged lengths, flat and truncated answers, several mini-batches, KL; and answers for fewer ranks than there are."""
    Processes(size, updates_are_those_of_one_process, [
        (dict(algo="grpo"), dict(flat=(1,), truncated=(2, 9))),
        (dict(algo="dapo", updates=2, beta=0.05), dict(truncated=(0,))),
        (dict(algo="dr_grpo", token_budget=20, tis=False), dict(flat=(0,))),
        (dict(algo="grpo", updates=4), dict()),
        (dict(algo="dapo"), dict(groups=1, truncated=(0, 1, 2))),  # one answer trains: the other ranks have nothing
    ]).succeed()


def nothing_to_train_and_faults() -> None:
    with distributed.join(os.environ) as ranks:
        def fresh(**settings):
            learner = Recorder(adapted(), Settings(lr=1e-2, **settings), ranks=ranks)
            return learner, distributed.byte_sums(learner.masters.values())

        learner, before = fresh()
        metrics = learner.update(ragged(groups=2, flat=(0, 1)))  # nobody has a gradient: nothing moves, nobody waits
        assert metrics["train/updates"] == 0 and distributed.byte_sums(learner.masters.values()) == before
        assert metrics["sampling/sampling_logp_difference/mean"] > 0

        learner, before = fresh(max_bad_steps=2)
        bad = ragged()
        bad[0] = dataclasses.replace(bad[0], advantage=float("nan"))  # is rank 0's alone
        assert learner.update(bad)["train/skipped_total"] == 1 and distributed.byte_sums(learner.masters.values()) == before
        try:
            learner.update(bad)
            raise AssertionError("no error after two bad updates")
        except RuntimeError as error:
            assert "non-finite" in str(error)

        plain, _ = fresh()
        plain.update(ragged())
        starved, _ = fresh()
        forward, calls = starved.forward, []

        def forward_without_memory(batch):
            calls.append(len(batch.tokens))
            if ranks.rank == ranks.size - 1 and len(calls) == 1:
                raise torch.OutOfMemoryError("injected")
            return forward(batch)

        starved.forward = forward_without_memory  # one rank tries again; the others do not hear of it
        starved.update(ragged())
        assert (plain.gradients[0] - starved.gradients[0]).abs().max() <= 1e-6 * plain.gradients[0].abs().max()


def test_what_is_not_finite_or_does_not_fit_on_one_rank_stops_nobody():
    run = Processes(2, nothing_to_train_and_faults)
    run.succeed()
    assert "rank 1: out of memory" in run.log(1) and "out of memory" not in run.log(0)


# ------------------------------------------------------------------------------------------------ whole runs

REWARD = '''
def low_letters(prompt, completion, answer):
    if int(prompt.split()[0]) % 3 == FLAT:  # a third of the problems (or none) tell nothing
        return 0.5
    return sum(c < "n" for c in completion) / (len(completion) + 1)
'''


def make_job(folder: Path, tiny_hf_folder):
    """start(name, number of ranks, ...) -> Processes that run train.py on a job of seconds."""
    (folder / "mine.py").write_text(REWARD.replace("FLAT", "-1"))
    (folder / "flat.py").write_text(REWARD.replace("FLAT", "0"))
    lines = [json.dumps({"prompt": f"{i} + {i} =", "answer": 2 * i}) for i in range(11)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    # A small learning rate: see updates_are_those_of_one_process. In six steps the adapter moves by 600 times the tolerance.
    flags = dict(model=tiny_hf_folder("qwen2-tied"), data=folder / "data.jsonl", reward=f"{folder / 'mine.py'}:low_letters",
                 eval_data=folder / "data.jsonl", eval_every=3, instruction="", steps=6, prompts=4, group=4, max_new_tokens=8,
                 lr=1e-4, stages=3, warmup=0, rank=4, checkpoint_every=2, sample_every=0, device="cpu", mask_truncated=False)

    def start(out: str, size: int, sabotage: str = "", words: list[str] | None = None, **changes) -> Processes:
        wanted = argv({**flags, **changes, "out": folder / out}) if words is None else words
        return Processes(size, train_with, sabotage, wanted)

    start.folder, start.flags = folder, flags
    return start


@pytest.fixture
def job(tmp_path, tiny_hf_folder):
    return make_job(tmp_path, tiny_hf_folder)


def train_with(sabotage: str, words: list[str]) -> int:
    """train.main in one rank, which comes to harm in step 4 (or before the first) if its number is in `sabotage`."""
    import train
    from training import groups

    how, _, victim = sabotage.partition(" ")
    take, taken = groups.DataOrder.take, []

    def harmed(self, count):
        taken.append(count)
        if len(taken) == 4:
            if how == "raise":
                raise RuntimeError("a cosmic ray")
            if how == "bug":
                return {}["missing"]
            os.kill(os.getpid(), getattr(signal, how))
        return take(self, count)

    def unready(*args, **kwargs):
        raise ValueError("the model is not on this host")

    if victim == os.environ.get("RANK"):
        groups.DataOrder.take = harmed
        if how == "unready":
            train.load_model = unready
    watch.PATIENCE_S, watch.SHORT_PATIENCE_S, distributed.SHORT_PATIENCE_S = 8.0, 5.0, 5.0
    train.Report.draw = lambda report: None  # takes longer than all else here
    return train.main(words)


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


OWN = ("step_time", "/seconds", "tok_per_s", "peak_gib", "slots", "micro_batches", "train/tokens")  # of hardware and cut


def assert_same_run(a: Path, b: Path) -> None:
    assert rows(a, "samples.jsonl") == rows(b, "samples.jsonl")
    for x, y in zip(rows(a), rows(b), strict=True):
        assert x.keys() == y.keys()
        for name in (n for n in x if not any(part in n for part in OWN)):
            same = x[name] == y[name] or x[name] == pytest.approx(y[name], rel=1e-3, abs=1e-5)
            assert same, (x["step"], name, x[name], y[name])
    one, other = (checkpoint.load_latest(folder) for folder in (a, b))
    assert one[1]["step"] == other[1]["step"] and one[1]["cursor"] == other[1]["cursor"]
    weights = [name for name in one[0] if name.startswith("/parameters")]
    assert weights and all((one[0][n] - other[0][n]).abs().max() <= 1e-6 for n in weights)
    assert any(one[0][n].abs().max() > 1e-4 for n in weights if "lora_B" in n)  # B began at 0: something was learnt


@pytest.mark.parametrize("size, flags", [
    (2, dict(updates=2, temperature=0.9)), (4, dict(algo="dapo", resample=4, noise="linear", beta=0.05))], ids=str)
def test_a_run_on_several_ranks_is_the_run_of_one(job, size, flags):
    """Samples, evaluations, every metric, the data cursor; under DAPO each rank finds other numbers of groups to keep."""
    if flags.get("algo") == "dapo":
        flags = flags | {"reward": f"{job.folder / 'flat.py'}:low_letters"}
    one, several = job("one", 1, **flags), job("several", size, **flags)
    one.succeed()
    several.succeed()
    assert_same_run(job.folder / "one", job.folder / "several")
    if flags.get("algo") == "dapo":
        assert {row["rollout/rounds"] for row in rows(job.folder / "several")[1:]} > {2}
    assert all(several.log(rank) == "" for rank in range(1, size))  # rank 0 alone speaks


def test_full_training_on_two_ranks_leaves_one_model(job):
    run = job("full", 2, full=True, weights="bf16", noise="none", steps=2, eval_data="none")
    run.succeed()
    assert (job.folder / "full/model/model.safetensors").exists() and len(rows(job.folder / "full")) == 3


def test_a_stop_of_one_rank_is_a_stop_of_all_and_the_run_goes_on_with_another_number(job):
    """Two ranks do three steps; one, and four, do the others: the run of one process."""
    whole, cut = job("whole", 1), job("cut", 2, sabotage="SIGTERM 1")
    assert cut.wait(60) == [130, 130], cut.logs()
    assert "stopped after step 3 of 6" in cut.log(0)
    assert checkpoint.load_latest(job.folder / "cut")[1]["step"] == 3
    shutil.copytree(job.folder / "cut", job.folder / "copy")
    resumed = [job("", size, words=["--resume", "--out", str(job.folder / name)]) for name, size in (("cut", 1), ("copy", 4))]
    for run in (whole, *resumed):
        run.succeed()
    assert_same_run(job.folder / "whole", job.folder / "cut")
    assert_same_run(job.folder / "whole", job.folder / "copy")


HARM = {  # sabotage: ranks, exit code, who says it, what is said
    "raise 1": (2, 1, [0], "error on rank 1"),
    "bug 1": (2, 1, [0], "KeyError on rank 1"),
    "unready 1": (2, 2, [0], "error on rank 1"),
    "SIGKILL 1": (2, 1, [0], "rank 1 has given no sign of life"),
    "SIGSTOP 1": (2, 1, [0], "rank 1 has given no sign of life"),
    "SIGKILL 0": (3, 1, [1, 2], "host of rank 0 is gone"),
}


@pytest.fixture(scope="module")
def harmed_runs(tiny_hf_folder, tmp_path_factory):
    """All at once: they mostly wait."""
    start = make_job(tmp_path_factory.mktemp("harm"), tiny_hf_folder)
    return start.folder, {sabotage: start(sabotage, size, sabotage=sabotage, prompts=6, eval_data="none")
                          for sabotage, (size, *_) in HARM.items()}


@pytest.mark.parametrize("sabotage", HARM)
def test_a_failing_or_dead_rank_ends_the_run_with_its_reason(harmed_runs, sabotage):
    """Within the patience (45 s; here 8) and a few seconds; in one line; what was saved is intact."""
    folder, runs = harmed_runs
    run, (size, code, speakers, told), victim = runs[sabotage], HARM[sabotage], int(sabotage[-1])
    others = [process for rank, process in enumerate(run.processes) if rank != victim]
    for process in others:
        process.join(60)
    codes = [process.exitcode for process in others]
    run.processes[victim].kill()
    assert codes == [code] * (size - 1), run.logs()
    said = [run.log(rank) for rank in range(size) if rank in speakers]
    assert all(text.count(told) == 1 and "Traceback" not in text for text in said), run.logs()
    if code == 1:
        assert checkpoint.load_latest(folder / sabotage)[1]["step"] == 2


def test_a_request_that_cannot_be_carried_out_is_one_line_of_rank_0_and_exit_code_2(job):
    runs = [job("refused", 2, nonsense=1), job("other", 2, data=job.folder / "nowhere.jsonl", prompts=6)]
    for run, told in zip(runs, ("--nonsense", "nowhere.jsonl")):
        assert run.wait(60) == [2, 2], run.logs()
        assert run.log(1) == "" and len(run.log(0).splitlines()) == 1 and told in run.log(0)


def test_evaluation_on_several_ranks_gives_the_records_of_one(job, tiny_hf_folder):
    """Five problems on four ranks, sampled: completions, verdicts and scores do not depend on who made them."""
    data = job.folder / "five.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"{i} + 1 =", "answer": i + 1}) for i in range(5)))
    words = ["--model", str(tiny_hf_folder("qwen2")), "--data", str(data), "--samples", "2", "--temperature", "1.0",
             "--max-new-tokens", "6", "--device", "cpu"]
    one, four = (Processes(size, evaluation.main, [*words, "--out", str(job.folder / f"{size}.jsonl")]) for size in (1, 4))
    one.succeed()
    four.succeed()
    assert rows(job.folder, "1.jsonl") == rows(job.folder, "4.jsonl") and len(rows(job.folder, "4.jsonl")) == 10
    assert one.log(0) == four.log(0) and four.log(1) == ""


def test_ctrl_c_under_torchrun_stops_saves_and_resumes(job):
    """The real launcher: it passes the signal on and gives its ranks 30 s."""
    flags = argv({**job.flags, "out": job.folder / "real", "steps": 2000, "eval_data": "none", "checkpoint_every": 500})
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    process = subprocess.Popen([*command, *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not (line := process.stdout.readline()).startswith("step 3/"):
        assert line, "torchrun ended early"
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[0]
    stopped = re.search(r"stopped after step (\d+) of 2000, saved", rest)
    assert stopped and checkpoint.load_latest(job.folder / "real")[1]["step"] == int(stopped[1]) >= 3, rest
