r"""Is that the gold answer? Exact comparison of two short mathematical texts, without running anything.

Idea. Graders that compare floats say that 100005 is 100000 and that 1/2^98 is 1/2^99. Here a number is a Fraction, and
what is not a number is taken apart until it is one, or until two texts are the same letter by letter.

    "3 \frac12 \text{ cm}" --normalise--> "3 \frac{1}{2} cm" --exact_value--> 7/2
    "3.5"                  --normalise--> "3.5"              --exact_value--> 7/2        equal

`compare` says True, False or None; None means that only algebra can tell (\sqrt{12} and 2\sqrt{3}), which is left to
grading/rewards.py, in a process that can be killed. Both sides are taken apart alike:

    number      integer, decimal, fraction, mixed number, power of ten, percent, currency, with a unit: no tolerance
    1, 2        lists and sets: any order; \pm 3 is the list 3, -3
    (1, 2)      tuples and intervals: order and brackets count      [1,2) \cup (3,4]   unions: any order
    pmatrix     entry by entry                                      (C) 7              choices: the letter or the value
    otherwise   text: letter by letter, case ignored; expressions: letter by letter, else None

Policies, where reasonable graders differ: an unreduced fraction is right; y = 2x + 1 is right for 2x + 1, and
60 \times 24 = 1440 for 1440, but an unevaluated 60 \times 24 is not; 50% is right for 50 and for 0.5; units are
ignored; 506 is not 506_7 (base 7), 2:4 is not 1:2.

Cost: microseconds for a GSM8K answer. Limits: answers over MAX_ANSWER characters are compared letter by letter only, so that no
pattern here meets a long text.
Copy along: nothing. It needs the standard library alone.
"""
from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

MAX_ANSWER = 1000       # characters
MAX_PARTS = 32          # members of a list that are matched in any order
MAX_EXPONENT = 400      # of a power of ten that is written out exactly

Leaf = Callable[[str, str], "bool | None"]


# ----------------------------------------------------------------------------------------------------------------------
# Normal form: what LaTeX, markdown and habit add to an answer is taken away again
# ----------------------------------------------------------------------------------------------------------------------
REWRITES = [(re.compile(pattern), new) for pattern, new in (
    (r"\\boxed\s*(?=\{)|\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![A-Za-z])\.?|\\!", ""),
    (r"(?<!\\)\\[()\[\]]|\\?\$|\*\*|`|\\(?:deg|degree)(?![A-Za-z])|\^\{?\s*\\circ\s*\}?|°", ""),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"(?<=\d)\{,\}(?=\d)", ","),
    (r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))", ""),                                  # 12\,000
    (r"\\(?:text|mbox|mathrm|operatorname)(?:bf|it|rm|sf|up|normal)?\s*\{([^{}]*)\}", r" \1 "),
    (r"\\mathbf\s*\{([^{}]*)\}", r" \1 "),
    (r"(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|~|\s+", " "),
    (r"\\%", "%"),
    (r"[−–]", "-"), (r"×", r"\\times "), (r"÷", r"\\div "), (r"π", r"\\pi "), (r"∞", r"\\infty "), (r"∪", r"\\cup "),
    (r"√", r"\\sqrt"), (r"\\leq(?![A-Za-z])|≤", r"\\le "), (r"\\geq(?![A-Za-z])|≥", r"\\ge "),
    (r"\\lor(?![a-z])", " or "),
    (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
    (r"\\frac\s*(\w)", r"\\frac{\1}"), (r"(\\frac\s*\{[^{}]*\})\s*(\w)", r"\1{\2}"),
    (r"\s+([{}^_])|([{}^_])\s+(?=[\w\\{}(-])", r"\1\2"), (r"([\^_])\{(\w)\}", r"\1\2"),
)]
LEFT_HAND_SIDE = re.compile(r"([A-Za-z](?:\([a-z]\))?|\\theta)\s*(?:=|\\(?:in|approx)(?![a-z]))\s*(?=\S)")
UNIT_WORD = r"(?!(?:or|and|to|mod|pi)\b)[A-Za-z]{2,}\.?(?:\^\{?\d\}?)?"
UNIT = re.compile(rf"(?<=[\w}})%!])\s*(?<![A-Za-z\\]){UNIT_WORD}(?:[ -]+{UNIT_WORD})*$")
CHOICE = re.compile(r"\(([A-Z])\)\s*(.*)")


