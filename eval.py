"""How good is it? pass@1 with its standard error, maj@n, and every completion with its verdict.

    python eval.py --model Qwen2.5-7B --adapter runs/my-run/adapter --data gsm8k
    torchrun --nproc-per-node 8 eval.py --model Qwen2.5-7B --data math500
    python eval.py --model Qwen2.5-7B --data aime24 --samples 16 --temperature 0.6 --top-p 0.95 --out aime.jsonl

Idea. A score without its error bar is an anecdote: on AIME's 30 problems one problem is 3.3 points. So each score comes
with the standard error over problems, and base and adapter are sampled in one call, on the same problems with the same
random numbers, so that their difference has a (much smaller) standard error of its own.

    problem   samples          mean     majority
       1      7  7  9  7       0.75     7   right           pass@1 = mean of the means = 0.375
       2      3  5  -  4       0.00     3   wrong           stderr = std(means) / sqrt(P), clustered by problem
                                                            maj@n  = share of right majorities = 0.5

Samples of one problem are not independent, so they are averaged first; P n samples are not P n observations. A vote is
cast by value (0.5 and 1/2 vote together), a completion without an answer does not vote, and a tie goes to the answer
that came first. Evaluation may truncate the distribution (--top-p); training may not. Noise is off.

Differs from the QeRL release, whose GSM8K evaluator grades the first character and leaves the adapter out: here a test
shows that the adapter changes the completions.

Source: standard errors clustered by problem, Miller, arXiv 2411.00640.
Cost: that of the rollouts. Limits: an interrupted evaluation is lost.
Copy along: rollout.py, lora.py, convert/loader.py, files/peft_files.py, problems/tasks.py, grading/answers.py,
grading/equality.py, grading/rewards.py, grading/working.py, training/config.py, training/distributed.py, training/report.py.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from convert.loader import load_model, pick_device
from files.peft_files import read_adapter
from grading.answers import extract_answer
from grading.equality import exact_value, normalise
from grading.rewards import Grader
from grading.working import share_that_holds, working_holds
from lora import check_fit, load_adapter
from problems.tasks import Problem, default_instruction, encode_prompt, fitting, load_problems, speaks_arithmetic
from rollout import Rollout, Sampling
from training import distributed
from training.config import Parser
from training.distributed import ALONE, Ranks, undeal
from training.report import one_line

EVAL_STEP = 2**31 - 1      # the random numbers of an evaluation are those of no training step


def majority(answers: Sequence[str | None]) -> int | None:
    """Index of the first sample that gives the most frequent answer; None where none gives any.

    >>> majority(["3", "1/2", None, "0.5"])
    1
    """
    votes: dict[object, list[int]] = {}
    for index, answer in enumerate(answers):
        if answer is not None:
            plain = normalise(answer[:1000])
            value = exact_value(plain)
            votes.setdefault("".join(plain.split()) if value is None else value, []).append(index)
    return max(votes.values(), key=len)[0] if votes else None      # max keeps the first of equals


def standard_error(means: Sequence[float]) -> float | None:
    """Of the mean of P problems' means; None for one problem, which says nothing about the others."""
    return statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None


