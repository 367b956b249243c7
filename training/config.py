"""Every knob of a run, once: one frozen dataclass, one comment a field, and the rules that make a bad run fail at once.

The dataclass is the single source.  Its comments are the `--help` text (they are read from this very file), its types
parse the command line, and what `resolve` returns is what `config.json` in the run folder holds.

    command line ──> parse ──> fields given by name
                                     │
    defaults (this file) <── preset  │      later wins:  default  <  preset  <  flag
                     └─────────┬─────┘
                          resolve ──> Config with no `None` left ──> validate ──> train.py

`None` means "depends": on the weights (learning rate), on the algorithm (group size), on the model (data, budgets).  The
dependent defaults follow QeRL (arXiv 2510.11696, table 4 and section 4.1), and where the paper contradicts itself the
choice is the comment's: sigma 1e-2 -> 5e-4, K = 10, lr 1e-5 for 4-bit bases and 5e-6 for 16-bit LoRA, no KL term, clip
0.2 / 0.28, 128 completions a step.

Where we differ: truncated importance sampling is on (`--no-tis` gives the authors' form), because under noise the policy
that samples is not the one that is trained; and training samples from the whole softmax, so that the scored policy is the
sampled one: there is no `--top-p` here (`eval.py` has it).

Cost: none; torch is not imported. Limits: settings are flat; no file of them is read but a run's own.
Copy along: problems/tasks.py. Only the wording of the instruction comes from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import json
import re
import typing
from dataclasses import dataclass
from pathlib import Path

from problems.tasks import data_sha256, default_instruction, speaks_arithmetic

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TINY = "tiny"  # the pretrained toy that ships in assets/tiny


@dataclass(frozen=True)
class Config:
    """The settings of a run. Each field's comment is its `--help`; [...] is what None stands for."""

    # --- what is trained, on what
    model: str = TINY  # "tiny" (ships with the code), a hub id, a short name such as Qwen2.5-7B, or a local folder
    data: str | None = None  # arithmetic | gsm8k | math | bigmath | a .jsonl or .jsonl.gz file [arithmetic for tiny, else gsm8k]
    eval_data: str | None = None  # comma-separated held-out sets, or "none" [fitting the training set]
    levels: str | None = None  # difficulty levels kept of bigmath, such as 3-5 [3-5; 4-5 for 32B models]
    instruction: str | None = None  # text added to each problem [asks for \\boxed{}; tiny: none]
    out: str | None = None  # run folder [runs/<model>-<data>-<algo>-<weights>-seed<seed>]
    resume: bool = False  # continue the run in --out from its last checkpoint
    seed: int = 0  # of everything: adapter, data order, noise, samples
    steps: int | None = None  # optimiser steps are steps x updates [200; tiny: 60]
    # --- weights and adapter
    weights: str = "nvfp4"  # how the frozen base is held: nvfp4 | nf4 (QLoRA, needs bitsandbytes) | bf16
    full: bool = False  # train every parameter in 16-bit instead of an adapter (needs --weights bf16)
    adapter: str | None = None  # PEFT folder to start from; it becomes the reference of the KL term [none]
    rank: int = 32  # LoRA rank
    alpha: float | None = None  # LoRA alpha; the update is scaled by alpha / rank [= rank]
    targets: str = ",".join(TARGETS)  # projections that carry an adapter
    # --- rollout
    prompts: int | None = None  # prompts a step [128 / group]
    group: int | None = None  # completions a prompt [8; dapo: 16]
    temperature: float = 1.0  # of the sampled and of the scored policy alike
    max_prompt_tokens: int = 1024  # longer prompts are left out, and counted
    max_new_tokens: int | None = None  # completion limit [4096, math and bigmath: 8192, as in the paper; tiny: 48]
    slots: int | None = None  # sequences decoded at once [planned from free memory]
    kv_dtype: str = "auto"  # KV cache: auto (the compute type) | fp8
    stop: str | None = None  # a stop string, besides the model's end tokens [none]
    # --- adaptive quantisation noise
    noise: str = "exponential"  # sigma's schedule: exponential | linear | cosine | logarithmic | none
    sigma_start: float = 1e-2  # sigma of stage 1 (stage 0 is silent)
    sigma_end: float = 5e-4  # sigma of the last stage
    stages: int | None = None  # equal stages of the run, K in the paper [10, or one a step in runs of 3 to 9; below 3: no noise]
    # --- loss
    algo: str = "grpo"  # grpo | dapo | dr_grpo
    clip_low: float = 0.2  # the ratio is clipped below 1 - clip_low
    clip_high: float = 0.28  # and above 1 + clip_high
    beta: float = 0.0  # KL coefficient; the reference is the base (adapter off), or the adapter started from
    tis: bool = True  # truncated importance sampling corrects for the noisy sampler
    tis_cap: float = 2.0  # its cap C
    mask_truncated: bool | None = None  # completions cut at the limit do not train [yes; dapo: no, their reward is shaped]
    overlong_buffer: int | None = None  # dapo: the last tokens before the limit over which the length penalty grows [limit / 4]
    resample: int = 3  # dapo: extra rounds of prompts that dynamic sampling may draw for groups without a signal
    reward: str | None = None  # file.py:function, called as f(prompt=, completion=, answer=) -> float [exact answer]
    reward_timeout: float = 10.0  # seconds that one call of it may take
    # --- optimiser
    lr: float | None = None  # AdamW's peak rate [1e-5 for nvfp4 and nf4, 5e-6 for bf16 LoRA, 1e-6 for --full; tiny: 3e-3]
    lr_schedule: str = "constant"  # after warm-up: constant | cosine (tiny: cosine)
    warmup: float = 0.1  # share of the run over which the rate rises from 0; a number >= 1 counts updates
    weight_decay: float = 0.0  # decoupled weight decay of AdamW
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    updates: int | None = None  # updates a step: its groups are split into that many mini-batches [grpo on gsm8k: 4, else 1]
    token_budget: int | None = None  # tokens of a packed micro-batch; memory only, no effect on the result [planned]
    recompute: bool | None = None  # make activations again in the backward instead of keeping them [on a GPU: yes]
    max_bad_steps: int = 5  # non-finite updates in a row that end the run (each is skipped)
    # --- evaluation and records
    eval_every: int | None = None  # steps between evaluations; also before the first and after the last; 0 = never [50; tiny: 10]
    eval_limit: int | None = None  # problems of each held-out set [all; tiny: 300]
    eval_max_new_tokens: int | None = None  # completion limit while evaluating [the training limit]
    checkpoint_every: int = 10  # steps between checkpoints; the last two are kept
    sample_every: int = 10  # steps between printed samples; 0 = none (tiny: 20)
    log_kl_every: int = 0  # steps between measurements of the KL that is not trained on, also first and last step; 0 = none
    tensorboard: bool = False  # write TensorBoard events into the run folder (needs tensorboard)
    wandb: str | None = None  # Weights & Biases project to log to (needs wandb) [none]
    device: str = "auto"  # auto | cpu | cuda
    threads: int | None = None  # CPU threads; sums depend on them in the last bit [tiny: 1, else torch's own choice]