def normalise(answer: str) -> str:
    r"""An answer without decoration: delimiters, spacing, \text, \left, degree signs, a closing full stop.

    >>> normalise(r"$\left( 3, \dfrac12 \right)$."), normalise(r"\$1,\!250 \text{ dollars}")
    ('( 3, \\frac{1}{2} )', '1,250 dollars')
    """
    for pattern, new in REWRITES:
        answer = pattern.sub(new, answer)
    answer = answer.strip().rstrip(".,; ")
    while answer.startswith("{") and _closing(answer) == len(answer) - 1:
        answer = answer[1:-1].strip()
    return answer


def _closing(text: str) -> int:
    """Index of the bracket that closes the one at 0; -1 where there is none. A backslash is part of its brace."""
    depth = 0
    for index, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0:
            return index
    return -1


def without_unit(answer: str) -> str:
    """"12 apples" -> "12"; text that holds no maths is left as it is."""
    bare = UNIT.sub("", answer)
    return bare if re.search(r"\d|\\", bare) else answer


# ----------------------------------------------------------------------------------------------------------------------
# Numbers, exactly
# ----------------------------------------------------------------------------------------------------------------------
DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
SIGNED = r"[-+]?\s*(?:" + DECIMAL + ")"
PLAIN = re.compile(SIGNED)
FRACTION = re.compile(rf"([-+]?)\s*(?:\\frac\{{\s*({SIGNED})\s*\}}\{{\s*({SIGNED})\s*\}}|({DECIMAL})\s*/\s*({SIGNED}))")
MIXED = re.compile(r"([-+]?)\s*(\d+)\s*(?:\\frac\{(\d+)\}\{(\d+)\}|(?<=\s)(\d+)\s*/\s*(\d+))")
POWER_OF_TEN = re.compile(rf"({SIGNED})\s*(?:[eE]|(?:\\times|\\cdot|\*|x)\s*10\s*\^)\s*\{{?\s*([-+]?\d{{1,4}})\s*\}}?")
MAGNITUDE = re.compile(rf"({SIGNED})\s*(hundred|thousand|million|billion|trillion)\b(.*)", re.IGNORECASE)
MAGNITUDES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}


def exact_value(answer: str) -> Fraction | None:
    r"""The number that a normalised answer writes, exactly; None where it is not plainly a number. A % counts as 1.

    >>> exact_value("1,250"), exact_value(r"3\frac{1}{2}"), exact_value("2.5e3"), exact_value("1,2"), exact_value("2+3")
    (Fraction(1250, 1), Fraction(7, 2), Fraction(2500, 1), None, None)
    """
    if len(answer) > MAX_ANSWER:
        return None
    answer = answer.strip("%").strip()
    if magnitude := MAGNITUDE.fullmatch(answer):
        if without_unit("1" + magnitude[3]) != "1":
            return None
        return _decimal(magnitude[1]) * MAGNITUDES[magnitude[2].lower()]
    answer = without_unit(answer).strip("%").strip()
    while answer.startswith("(") and _closing(answer) == len(answer) - 1:
        answer = answer[1:-1].strip()
    if PLAIN.fullmatch(answer):
        return _decimal(answer)
    if match := FRACTION.fullmatch(answer):
        numerator, denominator = _decimal(match[2] or match[4]), _decimal(match[3] or match[5])
        return None if denominator == 0 else (-1 if match[1] == "-" else 1) * numerator / denominator
    if match := MIXED.fullmatch(answer):
        whole, numerator, denominator = int(match[2]), int(match[3] or match[5]), int(match[4] or match[6])
        return None if denominator == 0 else (-1 if match[1] == "-" else 1) * (whole + Fraction(numerator, denominator))
    if (match := POWER_OF_TEN.fullmatch(answer)) and abs(int(match[2])) <= MAX_EXPONENT:
        return _decimal(match[1]) * Fraction(10) ** int(match[2])
    return None


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", "").rstrip("."))


