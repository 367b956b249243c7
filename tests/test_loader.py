"""Whole models in: logits against transformers, both NVFP4 layouts, memory of one layer, every kind of bad folder."""

import json
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from conftest import KINDS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import nvfp4
from convert.loader import load_model, resolve_model
from files import hub, layouts
from files.shards import FUSED, ShardReader, quantize_checkpoint

ROOT = Path(__file__).parent.parent
TOKENS = torch.arange(5, 45)


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.logits(model(TOKENS, model.packed([len(TOKENS)])))


@torch.no_grad()
def transformers_logits(folder, **options) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()(TOKENS[None]).logits[0]


def changed(folder: Path, tmp_path: Path, file: str = "config.json", **changes) -> Path:
    """A copy of the folder with fields of one JSON file changed; None removes a field."""
    copy = tmp_path / "changed"
    if not copy.exists():
        shutil.copytree(folder, copy)
    fields = json.loads((copy / file).read_text()) if (copy / file).exists() else {}
    fields = {key: value for key, value in (fields | changes).items() if value is not None}
    (copy / file).write_text(json.dumps(fields))
    return copy


def with_tensors(folder: Path, tmp_path: Path, change) -> Path:
    """A copy of the folder whose tensors change(dict) has altered."""
    copy = tmp_path / "tensors"
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def refused(name, **options) -> str:
    with pytest.raises(ValueError) as caught:
        load_model(str(name), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------- right models from right folders


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(tiny_hf_folder, kind, dtype):
    """Shards, tied and untied heads, biases, q and k norms, llama3 rope, every float source."""
    folder = tiny_hf_folder(kind, dtype=dtype, shard_size="60KB")
    model, _, info = load_model(str(folder), weights="bf16")
    assert info.valid_vocab == model.valid_vocab == 259 < model.config.vocab == 272
    ours, theirs = logits(model), transformers_logits(folder)
    torch.testing.assert_close(ours[:, :259], theirs[:, :259], rtol=1e-4, atol=1e-4)
    assert (ours[:, 259:] == -torch.inf).all()  # rows without a token are never sampled


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_an_nvfp4_checkpoint_is_the_model_quantised_on_the_way_in(tiny_hf_folder, tmp_path, kind, layout):
    source = tiny_hf_folder(kind, dtype="bfloat16", shard_size="60KB")
    quantize_checkpoint(str(source), str(tmp_path / "q"), layout, device="cpu", shard_bytes=60_000)
    here, _, _ = load_model(str(source), weights="nvfp4")
    stored, _, _ = load_model(str(tmp_path / "q"), weights="nvfp4")
    dequantised, _, _ = load_model(str(tmp_path / "q"), weights="bf16")
    if layout == "compressed-tensors":
        for layer, other in zip(here.layers, stored.layers):
            for a, b in zip(layer.qkv.weight.stored(), other.qkv.weight.stored()):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        assert torch.equal(logits(here), logits(stored))
    # ModelOpt stores 1/g: one more fp32 rounding. The float model is far away.
    torch.testing.assert_close(logits(here), logits(stored), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(logits(stored), logits(dequantised), rtol=1e-3, atol=1e-3)
    assert (logits(here) - logits(load_model(str(source), weights="bf16")[0]))[:, :259].abs().max() > 0.05


def test_nvfp4_logits_are_those_of_transformers_on_the_dequantised_weights(tiny_hf_folder, tmp_path):
    """An oracle that knows nothing of our layers: transformers, given weights that went through NVFP4 and back."""
    folder = tiny_hf_folder("qwen2")

    def through_nvfp4(tensors):
        for i in range(2):
            for group in FUSED:
                names = [f"model.layers.{i}.{part}.weight" for part in group]
                g = nvfp4.global_scale(*[tensors[name] for name in names])
                tensors.update({n: nvfp4.dequantize(nvfp4.quantize(tensors[n], g), torch.float32) for n in names})

    theirs = transformers_logits(with_tensors(folder, tmp_path, through_nvfp4))
    ours = logits(load_model(str(folder), weights="nvfp4")[0])
    torch.testing.assert_close(ours[:, :259], theirs[:, :259], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "layout, added",
    [("modelopt", {"input_scale": torch.tensor(0.1)}), ("compressed-tensors", {"input_global_scale": torch.tensor([9.0])})],
)
def test_activation_scales_of_w4a4_are_left_out_with_one_line(tiny_hf_folder, tmp_path, capsys, layout, added):
    source = tiny_hf_folder("llama", dtype="bfloat16")
    quantize_checkpoint(str(source), str(tmp_path / "q"), layout, device="cpu")

    def add(tensors):
        for group in FUSED:
            tensors.update({f"model.layers.0.{part}.{key}": value.clone() for part in group for key, value in added.items()})
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(1.0)

    w4a4 = with_tensors(tmp_path / "q", tmp_path, add)
    capsys.readouterr()
    model, _, _ = load_model(str(w4a4))
    said = capsys.readouterr().err
    assert said.count("left out") == 1 and f"7 {next(iter(added))}" in said and "1 k_scale" in said
    assert torch.equal(logits(model), logits(load_model(str(tmp_path / "q"))[0]))


def test_hf_quant_config_alone_describes_a_modelopt_checkpoint(tiny_hf_folder, tmp_path):
    """nvidia's older folders: nothing in config.json, and quant_algo NVFP4."""
    quantize_checkpoint(str(tiny_hf_folder("llama")), str(tmp_path / "q"), "modelopt", device="cpu")
    old = changed(tmp_path / "q", tmp_path, quantization_config=None)
    described = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    changed(old, tmp_path, "hf_quant_config.json", quantization=described)
    assert torch.equal(logits(load_model(str(old))[0]), logits(load_model(str(tmp_path / "q"))[0]))


def test_projections_left_in_16_bits_are_quantised_here_and_counted(tiny_hf_folder, tmp_path, capsys):
    """Checkpoints that exclude attention exist; they load, and a line says what was done."""
    source = tiny_hf_folder("llama", dtype="bfloat16")
    quantize_checkpoint(str(source), str(tmp_path / "q"), device="cpu")
    original = load_file(source / "model.safetensors")

    def restore(tensors):
        for part in FUSED[0]:
            linear = f"model.layers.1.{part}"
            for key in layouts.NAMES["compressed-tensors"]:
                del tensors[f"{linear}.{key}"]
            tensors[f"{linear}.weight"] = original[f"{linear}.weight"]

    mixed = with_tensors(tmp_path / "q", tmp_path, restore)
    capsys.readouterr()
    model, _, _ = load_model(str(mixed))
    assert "3 projections are 16-bit in this checkpoint and were quantised here" in capsys.readouterr().err
    assert torch.equal(logits(model), logits(load_model(str(tmp_path / "q"))[0]))


def test_an_nvfp4_checkpoint_is_not_quantised_a_second_time(tiny_hf_folder, tmp_path):
    quantize_checkpoint(str(tiny_hf_folder("llama")), str(tmp_path / "q"), device="cpu")
    assert "nf4 would quantise it twice" in refused(tmp_path / "q", weights="nf4")


# ---------------------------------------------------------------------------------------------------- memory


def test_no_more_than_one_fused_projection_is_alive_at_a_time(tiny_hf_folder, monkeypatch):
    """Counts the tensors that the reader has handed out and that somebody still holds."""
    folder = tiny_hf_folder("llama", dtype="bfloat16", num_hidden_layers=6, shard_size="60KB")
    alive: dict[int, int] = {}
    peak, read = 0, ShardReader.get

    def counting(self, name, device="cpu"):
        nonlocal peak
        tensor = read(self, name, device)
        alive[id(tensor)] = tensor.nbytes
        weakref.finalize(tensor, alive.pop, id(tensor))
        peak = max(peak, sum(alive.values()))
        return tensor

    monkeypatch.setattr(ShardReader, "get", counting)
    load_model(str(folder))
    sizes = {name: 2 * torch.Size(info.shape).numel() for name, info in ShardReader(folder).infos.items()}
    fused = max(sum(sizes[f"model.layers.0.{part}.weight"] for part in group) for group in FUSED)
    assert peak <= max(fused, sizes["model.embed_tokens.weight"])
    assert peak < sum(sizes.values()) / 5 and not alive


MEASURE = """
import re, sys
from convert import loader
def kib(field): return int(re.search(field + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
loader.load_model(sys.argv[1])                  # a one-layer model: everything that is allocated once
before = kib("VmRSS")
open("/proc/self/clear_refs", "w").write("5")   # the high-water mark starts here
model = loader.load_model(sys.argv[2])
print(kib("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from /proc")
def test_peak_memory_is_that_of_one_layer_not_of_the_model(tiny_hf_folder, tmp_path):
    """A synthetic checkpoint of 12 shards, measured in a fresh process: the packed model, one layer, and little more."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    generator = torch.Generator().manual_seed(0)

    def make(folder: Path, layers: int) -> int:
        changed(tiny_hf_folder("llama-tied"), folder, **shape, num_hidden_layers=layers)
        folder = folder / "changed"
        (folder / "model.safetensors").unlink()
        sizes = {"q": (512, 512), "k": (512, 512), "v": (512, 512), "o": (512, 512)}
        weight_map, total = {}, 0
        for i in range(layers):
            linears = {f"self_attn.{name}_proj": size for name, size in sizes.items()}
            linears |= {"mlp.gate_proj": (2048, 512), "mlp.up_proj": (2048, 512), "mlp.down_proj": (512, 2048)}
            tensors = {name: torch.randn(size, generator=generator) for name, size in linears.items()}
            tensors |= {name: torch.ones(512) for name in ("input_layernorm", "post_attention_layernorm")}
            tensors = {f"model.layers.{i}.{name}.weight": tensor for name, tensor in tensors.items()}
            if i == 0:
                tensors |= {"model.embed_tokens.weight": torch.ones(272, 512), "model.norm.weight": torch.ones(512)}
            save_file(tensors, folder / f"model-{i}.safetensors")
            weight_map |= dict.fromkeys(tensors, f"model-{i}.safetensors")
            total += sum(tensor.nbytes for tensor in tensors.values())
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return total

    make(tmp_path / "one", 1)
    total = make(tmp_path / "all", 12)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "one" / "changed"), str(tmp_path / "all" / "changed")]
    # Without this, glibc keeps freed megabytes for later, more or less of them from run to run.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    peak, packed, layer = int(result.stdout.splitlines()[-1]) * 1024, total * 4.5 / 32, total / 12
    # 201 MB of fp32 weights; 28 MB packed, 17 MB a layer, and up to 30 MB of temporaries of a chunk of rows.
    assert peak < packed + layer + 40e6 < total / 2, (peak, total)


