"""The matrix of the claims: what is done is skipped, what is half done goes on, what is missing is not passed over."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
sys.path.append(str(BENCH))

import claims  # noqa: E402
import claims_finals  # noqa: E402
import claims_report  # noqa: E402
import times_table  # noqa: E402

from training import config  # noqa: E402

sys.path.remove(str(BENCH))  # its other files are named after modules

# Stands for train.py: takes two calls when the folder is "slow", notes every call, writes what train.py writes.
PROGRAM = """
import json, os, pathlib, sys, time
flags = sys.argv[1:]
out = pathlib.Path(flags[flags.index("--out") + 1])
with open(out.parent / "calls", "a") as calls:
    calls.write(" ".join(flags) + " gpu=" + os.environ.get("CUDA_VISIBLE_DEVICES", "") + "\\n")
time.sleep(0.2)
out.mkdir(parents=True, exist_ok=True)
(out / "config.json").write_text(json.dumps({"versions": {"torch": "x"}, "gpu": None}))
if (out.parent / "slow").exists() and "--resume" not in flags:
    time.sleep(60)
if (out.parent / "broken").exists():
    sys.exit(1)
rows = [{"step": step, "eval/pass@1": 0.4 + step / 10, "reward": 0.5, "entropy": 0.1, "step_time": 1.0, "unknown": 3,
         "sampling/sampling_logp_difference/mean": 1e-3}
        for step in range(5)]
