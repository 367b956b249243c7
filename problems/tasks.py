"""What the model is asked: built-in arithmetic word problems, data sets by name, and the prompt as tokens.

Idea. A task is a list of `Problem`s, a prompt and its answer each, and one way to put a prompt before a model, the same
in training and in evaluation.

Built in: grade-school arithmetic, generated on the fly, for a model so small that it trains on two CPU cores.

    template    "{name} has {a} {item}. {name} buys {b} more. How many {item} does {name} have now?"     steps: a + b
    prompt      "Tom has 27 apples. Tom buys 15 more. How many apples does Tom have now?"
    solution    "27 + 15 = 42\\n#### 42"              (one to three steps, joined by ". ")

The text is made of a closed list of pieces (`arithmetic_pieces()`; words carry the space before them, numbers are
written digit by digit), so that a word-level tokenizer can be built from it: "".join(pieces) gives the text back.

    train      known templates, numbers whose hash is not 0 mod 5
    heldout    known templates, numbers whose hash is 0 mod 5: disjoint from train by construction. The hash is of the
               sorted numbers, so that the problem 27 + 15 does not come back as 15 + 27 or in another template; as a
               step inside a longer problem it may
    unseen     templates that are in neither, with heldout's numbers and words that train knows

Prompts. With a chat template: one user turn, rendered to text by the template (problems/templates.py: it can neither
read files nor run code nor hang) and tokenised without special tokens of its own, because the template has written them. Without
one: the text and a line break. Either way at most one beginning-of-text token, and no prompt is ever cut: one that is
too long is left out, and counted.

Where we differ from making chats token by token: the template's text is tokenised as it stands, as the model was trained.
Cost: a second to start the template's process. Limits: one user turn; the built-in task counts from 0 to 999.
Copy along: problems/sources.py, problems/templates.py.
"""
from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from problems.sources import HUB_SETS, Problem, data_sha256, is_file_name, read_file, read_hub
from problems.templates import render_chats

__all__ = ["Problem", "arithmetic_pieces", "arithmetic_problems", "data_sha256", "default_instruction", "encode_prompt",
           "encode_prompts", "fitting", "load_problems", "speaks_arithmetic", "worked_solution"]


# ----------------------------------------------------------------------------------------------------------------------
# Arithmetic word problems
# ----------------------------------------------------------------------------------------------------------------------
NAMES = ("Tom", "Anna", "Ben", "Mia", "Sam", "Lily", "Jack", "Nora", "Max", "Ella", "Leo", "Ruth")
ITEMS = ("apples", "books", "pens", "coins", "cards", "cups", "shells", "stamps", "balls", "eggs")
NUMBER_RANGES = {"two-digit": (10, 99), "small": (2, 9), "teens": (10, 49)}

