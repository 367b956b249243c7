"""A model's name becomes a folder, and the folder says what it is: architecture, storage, tokenizer, end tokens.

    "Qwen2.5-7B"  "org/name"  "./folder"
         │ resolve_model: a local folder wins; else the hub's safetensors, json and tokenizer files are downloaded
         v
    folder/config.json ────────────── read_config        a dict, refused unless qwen2, qwen3 or llama
          /hf_quant_config.json ───── quantised_layout   None (float) or one of layouts.LAYOUTS
          /tokenizer.json ... ─────── load_tokenizer     transformers' own
          /generation_config.json ─── generation_info    which tokens end a completion, which ids exist at all

Three things easily got wrong live here. A generation config may list several end tokens, and each of them ends a
completion. A base model's list lacks the end-of-turn token of its own chat template, so that it talks past its answer
to the limit: it is added. An embedding has more rows than the tokenizer has ids (Qwen2.5: 152064 and 151665); the
surplus must never be sampled, so valid_vocab goes to the sampler and to the trainer alike.

A model folder is untrusted input: no code from it runs (trust_remote_code is never set), no pickle is downloaded, no
link out of it is followed. Each failure is a ValueError of one line: the value, the limit, the remedy.

Source: the files that transformers writes. Where we differ: end tokens are the union of all that the files name, not the
first list found. Cost: small JSON files, and a download where there is no copy.
Limits: dense Qwen2/2.5, Qwen3 and Llama.
Copy along: files/layouts.py, layers/shapes.py.

    python -m files.hub [MODEL]        what a folder or hub model says of itself; without MODEL the names that are understood
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from files import layouts
from layers.shapes import MODEL_TYPES

# "Qwen2.5-7B" means "Qwen/Qwen2.5-7B": the family's own organisation on the hub.
ORGANISATIONS = {"qwen": "Qwen", "llama": "meta-llama", "meta-llama": "meta-llama", "smollm": "HuggingFaceTB"}
DOWNLOADED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
# Tokens that end a turn. The one that a chat template uses is added to the stops.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>")


# ------------------------------------------------------------------------------------------------- name -> folder


def hub_name(name: str) -> str:
    """The hub id that a bare model name stands for.

    >>> hub_name("Qwen2.5-7B"), hub_name("Llama-3.2-1B"), hub_name("SmolLM2-135M-Instruct"), hub_name("me/mine")
    ('Qwen/Qwen2.5-7B', 'meta-llama/Llama-3.2-1B', 'HuggingFaceTB/SmolLM2-135M-Instruct', 'me/mine')
    """
    if "/" in name:
        return name
    family = re.match(r"meta-llama|[a-z]+", name.lower())
    if family is None or family.group() not in ORGANISATIONS:
        raise ValueError(
            f"model {name!r} is neither a folder here nor a bare name of a known family "
            f"(Qwen, Llama, SmolLM); give a hub id such as Qwen/Qwen2.5-7B, or the path of a folder"
        )
    return f"{ORGANISATIONS[family.group()]}/{name}"


def resolve_model(name: str) -> Path:
    """The folder of a model: a local one wins, else the hub's is downloaded (safetensors, json and tokenizer only).

    ValueError when there is no such folder, no such model, or no hub to be reached and no copy in its cache.
    """
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        if (folder / "config.json").exists():  # else it is no model folder at all, and read_config says so
            check_stays_inside(folder)
        return folder
    if folder.is_file():
        raise ValueError(f"model {name!r} is a file; give the folder that holds config.json and *.safetensors")
    if name == "tiny" and (assets := Path(__file__).parent.parent / "assets" / "tiny").is_dir():
        return assets
    if not name or name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/"):
        raise ValueError(f"model folder {name!r} does not exist; check the path, or give a hub id: Qwen/Qwen2.5-7B")
    return _download(hub_name(name))


def check_stays_inside(folder: Path) -> None:
    """ValueError when a link in the folder leads out of it (but into the hub cache's own blobs), or a pipe lies there.

    An archive can bring links along; what one leads to would be copied into every checkpoint made from the folder.
    """
    root = folder.resolve()
    allowed = (root, root.parent.parent / "blobs") if root.parent.name == "snapshots" else (root,)
    for path in root.iterdir():
        if path.is_symlink() and not any(path.resolve().is_relative_to(place) for place in allowed):
            raise ValueError(
                f"{path} is a link that leads out of the model folder, to {path.resolve()}; only files of the folder "
                "itself are read: copy the file there, if you know what it is"
            )
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is neither a file nor a folder (a pipe or a device); remove it")


def _download(hub_id: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=DOWNLOADED, ignore_patterns=["*/*"]))
    except errors.GatedRepoError as error:
        raise ValueError(
            f"model {hub_id!r} is gated; accept its licence at https://huggingface.co/{hub_id} and set HF_TOKEN"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ValueError(
            f"the hub has no model {hub_id!r} (or it is private); check the spelling, or set HF_TOKEN"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError) as error:
        reason = textwrap.shorten(str(error) or type(error).__name__, 100, placeholder=" ...")
        raise ValueError(
            f"model {hub_id!r} is not in the local cache and the hub cannot be reached ({reason!r}); "
            "go online once, or give the path of a local folder"
        ) from error


# ------------------------------------------------------------------------------------------------- folder -> config


def read_json(path: Path) -> dict:
    """The JSON object in a file; ValueError naming the file when it is missing, malformed or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing; {path.parent} is not a complete model folder") from error
    except (ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object; download it again")
    return value


def read_config(folder: Path) -> dict:
    """config.json as a dict, refused unless its model_type is one that model.py defines."""
    config = read_json(folder / "config.json")
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        adapter = " (a LoRA adapter: give its base as --model)" if (folder / "adapter_config.json").exists() else ""
        raise ValueError(
            f"{folder}: model_type {repr(kind)[:80]}{adapter} is not supported; nanoQeRL knows {', '.join(MODEL_TYPES)}"
        )
    return config


def quantised_layout(folder: Path, config: dict) -> str | None:
    """Which NVFP4 layout the checkpoint is in; None for a float one. ValueError for any other quantisation."""
    described = config.get("quantization_config")
    if described is None and (folder / "hf_quant_config.json").exists():
        described = read_json(folder / "hf_quant_config.json").get("quantization")
    if described is None:
        return None
    if not isinstance(described, dict):
        raise ValueError(f"{folder}: quantization_config is not an object; download the config again")
    try:
        return layouts.read_layout(described)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


# --------------------------------------------------------------------------------------- tokenizer and end tokens


@dataclass(frozen=True)
class GenerationInfo:
    """What generation must know of a model beside its weights."""

    stop_ids: tuple[int, ...]  # any of them ends a completion; sorted
    pad_id: int  # to fill a batch; masks come from lengths, so it may equal a stop
    valid_vocab: int  # ids from here on have an embedding row but no token


def _check_names(folder: Path) -> None:
    """ValueError for a name in the tokenizer's settings that no terminal should see: the tokenizers package prints the
    options of added tokens that it does not know, as they are. (The vocabulary may hold anything.)"""
    found: list = [read_json(folder / file) for file in TOKENIZER_SETTINGS if (folder / file).exists()]
    if (folder / "tokenizer.json").exists():
        found.append(read_json(folder / "tokenizer.json").get("added_tokens"))
    while found:
        node = found.pop()
        if isinstance(node, dict):
            if unprintable := [name for name in node if not name.isprintable()]:
                raise ValueError(f"{folder}: the tokenizer's settings hold the name {unprintable[0][:40]!r}; remove it")
            node = list(node.values())
        found += node if isinstance(node, list) else []


def load_tokenizer(folder: Path):
    """transformers' tokenizer of a folder; ValueError when there is none or it cannot be read."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not any((folder / file).exists() for file in TOKENIZER_FILES):
        raise ValueError(
            f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES)}); copy the tokenizer files of the model there"
        )
    _check_names(folder)
    try:
        if (folder / "tokenizer.json").exists():  # is the tokenizer; AutoTokenizer would put its model type's parts over it
            return PreTrainedTokenizerFast.from_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the tokenizers package raises plain Exception
        reason = textwrap.shorten(str(error) or type(error).__name__, 160, placeholder=" ...")
        raise ValueError(f"the tokenizer of {folder} cannot be read ({reason!r}); copy its files again") from error


def _token_ids(value: object, where: str) -> list[int]:
    """An eos or pad entry of a config: an id, a list of ids, or nothing."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"{where} is {repr(value)[:80]}; it should be a token id or a list of them")
    return ids


def generation_info(folder: Path, config: dict, tokenizer) -> GenerationInfo:
    """Every end token that the generation config, the config, the tokenizer and its chat template know."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    vocabulary = tokenizer.get_vocab()
    valid_vocab = max(vocabulary.values(), default=-1) + 1  # len(tokenizer), where ids have no holes
    stops = set(_token_ids(generation.get("eos_token_id"), f"{path}: eos_token_id"))
    stops |= set(_token_ids(config.get("eos_token_id"), f"{folder / 'config.json'}: eos_token_id"))
    stops |= set(_token_ids(tokenizer.eos_token_id, f"{folder}: the tokenizer's eos token"))
    template = str(tokenizer.chat_template or "")
    stops |= {vocabulary[token] for token in TURN_ENDS if token in vocabulary and token in template}
    stops = {stop for stop in stops if stop < valid_vocab}  # an id without a token cannot be sampled
    if not stops:
        raise ValueError(
            f"{folder}: no end token in generation_config.json, config.json or the tokenizer; "
            'completions could not end. Add {"eos_token_id": ...} as generation_config.json'
        )
    pads = [tokenizer.pad_token_id, *_token_ids(generation.get("pad_token_id"), f"{path}: pad_token_id"), min(stops)]
    pad = next(pad for pad in pads if pad is not None and pad < valid_vocab)
    return GenerationInfo(tuple(sorted(stops)), pad, valid_vocab)


def main(arguments: list[str]) -> int:
    if not arguments:
        for name in ("Qwen2.5-7B", "Qwen3-8B", "Llama-3.2-1B", "SmolLM2-135M-Instruct", "org/name"):
            print(f"{name:24} -> {hub_name(name)}")
        return 0
    try:
        folder = resolve_model(arguments[0])
        config = read_config(folder)
        tokenizer = load_tokenizer(folder)
        info = generation_info(folder, config, tokenizer)
    except ValueError as error:
        print(f"files/hub.py: {error}", file=sys.stderr)
        return 2
    stops = ", ".join(f"{i} {tokenizer.convert_ids_to_tokens(i)!r}" for i in info.stop_ids)  # escaped: they are a stranger's
    print(f"{folder}: {config['model_type']}, weights {quantised_layout(folder, config) or 'float'}")
    print(f"ends with {stops}; pad {info.pad_id}; {info.valid_vocab} ids of {config.get('vocab_size')} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