# ------------------------------------------------------------------------------------- tokenizer and end tokens


def test_every_end_token_of_the_generation_config_ends_a_completion(tiny_hf_folder):
    _, tokenizer, info = load_model(str(tiny_hf_folder("llama")))
    assert info.stop_ids == (256, 258) and info.pad_id == 256
    assert tokenizer.convert_ids_to_tokens(list(info.stop_ids)) == ["<|endoftext|>", "<|im_end|>"]


def test_a_base_model_gets_the_end_token_of_its_chat_template(tiny_hf_folder, tmp_path):
    """Qwen2.5-7B says eos = <|endoftext|> everywhere; its template ends a turn with <|im_end|>, else it never stops."""
    base = changed(tiny_hf_folder("llama"), tmp_path, eos_token_id=256)
    changed(base, tmp_path, "generation_config.json", eos_token_id=256)
    changed(base, tmp_path, "tokenizer_config.json", eos_token="<|endoftext|>")
    assert load_model(str(base))[2].stop_ids == (256, 258)
    (base / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert load_model(str(base))[2].stop_ids == (256,)


def test_end_tokens_are_found_without_a_generation_config(tiny_hf_folder, tmp_path):
    folder = changed(tiny_hf_folder("llama"), tmp_path)
    (folder / "generation_config.json").unlink()
    assert load_model(str(folder))[2].stop_ids == (258,)


def test_a_model_that_could_not_stop_is_refused(tiny_hf_folder, tmp_path):
    folder = changed(tiny_hf_folder("llama"), tmp_path, eos_token_id=None)
    changed(folder, tmp_path, "generation_config.json", eos_token_id=None)
    changed(folder, tmp_path, "tokenizer_config.json", eos_token=None)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert "no end token" in refused(folder)


@pytest.mark.parametrize("eos", ["<|im_end|>", [1, "x"], -1, True, 2.5, {"a": 1}])
def test_a_malformed_end_token_is_named(tiny_hf_folder, tmp_path, eos):
    folder = changed(tiny_hf_folder("llama"), tmp_path, "generation_config.json", eos_token_id=eos)
    assert "eos_token_id" in refused(folder)


# ------------------------------------------------------------------------------------------------ bad folders


def test_a_folder_without_a_tokenizer_is_refused(tiny_hf_folder, tmp_path):
    folder = changed(tiny_hf_folder("llama"), tmp_path)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert "has no tokenizer (tokenizer.json" in refused(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": "9", "model": {"type": "Hostile"}}'])
def test_a_corrupt_tokenizer_is_refused(tiny_hf_folder, tmp_path, text):
    folder = changed(tiny_hf_folder("llama"), tmp_path)
    (folder / "tokenizer.json").write_text(text)
    assert "tokenizer" in refused(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
def test_a_corrupt_config_is_refused(tiny_hf_folder, tmp_path, text):
    folder = changed(tiny_hf_folder("llama"), tmp_path)
    (folder / "config.json").write_text(text)
    assert "config.json" in refused(folder)


def test_a_folder_without_a_config_is_refused(tmp_path):
    assert "config.json is missing" in refused(tmp_path)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", None, ["llama"], 3])
def test_an_unknown_architecture_is_refused_by_name(tiny_hf_folder, tmp_path, model_type):
    message = refused(changed(tiny_hf_folder("llama"), tmp_path, model_type=model_type))
    assert repr(model_type) in message and "qwen2, qwen3, llama" in message


def test_an_adapter_is_not_a_model(tiny_hf_folder, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    assert "LoRA adapter" in refused(tmp_path)


def test_code_in_the_folder_is_never_run(tiny_hf_folder, tmp_path):
    """auto_map is how a folder asks transformers to import its Python."""
    auto_map = {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.Tokenizer", None], "AutoModelForCausalLM": "evil.M"}
    folder = changed(tiny_hf_folder("llama"), tmp_path, auto_map=auto_map)
    changed(folder, tmp_path, "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})
    evil = f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Tokenizer: pass\nConfig = M = Tokenizer"
    (folder / "evil.py").write_text(evil)
    try:
        load_model(str(folder))
    except ValueError:
        pass
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"hidden_size": 32}, "has shape (272, 64) where config.json implies (272, 32)"),
        ({"vocab_size": 10**12}, "do not belong together"),
        ({"num_hidden_layers": 3}, "lacks tensor 'model.layers.2."),
        ({"intermediate_size": 104}, "multiple of the NVFP4 block 16"),
        ({"head_dim": 10}, "multiple of the NVFP4 block 16"),
        ({"rope_parameters": [1]}, "config.json"),
    ],
)
def test_a_config_that_does_not_fit_its_weights_is_refused(tiny_hf_folder, tmp_path, changes, complaint):
    assert complaint in refused(changed(tiny_hf_folder("llama"), tmp_path, **changes))


def test_a_missing_head_is_not_replaced_by_chance(tiny_hf_folder, tmp_path):
    """transformers re-initialises what a checkpoint lacks, with a warning that nobody reads."""
    folder = with_tensors(tiny_hf_folder("qwen2"), tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lacks tensor 'lm_head.weight'" in refused(folder)


@pytest.mark.parametrize("weights", ["nvfp4", "bf16"])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"])
def test_nan_in_the_weights_is_refused_by_name(tiny_hf_folder, tmp_path, name, weights):
    def poison(tensors):
        tensors[name].view(-1)[3] = float("nan")

    assert f"{name} holds NaN" in refused(with_tensors(tiny_hf_folder("llama"), tmp_path, poison), weights=weights)


def test_integer_weights_without_a_description_are_refused(tiny_hf_folder, tmp_path):
    name = "model.layers.0.mlp.down_proj.weight"
    folder = with_tensors(tiny_hf_folder("llama"), tmp_path, lambda tensors: tensors.update({name: tensors[name].byte()}))
    message = refused(folder)
    assert name in message and "no quantization_config" in message


def test_another_quantisation_is_refused_by_name(tiny_hf_folder, tmp_path):
    folder = changed(tiny_hf_folder("llama"), tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    assert "quantised by awq" in refused(folder)


def test_a_damaged_nvfp4_linear_is_refused_by_name(tiny_hf_folder, tmp_path):
    quantize_checkpoint(str(tiny_hf_folder("llama")), str(tmp_path / "q"), device="cpu")

    def damage(tensors):
        tensors["model.layers.1.mlp.down_proj.weight_global_scale"].fill_(0)

    assert "model.layers.1.mlp.down_proj: global scale" in refused(with_tensors(tmp_path / "q", tmp_path, damage))


FIELDS = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
          "intermediate_size", "vocab_size", "rms_norm_eps", "rope_parameters", "rope_theta", "tie_word_embeddings",
          "attention_bias", "eos_token_id", "layer_types", "quantization_config", "max_position_embeddings")  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-4, 300) | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=6), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=2))
