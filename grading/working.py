r"""Is what stands before the answer true? The equations of a completion, worked out again.

Idea. A reward that compares answers pays for answers, whatever led there. What it does not look at is free to drift:

    Ella has 82 shells. Ben has 30 fewer than Ella. How many do they have together?

    52 + 82 ...           82 - 30 = 52. 82 + 52 = 134     #### 134    right answer, right working: reward 1
                          42 - 30 = 52. 82 + 52 = 134     #### 134    right answer, wrong working: reward 1
                          \__________/
                          false, and no reward has seen it

So this is measured beside the reward, never paid: `working` is the share of right answers whose every equation holds.
An equation is "a op b = c" with whole numbers and one of + - *. It counts only where it stands alone, so that what
is part of something longer ("2 + 3 + 4 = 9", "1.5 + 2 = 3.5", "5 + 2 = 3 + 4") is not taken for a false one. What has no
such equation says nothing, and a share of nothing is None.

Source: ours. Process rewards (Lightman et al., arXiv 2305.20050) judge every step with a trained model; a program can do it
here because the steps of the built-in task have one form.
Cost: one regular expression a completion. Limits: true equations may still be the wrong ones for the question; other notations
(LaTeX, division, units) are not read, so on other data sets it describes what it can read, and no more.
Copy along: nothing. It needs the standard library alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
EQUATION = re.compile(
    r"(?<![\w.,:/^$)}\]])(?<![-+*/=^] )(?<![-+*/=^])"  # nothing of a number or of a longer sum before it
    r"(\d{1,15}) ?([-+*]) ?(\d{1,15}) ?= ?(-?\d{1,15})"
    r"(?![\d%:^]|[.,/]\d| ?[-+*/=^(\\])"  # nor after it
)


def equations(text: str) -> list[tuple[str, bool]]:
    """Every equation that stands alone, and whether it is true.

    >>> equations("42 - 30 = 52. 82 + 52 = 134\\n#### 134")
    [('42 - 30 = 52', False), ('82 + 52 = 134', True)]
    """
    return [(found[0], OPERATIONS[found[2]](int(found[1]), int(found[3])) == int(found[4])) for found in EQUATION.finditer(text)]


def working_holds(text: str) -> bool | None:
    """Whether every equation of a completion is true; None where it has none.

    >>> working_holds("2 + 3 = 5. 5 * 2 = 10"), working_holds("2 + 3 = 6"), working_holds("#### 5")
    (True, False, None)
    """
    found = equations(text)
    return all(is_true for _, is_true in found) if found else None


def share_that_holds(texts: Iterable[str]) -> float | None:
    """Of the texts that have equations, the share in which all of them are true; None where no text has any."""
    verdicts = [verdict for verdict in map(working_holds, texts) if verdict is not None]
    return sum(verdicts) / len(verdicts) if verdicts else None


def demo() -> None:
    """Two completions that an exact-answer reward cannot tell apart."""
    for text in ("82 - 30 = 52. 82 + 52 = 134\n#### 134", "42 - 30 = 52. 82 + 52 = 134\n#### 134"):
        print(f"{text!r}: reward 1 for 134, working holds: {working_holds(text)}")


if __name__ == "__main__":
    demo()
