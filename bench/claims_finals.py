"""Final evaluations of the claims' runs: base against trained, arm against arm, problem by problem.

A final evaluation keeps one 0 or 1 a problem (`right`), so a difference has the standard error of paired answers, which is
smaller than that of two shares: what both get right or both get wrong cancels. It is an error over problems; how much another
seed of training would differ it cannot know.

    <arm>-seed<k>.final.json, base-<weights>.final.json     from bench/claims.py; read by bench/claims_report.py
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from claims_matrix import ARMS, Arm


def found_in(folder: Path, arm: Arm) -> Iterator[tuple[int, dict, dict]]:
    """(seed, base, trained) of an arm's runs whose final evaluation is kept, as far as their base's is."""
    weights = arm.flags[arm.flags.index("--weights") + 1]
    before = folder / f"base-{weights}.final.json"
    for seed in range(arm.seeds):
        after = folder / f"{arm.name}-seed{seed}.final.json"
        if after.exists() and before.exists():
            yield seed, json.loads(before.read_text()), json.loads(after.read_text())


def budgets(found: dict) -> list[str]:
    return [key for key in found if key.isdigit()]


def paired(above: str, below: str) -> tuple[float, float]:
    """Mean difference of two strings of verdicts on the same problems, and its standard error."""
    differences = [int(a) - int(b) for a, b in zip(above, below, strict=True)]
    return statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))


def changed(before: str, after: str) -> tuple[int, int]:
    """How many answers became right, and how many wrong."""
    return sum(a > b for a, b in zip(after, before, strict=True)), sum(a < b for a, b in zip(after, before, strict=True))


def gains_table(folder: Path) -> list[str]:
    """Each trained model and its base, on the same problems, at every budget."""
    rows = []
    for arm in ARMS:
        for seed, base, trained in found_in(folder, arm):
            for tokens in budgets(trained):
                before, after = base[tokens], trained[tokens]
                gain, error = paired(after["right"], before["right"])
                right, wrong = changed(before["right"], after["right"])
                rows.append(
                    f"| {arm.name} | {seed} | {tokens} | {before['pass@1']:.3f} ± {before['stderr']:.3f} "
                    f"| {after['pass@1']:.3f} ± {after['stderr']:.3f} | {gain:+.3f} ± {error:.3f} "
                    f"| {right}, {wrong} | {before['truncated']:.3f}, {after['truncated']:.3f} "
                    f"| {before['mean_length']:.0f}, {after['mean_length']:.0f} | {after['problems']} |")
    head = ["Final evaluations, greedy, without noise (± standard error; the gain's is that of paired answers):", "",
            "| arm | seed | tokens | base | trained | gain | now right, now wrong | cut: base, trained "
            "| length: base, trained | problems |", "|" + "---|" * 10]
    return [*head, *rows, ""] if rows else []


def arms_table(folder: Path, pairs: tuple[tuple[str, str, str], ...]) -> list[str]:
    """Arm against arm (claim, above, below), seed by seed, on the same problems."""
    finals = {arm.name: {seed: trained for seed, _, trained in found_in(folder, arm)} for arm in ARMS}
    rows = []
    for claim, above, below in pairs:
        for seed in sorted(finals[above].keys() & finals[below].keys()):
            for tokens in budgets(finals[above][seed]):
                a, b = (finals[name][seed][tokens]["right"] for name in (above, below))
                difference, error = paired(a, b)
                only = changed(b, a)
                rows.append(f"| {claim} | {above} - {below} | {seed} | {tokens} | {difference:+.3f} ± {error:.3f} "
                            f"| {only[0]}, {only[1]} of {len(a)} |")
    head = ["Arm against arm, problem by problem (± standard error over problems, not over seeds):", "",
            "| claim | arms | seed | tokens | difference | right in the first alone, in the second alone |",
            "|---|---|---|---|---|---|"]
    return [*head, *rows, ""] if rows else []


def readme_table(folder: Path, runs: dict) -> list[str]:
    """The short form for README.md: before and after at every budget; `runs` as claims_report.load gives them."""
    rows, head = [], []
    for arm in ARMS:
        for seed, base, trained in found_in(folder, arm):
            run = runs[arm.name][seed]
            head = [f"{n} tokens, {when}" for n in budgets(trained)
                    for when in ("before", "after", "gain", "now right, now wrong")]
            scores = [cell for n in budgets(trained) for cell in (
                f"{base[n]['pass@1']:.3f}", f"{trained[n]['pass@1']:.3f}",
                "{:+.1f} ± {:.1f}".format(*(100 * x for x in paired(trained[n]["right"], base[n]["right"]))),
                "{}, {}".format(*changed(base[n]["right"], trained[n]["right"])))]
            cost = [f"{run.head['seconds']:.0f}", f"{max(value for _, value in run.series('memory/peak_gib')):.1f}"]
            rows.append(f"| {' | '.join([arm.name, str(seed), *scores, *cost])} |")
    titles = [f"{folder.name}: arm", "seed", *head, "seconds in steps", "peak GiB"]
    return [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles), *rows] if rows else []