def test_any_config_is_a_model_or_one_clear_line(tiny_hf_folder, tmp_path, changes):
    folder = changed(tiny_hf_folder("llama"), tmp_path)
    original = json.loads((tiny_hf_folder("llama") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(original | changes))
    try:
        load_model(str(folder), weights="bf16")
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 800


# ------------------------------------------------------------------------------------------------------- names


def test_a_local_folder_wins_over_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen2.5-7B").mkdir()
    assert resolve_model("Qwen2.5-7B") == Path("Qwen2.5-7B")


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", "", "~/nowhere/at-all", "name/"])
def test_a_path_that_is_not_there_is_not_looked_up_on_the_hub(name):
    with pytest.raises(ValueError, match="does not exist; check the path"):
        resolve_model(name)


def test_a_file_is_not_a_model(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="is a file; give the folder"):
        resolve_model(str(tmp_path / "model.gguf"))


def test_an_unknown_bare_name_is_refused():
    with pytest.raises(ValueError, match="'Frobnicator-7B' is neither a folder here nor a bare name of a known family"):
        resolve_model("Frobnicator-7B")


def test_only_safetensors_json_and_tokenizer_files_are_downloaded(monkeypatch, tmp_path):
    asked = {}

    def download(repo, **options):
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("Qwen2.5-7B") == tmp_path and asked["repo"] == "Qwen/Qwen2.5-7B"
    import fnmatch

    def wanted(file):
        allowed = any(fnmatch.fnmatch(file, pattern) for pattern in asked["allow_patterns"])
        return allowed and not any(fnmatch.fnmatch(file, pattern) for pattern in asked["ignore_patterns"])

    for file in ("model-00001-of-00004.safetensors", "model.safetensors.index.json", "config.json", "merges.txt",
                 "generation_config.json", "tokenizer.json", "chat_template.jinja", "tokenizer.model"):  # fmt: skip
        assert wanted(file), file
    for file in ("pytorch_model.bin", "consolidated.00.pth", "model.pt", "modeling_qwen.py", "original/params.json",
                 "optimizer.pkl", "onnx/model.safetensors", "README.md", "model.gguf"):  # fmt: skip
        assert not wanted(file), file


@pytest.mark.parametrize(
    "error, complaint",
    [("RepositoryNotFoundError", "has no model"), ("GatedRepoError", "is gated; accept its licence"),
     ("LocalEntryNotFoundError", "hub cannot be reached"), ("OfflineModeIsEnabled", "hub cannot be reached"),
     ("HFValidationError", "has no model"), ("OSError", "hub cannot be reached")],
)  # fmt: skip
def test_what_the_hub_refuses_is_one_clear_line(monkeypatch, error, complaint):
    from huggingface_hub import errors

    kind = getattr(errors, error, OSError)

    def fail(*_, **__):
        raise kind.__new__(kind, "a reason\nof two lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ValueError, match=complaint) as caught:
        resolve_model("some/model")
    assert "\n" not in str(caught.value) and "some/model" in str(caught.value)


def test_offline_without_a_copy_is_one_clear_line(monkeypatch, tmp_path):
    """The real client, offline, with an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="not in the local cache and the hub cannot be reached") as caught:
        resolve_model("Qwen/Qwen2.5-7B")
    assert "\n" not in str(caught.value)


def test_the_command_describes_a_folder(tiny_hf_folder, capsys):
    assert hub.main([str(tiny_hf_folder("qwen3"))]) == 0
    said = capsys.readouterr().out
    assert "qwen3, weights float" in said and "256 '<|endoftext|>', 258 '<|im_end|>'" in said
    assert hub.main(["./nowhere"]) == 2