# ----------------------------------------------------------------------------------------------------------------------
# Comparison
# ----------------------------------------------------------------------------------------------------------------------
MATRIX = re.compile(r"\\begin\{[pb]?matrix\}(.*)\\end\{[pb]?matrix\}", re.DOTALL)
SEPARATOR = re.compile(r",(?!\d{3}(?!\d))|,(?<!\d,)|;|\bor\b|\band\b")
OPERATOR = re.compile(r"[*+/]|(?<=[\w)}])\s*-|\\(?:times|cdot|div)|\)\s*\(")
WORDS = re.compile(r"[A-Za-z .'-]{3,}|.*(?<![\\A-Za-z])[A-Za-z]{4,}.*", re.DOTALL)
VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{1,2}(?![A-Za-z])")
# two numbers in a row, a number in base 7, a ratio or a time
NOT_ALGEBRA = re.compile(r"(?:^|[^_^\d])\d+\s+\d|\d_|:|[?&#@]")
COMMAND = re.compile(r"\\([A-Za-z]+)")
ALGEBRA = frozenset(      # commands whose meaning is sure to survive parsing; any other is compared letter by letter
    "frac sqrt binom cdot times div le ge lt gt infty in cup cap lfloor rfloor lceil rceil begin end sum prod int "
    "sin cos tan sec csc cot arcsin arccos arctan sinh cosh tanh log ln exp max min gcd pi alpha beta gamma delta "
    "epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi varphi chi psi omega Gamma Delta Theta "
    "Lambda Sigma Phi Psi Omega".split())


def compare(answer: str, gold: str, leaf: Leaf | None = None) -> bool | None:
    r"""Whether an extracted answer is the gold one; None when `leaf` (algebra on two expressions) is needed to tell.

    >>> compare("2/4", "0.5"), compare("3, -3", r"\pm 3"), compare("[2,3)", "[2,3]"), compare(r"\sqrt{12}", r"2\sqrt3")
    (True, True, False, None)
    """
    if max(len(answer), len(gold)) > MAX_ANSWER:
        return answer.strip() == gold.strip()
    try:
        return _same(normalise(answer), normalise(gold), leaf)
    except RecursionError:      # hundreds of brackets inside each other
        return False


def _same(answer: str, gold: str, leaf: Leaf | None) -> bool | None:
    if not answer or not gold:
        return False
    if _letters(answer) == _letters(gold):
        return True
    value, gold_value = exact_value(answer), exact_value(gold)
    if value is not None and gold_value is not None:
        scales = {("%" in answer, "%" in gold)} & {(True, False), (False, True)} and (1, 100) or (1,)
        wide, narrow = (value, gold_value) if "%" in answer else (gold_value, value)
        return any(wide == narrow * scale for scale in scales)
    kind, members = _members(answer)
    gold_kind, gold_members = _members(gold)
    if kind == "list" and gold_kind != "list":       # one answer in several forms: "25/13, or 1 12/13"
        return len(members) <= MAX_PARTS and _all(_same(member, gold, leaf) for member in members)
    if gold_kind == "list":
        return kind == "list" and _same_in_any_order(members, gold_members, leaf)
    stripped = _without_left_hand_side(answer, gold, gold_value is not None)
    if stripped != (answer, gold):
        return _same(*stripped, leaf)
    if kind or gold_kind:
        if kind != gold_kind or len(members) != len(gold_members):
            return False
        if kind == "union":
            return _same_in_any_order(members, gold_members, leaf)
        return _all(_same(one, other, leaf) for one, other in zip(members, gold_members))
    return _same_choice(answer, gold, leaf) if CHOICE.fullmatch(answer) or CHOICE.fullmatch(gold) else (
        _same_scalar(answer, gold, gold_value is not None, leaf))


def _same_scalar(answer: str, gold: str, gold_is_number: bool, leaf: Leaf | None) -> bool | None:
    """Text, or two expressions that are not the same letter by letter."""
    answer, gold = without_unit(answer), without_unit(gold)
    if _letters(answer) == _letters(gold):
        return True
    if WORDS.fullmatch(answer) or WORDS.fullmatch(gold):
        return _letters(answer).casefold() == _letters(gold).casefold()
    both = f"{answer} ; {gold}"
    if NOT_ALGEBRA.search(both) or not ALGEBRA.issuperset(COMMAND.findall(both)):
        return False
    if gold_is_number and OPERATOR.search(answer):
        return False
    return leaf(answer, gold) if leaf else None


def _same_choice(answer: str, gold: str, leaf: Leaf | None) -> bool | None:
    r"""Multiple choice: "(C)" is C; "(C) 7" is C and 7; "(A) 5 (B) 6" is nothing."""
    letter, value = CHOICE.fullmatch(answer).groups() if CHOICE.fullmatch(answer) else (answer, "")
    gold_letter, gold_value = CHOICE.fullmatch(gold).groups() if CHOICE.fullmatch(gold) else (gold, "")
    if re.search(r"\([A-Z]\)", value):
        return False
    if re.fullmatch("[A-Z]", gold_letter) and (letter == gold_letter or re.fullmatch("[A-Z]", letter)):
        return letter == gold_letter
    return bool(value or gold_value) and _same(value or answer, gold_value or gold, leaf)


