"""Tiny models for every test: a Hugging Face folder as it would come from the hub, and our model read from it.

    tiny_config("qwen2-tied")          a transformers config; kinds: qwen2, qwen3, llama, each also with "-tied"
    tiny_hf_folder("qwen3", seed=0)    a folder: config, safetensors, generation config, tokenizer with a chat template
    tiny_model("llama", weights=...)   our Transformer with the weights of that folder, read without convert/loader.py

The tokenizer is byte level with a chat template; its 259 ids are fewer than the 272 rows of the embedding, as in
Qwen2.5, so that padded ids are met in every test.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)

KINDS = ("qwen2", "qwen2-tied", "qwen3", "qwen3-tied", "llama", "llama-tied")
VOCAB = 272  # rows of the embedding; the tokenizer knows 259
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def pytest_collection_modifyitems(items):
    """Tests marked gpu are skipped where there is no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def make_config(kind: str, **overrides):
    """A transformers config of two layers, hidden 64, four heads over two kv heads."""
    import transformers

    family, _, tied = kind.partition("-")
    config_class = {"qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "llama": "LlamaConfig"}[family]
    options = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied == "tied", "bos_token_id": None, "pad_token_id": 256, "eos_token_id": 258,
        "dtype": "float32", "initializer_range": 0.3,
    }  # fmt: skip
    if family == "qwen3":
        options["head_dim"] = 32  # not hidden / heads
    if family == "llama":
        options["rope_parameters"] = LLAMA3_ROPE
    return getattr(transformers, config_class)(**(options | overrides))


def make_tokenizer():
    """256 bytes and three special tokens, without merges: every text encodes, every id below 259 decodes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab=dict(zip(alphabet, range(256))), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_hf_model(config, seed: int = 0):
    """A transformers model in fp32 whose norms and biases are random too: their defaults would hide mistakes."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


@pytest.fixture(scope="session")
def tiny_config():
    return make_config


@pytest.fixture(scope="session")
def tiny_tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_hf_folder(tmp_path_factory):
    """make(kind, seed, dtype="float32", shard_size="5GB", **config overrides) -> Path; one for equal arguments."""
    made: dict[str, Path] = {}

    def make(kind: str = "qwen2-tied", seed: int = 0, dtype: str = "float32", shard_size: str = "5GB", **overrides):
        key = json.dumps([kind, seed, dtype, shard_size, overrides], sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp("hf") / kind
            model = make_hf_model(make_config(kind, **overrides), seed).to(getattr(torch, dtype))
            model.generation_config.eos_token_id = [258, 256]
            model.generation_config.pad_token_id = 256
            model.save_pretrained(folder, max_shard_size=shard_size)
            make_tokenizer().save_pretrained(folder)
            made[key] = folder
        return made[key]

    return make


def read_model(folder: Path, weights: str = "bf16", **options):
    """Our Transformer from a folder, every tensor at once and without convert/loader.py: for tests of the model itself."""
    from model import ModelConfig, Transformer

    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)

    def source(name, shape):
        assert tuple(tensors[name].shape) == tuple(shape), (name, tensors[name].shape, shape)
        return tensors[name]

    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    return Transformer(config, source, weights=weights, **options)


@pytest.fixture(scope="session")
def tiny_model(tiny_hf_folder):
    """make(kind, weights="bf16", seed=0, **options of Transformer) -> a new model each time."""

    def make(kind: str = "qwen2-tied", weights: str = "bf16", seed: int = 0, **options):
        return read_model(tiny_hf_folder(kind, seed=seed), weights, **options)

    return make