CHOICES = {
    "weights": ("nvfp4", "nf4", "bf16"),
    "noise": ("exponential", "linear", "cosine", "logarithmic", "none"),
    "algo": ("grpo", "dapo", "dr_grpo"),
    "lr_schedule": ("constant", "cosine"),
    "kv_dtype": ("auto", "fp8"),
    "device": ("auto", "cpu", "cuda"),
}

# The embedded main job: a million parameters want a far larger rate and a far shorter completion than seven billion do.
TINY_PRESET = dict(
    data="arithmetic", steps=60, prompts=16, group=8, max_new_tokens=48, lr=3e-3, updates=1, eval_every=10, eval_limit=300,
    lr_schedule="cosine", instruction="", checkpoint_every=10, sample_every=20,
    threads=1,  # its matrices are so small that a second thread gains nothing, and loses much on a busy machine
)


def comments() -> dict[str, str]:
    """Field name -> its comment, read from this file, so that `--help` and the source cannot disagree."""
    pattern = re.compile(r"^    (\w+): [^#]*#\s*(.*)$", re.MULTILINE)
    return {name: text for name, text in pattern.findall(inspect.getsource(Config))}


def field_types() -> dict[str, type]:
    """Field name -> bool, int, float or str (the `| None` of dependent defaults taken off)."""
    hints = typing.get_type_hints(Config)
    return {name: next((t for t in typing.get_args(hint) if t is not type(None)), hint) for name, hint in hints.items()}


