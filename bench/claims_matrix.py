"""The matrix of the claims: which arms are trained, and what all arms of a model share. bench/claims.py runs it.

An arm differs from the others in what its question asks about (tests/test_claims.py compares their settings), a budget is a
model's: steps, prompts, completions, tokens, learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass

# Question, arm, multiple of the model's base learning rate, seeds (3 = all), flags.  In the order in which they are run.
ARMS_TABLE = """
main      nvfp4                  1     3  --weights nvfp4 --noise none
main      nvfp4-aqn              1     3  --weights nvfp4 --noise exponential
main      bf16                   1     3  --weights bf16 --noise none
main      bf16-aqn               1     3  --weights bf16 --noise exponential
main      nf4                    1     3  --weights nf4 --noise none
main      nf4-aqn                1     3  --weights nf4 --noise exponential
sigma     nvfp4-aqn5e-2          1     3  --weights nvfp4 --noise exponential --sigma-start 5e-2
sigma     bf16-aqn5e-2           1     3  --weights bf16 --noise exponential --sigma-start 5e-2
tis       nvfp4-aqn5e-2-notis    1     3  --weights nvfp4 --noise exponential --sigma-start 5e-2 --no-tis
tis       nvfp4-aqn-notis        1     3  --weights nvfp4 --noise exponential --no-tis
lr        bf16-half              0.5   1  --weights bf16 --noise none
lr        bf16-twice             2     1  --weights bf16 --noise none
lr        nvfp4-half             0.5   1  --weights nvfp4 --noise none
lr        nvfp4-twice            2     1  --weights nvfp4 --noise none
lr        nf4-half               0.5   1  --weights nf4 --noise none
lr        nf4-twice              2     1  --weights nf4 --noise none
full      full-tenth             0.1   1  --weights bf16 --full --noise none
full      full-thirtieth         0.033 1  --weights bf16 --full --noise none
schedule  nvfp4-linear           1     1  --weights nvfp4 --noise linear
schedule  nvfp4-cosine           1     1  --weights nvfp4 --noise cosine
schedule  nvfp4-logarithmic      1     1  --weights nvfp4 --noise logarithmic
rank      nvfp4-aqn-rank16       1     1  --weights nvfp4 --noise exponential --rank 16
rank      nvfp4-aqn-rank64       1     1  --weights nvfp4 --noise exponential --rank 64
rank      nvfp4-aqn-rank128      1     1  --weights nvfp4 --noise exponential --rank 128
"""


@dataclass(frozen=True)
class Arm:
    question: str
    name: str
    rate: float  # multiple of the budget's learning rate
    seeds: int
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Budget:
    """What every arm of a model shares."""

    lr: float
    flags: str
    finals: tuple[int, ...] = ()  # completion limits at which the trained model and its base are evaluated on the whole set
    measures: str = ""  # flags that change nothing in a run; a kept one without them is as good


ARMS = tuple(Arm(q, name, float(rate), int(seeds), tuple(flags))
             for q, name, rate, seeds, *flags in (line.split() for line in ARMS_TABLE.strip().splitlines()))
BUDGETS = {
    "tiny": Budget(3e-3, "--steps 20 --eval-every 2 --eval-data arithmetic --eval-limit 300 --sample-every 0",
                   measures="--log-kl-every 1"),
    # bench/times_table.py; in 24 tokens the model must learn to answer shortly, the second limit tells whether that is all.
    "smollm2": Budget(5e-4, "--steps 20 --prompts 6 --group 8 --updates 1 --max-prompt-tokens 64 --max-new-tokens 24 "
                      "--no-mask-truncated --instruction '' --lr-schedule cosine --eval-every 2 --sample-every 0", (24, 96),
                      "--log-kl-every 2"),
    # 256 tokens: the base finishes about a third of GSM8K in them; 400: four fifths.  Cut answers train (their reward is 0).
    "other": Budget(2e-4, "--steps 40 --prompts 16 --group 8 --updates 1 --max-prompt-tokens 320 --max-new-tokens 256 "
                    "--no-mask-truncated --lr-schedule cosine --eval-every 20 --eval-limit 256 --checkpoint-every 20 "
                    "--sample-every 20", (256, 512), "--log-kl-every 2"),
}