(out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""


@pytest.fixture
def matrix(tmp_path):
    """run(*flags) -> exit code of bench/claims.py with the stand-in; .runs is the folder of the model's runs."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    folders = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]

    def run(*flags):
        return claims.main([*folders, "--program", str(program), "--only", "nvfp4,nvfp4-aqn", "--seeds", "1", *flags])

    run.runs, run.results = tmp_path / "runs" / "tiny", tmp_path / "results"
    run.runs.mkdir(parents=True)
    run.calls = lambda: (run.runs / "calls").read_text().splitlines()
    return run


def test_finished_runs_are_skipped(matrix):
    assert matrix() == 0 and len(matrix.calls()) == 2
    assert matrix() == 0 and len(matrix.calls()) == 2
    head, *rows = map(json.loads, (matrix.results / "tiny" / "nvfp4-seed0.jsonl").read_text().splitlines())
    assert "--weights nvfp4 --noise none --seed 0" in head["command"] and head["seconds"] == 5.0
    assert [row["step"] for row in rows] == list(range(5)) and "unknown" not in rows[0]


def test_time_up_stops_the_run_and_the_same_command_resumes_it(matrix):
    """A run killed by a limit and begun anew would never finish on a machine that lends ten minutes at a time."""
    (matrix.runs / "slow").touch()
    assert matrix("--seconds", "4") == 3
    assert "--resume" not in matrix.calls()[0]
    assert not list(matrix.results.rglob("*.jsonl"))
    (matrix.runs / "slow").unlink()
    assert matrix() == 0
    assert matrix.calls()[1].startswith("--resume --out") and len(matrix.calls()) == 3


def test_cards_are_used_side_by_side_one_run_on_each(matrix):
    """Two runs on one card in the same moment would slow each other; a card left idle is paid for."""
    assert matrix("--gpus", "0,1") == 0
    assert sorted(call.split()[-1] for call in matrix.calls()) == ["gpu=0", "gpu=1"]


def test_a_failed_run_is_named_and_does_not_stop_the_others(matrix, capsys):
    (matrix.runs / "broken").touch()
    assert matrix() == 1
    assert len(matrix.calls()) == 2 and capsys.readouterr().err.count("failed:") == 2
    (matrix.runs / "broken").unlink()
    assert matrix() == 0


def test_results_of_another_budget_are_not_taken_for_these(matrix):
    assert matrix() == 0
    with pytest.raises(ValueError, match="was made by"):
        matrix("--lr", "0.1")


def test_a_flag_that_only_measures_leaves_kept_rows_valid(matrix, monkeypatch):
    """Rows from before there was a KL to log are not run again, nor taken for another budget's; new ones have it."""
    for measures, arm in (("", "nvfp4"), ("--log-kl-every 2", "nvfp4-aqn"), ("--log-kl-every 9", "full-tenth")):
        monkeypatch.setitem(claims.BUDGETS, "tiny", replace(claims.BUDGETS["tiny"], measures=measures))
        assert matrix("--only", f"nvfp4,{arm}") == 0
    plain, measured, full = matrix.calls()
    assert "--log-kl-every" not in plain and "--seed 0 --log-kl-every 2" in measured
    assert "--log-kl-every" not in full  # without an adapter there is no reference: train.py would refuse


def test_arms_of_a_seed_differ_only_in_what_they_ask_about():
    """Same data, same order, same budget: the settings of any two arms may differ in these fields alone."""
    asked = {"weights", "full", "rank", "alpha", "noise", "sigma_start", "tis", "lr", "out"}
    asked.add("log_kl_every")  # changes nothing (tests/test_train.py), and --full has no reference to measure against
    for model in ("tiny", "models/smollm2", "Qwen2.5-7B"):
        plan, _ = claims.parse(["--model", model, *([] if model == "tiny" else ["--data", "gsm8k"])])
        settings = [vars(config.resolve(config.parse(plan.command(arm, 1)))) for arm in claims.ARMS]
        assert len({json.dumps(one, sort_keys=True) for one in settings}) == len(claims.ARMS)
        for one in settings:
            assert {name for name in one if one[name] != settings[0][name]} <= asked


def test_the_report_fails_if_a_file_is_missing_and_keeps_what_was_written_by_hand(matrix, monkeypatch):
    assert matrix() == 0
    readme = matrix.results / "README.md"
    readme.write_text("By hand.\n" + claims_report.MARK + "old")
    monkeypatch.setattr(sys, "argv", ["claims_report.py", "--collect", "--results", str(matrix.results)])
    claims_report.main()
    text = readme.read_text()
    assert text.startswith("By hand.\n") and "old" not in text and "| nvfp4-aqn - nvfp4 | 1 | +0.000 |" in text
    assert "Not run: nvfp4 seed 1" in text and (matrix.results / "tiny" / "main.png").exists()
    assert "in no seed bf16, bf16-aqn, nf4" in text and "bf16 seed" not in text
    (matrix.results / "tiny" / "nvfp4-seed0.jsonl").unlink()
    monkeypatch.setattr(sys, "argv", ["claims_report.py", "--results", str(matrix.results)])
    with pytest.raises(SystemExit, match="nvfp4-seed0.jsonl"):
        claims_report.main()


def test_a_kl_is_drawn_where_a_run_has_one_and_no_column_is_empty(matrix):
    """Rows from before the KL was logged stand beside rows that have it; neither stops the other."""
    assert matrix() == 0
    path = matrix.results / "tiny" / "nvfp4-seed0.jsonl"
    head, *rows = path.read_text().splitlines()
    claims_report.collect(path.parent)
    runs = claims_report.load(path.parent)
    assert "KL, second half" not in claims_report.arms_table(runs, list(claims.ARMS))[0]
    path.write_text("\n".join([head, *(json.dumps(json.loads(row) | {"kl": 0.25}) for row in rows)]))
    runs = claims_report.load(path.parent)
    titles, _, row, other = claims_report.arms_table(runs, list(claims.ARMS))
    at = titles.split(" | ").index("KL, second half")
    assert (row.split(" | ")[at], other.split(" | ")[at]) == ("0.250", "-")
    assert "steps to" not in titles  # neither comes to 0.85
    claims_report.draw(runs, ["nvfp4", "nvfp4-aqn"], claims_report.PANELS, matrix.results / "one.png")
    assert (matrix.results / "one.png").stat().st_size > 10_000


def test_final_evaluations_are_compared_problem_by_problem(matrix):
    """By hand: differences 0, 1, 0, 1 have a mean of 0.5 and a standard deviation of 0.577, over the root of four 0.289."""
    assert claims_finals.paired("1101", "1000") == pytest.approx((0.5, 0.288675), abs=1e-6)
    with pytest.raises(ValueError):
        claims_finals.paired("110", "1000")  # not the same problems
    folder = matrix.results / "tiny"
    folder.mkdir(parents=True)
    for name, right in (("base-nvfp4", "1000"), ("nvfp4-seed0", "1101"), ("nvfp4-aqn-seed0", "1010")):
        records = [{"correct": c == "1", "tokens": 10, "stopped": True} for c in right]
        (folder / f"{name}.final.json").write_text(json.dumps({"command": "x", "256": claims.summarise(records)}))
    gains = claims_finals.gains_table(folder)
    assert "| nvfp4 | 0 | 256 | 0.250 ± 0.250 | 0.750 ± 0.250 | +0.500 ± 0.289 |" in "\n".join(gains)
    (row,) = [line for line in claims_finals.arms_table(folder, claims_report.PAIRS) if "noise helps NVFP4" in line]
    assert "| nvfp4-aqn - nvfp4 | 0 | 256 | -0.250 ± 0.479 | 1, 2 of 4 |" in row  # 0, -1, 1, -1


def test_the_readmes_table_is_what_the_kept_files_give():
    folders = sorted(filter(Path.is_dir, claims.RESULTS.iterdir()))
    drawn = claims_report.readme_lines(folders)
    assert "| nvfp4-aqn | 0 |" in drawn
    assert "\n".join([claims_report.TABLE[0], drawn, claims_report.TABLE[1]]) in (claims.ROOT / "README.md").read_text()


def test_both_readmes_say_of_the_noise_what_the_report_draws():
    """Nine pairs that share their seeds are three observations: an interval over nine claims more than was measured."""
    rows = claims_report.pairs_table(claims_report.load(claims.RESULTS / "tiny"))
    (cells,) = [row.split(" | ") for row in rows if "three formats together" in row]
    assert cells[2] == "3"
    for path in (claims.ROOT / "README.md", claims.RESULTS / "README.md"):
        assert f"changes by {cells[3]} (three seeds" in " ".join(path.read_text().split(claims_report.MARK)[0].split())


def test_the_committed_results_are_complete():
    for folder in filter(Path.is_dir, claims.RESULTS.iterdir()):
        for runs in claims_report.load(folder).values():
            for run in runs.values():
                assert run.rows[-1]["step"] > 0 and "eval/pass@1" in run.rows[-1]


def test_a_final_evaluation_is_summarised_problem_by_problem():
    records = [{"correct": i % 2 == 0, "tokens": 10, "stopped": i < 3} for i in range(4)]
    found = claims.summarise(records)
    assert found["right"] == "1010" and found["pass@1"] == 0.5 and found["truncated"] == 0.25
    # By hand: sqrt(0.5 * 0.5 / 3) is the standard deviation of four answers divided by sqrt(4).
    assert found["stderr"] == pytest.approx(0.28868, abs=1e-5)


def test_the_times_table_is_split_by_unordered_pair():
    train, test = times_table.pairs()
    assert len(train) + len(test) == 66 and not set(train) & set(test)
    assert {"prompt": "What is 7 times 8?", "answer": "56"} in times_table.problems(train) + times_table.problems(test)


def test_an_interval_of_three_seeds_uses_students_t():
    mean, half = claims_report.interval([0.01, 0.02, 0.03])
    assert mean == pytest.approx(0.02) and half == pytest.approx(4.30 * 0.01 / 3**0.5)
    assert claims_report.verdict(mean, half).startswith("not shown")
    assert claims_report.verdict(0.02, 0.01) == "holds here" and "opposite" in claims_report.verdict(-0.02, 0.01)


def test_final_evaluations_can_wait_and_be_limited_alike_for_a_model_and_its_base(matrix, monkeypatch):
    monkeypatch.setitem(claims.BUDGETS, "tiny", claims.Budget(3e-3, "--steps 4 --max-prompt-tokens 64", (8, 16)))
    asked, execute = [], claims.execute

    def evaluate(argv, log, deadline, gpu):
        if argv[0] != "eval.py":
            return execute(argv, log, deadline, gpu)
        asked.append(argv)
        Path(argv[argv.index("--out") + 1]).write_text('{"correct": true, "tokens": 5, "stopped": true}\n')
        return 0

    monkeypatch.setattr(claims, "execute", evaluate)
    assert matrix("--train-only") == 0 and not asked
    assert matrix("--final-limit", "7") == 0 and len(matrix.calls()) == 2
    assert len(asked) == 2 * 3 and all(argv[argv.index("--limit") + 1] == "7" for argv in asked)  # a base and two arms
    found = json.loads((matrix.results / "tiny" / "nvfp4-aqn-seed0.final.json").read_text())
    assert "--limit 7" in found["command"] and found["16"]["right"] == "1"
