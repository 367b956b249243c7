"""Tasks: arithmetic splits that cannot leak, and prompts with exactly the tokens that they should have."""

import json
import re

import pytest

from files.hub import load_tokenizer, resolve_model
from grading.answers import extract_answer
from grading.rewards import grade
from problems import tasks
from problems.tasks import (
    KNOWN_TEMPLATES,
    PIECE,
    UNSEEN_TEMPLATES,
    Problem,
    arithmetic_pieces,
    arithmetic_problems,
    encode_prompt,
    fitting,
    load_problems,
    prompt_texts,
    worked_solution,
)

SPLITS = ("train", "heldout", "unseen")


# ----------------------------------------------------------------------------------------------------------------------
# Arithmetic
# ----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("split", SPLITS)
def test_every_solution_is_true_and_earns_the_reward(split):
    """Each step is computed again by Python, each step's result is used, and the grader pays for the solution."""
    for problem in arithmetic_problems(split, 200, seed=1):
        steps, _, answer = worked_solution(problem).partition("\n#### ")
        for step in steps.split(". "):
            left, right = step.split(" = ")
            assert eval(left) == int(right) >= 0
        assert answer == problem.answer == right and problem.answer.isdigit()
        assert all(number in problem.prompt for number in re.findall(r"\d+", steps.split(" = ")[0]))
        assert extract_answer(problem.solution) == answer and grade(problem.solution, answer)
        assert not grade(problem.prompt, answer) and not grade(problem.solution, str(int(answer) + 1))


def test_splits_are_disjoint_by_construction():
    """New numbers in known templates, and templates never trained on: nothing is in two splits, whatever the seeds."""
    seen = {split: {problem.prompt for seed in (0, 1) for problem in arithmetic_problems(split, 2000, seed)}
            for split in SPLITS}
    assert not seen["train"] & seen["heldout"] and not (seen["train"] | seen["heldout"]) & seen["unseen"]
    numbers = {split: {tuple(sorted(re.findall(r"\d+", prompt))) for prompt in prompts}
               for split, prompts in seen.items()}
    assert not numbers["train"] & numbers["heldout"] and not numbers["train"] & numbers["unseen"]
    assert len(KNOWN_TEMPLATES) >= 12 and len(UNSEEN_TEMPLATES) >= 4
    shape = lambda text: re.sub(r"\d+|" + "|".join(tasks.NAMES + tasks.ITEMS), "_", text)  # noqa: E731
    assert len({shape(prompt) for prompt in seen["train"]}) == len(KNOWN_TEMPLATES)
    assert {shape(prompt) for prompt in seen["heldout"]} == {shape(prompt) for prompt in seen["train"]}
    assert not {shape(prompt) for prompt in seen["unseen"]} & {shape(prompt) for prompt in seen["train"]}


def test_every_text_is_made_of_the_closed_list_of_pieces():
    """Joining the pieces gives the text back, and train shows every piece that the other splits need."""
    pieces, seen = set(arithmetic_pieces()), set()
    for split in SPLITS:
        for problem in arithmetic_problems(split, 3000, seed=0):
            for text in (problem.prompt, problem.solution):
                found = PIECE.findall(text)
                assert "".join(found) == text and pieces.issuperset(found)
                seen |= set(found) if split == "train" else set()
                assert seen.issuperset(found)
    assert seen == pieces


def test_the_same_seed_gives_the_same_problems_and_none_twice():
    first, second, other = (arithmetic_problems("train", 500, seed) for seed in (0, 0, 1))
    assert first == second != other and first[:20] == arithmetic_problems("train", 20, 0)
    assert len({problem.prompt for problem in first}) == len({problem.id for problem in first}) == 500


def test_one_to_three_steps():
    lengths = {len(worked_solution(problem).split(". ")) for problem in arithmetic_problems("train", 300, 0)}
    assert lengths == {1, 2, 3}


# ----------------------------------------------------------------------------------------------------------------------
# By name
# ----------------------------------------------------------------------------------------------------------------------
def test_names_lead_to_their_problems(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"p{i}", "answer": i}) for i in range(20)))
    assert load_problems("arithmetic", "train", seed=3, limit=5) == arithmetic_problems("train", 5, 3)
    assert load_problems("arithmetic", "test", limit=5) == arithmetic_problems("heldout", 5, 0)
    assert load_problems("arithmetic-unseen", "test", limit=5) == arithmetic_problems("unseen", 5, 0)
    assert len(load_problems(str(file))) == len(load_problems(str(file), "test")) == 20
    some, same, other = (load_problems(str(file), limit=6, seed=seed) for seed in (0, 0, 1))
    assert some == same != other and [int(p.answer) for p in some] == sorted(int(p.answer) for p in some)


@pytest.mark.parametrize("arguments, message", [
    (dict(name="gsm8"), "did you mean gsm8k"), (dict(name="arithmetic-unseen"), "'train' is unknown"),
    (dict(name="x.jsonl"), "cannot be read"), (dict(name="arithmetic", split="dev"), "train, test"),
    (dict(name="arithmetic", limit=0), "limit=0"), (dict(name=""), "unknown"),
])  # fmt: skip
def test_a_name_that_leads_nowhere_is_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        load_problems(**arguments)
    assert "\n" not in str(error.value)


