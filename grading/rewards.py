r"""Rewards: 1 for the right answer, 0 for anything else, and nothing that a model writes can stop the training.

Idea. `grade(completion, gold) -> bool` is the one door. Behind it:

    completion --answers.extract_answer--> "\sqrt{12}" --equality.compare--> True | False          (microseconds, here)
                                                                          \-> None: only algebra can tell
                                                                               |
                       math-verify's LaTeX parser + sympy, in a process that can be killed         (milliseconds)

Algebra. Two expressions are equal when they have the same value, to 2000 digits of their own size, at three positive
rational points (and at three negative ones, unless roots or logarithms make those a matter of branches: \sqrt{1/n} is
1/\sqrt{n} for positive n). This is exact for what occurs in answers, cannot hang as `simplify` can, and sees that
1/2^98 is not 1/2^99, which math-verify's own comparison does not. Equations are equal when one is a multiple of the
other; inequalities, sets and the like are left to math-verify.

A reward of one's own: `CustomReward("my_rewards.py:length_bonus")` calls

    def length_bonus(prompt: str, completion: str, answer: str) -> float

for each completion, in worker processes too. A call that raises, takes longer than its time, kills its process or gives
NaN earns 0, is counted in `failures`, and the step says so in one line. Where every call of a step is like that, the
function is at fault and not a completion: the training ends (`check_step`).

Cost: 128 GSM8K completions grade in a few milliseconds and start no process.
Limits: algebra needs math-verify 0.9, and with it antlr 4.13: other versions parse, and so reward, differently.
Copy along: grading/answers.py, grading/equality.py, grading/killable.py.
"""
from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence

from grading.answers import extract_answer
from grading.equality import compare
from grading.killable import CallFailed, Pool

__all__ = ["CustomReward", "Grader", "extract_answer", "grade"]

ALGEBRA_CPU_S, ALGEBRA_WALL_S, ALGEBRA_GIB = 3.0, 60.0, 4.0
DIGITS = 2000      # 2^2005 and 2^2005 + 1 agree in the first 600


def grade(completion: str, gold: str) -> bool:
    r"""Whether a completion's answer is the gold answer.

    >>> grade(r"so we get \boxed{0.5}", r"\frac{1}{2}"), grade("5 or 7", "7"), grade("#### 100005", "100000")
    (True, False, False)
    """
    return _shared_grader(os.getpid()).grade(completion, gold)


@functools.lru_cache(maxsize=1)
def _shared_grader(process_id: int) -> Grader:
    """One grader a process: a fork must not share its parent's worker."""
    return Grader(workers=1)