# Each line: the text, the range of each number, the steps. A step is "left operator right"; x and y are the results of
# the first and second step. Numbers for which any step is negative (or over 999) are drawn again.
TWO, SMALL, TEENS = "two-digit", "small", "teens"
KNOWN_TEMPLATES = (
    ("{name} has {a} {item}. {name} buys {b} more. How many {item} does {name} have now?",
     (TWO, TWO), ("a + b",)),
    ("{name} had {a} {item} and gave {b} of them to {other}. How many {item} does {name} have left?",
     (TWO, TWO), ("a - b",)),
    ("There are {a} {item} on the table and {b} {item} in the box. How many {item} are there in all?",
     (TWO, TWO), ("a + b",)),
    ("{name} needs {a} {item} and has {b} of them. How many more {item} does {name} need?",
     (TWO, TWO), ("a - b",)),
    ("{name} has {a} boxes with {b} {item} in each box. {name} finds {c} more. How many {item} does {name} have now?",
     (SMALL, SMALL, TEENS), ("a * b", "x + c")),
    ("{name} buys {a} bags with {b} {item} in each bag and lost {c} of them. How many {item} does {name} have left?",
     (SMALL, SMALL, TEENS), ("a * b", "x - c")),
    ("{name} has {a} {item}. {other} has {b} more than {name}. How many {item} do they have together?",
     (TEENS, TEENS), ("a + b", "a + x")),
    ("{name} has {a} {item}. {other} has {b} fewer than {name}. How many {item} do they have together?",
     (TWO, TWO), ("a - b", "a + x")),
    ("{name} had {a} {item}, found {b} more and lost {c} of them. How many {item} does {name} have left?",
     (TWO, TWO, TEENS), ("a + b", "x - c")),
    ("{name} sold {a} {item} on Monday, {b} on Tuesday and {c} on Friday. How many {item} were sold in all?",
     (TWO, TWO, TWO), ("a + b", "x + c")),
    ("{name} buys {a} {item} for {b} dollars each and pays with {c} dollars. How many dollars does {name} get back?",
     (SMALL, SMALL, TWO), ("a * b", "c - x")),
    ("{name} buys {a} bags with {b} {item} each and {c} boxes with {d} {item} each. How many {item} does {name} have?",
     (SMALL, SMALL, SMALL, SMALL), ("a * b", "c * d", "x + y")),
    ("{name} has {a} {item}. {other} has {b} times as many. They find {c} more. How many {item} do they have together?",
     (SMALL, SMALL, TEENS), ("a * b", "a + x", "y + c")),
    ("{name} had {a} {item}, gave {b} to {other}, lost {c} and found {d} more. How many {item} does {name} have now?",
     (TWO, TEENS, TEENS, TEENS), ("a - b", "x - c", "y + d")),
    ("There were {a} {item} in the shop. {b} boxes with {c} {item} each came and {d} {item} were sold. "
     "How many {item} are left in the shop?",
     (TWO, SMALL, SMALL, TEENS), ("b * c", "a + x", "y - d")),
)
UNSEEN_TEMPLATES = (   # every word of these also occurs above: what is new is the way they are put together
    ("There were {a} {item} in the box. {name} lost {b} and {other} lost {c} of them. "
     "How many {item} are left in the box?",
     (TWO, TEENS, TEENS), ("a - b", "x - c")),
    ("{name} had {a} {item} and buys {b} bags with {c} {item} in each bag. How many {item} does {name} have now?",
     (TWO, SMALL, SMALL), ("b * c", "a + x")),
    ("{name} sold {a} {item} on Monday and {b} fewer on Tuesday. How many {item} were sold in all?",
     (TWO, TWO), ("a - b", "a + x")),
    ("{name} and {other} need {a} {item}. {name} has {b} and {other} has {c}. How many more {item} do they need?",
     (TWO, TEENS, TEENS), ("b + c", "a - x")),
    ("There are {a} boxes on the table with {b} {item} in each box. {name} gave {c} more. "
     "How many {item} are there in all?",
     (SMALL, SMALL, TEENS), ("a * b", "x + c")),
)

PIECE = re.compile(r" ?[A-Za-z]+| ?[0-9]|####| ?[-+*=]|[.,?\n]")   # the words of the closed vocabulary
OPERATIONS = {"+": lambda l, r: l + r, "-": lambda l, r: l - r, "*": lambda l, r: l * r}


def arithmetic_pieces() -> list[str]:
    """Every piece an arithmetic prompt or solution can be made of, sorted; a piece may start with its space.

    >>> PIECE.findall("Tom has 27 apples.")
    ['Tom', ' has', ' 2', '7', ' apples', '.']
    """
    pieces = {form for digit in "0123456789" for form in (digit, " " + digit)}
    pieces |= {" +", " -", " *", " =", "####", "\n", ".", ",", "?"}
    for text, _, _ in KNOWN_TEMPLATES + UNSEEN_TEMPLATES:
        pieces |= set(PIECE.findall(re.sub(r" ?\{\w+\}", "", text)))
    pieces |= {form for name in NAMES for form in (name, " " + name)} | {" " + item for item in ITEMS}
    return sorted(pieces)


def arithmetic_problems(split: str, n: int, seed: int) -> list[Problem]:
    """`n` different problems of a split ("train", "heldout" or "unseen"); the same (split, seed) gives the same list.

    >>> print(arithmetic_problems("train", 1, seed=0)[0].answer.isdigit())
    True
    """
    if split not in ("train", "heldout", "unseen"):
        raise ValueError(f"split={split!r} of the arithmetic problems is unknown; use 'train', 'heldout' or 'unseen'")
    templates = UNSEEN_TEMPLATES if split == "unseen" else KNOWN_TEMPLATES
    generator = random.Random(f"{split}-{seed}")
    problems: dict[str, Problem] = {}     # by prompt: a problem is not given twice
    while len(problems) < n:
        problem = _draw_problem(f"arithmetic-{split}-{seed}-{len(problems)}", templates, split != "train", generator)
        problems.setdefault(problem.prompt, problem)
    return list(problems.values())


