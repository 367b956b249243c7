"""The evaluation: its statistics against hand calculations, the command line on a tiny model, base beside adapter."""

import json
import math
import shutil

import pytest
import torch

import eval as evaluation
from convert.loader import load_model
from eval import evaluate, main, majority, standard_error
from files.hub import resolve_model
from grading.rewards import Grader
from lora import adapter_pairs, add_adapters, save_adapter
from problems.tasks import Problem, arithmetic_problems
from rollout import Completion, Rollout
from training.config import TINY_PRESET, resolve


class FakeTokenizer:
    """Words for ids, so that a test can dictate completions."""

    chat_template, bos_token_id = None, None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [1] * len(text.split())}

    def decode(self, tokens, skip_special_tokens=False):
        return " ".join(tokens)


class FakeRollout:
    """Returns the completions that it is given and remembers how it was called."""

    def __init__(self, texts: list[list[str]], truncated=()):
        self.groups = [[Completion(text.split() + ["</s>"], [], [], (p, g) not in truncated)
                        for g, text in enumerate(group)] for p, group in enumerate(texts)]  # fmt: skip

    def generate(self, prompts, group, sampling, *, key, prompt_keys=None, progress=None):
        assert len(prompts) == len(self.groups) and group == len(self.groups[0])
        self.sampling, self.key = sampling, key
        return self.groups


def problems(*golds: str) -> list[Problem]:
    return [Problem(f"p{index}", f"problem {index}", gold) for index, gold in enumerate(golds)]


def run(texts, golds, truncated=(), **options):
    records, rollout = [], FakeRollout(texts, truncated)
    with Grader(workers=1) as grader:
        scores = evaluate(rollout, problems(*golds), FakeTokenizer(), grader, stop_ids=(7,), max_new_tokens=9,
                          records=records, **options)
    return scores, records, rollout


def test_scores_are_those_of_a_hand_calculation():
    """Two problems with four samples each: means 0.75 and 0.25, the majority right and wrong."""
    scores, records, rollout = run([["7", "#### 7", "9", "so 7"], ["3", "5", "none", "4"]], ["7", "5.0"],
                                   truncated={(1, 2)}, samples=4, temperature=1.0, top_p=0.95, seed=3)
    assert scores["pass@1"] == pytest.approx((0.75 + 0.25) / 2)
    assert scores["pass@1_stderr"] == pytest.approx(math.sqrt(((0.25) ** 2 + (0.25) ** 2) / 1 / 2))
    assert scores["maj@4"] == 0.5
    assert scores["truncated"] == 1 / 8 and scores["answered"] == 7 / 8
    assert scores["mean_length"] == pytest.approx((2 + 3 + 2 + 3 + 2 + 2 + 2 + 2) / 8)
    assert (rollout.sampling.temperature, rollout.sampling.top_p, rollout.sampling.stop_ids) == (1.0, 0.95, (7,))
    assert rollout.key == (3, evaluation.EVAL_STEP)
    assert [(row["id"], row["sample"], row["extracted"], row["correct"]) for row in records[:3]] == [
        ("p0", 0, "7", True), ("p0", 1, "7", True), ("p0", 2, "9", False)]  # fmt: skip
    assert records[6]["extracted"] is None and not records[6]["stopped"] and json.dumps(records)


def test_standard_error_is_clustered_over_problems():
    """Eight copies of each sample add no information: pooling them would shrink the error by sqrt(8)."""
    once, *_ = run([["1"], ["2"], ["3"], ["0"]], ["1", "2", "3", "4"])
    copies, *_ = run([["1"] * 8, ["2"] * 8, ["3"] * 8, ["0"] * 8], ["1", "2", "3", "4"], samples=8, temperature=1.0)
    assert copies["pass@1_stderr"] == pytest.approx(once["pass@1_stderr"])
    assert once["pass@1_stderr"] == pytest.approx(math.sqrt(0.75 * 0.25 / 3))      # p(1-p)/(P-1) for one sample each
    assert standard_error([1.0]) is None


def test_votes_are_cast_by_value_and_ties_go_to_the_first():
    assert majority(["3", "1/2", None, "0.5"]) == 1
    assert majority(["4", "5", "5", "4"]) == 0
    assert majority([None, None]) is None
    assert majority([r"x + 1", "2", r"x+1"]) == 0


@pytest.mark.parametrize("texts, options, message", [
    ([], {}, "no problem"),
    ([["1", "1"]], {"samples": 2}, "greedy"),
    ([["1"]], {"samples": 0}, "samples=0"),
])  # fmt: skip
def test_what_cannot_be_evaluated_is_refused_in_one_line(texts, options, message):
    with pytest.raises(ValueError, match=message) as error:
        run(texts, ["1"] * len(texts), **options)
    assert "\n" not in str(error.value)


# ----------------------------------------------------------------------------------------------------------------------
# With a model
# ----------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def adapter(tiny_hf_folder, tmp_path_factory):
    """An adapter large enough to change what the tiny model says."""
    folder = tmp_path_factory.mktemp("eval") / "adapter"
    model, *_ = load_model(str(tiny_hf_folder("qwen2")), weights="bf16", device="cpu")
    add_adapters(model, 4, 8.0, {"q_proj", "v_proj", "down_proj"}, generator=torch.Generator().manual_seed(0))
    for _, b in adapter_pairs(model).values():
        b.data.normal_(0.0, 1.0, generator=torch.Generator().manual_seed(1))
    save_adapter(model, folder, "tiny")
    return folder


