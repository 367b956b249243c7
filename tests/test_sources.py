"""Data sets: every field layout, every way in which a file can be wrong, and the hub out of reach."""

import gzip
import json
import os
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from problems.sources import HUB_SETS, data_sha256, demo, problem_from, read_file, read_hub

GSM8K = {"question": "Tom has 2 pens and buys 3. How many?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}
MATH = {"problem": "Half of 1?", "solution": r"It is $\boxed{\frac{1}{2}}$.", "level": None}
OWN = {"prompt": "2 + 2 =", "answer": 4}


def write(path, *rows):
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("row, prompt, answer", [
    (GSM8K, GSM8K["question"], "5"),
    (MATH, "Half of 1?", r"\frac{1}{2}"),
    (MATH | {"answer": "0.5"}, "Half of 1?", "0.5"),
    (OWN, "2 + 2 =", "4"),
    ({"prompt": "p", "solution": "12"}, "p", "12"),                                     # Big-Math: solution is the answer
    ({"id": 1, "problem": "p", "question": "q", "answer": "025", "url": "u"}, "p", "025"),      # AIME
    ({"question": "q", "answer": 27.0}, "q", "27.0"),
])  # fmt: skip
def test_the_fields_of_every_known_data_set_are_read(row, prompt, answer):
    problem = problem_from(row, "x")
    assert (problem.prompt, problem.answer) == (prompt, answer)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_plain_and_compressed_files_give_the_same_problems(tmp_path, suffix):
    problems = read_file(write(tmp_path / f"data{suffix}", GSM8K, "", MATH, "   ", OWN))
    assert [problem.answer for problem in problems] == ["5", r"\frac{1}{2}", "4"]
    assert problems[1].id == f"data{suffix}:3" and problems[0].solution.endswith("#### 5")


@pytest.mark.parametrize("line", [
    "{", "[]", "3", "null", "{}", '{"prompt": ""}', '{"prompt": "p"}', '{"prompt": "p", "answer": null}',
    '{"prompt": 3, "answer": 4}',
    '{"prompt": "p", "answer": NaN}', '{"prompt": "p", "answer": Infinity}', '{"prompt": "p", "answer": 1e999}',
    '{"prompt": "p", "answer": true}', '{"prompt": "p", "answer": ["4"]}', '{"prompt": "\\ud800", "answer": "4"}',
    '{"prompt": "p", "answer": "4"} x', "[" * 100_000, '{"prompt": "p", "answer": ' + "9" * 5000 + "}",
])  # fmt: skip
def test_a_bad_line_is_named_by_its_number(tmp_path, line):
    path = write(tmp_path / "data.jsonl", OWN, "", line, GSM8K)
    with pytest.raises(ValueError, match=r"data.jsonl, line 3: ") as error:
        read_file(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_bytes_that_are_not_utf8_are_named_by_their_line(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(json.dumps(OWN).encode() + b"\n{\"prompt\": \"\xff\", \"answer\": 1}\n")
    with pytest.raises(ValueError, match="line 2: .*utf-8"):
        read_file(path)


@pytest.mark.parametrize("content, message", [
    (b"", "no problem"), (b"\n \n", "no problem"), (gzip.compress(b"", mtime=0), "no problem"), (b"\x1f\x8b", "damaged"),
    (b"\x1f\x8bxxxxxxxxxxxx", "damaged"), (gzip.compress(json.dumps(OWN).encode() * 9, mtime=0)[:-9], "damaged"),
])  # fmt: skip
def test_empty_and_damaged_files_are_one_line(tmp_path, content, message):
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_file(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_missing_file_a_folder_and_a_pipe_are_one_line(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")  # nobody writes: to open it would wait forever
    for path in (tmp_path / "absent.jsonl", tmp_path, tmp_path / "pipe.jsonl"):
        with pytest.raises(ValueError, match="cannot be read"):
            read_file(path)
    for name in ("absent.jsonl", "pipe.jsonl"):
        with pytest.raises(ValueError, match="cannot be read"):
            data_sha256(str(tmp_path / name))


def test_repeats_and_empty_answers_are_left_out_and_counted(tmp_path, capsys):
    """MATH has two problems with an empty box, MultiArith twenty repeats, which leak from one split into another."""
    path = write(tmp_path / "data.jsonl", OWN, OWN | {"prompt": "2 +  2 ="}, GSM8K, {"prompt": "p", "answer": ""},
                 MATH | {"solution": r"\boxed{}"})
    assert [problem.answer for problem in read_file(path)] == ["4", "5"]
    printed = capsys.readouterr().out
    assert "1 problems repeat" in printed and "2 problems have an empty answer" in printed and "data.jsonl:4" in printed


def test_the_hash_is_of_the_files_bytes(tmp_path):
    """A data file that changes between start and resume is found out."""
    path = write(tmp_path / "data.jsonl", OWN)
    before = data_sha256(str(path))
    write(path, OWN, GSM8K)
    assert data_sha256(str(path)) != before and data_sha256("gsm8k") != data_sha256("math")


# ----------------------------------------------------------------------------------------------------------------------
# The hub, with the package's place taken
# ----------------------------------------------------------------------------------------------------------------------
class FakeDatasets:
    def __init__(self, rows=None, error=None):
        self.rows, self.error, self.asked = rows, error, []

    def load_dataset(self, repo, config=None, split=None):
        self.asked.append((repo, config, split))
        if self.error:
            raise self.error
        return self.rows


def test_named_sets_come_from_the_hub(monkeypatch):
    fake = FakeDatasets([GSM8K, GSM8K])
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert [problem.id for problem in read_hub("gsm8k", "test")] == ["gsm8k-test-0"]
    assert fake.asked == [("openai/gsm8k", "main", "test")]


def test_bigmath_is_filtered_by_level(monkeypatch):
    fake = FakeDatasets([{"prompt": "p", "solution": "4"}])
    monkeypatch.setitem(sys.modules, "datasets", fake)
    for levels, wanted in ((None, [3, 4, 5]), ("4-5", [4, 5]), ("2", [2])):
        fake.asked.clear()
        read_hub("bigmath", "train", levels)
        assert fake.asked == [(HUB_SETS["bigmath"].repo, f"level_{level}", "train") for level in wanted]


@pytest.mark.parametrize("error", [ConnectionError("no route\nto host"), ValueError(""), OSError("offline"), KeyError("x")])
def test_the_hub_out_of_reach_is_one_line_with_the_remedy(monkeypatch, error):
    monkeypatch.setitem(sys.modules, "datasets", FakeDatasets(error=error))
    with pytest.raises(ValueError, match="data=math500.*MATH-500 cannot be had.*local .jsonl") as found:
        read_hub("math500", "test")
    assert "\n" not in str(found.value)


def test_without_the_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        read_hub("gsm8k", "train")
    with pytest.raises(ValueError, match="no train split"):
        read_hub("aime24", "train")


# ----------------------------------------------------------------------------------------------------------------------
# Fuzzing
# ----------------------------------------------------------------------------------------------------------------------
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
                      max_leaves=6)
FIELDS = st.sampled_from(["prompt", "problem", "question", "answer", "solution", "level"])
TEXTS = st.sampled_from(["####", "#### 5", "\\boxed{5}", "\\boxed{", "text"])
ROWS = st.dictionaries(FIELDS, VALUES | TEXTS, max_size=5) | VALUES


@settings(max_examples=300, deadline=None)
@given(ROWS)
def test_any_row_is_a_problem_or_a_value_error(row):
    try:
        problem = problem_from(row, "x")
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert problem.prompt.strip() and isinstance(problem.answer, str) and isinstance(problem.solution, str)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | st.lists(ROWS.map(lambda row: json.dumps(row).encode()) | st.binary(max_size=9),
                                          max_size=4).map(b"\n".join), st.booleans())
def test_any_file_is_problems_or_one_line(tmp_path_factory, data, is_gzip):
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_bytes(gzip.compress(data) if is_gzip else data)
    try:
        assert read_file(path)
    except ValueError as error:
        assert "\n" not in str(error)


def test_demo(capsys):
    demo()
    assert "line 3: NaN" in capsys.readouterr().out