def worked_solution(problem: Problem) -> str:
    """The solution to imitate in pretraining, ending in the answer: "27 + 15 = 42\\n#### 42"."""
    return problem.solution


def is_heldout(numbers: list[int]) -> bool:
    """Whether problems with these numbers (in whatever order) are kept from training: one in five."""
    key = ",".join(map(str, sorted(numbers)))
    return hashlib.sha256(key.encode()).digest()[0] % 5 == 0


def _draw_problem(id: str, templates: tuple, heldout: bool, generator: random.Random) -> Problem:
    text, ranges, steps = generator.choice(templates)
    while True:
        numbers = [generator.randint(*NUMBER_RANGES[kind]) for kind in ranges]
        lines, result = _work_out(dict(zip("abcd", numbers)), steps)
        if is_heldout(numbers) == heldout and lines:
            break
    name, other = generator.sample(NAMES, 2)
    prompt = text.format(name=name, other=other, item=generator.choice(ITEMS), **dict(zip("abcd", numbers)))
    return Problem(id, prompt, str(result), ". ".join(lines) + f"\n#### {result}")


def _work_out(values: dict[str, int], steps: tuple[str, ...]) -> tuple[list[str], int]:
    """The lines of a solution and its result; no lines when a step leaves 0..999."""
    lines, result = [], 0
    for step, name in zip(steps, "xyz"):
        left, operator, right = step.split()
        result = values[name] = OPERATIONS[operator](values[left], values[right])
        if not 0 <= result <= 999:
            return [], result
        lines.append(f"{values[left]} {operator} {values[right]} = {result}")
    return lines, result


# ----------------------------------------------------------------------------------------------------------------------
# Problems by name
# ----------------------------------------------------------------------------------------------------------------------
ARITHMETIC = {("arithmetic", "train"): ("train", 20_000), ("arithmetic", "test"): ("heldout", 1_000),
              ("arithmetic-unseen", "test"): ("unseen", 1_000)}      # the split and how many when no limit is given


def load_problems(name: str, split: str = "train", seed: int = 0, limit: int | None = None,
                  levels: str | None = None) -> list[Problem]:
    """The problems of a data set: "arithmetic", "arithmetic-unseen", a name in sources.HUB_SETS, or a .jsonl[.gz] file.

    split is "train" or "test"; a file is the same in both. limit keeps that many, drawn with `seed`, in their order.
    levels ("3-5", "4") are Big-Math's. Raises ValueError with one line.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r} is not one of train, test")
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} leaves no problem; give 1 or more")
    if (name, split) in ARITHMETIC:
        kind, count = ARITHMETIC[name, split]
        return arithmetic_problems(kind, limit or count, seed)
    if name in HUB_SETS:
        problems = read_hub(name, split, levels)
    elif is_file_name(name):
        problems = read_file(name)
    else:
        names = [*dict.fromkeys(name for name, _ in ARITHMETIC), *HUB_SETS]
        near = get_close_matches(name, names, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"data={name!r} with split {split!r} is unknown{hint}; "
                         f"give a .jsonl or .jsonl.gz file, or one of {', '.join(names)}")
    if limit is None or limit >= len(problems):
        return problems
    return [problems[index] for index in sorted(random.Random(f"subset-{seed}").sample(range(len(problems)), limit))]


# ----------------------------------------------------------------------------------------------------------------------
# Prompts as tokens
# ----------------------------------------------------------------------------------------------------------------------
def speaks_arithmetic(model: str) -> bool:
    """Whether a model is "tiny", or a folder with its closed vocabulary (a merged export, say), which can read nothing else.

    >>> speaks_arithmetic("tiny"), speaks_arithmetic("Qwen2.5-7B")
    (True, False)
    """
    if model == "tiny":
        return True
    try:
        vocabulary = json.loads((Path(model) / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        return set(arithmetic_pieces()) <= set(vocabulary)      # a byte-level vocabulary has no piece with a plain space
    except (OSError, ValueError, LookupError, TypeError, RecursionError):      # a damaged file is for its reader to refuse
        return False


def default_instruction(name: str) -> str:
    """What is added to each problem of a data set, so that the answer can be found; nothing for arithmetic."""
    return "" if name.startswith("arithmetic") else (
        "Please reason step by step, and put your final answer within \\boxed{}.")


def prompt_texts(problems: Sequence[Problem], tokenizer, instruction: str | None = None) -> list[str]:
    """Prompts as text: the problem, the instruction on a line of its own, in the chat template if there is one."""
    texts = [f"{problem.prompt}\n{instruction}" if instruction else problem.prompt for problem in problems]
    if not getattr(tokenizer, "chat_template", None):
        return [text + "\n" for text in texts]
    return render_chats(texts, tokenizer, [problem.id for problem in problems])


def encode_prompts(problems: Sequence[Problem], tokenizer, instruction: str | None = None) -> list[list[int]]:
    """Each prompt's token ids, with at most one beginning-of-text token."""
    texts, bos = prompt_texts(problems, tokenizer, instruction), tokenizer.bos_token_id
    wants_bos = (bos is not None and not getattr(tokenizer, "chat_template", None)
                 and bos in tokenizer("a")["input_ids"][:1])
    prompts = []
    for problem, text in zip(problems, texts):
        try:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:      # of a damaged tokenizer_config.json, say
            raise ValueError(f"the tokenizer fails on problem {problem.id} ({type(error).__name__}: {str(error)[:100]!r}); "
                             "copy the tokenizer's files again") from None
        if wants_bos and ids[:1] != [bos]:
            ids = [bos, *ids]
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        if not ids:
            raise ValueError(f"the prompt of problem {problem.id} has no tokens; the tokenizer does not know its text")
        prompts.append(ids)
    return prompts