def test_base_and_adapter_are_evaluated_in_one_call(tiny_hf_folder, adapter, tmp_path, capsys):
    """The released evaluator left the adapter out: here the adapter's completions differ from the base's."""
    out, data = tmp_path / "records.jsonl", tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": p.prompt, "answer": p.answer})
                              for p in arithmetic_problems("train", 3, 0)))
    status = main(["--model", str(tiny_hf_folder("qwen2")), "--adapter", str(adapter), "--data", str(data),
                   "--out", str(out), "--weights", "bf16", "--max-new-tokens", "6", "--samples", "2", "--temperature", "0.8",
                   "--device", "cpu"])
    printed = capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert status == 0 and len(rows) == 2 * 3 * 2
    assert "base" in printed and "maj@2" in printed and "paired by problem" in printed
    base, adapted = ([row["completion"] for row in rows if row["adapter"] == name] for name in (None, str(adapter)))
    assert base != adapted
    assert {"id", "prompt", "gold", "completion", "extracted", "correct", "tokens", "stopped"} <= rows[0].keys()


def test_greedy_evaluation_is_the_same_every_time(tiny_hf_folder):
    model, tokenizer, info = load_model(str(tiny_hf_folder("llama")), weights="bf16", device="cpu")
    found = []
    for slots in (1, 3):
        records = []
        with Grader(workers=1) as grader:
            evaluate(Rollout(model, max_len=160, slots=slots, tokenizer=tokenizer), arithmetic_problems("train", 3, 1),
                     tokenizer, grader, stop_ids=info.stop_ids, max_new_tokens=5, records=records)
        found.append([row["completion"] for row in records])
    assert found[0] == found[1]


@pytest.mark.parametrize("arguments, message", [
    (["--data", "gsm9k"], "did you mean gsm8k"),
    (["--no-base"], "--adapter"),
    (["--top-p", "0"], "top_p=0"),
    (["--temperature", "-1"], "temperature=-1"),
    (["--limit", "0"], "limit=0"),
    (["--samples", "4", "--model", "MODEL"], "greedy"),
    (["--model", "/no/such/folder"], "/no/such/folder"),
    (["--adapter", "/no/such/adapter", "--no-base", "--model", "MODEL"], "/no/such/adapter"),
    (["--out", "/no/such/folder/out.jsonl"], "/no/such/folder"),
    (["--max-prompt-tokens", "2", "--model", "MODEL"], "no prompt has at most 2"),
])  # fmt: skip
def test_bad_input_ends_with_one_line_and_exit_code_2(arguments, message, tiny_hf_folder, capsys):
    model = str(tiny_hf_folder("qwen2"))
    given = [model if argument == "MODEL" else argument for argument in arguments]
    defaults = ["--data", "arithmetic", "--limit", "2", "--device", "cpu", "--weights", "bf16", "--max-new-tokens", "2"]
    capsys.readouterr()  # what transformers said when it wrote the model, if this is the first test to want it
    status = main(defaults + given if "--model" in given else defaults + ["--model", model] + given)
    lines = capsys.readouterr().err.strip().splitlines()
    assert status == 2 and len(lines) == 1 and message in lines[0]


def test_an_adapter_that_is_none_or_does_not_fit_is_refused_before_the_base_is_evaluated(tiny_hf_folder, adapter, tmp_path,
                                                                                         monkeypatch, capsys):  # fmt: skip
    """On a 7B model the refusal came after hours."""
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: pytest.fail("the base is evaluated first"))
    other = tiny_hf_folder("qwen2", intermediate_size=128)
    for model, folder, told in ((other, tmp_path / "nothing", "adapter_config.json"), (other, adapter, "the model's")):
        argv = ["--model", str(model), "--adapter", str(folder), "--data", "arithmetic", "--limit", "2", "--device", "cpu"]
        assert main(argv) == 2
        assert told in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_merged_tiny_model_has_the_tiny_models_data_and_others_have_gsm8k(tiny_hf_folder, tmp_path, monkeypatch, capsys):
    """It was asked GSM8K, in words that it does not know, if the hub could be reached at all."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": 1}}')
    base, folder = resolve_model("tiny"), tmp_path / "merged"
    shutil.copytree(base, folder)
    for name in ("tiny", str(folder)):
        options = evaluation.parse(["--model", name])
        assert (options.data, options.max_new_tokens, options.instruction) == ("arithmetic", 64, "")
        assert resolve({"model": name}).data == "arithmetic" and resolve({"model": name}).lr == TINY_PRESET["lr"]
    for name in (".", "Qwen2.5-7B", str(tiny_hf_folder("qwen2"))):
        assert evaluation.parse(["--model", name]).data == resolve({"model": name, "out": "runs/x"}).data == "gsm8k"
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: {"pass@1": 0.5, "pass@1_stderr": None, "mean_length": 9,
                                                                  "truncated": 0, "answered": 1})
    for weights, lines in (("nvfp4", 1), ("bf16", 0)):
        assert main(["--model", str(folder), "--weights", weights, "--limit", "2", "--device", "cpu"]) == 0
        assert capsys.readouterr().out.count("16-bit weights, rounded to nvfp4 on loading (--weights bf16 keeps them)") == lines