def evaluate(rollout: Rollout, problems: Sequence[Problem], tokenizer, grader: Grader, *, stop_ids: Sequence[int],
             max_new_tokens: int, samples: int = 1, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0,
             instruction: str | None = None, progress: Callable[[int, int, int], None] | None = None,
             records: list[dict] | None = None, ranks: Ranks = ALONE) -> dict[str, float | None]:
    """Sample and grade `samples` completions of each problem under the model's present adapter, without noise.

    Appends one dict a completion to `records`. Returns pass@1, pass@1_stderr, maj@n (n > 1), mean_length (tokens),
    truncated and answered (shares of completions), working (share of right answers whose every equation holds, or None),
    problems and samples. Raises ValueError for an empty set, a prompt that leaves no room in the rollout's max_len, or
    several greedy samples. Each rank samples and grades a part; all get the whole's records and scores, however many they are.
    """
    if not problems:
        raise ValueError("there is no problem to evaluate on")
    if samples < 1 or (samples > 1 and temperature == 0):
        raise ValueError(f"samples={samples} at temperature={temperature} "
                         "gives nothing new; greedy is one sample, else raise the temperature")
    sampling = Sampling(max_new_tokens, temperature, top_p=top_p, stop_ids=stop_ids)

    def answered() -> list[list[dict]]:
        places = ranks.deal(range(len(problems)))
        chosen = [problems[place] for place in places]
        prompts = [encode_prompt(problem, tokenizer, instruction) for problem in chosen]
        groups = rollout.generate(prompts, samples, sampling, key=(seed, EVAL_STEP), prompt_keys=places, progress=progress)
        return graded(chosen, groups, tokenizer, grader)

    rows = undeal(ranks.together(answered))      # P lists of one dict a sample
    flat = [one for row in rows for one in row]
    if records is not None:
        records += flat
    means = [statistics.fmean(one["correct"] for one in row) for row in rows]
    scores = {"pass@1": statistics.fmean(means), "pass@1_stderr": standard_error(means)}
    if samples > 1:
        votes = [majority([one["extracted"] for one in row]) for row in rows]
        scores[f"maj@{samples}"] = statistics.fmean(
            vote is not None and row[vote]["correct"] for vote, row in zip(votes, rows))
    return scores | {
        "mean_length": statistics.fmean(one["tokens"] for one in flat),
        "truncated": statistics.fmean(not one["stopped"] for one in flat),
        "answered": statistics.fmean(one["extracted"] is not None for one in flat),
        "working": share_that_holds(one["completion"] for one in flat if one["correct"]),
        "problems": len(problems), "samples": samples}