class Parser(argparse.ArgumentParser):
    """argparse that answers a mistake with one line and exit code 2, and guesses what was meant."""

    def error(self, message: str):
        unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            close = difflib.get_close_matches(unknown.group(1), flags, n=1)
            message += f"; did you mean {close[0]}?" if close else "; --help lists the flags"
        self.exit(2, f"error: {message}\n")


def parse(argv: list[str] | None = None, program: str = "train.py") -> dict:
    """Command line -> the fields that were given by name.  A bare `--flag` sets a bool, `--no-flag` clears it."""
    parser = Parser(prog=program, description="QeRL: RL of a language model on a frozen 4-bit base.", allow_abbrev=False)
    types, notes = field_types(), comments()
    for field in dataclasses.fields(Config):
        flag, note = "--" + field.name.replace("_", "-"), notes[field.name].replace("%", "%%")
        note += "" if field.default is None else f" (default {field.default})"
        if types[field.name] is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=note)
        else:
            parser.add_argument(flag, type=types[field.name], choices=CHOICES.get(field.name), default=argparse.SUPPRESS,
                                metavar=None if field.name in CHOICES else field.name.upper(), help=note)
    return vars(parser.parse_args(argv))


def resolve(given: dict) -> Config:
    """Fields given by name -> a complete, validated Config.  Raises ValueError with one line on a bad combination."""
    unknown = sorted(set(given) - set(field_types()))
    if unknown:
        raise ValueError(f"unknown setting {unknown[0][:80]!r}; the settings are the fields of Config (training/config.py)")
    preset = dict(TINY_PRESET) if speaks_arithmetic(given.get("model", TINY)) else {}
    if given.get("full"):
        preset.pop("lr", None)  # that rate is an adapter's
    merged = {**preset, **given}
    cfg = Config(**merged)
    fill = {}

    def default(name, value):
        if getattr(cfg, name) is None:
            fill[name] = value
        return fill.get(name, getattr(cfg, name))

    data = default("data", "gsm8k")
    default("eval_data", {"arithmetic": "arithmetic,arithmetic-unseen", "gsm8k": "gsm8k",
                          "math": "math500,aime24,aime25,amc23", "bigmath": "math500,aime24,aime25,amc23"}.get(data, "none"))
    default("levels", "4-5" if "32b" in cfg.model.lower() else "3-5")
    default("instruction", default_instruction(data))
    default("steps", 200)
    default("alpha", float(cfg.rank))
    group = default("group", 16 if cfg.algo == "dapo" else 8)
    default("prompts", max(1, 128 // group))
    limit = default("max_new_tokens", 8192 if data in ("math", "bigmath") else 4096)
    default("eval_max_new_tokens", limit)
    default("mask_truncated", cfg.algo != "dapo")
    default("overlong_buffer", max(1, limit // 4) if cfg.algo == "dapo" else 0)
    default("lr", 1e-6 if cfg.full else 5e-6 if cfg.weights == "bf16" else 1e-5)
    default("updates", 4 if (data, cfg.algo) == ("gsm8k", "grpo") and fill.get("prompts", cfg.prompts) % 4 == 0 else 1)
    default("eval_every", 50)
    steps = fill.get("steps", cfg.steps)
    default("stages", min(10, max(3, steps)))
    if 1 <= steps < 3 and not given.keys() & {"noise", "stages", "sigma_start", "sigma_end"}:
        fill["noise"] = "none"
        print(f"steps={steps} is too short for a noise schedule, which has 3 stages or more: no noise")
    name = cfg.model.rstrip("/").split("/")[-1]
    method = "full" if cfg.full else cfg.weights
    default("out", f"runs/{name}-{data.split('/')[-1].split('.')[0]}-{cfg.algo}-{method}-seed{cfg.seed}")
    cfg = dataclasses.replace(cfg, **fill)
    validate(cfg)
    return cfg


def validate(cfg: Config) -> None:
    """Refuses what cannot work, before any long work starts: one line with the value, the limit and the remedy."""
    for name, kind in field_types().items():  # a config.json may have been edited by hand
        value, kinds = getattr(cfg, name), (int, float) if kind is float else kind
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool) != (kind is bool)):
            raise ValueError(f"{name}={str(value)[:80]!r} should be of type {kind.__name__}")
        if kind is float and value in (float("inf"), float("-inf")):
            raise ValueError(f"{name}={value} should be finite")
    for name, allowed in CHOICES.items():
        if getattr(cfg, name) not in allowed:
            raise ValueError(f"{name}={getattr(cfg, name)!r} is not one of {', '.join(allowed)}")
    at_least = dict(steps=1, rank=1, prompts=1, group=2, max_prompt_tokens=1, max_new_tokens=1, stages=3, updates=1, resample=0,
                    eval_every=0, eval_limit=1, eval_max_new_tokens=1, checkpoint_every=1, sample_every=0, slots=1, threads=1,
                    token_budget=1, max_bad_steps=1, seed=0, clip_low=0, clip_high=0, beta=0, warmup=0, weight_decay=0,
                    log_kl_every=0)
    for name, low in at_least.items():
        value = getattr(cfg, name)
        if value is not None and not value >= low:  # `not >=` also catches NaN
            raise ValueError(f"{name}={value} is below {low}; give {low} or more")
    if cfg.rank > 4096:
        raise ValueError(f"rank={cfg.rank} is above 4096, beyond any matrix that LoRA would be low-rank for; give less")
    for name in ("temperature", "lr", "alpha", "tis_cap", "max_grad_norm", "reward_timeout"):
        if not 0 < getattr(cfg, name) < float("inf"):
            raise ValueError(f"{name}={getattr(cfg, name)} must be a positive number")
    if not 0 < cfg.sigma_end <= cfg.sigma_start:
        raise ValueError(f"sigma_start={cfg.sigma_start} and sigma_end={cfg.sigma_end}: need 0 < sigma_end <= sigma_start "
                         "(--noise none switches noise off)")
    if cfg.noise != "none" and cfg.stages > cfg.steps:
        remedy = f"--stages {cfg.steps} or fewer, or " if cfg.steps >= 3 else "--steps 3 or more, or "
        raise ValueError(f"stages={cfg.stages} noise stages do not fit into steps={cfg.steps}; give {remedy}--noise none")
    if cfg.full and cfg.weights != "bf16":
        raise ValueError(f"--full trains 16-bit weights, but weights={cfg.weights}; add --weights bf16, or drop --full")
    if cfg.full and (cfg.adapter or cfg.beta > 0 or cfg.log_kl_every):
        raise ValueError("--full has no adapter: --adapter cannot be given, --beta and --log-kl-every need a "
                         "reference; drop them")
    if cfg.prompts % cfg.updates:
        raise ValueError(f"prompts={cfg.prompts} cannot be split into updates={cfg.updates} equal mini-batches; "
                         f"give --prompts {cfg.updates * -(-cfg.prompts // cfg.updates)} or another --updates")
    if cfg.prompts * cfg.group > 1_000_000:
        raise ValueError(f"prompts={cfg.prompts} x group={cfg.group} completions a step are more than a million; give fewer")
    if cfg.overlong_buffer > cfg.max_new_tokens:
        raise ValueError(f"overlong_buffer={cfg.overlong_buffer} exceeds max_new_tokens={cfg.max_new_tokens}; give less")
    if cfg.overlong_buffer and cfg.algo != "dapo":
        raise ValueError(f"overlong_buffer={cfg.overlong_buffer} is DAPO's length shaping, but algo={cfg.algo}; drop it")
    wrong = [t for t in target_names(cfg) if t not in TARGETS]
    if wrong or not target_names(cfg):
        raise ValueError(f"targets={cfg.targets!r}: {repr(wrong[0]) if wrong else 'nothing'} is not among {', '.join(TARGETS)}")
    if not re.fullmatch(r"[1-9](-[1-9])?", cfg.levels) or cfg.levels[0] > cfg.levels[-1]:
        raise ValueError(f"levels={cfg.levels!r} is not of the form 3-5 or 4")
    if Path(cfg.out).resolve() in (Path.cwd(), Path(__file__).resolve().parent.parent):
        raise ValueError(f"out={cfg.out!r} is the working folder or the program's own; give one such as runs/mine")
    if cfg.reward is not None and not re.fullmatch(r".+\.py:\w+", cfg.reward):
        raise ValueError(f"reward={cfg.reward!r} is not of the form file.py:function")


def target_names(cfg: Config) -> tuple[str, ...]:
    """The projections that carry an adapter; `q` is short for `q_proj`."""
    names = (name.strip() for name in cfg.targets.split(",") if name.strip())
    return tuple(name if name.endswith("_proj") else name + "_proj" for name in names)


# --------------------------------------------------------------------------------------- which run: a new one, or one to resume

CHANGEABLE = {"resume", "out", "slots", "token_budget", "checkpoint_every", "sample_every", "log_kl_every", "tensorboard",
              "wandb", "device"}


def check_ranks(cfg: Config, ranks: int) -> None:
    """The prompts of a step are the run's, whatever the number of ranks, and each samples as many: ranks must divide them."""
    if cfg.prompts % ranks:
        fewer = max(n for n in range(1, ranks) if cfg.prompts % n == 0)
        raise ValueError(f"prompts={cfg.prompts} of a step cannot be dealt evenly to {ranks} ranks; take {fewer} ranks, or (in "
                         f"a new run) --prompts {ranks * -(-cfg.prompts // ranks)}")


def prepare(given: dict, ranks: int = 1) -> tuple[Config, dict | None]:
    """Command line -> settings, and the record of the run to resume (None for a new one)."""
    if not given.get("resume"):
        cfg = resolve(given)
        check_ranks(cfg, ranks)
        if "out" not in given:  # a second run of the same name gets a folder of its own
            names = (cfg.out if n == 1 else f"{cfg.out}-{n}" for n in range(1, 10_000))
            cfg = dataclasses.replace(cfg, out=next(name for name in names if not (Path(name) / "config.json").exists()))
        elif (Path(cfg.out) / "config.json").exists():
            raise ValueError(f"{cfg.out} already holds a run; add --resume to continue it, or give another --out")
        return cfg, None
    if "out" not in given:
        raise ValueError("--resume needs to know the run: give its folder with --out")
    try:
        saved = json.loads((Path(given["out"]) / "config.json").read_text())
        cfg = resolve({name: value for name, value in saved["config"].items() if value is not None})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{given['out']} holds no run to resume ({str(error)[:300]}); check --out") from None
    for name, value in given.items():
        if name not in CHANGEABLE and value != getattr(cfg, name):
            raise ValueError(f"{name}={value} differs from the run's {getattr(cfg, name)}; a resumed run keeps its settings: "
                             f"drop the flag, or start a new run (--adapter {given['out']}/adapter begins from this one)")
    cfg = dataclasses.replace(cfg, **given)
    validate(cfg)
    check_ranks(cfg, ranks)
    return cfg, saved


def input_hashes(cfg: Config, saved: dict | None) -> dict[str, str | None]:
    """SHA-256 of the files that a run reads, by setting; ValueError where one has changed since the record `saved`."""
    adapter = cfg.adapter and Path(cfg.adapter) / "adapter_model.safetensors"
    if adapter and not adapter.is_file():
        raise ValueError(f"adapter {cfg.adapter} has no adapter_model.safetensors; give the folder of a PEFT LoRA adapter")
    held_out = [name for name in cfg.eval_data.split(",") if name != "none"] if cfg.eval_every else []
    found = {
        "data": data_sha256(cfg.data), "eval_data": ",".join(map(data_sha256, held_out)),
        "adapter": adapter and data_sha256(str(adapter)),  # it is the reference of the KL term, also after a resume
        "reward": cfg.reward and data_sha256(cfg.reward.rpartition(":")[0]),
    }
    for setting, value in found.items():
        if saved and saved.get(f"{setting}_sha256", value) != value:
            raise ValueError(f"the {setting} that {cfg.out} was started with has changed ({getattr(cfg, setting)}); restore it, "
                             "or start a new --out")
    return {f"{setting}_sha256": value for setting, value in found.items()}


def demo() -> None:
    print("python train.py --model Qwen2.5-7B --algo dapo resolves to")
    cfg = resolve(parse(["--model", "Qwen2.5-7B", "--algo", "dapo"]))
    for name, note in comments().items():
        print(f"  {name:20} {str(getattr(cfg, name))[:44]:44} # {note[:70]}")


if __name__ == "__main__":
    demo()