# ----------------------------------------------------------------------------------------------------------------------
# Prompts
# ----------------------------------------------------------------------------------------------------------------------
PROBLEM = Problem("one", "What is 2 + 2?", "4")


def word_tokenizer(chat_template=None, bos=False):
    """Words, with or without a beginning-of-text token of its own (as Llama's and unlike Qwen's)."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = "<s> <unk> <|im_start|> <|im_end|> user assistant What is 2 + ? Box it .".split()
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>" if bos else None, unk_token="<unk>")
    fast.chat_template = chat_template
    return fast


CHAT = ("{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}")


@pytest.mark.parametrize("chat, bos", [(False, False), (False, True), (True, False), (True, True)])
def test_a_prompt_has_one_beginning_and_the_templates_own_end(chat, bos):
    """Double and missing BOS (open-r1#462, vllm#27515, trl#3520): pitfall 12."""
    tokenizer = word_tokenizer(CHAT if chat else None, bos)
    ids = encode_prompt(PROBLEM, tokenizer, "Box it.")
    assert ids.count(0) == (1 if bos else 0) and ids[0] == (0 if bos else 2 if chat else 6)
    text = tokenizer.decode(ids)
    assert "What is 2 + 2 ? Box it ." in text
    assert (ids[-2:] == [2, 5]) if chat else ids[-1] == 13
    assert encode_prompt(PROBLEM, tokenizer) == encode_prompt(PROBLEM, tokenizer, "") != ids


def test_prompt_ids_are_transformers_own(tiny_tokenizer):
    """Pitfall 11: the same ids as apply_chat_template gives when it tokenises itself."""
    wanted = tiny_tokenizer.apply_chat_template([{"role": "user", "content": "What is 2 + 2?\nBox it."}],
                                                add_generation_prompt=True, tokenize=True, return_dict=False)
    assert encode_prompt(PROBLEM, tiny_tokenizer, "Box it.") == list(wanted)


def test_prompts_that_are_too_long_are_counted_and_left_out_but_never_cut(tiny_tokenizer, capsys):
    """Pitfall 13: a prompt that is silently cut asks another question."""
    problems = [Problem(str(i), "x" * i, "1") for i in (1, 10, 100)]
    whole = [encode_prompt(problem, tiny_tokenizer) for problem in problems]
    kept, ids = fitting(problems, tiny_tokenizer, None, len(whole[1]), "mine")
    assert kept == problems[:2] and ids == whole[:2]
    assert capsys.readouterr().out == f"mine: 1 of 3 prompts exceed {len(whole[1])} tokens and are left out\n"
    with pytest.raises(ValueError, match=rf"no prompt has at most 3 tokens, the shortest has {len(whole[0])}"):
        fitting(problems, tiny_tokenizer, None, 3, "mine")


def test_words_that_the_tokenizer_does_not_know_are_told_in_one_line_with_their_share(tiny_tokenizer, capsys):
    """The tiny model trained on holes for reward 0, and nothing said why. 3 holes in 6 + 7 + 3 tokens, line ends counted."""
    tokenizer = load_tokenizer(resolve_model("tiny"))
    texts = ("Tom has 3 apples.", "Zebra has 13 apples.", "Überzug")  # its Ü is a piece of its own
    problems = [Problem(str(i), text, "3") for i, text in enumerate(texts)]
    kept, ids = fitting(problems, tokenizer, "", 100, "mine")
    said = capsys.readouterr().out
    assert kept == problems and sum(map(len, ids)) == 16
    assert said.startswith("mine: 18.8% of the prompts' tokens are unknown to the tokenizer, such as 'Zebra'; ")
    assert "(2 of 3 prompts)" in said and said.count("\n") == 1
    fitting(problems[:1], tokenizer, "", 100, "mine")
    fitting(problems, tiny_tokenizer, "", 100, "mine")  # bytes spell every word
    tiny_tokenizer.unk_token = tiny_tokenizer.eos_token  # as GPT-2's, and the chat template writes it
    try:
        fitting(problems, tiny_tokenizer, "", 100, "mine")
    finally:
        tiny_tokenizer.unk_token = None
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("template", [
    "{% include '/etc/passwd' %}", "{% import '/etc/passwd' as x %}", "{{ open('/etc/passwd').read() }}",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}", "{{ ''.__class__.__base__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{% for i in range(10**9) %}x{% endfor %}", "{{ messages[7].content }}", "{% if %}", "{{ 1/0 }}",
    "{{ raise_exception('no') }}",
])  # fmt: skip
def test_a_chat_template_cannot_read_files_or_run_code(template, tiny_tokenizer):
    """It fails in one line, or says nothing that the files hold."""
    tokenizer = word_tokenizer(template)
    try:
        text = prompt_texts([PROBLEM], tokenizer)[0]
    except ValueError as error:
        assert "chat template fails on problem one" in str(error) and "\n" not in str(error)
    else:
        assert "root:" not in text and "uid=" not in text and "<class" not in text


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="no tokens"):
        encode_prompt(Problem("empty", " ", "1"), word_tokenizer())


def test_demo(capsys):
    tasks.demo()
    assert "unseen" in capsys.readouterr().out