def graded(problems: Sequence[Problem], groups: list[list], tokenizer, grader: Grader) -> list[list[dict]]:
    """The record of each completion of each problem: its text, the answer found in it, and the verdict."""
    texts = [[tokenizer.decode(one.tokens, skip_special_tokens=True) for one in group] for group in groups]
    answers = [[extract_answer(text) for text in group] for group in texts]
    verdicts = iter(grader.compare_many(
        [(answer, problem.answer) for problem, group in zip(problems, answers) for answer in group]))
    return [[{"id": problem.id, "prompt": problem.prompt, "gold": problem.answer, "sample": index, "completion": text,
              "extracted": answer, "correct": next(verdicts), "tokens": len(one.tokens), "stopped": one.stopped,
              "working": working_holds(text)}
             for index, (one, text, answer) in enumerate(zip(*group))]
            for problem, *group in zip(problems, groups, texts, answers)]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with what depends on the model and the data filled in; ValueError for what cannot work."""
    parser = Parser(prog="eval.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", default="tiny", help="hub id, short name, local folder, or the tiny model [tiny]")
    parser.add_argument("--adapter", help="PEFT folder; the base is evaluated beside it [none]")
    parser.add_argument("--no-base", action="store_true", help="with --adapter: leave the base out")
    parser.add_argument("--data", help="gsm8k | math | math500 | aime24 | aime25 | amc23 | arithmetic | "
                        "arithmetic-unseen | a .jsonl or .jsonl.gz file [arithmetic for tiny, else gsm8k]")
    parser.add_argument("--samples", type=int, default=1, help="completions a problem [1]")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy [0]")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this share [1]")
    parser.add_argument("--max-new-tokens", type=int, help="completion limit [4096; arithmetic: 64]")
    parser.add_argument("--max-prompt-tokens", type=int, default=1024, help="longer prompts are left out [1024]")
    parser.add_argument("--instruction", help="text added to each problem [asks for \\boxed{}; none for arithmetic]")
    parser.add_argument("--weights", default="nvfp4", choices=("nvfp4", "nf4", "bf16"), help="how the base is held")
    parser.add_argument("--limit", type=int, help="so many problems, drawn with --seed [all]")
    parser.add_argument("--slots", type=int, help="sequences decoded at once [planned from free memory]")
    parser.add_argument("--seed", type=int, default=0, help="of the samples and of --limit [0]")
    parser.add_argument("--out", type=Path, help="jsonl of every completion with its verdict [none]")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    options = parser.parse_args(argv)
    tiny = speaks_arithmetic(options.model)
    options.data = options.data or ("arithmetic" if tiny else "gsm8k")
    if options.max_new_tokens is None:
        options.max_new_tokens = 64 if options.data.startswith("arithmetic") or tiny else 4096
    if options.instruction is None:
        options.instruction = "" if tiny else default_instruction(options.data)
    if options.no_base and not options.adapter:
        raise ValueError("--no-base leaves nothing to evaluate without --adapter; give one")
    if options.max_prompt_tokens < 1:
        raise ValueError(f"max_prompt_tokens={options.max_prompt_tokens} leaves no prompt; give 1 or more")
    Sampling(options.max_new_tokens, options.temperature, top_p=options.top_p)      # refuses what is out of range
    return options


def run(options: argparse.Namespace, ranks: Ranks = ALONE) -> list[dict]:
    """Evaluate base and adapter; prints the table, writes the records, returns the scores of each."""
    trained = read_adapter(options.adapter) if options.adapter else None      # refused here if it is none,
    problems = load_problems(options.data, "test", options.seed, options.limit)
    writes = options.out and ranks.is_first
    out = open(options.out, "w", encoding="utf-8") if writes else None      # a bad path fails now, not at the end
    device = pick_device(options.device)
    ranks.use(device)
    model, tokenizer, info = load_model(options.model, weights=options.weights, device=device)
    if trained:
        check_fit(trained, model.config.projections(), options.adapter)      # or does not fit: not after hours with the base
    problems, _ = fitting(problems, tokenizer, options.instruction, options.max_prompt_tokens, options.data)
    variants = [] if options.no_base else [None]
    variants += [options.adapter] if options.adapter else []
    print(f"{options.data}: {len(problems)} problems x {options.samples}, temperature {options.temperature:g}, "
          f"{options.model} in {options.weights}")
    scores, columns = [], []
    with Grader() as grader:
        for adapter in variants:
            if adapter:
                load_adapter(model, adapter)
            rollout = Rollout(model, max_len=options.max_prompt_tokens + options.max_new_tokens, slots=options.slots,
                              tokenizer=tokenizer)
            records: list[dict] = []
            with tqdm(total=len(ranks.deal(problems)) * options.samples, desc=adapter or "base", unit="completion",
                      leave=False, disable=None) as bar:      # silent in a log file
                found = evaluate(rollout, problems, tokenizer, grader, stop_ids=info.stop_ids, samples=options.samples,
                                 temperature=options.temperature, top_p=options.top_p, seed=options.seed,
                                 max_new_tokens=options.max_new_tokens, instruction=options.instruction,
                                 progress=lambda done, total, tokens, bar=bar: bar.update(done - bar.n),
                                 records=records, ranks=ranks)
            rollout.free()
            scores.append({"adapter": adapter} | found)
            columns.append([row["correct"] for row in records])
            print(line(adapter or "base", found))
            if out:
                out.writelines(json.dumps({"adapter": adapter} | row, ensure_ascii=False) + "\n" for row in records)
                out.flush()
    if len(columns) == 2:
        print(difference(*columns, options.samples))
    if out:
        out.close()
    return scores


def line(name: str, scores: dict) -> str:
    """One line of the table."""
    error, working = scores["pass@1_stderr"], scores.get("working")
    votes = "".join(f"   {key} {value:.4f}" for key, value in scores.items() if key.startswith("maj@"))
    return (f"  {name:<24} pass@1 {scores['pass@1']:.4f}" + ("" if error is None else f" +- {error:.4f}") + votes
            + f"   length {scores['mean_length']:.0f}   truncated {scores['truncated']:.3f}   "
            + f"answered {scores['answered']:.3f}" + ("" if working is None else f"   working {working:.3f}"))


def difference(base: list[bool], adapter: list[bool], samples: int) -> str:
    """Adapter minus base, paired by problem."""
    gains = [after - before for before, after in zip(base, adapter)]
    means = [sum(gains[start : start + samples]) / samples for start in range(0, len(gains), samples)]
    error = standard_error(means)
    return f"  difference               {statistics.fmean(means):+.4f}" + (
        "" if error is None else f" +- {error:.4f} (paired by problem)")


def main(argv: Sequence[str] | None = None) -> int:
    with distributed.join(os.environ) as ranks:
        try:
            run(ranks.first(lambda: parse(argv)), ranks)
        except (ValueError, OSError, RuntimeError, MemoryError) as error:      # RuntimeError: out of GPU memory
            return ranks.end(f"eval.py{ranks.who}: {one_line(error)}", 1 if isinstance(error, RuntimeError) else 2)
        except KeyboardInterrupt:
            return ranks.end("eval.py: interrupted; what was not finished is lost", 130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