def encode_prompt(problem: Problem, tokenizer, instruction: str | None = None) -> list[int]:
    """One prompt's token ids."""
    return encode_prompts([problem], tokenizer, instruction)[0]


def tell_unknown(problems: list[Problem], ids: list[list[int]], tokenizer, instruction: str | None, name: str) -> None:
    """One line where prompts hold unknown tokens: the model sees the same hole for every such word."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None or unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id):      # GPT-2's is its end token, never used
        return
    holes = [prompt.count(unknown) for prompt in ids]
    if not any(holes):
        return
    first = next(index for index, count in enumerate(holes) if count)
    word = ""
    if getattr(tokenizer, "is_fast", False):
        text = prompt_texts([problems[first]], tokenizer, instruction)[0]
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        start, end = found["offset_mapping"][found["input_ids"].index(unknown)]
        word = f", such as {text[start:end].strip()[:40]!r}"
    print(f"{name}: {sum(holes) / sum(map(len, ids)):.1%} of the prompts' tokens are unknown to the tokenizer{word}; the model "
          f"cannot read them ({sum(map(bool, holes))} of {len(ids)} prompts): take data in its words, or another model")


def fitting(problems: list[Problem], tokenizer, instruction: str | None, max_tokens: int,
            name: str) -> tuple[list[Problem], list[list[int]]]:
    """The problems whose prompt has at most max_tokens tokens, and their ids; the others are counted, never cut.

    Says so in one line where prompts hold words that the tokenizer does not know (byte-level ones know every word).
    """
    ids = encode_prompts(problems, tokenizer, instruction)
    tell_unknown(problems, ids, tokenizer, instruction, name)
    fits = [index for index, prompt in enumerate(ids) if len(prompt) <= max_tokens]
    if not fits:
        raise ValueError(f"{name}: no prompt has at most {max_tokens} tokens, the shortest has {min(map(len, ids))}; "
                         "raise the limit")
    if len(fits) < len(ids):
        print(f"{name}: {len(ids) - len(fits)} of {len(ids)} prompts exceed {max_tokens} tokens and are left out")
    return [problems[index] for index in fits], [ids[index] for index in fits]


def demo() -> None:
    for split in ("train", "heldout", "unseen"):
        problem = arithmetic_problems(split, 1, seed=0)[0]
        print(f"{split:>8}  {problem.prompt}\n          " + worked_solution(problem).replace("\n", "\n          "))
    print(f"{len(arithmetic_pieces())} pieces write all of it: {PIECE.findall(problem.solution)}")


if __name__ == "__main__":
    demo()