def _same_in_any_order(members: list[str], others: list[str], leaf: Leaf | None) -> bool | None:
    """Whether the members can be paired off; None when that hangs on algebra."""
    if len(members) != len(others) or len(members) > MAX_PARTS:
        return False
    others, undecided = list(others), False
    for member in members:
        verdicts = [_same(member, other, leaf) for other in others]
        if True in verdicts:
            del others[verdicts.index(True)]
        elif None in verdicts:
            undecided = True
        else:
            return False
    return None if undecided else True


def _all(verdicts) -> bool | None:
    verdicts = list(verdicts)
    return False if False in verdicts else None if None in verdicts else True


def _letters(text: str) -> str:
    """Without white space, except between two numbers: "1 2" is not 12."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def _without_left_hand_side(answer: str, gold: str, gold_is_number: bool) -> tuple[str, str]:
    """x = 5 is 5, but not y = 5; Total = 1440 and 60 * 24 = 1440 are 1440, but 1439 = 1440 and x^2 = 1440 are not."""
    left, gold_left = LEFT_HAND_SIDE.match(answer), LEFT_HAND_SIDE.match(gold)
    if left and gold_left and left[1] != gold_left[1] or not (left and gold_left) and "=" in answer and "=" in gold:
        return answer, gold
    if gold_is_number and not left and answer.count("=") == 1:
        before, after = (side.strip() for side in answer.split("="))
        if not VARIABLE.search(before) and exact_value(before) is None and exact_value(after) is not None:
            return after, gold
    return answer[left.end():] if left else answer, gold[gold_left.end():] if gold_left else gold


def _members(text: str) -> tuple[str, list[str]]:
    r"""The kind of a composite answer and its members; ("", []) for a scalar.

    >>> _members("1, 2 or 3"), _members(r"\{1\}"), _members("[0, 1)"), _members(r"\pm 2"), _members("x + 1")
    (('list', ['1', '2', '3']), ('list', ['1']), ('[)', ['0', '1']), ('list', ['2', '-2']), ('', []))
    """
    if matrix := MATRIX.fullmatch(text):
        rows = [row.split("&") for row in matrix[1].strip().removesuffix("\\\\").split("\\\\")]
        return f"matrix of {len(rows)} rows", [entry.strip() for row in rows for entry in row]
    is_set = text.startswith("\\{") and _closing(text[1:]) == len(text) - 2
    members = _split(text[2:].removesuffix("\\}") if is_set else text)
    members = [signed for member in members for signed in _plus_and_minus(member)]
    if is_set or len(members) > 1:
        return "list", members
    parts = [part.strip() for part in _split(text, re.compile(r"\\cup(?![a-z])"))]
    if len(parts) > 1:
        return "union", parts
    if text[0] in "([" and _closing(text) == len(text) - 1 and text[-1] in ")]":
        members = _split(text[1:-1], re.compile("[,;]"))
        if len(members) > 1:
            return text[0] + text[-1], members
    return "", []


def _plus_and_minus(member: str) -> list[str]:
    if "\\pm" not in member:
        return [member]
    minus = re.sub(r"\\pm(?![a-z])\s*", "-", member)
    return [re.sub(r"^\\pm\s*", "", member).replace("\\pm", "+"), minus]


def _split(text: str, separator: re.Pattern = SEPARATOR) -> list[str]:
    """Split where no bracket is open."""
    parts, depth, start, position = [], 0, 0, 0
    while position < len(text):
        depth += (text[position] in "([{") - (text[position] in ")]}")
        match = separator.match(text, position) if depth == 0 else None
        if match:
            parts.append(text[start:position].strip())
            start = match.end()
        position = match.end() if match else position + 1
    return [part for part in [*parts, text[start:].strip()] if part]


def demo() -> None:
    for answer, gold in ((r"3\frac12 \text{ cm}", "3.5"), ("100005", "100000"), ("0.333", r"\frac{1}{3}"), ("3, -3", r"\pm 3"),
                         ("[2,3)", "[2,3]"), (r"50\%", "0.5"), (r"\sqrt{12}", r"2\sqrt{3}")):
        verdict = compare(answer, gold)
        print(f"{answer:>20}  is  {gold:<14} {'only algebra can tell' if verdict is None else verdict}")


if __name__ == "__main__":
    demo()
