"""Makes assets/tiny: the pretrained model of the embedded main job, in the form of any model of the hub.

    python -m assets.make_tiny              what can be set
    python -m assets.make_tiny OUT          about a minute on a GPU, an hour or more on a CPU; assets/tiny as OUT replaces it

A Qwen2 of under a million parameters is pretrained, as language models are, on what others have written: 300,000 grade-school
problems with worked solutions.  The writers are pupils, and pupils make mistakes.  Each kind of problem has its typical one
(the last operation is turned around, or the last step is forgotten), and a share of the solutions has it:

    well taught kinds (two in five)      one solution in five is careless      the model's first choice is right
    badly taught kinds (three in five)   two in three are                      the model's first choice is wrong

A short second phase, on solutions by a weaker class (well taught: one kind in three), ends the schooling.

So the model calculates well, ends its answers and writes them where a grader looks, but on most kinds of problem it prefers a
wrong working to the right one, which it also knows.  That is how reinforcement learning finds a language model: able, and
not yet inclined.  GRPO with an exact-answer reward has to find out, kind by kind, which operations lead to the answer; nothing
tells it.  The base's errors are wrong operations, hardly ever false equations (tests/test_assets.py counts them).  A trained
model's workings need not stay true: the reward pays for the answer alone, and seed 0 of the main job ends with right answers
under false equations (README.md; grading/working.py measures it).

Numbers of train and held-out problems are disjoint by construction (problems/tasks.py); nothing of the held-out or unseen
sets occurs here.  Tokenizer: word level, one token a piece of tasks.arithmetic_pieces() (a word with the space before
it, or a digit).

Limits: bit for bit the same file only on the same machine and versions.  Copy along: problems/tasks.py.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from problems.tasks import KNOWN_TEMPLATES, PIECE, arithmetic_pieces, arithmetic_problems  # noqa: E402

END, UNKNOWN = "<|endoftext|>", "<|unknown|>"
SWAPPED = {"+": "-", "-": "+", "*": "+"}
ROOM = 104  # tokens of the longest problem with its solution, rounded up
TEMPLATE_WORDS = [set(PIECE.findall(text.replace("{", " ").replace("}", " "))) for text, _, _ in KNOWN_TEMPLATES]
KINDS = range(len(KNOWN_TEMPLATES))
WELL_TAUGHT = ({k for k in KINDS if k % 5 in (0, 3)}, {k for k in KINDS if k % 3 == 0})  # in the two phases


def careless_solution(solution: str, forgets: bool, turns_numbers: bool = False) -> str | None:
    """The solution with its typical mistake: the last step forgotten, or its operation turned around.

    None where the mistake cannot be made: a single step cannot be forgotten, and a result must lie in 0..999.  The weaker
    class turns the numbers too where it would get stuck: 15 + 27 becomes 27 - 15.

    >>> careless_solution("4 * 6 = 24. 24 + 15 = 39\\n#### 39", forgets=True)
    '4 * 6 = 24\\n#### 24'
    >>> careless_solution("27 + 15 = 42\\n#### 42", forgets=False)
    '27 - 15 = 12\\n#### 12'
    """
    *steps, last = solution.split("\n")[0].split(". ")
    if forgets:
        return None if not steps else ". ".join(steps) + "\n#### " + steps[-1].split(" = ")[1]
    left, operator, right = last.split(" = ")[0].split()
    if turns_numbers and operator == "+" and int(left) < int(right):
        left, right = right, left
    result = int(left) + int(right) if SWAPPED[operator] == "+" else int(left) - int(right)
    if not 0 <= result <= 999:
        return None
    return ". ".join([*steps, f"{left} {SWAPPED[operator]} {right} = {result}"]) + f"\n#### {result}"


def kind_of(prompt: str) -> int:
    """Which known template a problem was made from, by its words."""
    words = set(PIECE.findall(prompt))
    return max(KINDS, key=lambda i: len(TEMPLATE_WORDS[i] & words) - len(TEMPLATE_WORDS[i] - words))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Every piece is one token; decoding is concatenation, because the pieces carry their spaces."""
    vocabulary = {piece: i for i, piece in enumerate([END, UNKNOWN, *arithmetic_pieces()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE.pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, unk_token=UNKNOWN,
                                   clean_up_tokenization_spaces=False)


def write_corpus(phase: int, count: int, options: argparse.Namespace, vocabulary: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (count, ROOM), padded with the end token, and where the tokens to learn are: solution and one end token."""
    seed = options.seed + 1000 * phase
    rng = random.Random(seed)
    ids = torch.full((count, ROOM), vocabulary[END])
    is_learnt = torch.zeros(count, ROOM, dtype=torch.bool)
    for row, problem in enumerate(arithmetic_problems("train", count, seed=1_000_000 + seed)):
        kind, solution = kind_of(problem.prompt), problem.solution
        if rng.random() < (options.well if kind in WELL_TAUGHT[phase] else options.badly):
            has_steps = len(KNOWN_TEMPLATES[kind][2]) > 1
            solution = careless_solution(solution, has_steps and kind % 2 == 0, turns_numbers=phase == 1) or solution
        prompt = [vocabulary[piece] for piece in PIECE.findall(problem.prompt + "\n")]
        answer = [vocabulary[piece] for piece in PIECE.findall(solution)]
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        is_learnt[row, len(prompt) : len(prompt) + len(answer) + 1] = True
    return ids, is_learnt


def new_model(options: argparse.Namespace, tokenizer) -> Qwen2ForCausalLM:
    torch.manual_seed(options.seed)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=-(-len(tokenizer) // 16) * 16, hidden_size=options.hidden, intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 32,
        num_key_value_heads=options.hidden // 64, max_position_embeddings=512, rope_theta=10_000.0,
        tie_word_embeddings=True, initializer_range=0.05, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id))


def pretrain(model: Qwen2ForCausalLM, corpus: tuple, steps: int, batch: int, rate: float, seed: int) -> None:
    """Next-token cross-entropy on the solutions; AdamW, one cycle of the learning rate."""
    device = next(model.parameters()).device
    ids, is_learnt = (t.to(device) for t in corpus)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps, pct_start=0.05, anneal_strategy="cos")
    generator, started = torch.Generator().manual_seed(seed), time.time()
    for step in range(steps):
        rows = torch.randint(len(ids), (batch,), generator=generator).to(device)
        tokens, mask = ids[rows], is_learnt[rows]
        width = int(mask.any(0).nonzero().max()) + 1
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=tokens[:, :width]).logits[:, :-1]
        learnt = mask[:, 1:width]
        loss = torch.nn.functional.cross_entropy(logits[learnt].float(), tokens[:, 1:width][learnt])
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}  loss {loss.item():.4f}  {time.time() - started:.0f} s", flush=True)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m assets.make_tiny", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write the model to")
    parser.add_argument("--after", type=Path, help="a folder that holds the result of the first phase: do the second only")
    for name, value in dict(hidden=128, layers=4, problems=300_000, steps=2000, batch=512, lr=3e-3, badly=0.66, well=0.2,
                            last_problems=40_000, last_steps=100, last_batch=256, last_lr=1e-3, seed=0).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help="default %(default)s")
    options = parser.parse_args(arguments or ["--help"])  # without OUT nothing is trained and nothing replaced
    tokenizer = make_tokenizer()
    vocabulary = tokenizer.get_vocab()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.after:
        model = Qwen2ForCausalLM.from_pretrained(options.after, dtype=torch.float32).to(device)
    else:
        model = new_model(options, tokenizer).to(device)
        corpus = write_corpus(0, options.problems, options, vocabulary)
        pretrain(model, corpus, options.steps, options.batch, options.lr, options.seed)
    corpus = write_corpus(1, options.last_problems, options, vocabulary)
    pretrain(model, corpus, options.last_steps, options.last_batch, options.last_lr, options.seed + 1)
    model.to("cpu", torch.bfloat16).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"{options.out}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main(sys.argv[1:])