class Grader:
    """Exact grading. Thread-safe; holds `workers` processes, none of which is started before algebra is needed."""

    def __init__(self, workers: int | None = None, log: Callable[[str], None] = print, cpu_s: float = ALGEBRA_CPU_S):
        self.failures = 0          # answers that could not be compared, for want of time, and so count as wrong
        self._log = log
        self._pool = Pool(f"{os.path.abspath(__file__)}:compare_with_algebra", workers or min(4, os.cpu_count() or 1),
                          wall_s=ALGEBRA_WALL_S, cpu_s=cpu_s, memory_gib=ALGEBRA_GIB, quiet=True)

    def grade(self, completion: str, gold: str) -> bool:
        return self.grade_many([(completion, gold)])[0]

    def grade_many(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Verdicts on (completion, gold) pairs, in order; what needs algebra is shared out among the workers."""
        return self.compare_many([(extract_answer(completion), gold) for completion, gold in pairs])

    def compare_many(self, pairs: Sequence[tuple[str | None, str]]) -> list[bool]:
        """Verdicts on (extracted answer, gold) pairs."""
        verdicts = [bool(answer) and compare(answer, gold) for answer, gold in pairs]
        undecided = [index for index, verdict in enumerate(verdicts) if verdict is None]
        outcomes = self._pool.map([dict(zip(("answer", "gold"), pairs[index])) for index in undecided])
        failed = []
        for index, outcome in zip(undecided, outcomes):
            verdicts[index] = outcome is True
            if isinstance(outcome, CallFailed):
                failed.append(f"{pairs[index][0][:40]!r} ({outcome})")
        if failed:
            self.failures += len(failed)
            self._log(f"grading: {len(failed)} of {len(verdicts)} answers could not be compared and count as wrong, "
                      f"for example {failed[0]}")
        return verdicts

    def close(self) -> None:
        self._pool.close()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_) -> None:
        self.close()


class CustomReward:
    """A user's reward function, "path/to/file.py:function", called once a completion in processes that can be killed.

    ValueError at once where it cannot be loaded.
    """

    def __init__(self, target: str, timeout_s: float = 10.0, workers: int | None = None,
                 log: Callable[[str], None] = print):
        self.target, self.failures, self._log = target, 0, log
        self._succeeded = self._checked = 0      # calls that gave a reward since the last check; failures at that time
        self._pool = Pool(target, workers or min(4, os.cpu_count() or 1), wall_s=timeout_s)
        if problem := self._pool.check():
            raise ValueError(f"reward={target!r}: {problem}")

    def score(self, calls: Sequence[dict]) -> list[float]:
        """The rewards of calls such as dict(prompt=..., completion=..., answer=...), in order.

        0 where the function gave no finite number, with one line for all of them together.
        """
        rewards, failed, example = [], Counter(), ""
        for outcome in self._pool.map(calls):
            if isinstance(outcome, bool | int | float) and math.isfinite(outcome):
                self._succeeded += 1
                rewards.append(float(outcome))
                continue
            rewards.append(0.0)
            failed[outcome.reason if isinstance(outcome, CallFailed) else "not a finite number"] += 1
            example = example or str(outcome)[:200]
        if failed:
            self.failures += failed.total()
            kinds = ", ".join(f"{count} {reason}" for reason, count in failed.items())
            self._log(f"reward {self.target}: {failed.total()} of {len(rewards)} completions got 0 ({kinds}), "
                      f"for example: {example}")
        return rewards

    def check_step(self, gather: Callable[[object], list] = lambda value: [value]) -> int:
        """Failures so far; ValueError where not one call since the last check gave a reward. `gather`: over all ranks."""
        counts = gather((self._succeeded, self.failures - self._checked, self.failures))
        succeeded, failed, in_all = map(sum, zip(*counts))
        self._succeeded, self._checked = 0, self.failures
        if failed and not succeeded:
            raise ValueError(f"reward {self.target} gave none of the step's {failed} completions a reward, so that nothing "
                             "can be learnt (a mended function needs a new --out)")
        return in_all

    def close(self) -> None:
        self._pool.close()


# ----------------------------------------------------------------------------------------------------------------------
# What runs in the worker
# ----------------------------------------------------------------------------------------------------------------------
def compare_with_algebra(answer: str, gold: str) -> bool:
    """equality.compare with sympy for what is not equal letter by letter."""
    return compare(answer, gold, leaf=algebraically_equal) is True


def algebraically_equal(answer: str, gold: str) -> bool:
    """Whether two LaTeX expressions, equations or relations mean the same; False where one cannot be parsed."""
    import sympy
    one, other = _parse(answer), _parse(gold)
    if one is None or other is None:
        return False
    if one == other:
        return True
    if isinstance(one, sympy.Equality) and isinstance(other, sympy.Equality):
        return _is_multiple(one.lhs - one.rhs, other.lhs - other.rhs)
    if isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr):
        return _same_values(one, other)
    if isinstance(one, sympy.Expr | sympy.Equality) or isinstance(other, sympy.Expr | sympy.Equality):
        return False
    from math_verify import verify
    return verify(other, one, timeout_seconds=None)


def _parse(text: str):
    """A sympy object with rationals in place of floats and i as the imaginary unit; None for what is no LaTeX."""
    import sympy
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig
    try:
        parsed = latex2sympy(
            text, normalization_config=NormalizationConfig(
                basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False),
            conversion_config=ConversionConfig(interpret_as_mixed_fractions=True, lowercase_symbols=False))
    except Exception:     # the parser raises plain Exceptions, and whatever its grammar runs into
        return None
    if not isinstance(parsed, sympy.Basic):
        return None
    exact = {number: sympy.Rational(str(number)) for number in parsed.atoms(sympy.Float)}
    return parsed.xreplace({**exact, sympy.Symbol("i"): sympy.I})


def _points(*expressions) -> list[dict]:
    """Rational values for all symbols: three positive points, and three negative ones where no branch is at stake."""
    import sympy
    symbols = sorted(set().union(*(expression.free_symbols for expression in expressions)), key=str)
    branches = any(not power.exp.is_integer for expression in expressions for power in expression.atoms(sympy.Pow))
    branches = branches or any(expression.has(sympy.log) for expression in expressions)
    signs = (1,) if branches or not symbols else (1, -1)
    return [{symbol: sign * sympy.Rational(101 + 37 * index + 53 * point, 97) for index, symbol in enumerate(symbols)}
            for sign in signs for point in range(3 if symbols else 1)]


def _same_values(one, other) -> bool:
    import sympy
    for point in _points(one, other):
        for digits in (30, DIGITS):      # most that differ do so at once
            values = [sympy.N(side.xreplace(point), digits + 20) for side in (one, other)]
            if not all(value.is_number and value.is_finite for value in values):
                return False
            if abs(values[0] - values[1]) > max(map(abs, values)) * sympy.Float(10) ** -digits:
                return False
    return True


def _is_multiple(one, other) -> bool:
    """Whether one = c * other with the same c at every point: then one = 0 and other = 0 are the same equation."""
    import sympy
    ratios = [sympy.N((one / other).xreplace(point), 50) for point in _points(one, other)]
    if not all(ratio.is_number and ratio.is_finite and ratio != 0 for ratio in ratios):
        return False
    return len(ratios) > 1 and all(abs(ratio / ratios[0] - 1) < 1e-30 for ratio in ratios)


def demo() -> None:
    with Grader(workers=1, cpu_s=1.5) as grader:
        for completion, gold in ((r"\boxed{2\sqrt3}", r"\sqrt{12}"), (r"\boxed{\frac{1}{2^{98}}}", r"\frac{1}{2^{99}}"),
                                 ("#### 1,250", "1250"), (r"\boxed{5} or \boxed{7}", "7"), ("", "7")):
            print(f"{completion:>26}   gold {gold:<18} {grader.grade(completion, gold)}")
        print("and one that no computer can work out; its process is killed, and the answer counts as wrong:")
        grader.grade(r"\boxed{9^{9^{9^{9}}}}", r"x + 1")


if __name__ == "__main__":
    demo()
