"""Reading shards lazily, refusing damaged and hostile folders, and writing NVFP4 checkpoints that others read."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import nvfp4
from files import layouts, shards
from files.peft_files import Adapter, write_adapter
from files.shards import FUSED, ShardReader, quantize_checkpoint

ROOT = Path(__file__).parent.parent
INDEX = "model.safetensors.index.json"


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder by the safetensors package itself."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def damage(folder: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "damaged"
    shutil.copytree(folder, copy)
    return copy


def one_line(caught) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ reading


def test_shards_are_read_as_the_safetensors_package_reads_them(tiny_hf_folder):
    folder = tiny_hf_folder("qwen2", dtype="bfloat16", shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    reader, wanted = ShardReader(folder), read_all(folder)
    assert set(reader.names()) == set(wanted) and len(reader) == len(wanted)
    for name, tensor in wanted.items():
        assert name in reader and reader.infos[name].shape == tuple(tensor.shape) and reader.infos[name].dtype == "BF16"
        assert torch.equal(reader.get(name), tensor)


def test_a_tensor_outlives_its_file(tiny_hf_folder, tmp_path):
    """safetensors maps files; a mapped weight whose file is replaced during training changes, or kills the process."""
    folder = damage(tiny_hf_folder("llama"), tmp_path)
    reader = ShardReader(folder)
    tensor = reader.get("model.norm.weight")
    before = tensor.clone()
    path = folder / "model.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(tensor, before)


def test_a_tensor_that_is_not_there_is_named(tiny_hf_folder):
    with pytest.raises(ValueError, match="lacks tensor 'model.layers.7.mlp.up_proj.weight'"):
        ShardReader(tiny_hf_folder("llama")).get("model.layers.7.mlp.up_proj.weight")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1000, -1])
def test_a_truncated_file_is_refused_when_the_reader_is_made(tiny_hf_folder, tmp_path, keep):
    folder = damage(tiny_hf_folder("llama"), tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="truncated or corrupt") as caught:
        ShardReader(folder)
    assert str(path) in one_line(caught) and "download it again" in str(caught.value)


def test_a_corrupt_header_is_refused(tiny_hf_folder, tmp_path):
    folder = damage(tiny_hf_folder("llama"), tmp_path)
    path = folder / "model.safetensors"
    for damaged in (b"\xff" * 8 + path.read_bytes()[8:], b"PK\x03\x04" * 100, path.read_bytes().replace(b"F32", b"F33", 1)):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="truncated or corrupt") as caught:
            ShardReader(folder)
        one_line(caught)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_bytes_in_the_header_are_a_reader_or_one_clear_line(tiny_hf_folder, tmp_path, data):
    path = tiny_hf_folder("llama") / "model.safetensors"
    raw = bytearray(path.read_bytes())
    for position in data.draw(st.lists(st.integers(0, 3000), min_size=1, max_size=4)):
        raw[position] = data.draw(st.integers(0, 255))
    folder = tmp_path / "fuzz"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(raw)
    try:
        reader = ShardReader(folder)
        for name in reader.names():
            reader.get(name)
    except ValueError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "file",
    ["../other.safetensors", "/etc/passwd", "/tmp/x.safetensors", "sub/x.safetensors", "..", "x.bin", "", 7, None,
     "a\\b.safetensors", "x.safetensors\n", "C:x.safetensors"],
)  # fmt: skip
def test_an_index_reaches_only_plain_files_of_its_folder(tmp_path, file):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(ValueError, match="only \\*.safetensors files of the folder itself") as caught:
        ShardReader(tmp_path)
    one_line(caught)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000, "\x00"])
def test_a_malformed_index_is_named(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=INDEX) as caught:
        ShardReader(tmp_path)
    one_line(caught)


def test_a_missing_shard_and_a_promised_tensor_are_named(tiny_hf_folder, tmp_path):
    folder = damage(tiny_hf_folder("qwen2", dtype="bfloat16", shard_size="50KB"), tmp_path)
    index = json.loads((folder / INDEX).read_text())
    file = next(iter(index["weight_map"].values()))
    index["weight_map"]["model.promised.weight"] = file
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="lacks tensor 'model.promised.weight' that the index promises"):
        ShardReader(folder)
    (folder / file).unlink()
    with pytest.raises(ValueError, match=f"{file} is missing; the download is incomplete"):
        ShardReader(folder)


@pytest.mark.parametrize(
    "file, complaint",
    [("pytorch_model.bin", "pickled weights"), ("consolidated.00.pth", "pickled weights"), ("model.pt", "pickled weights"),
     ("adapter_model.safetensors", "LoRA adapter"), ("README.md", "neither model.safetensors nor")],
)  # fmt: skip
def test_a_folder_without_safetensors_weights_is_refused_and_nothing_is_opened(tmp_path, file, complaint):
    (tmp_path / file).write_bytes(b"\x80\x04cos\nsystem\n")  # the beginning of a hostile pickle
    with pytest.raises(ValueError, match=complaint) as caught:
        ShardReader(tmp_path)
    one_line(caught)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.fixed_dictionaries({"weight_map": st.dictionaries(st.text(max_size=8), JSON, min_size=1, max_size=3)}) | JSON)
def test_any_json_as_an_index_is_one_clear_line(tmp_path, index):
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError) as caught:
        ShardReader(tmp_path)
    assert len(one_line(caught)) < 600


# ------------------------------------------------------------------------------------------------ writing


def projections(layers: int) -> list[list[str]]:
    return [[f"model.layers.{i}.{part}" for part in group] for i in range(layers) for group in FUSED]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3-tied", "llama-tied"])
def test_compressed_tensors_decompresses_our_checkpoint_bit_for_bit(tiny_hf_folder, tmp_path, kind, dtype):
    """transformers loads it through compressed-tensors; each weight is our dequantised one, and the rest is bf16."""
    from transformers import AutoModelForCausalLM

    source, out = tiny_hf_folder(kind, dtype=dtype, shard_size="50KB"), tmp_path / "out"
    quantize_checkpoint(str(source), str(out), device="cpu")
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    model(torch.tensor([[1, 2, 3]]))  # decompresses where loading did not
    loaded, original = model.state_dict(), read_all(source)
    for group in projections(2):
        g = nvfp4.global_scale(*[original[f"{name}.weight"] for name in group])
        for name in group:
            wanted = nvfp4.dequantize(nvfp4.quantize(original.pop(f"{name}.weight"), g), torch.bfloat16)
            assert torch.equal(loaded[f"{name}.weight"], wanted), name
    assert original  # embeddings, head, norms, biases
    for name, tensor in original.items():
        assert torch.equal(loaded[name], tensor.to(torch.bfloat16)), name


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_fused_projections_share_a_scale_and_lm_head_stays(tiny_hf_folder, tmp_path, layout):
    source, out = tiny_hf_folder("qwen2", dtype="bfloat16"), tmp_path / "out"
    quantize_checkpoint(str(source), str(out), layout, device="cpu")
    tensors, (_, _, last) = read_all(out), layouts.NAMES[layout]
    for group in projections(2):
        assert len({tensors[f"{name}.{last}"].item() for name in group}) == 1
    assert tensors["lm_head.weight"].dtype == tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    config = json.loads((out / "config.json").read_text())
    assert layouts.read_layout(config["quantization_config"]) == layout
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    if layout == "modelopt":
        described = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
        assert described == {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None, "group_size": 16,
                             "exclude_modules": ["lm_head"]}  # fmt: skip


def test_compressed_tensors_converts_our_modelopt_checkpoint_to_our_other_layout(tiny_hf_folder, tmp_path):
    """Its own ModelOpt reader finds what it expects, and the same codes, scales and (to one rounding) global scales."""
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4")
    source = tiny_hf_folder("llama", dtype="bfloat16")
    for layout in layouts.LAYOUTS:
        quantize_checkpoint(str(source), str(tmp_path / layout), layout, device="cpu")
    converter = converters.ModelOptNvfp4Converter(ignore=["lm_head"], targets=["re:.*proj.*"])
    converted, ours = converter.process(read_all(tmp_path / "modelopt")), read_all(tmp_path / "compressed-tensors")
    assert set(converted) == set(ours)
    for name, tensor in ours.items():
        if name.endswith("global_scale"):
            torch.testing.assert_close(converted[name].reshape(1), tensor, rtol=2**-23, atol=0)
        else:
            assert torch.equal(converted[name].view(torch.uint8), tensor.view(torch.uint8))


def test_a_large_checkpoint_is_written_in_shards_with_an_index(tiny_hf_folder, tmp_path):
    source = tiny_hf_folder("llama", dtype="bfloat16")
    quantize_checkpoint(str(source), str(tmp_path / "one"), device="cpu")
    quantize_checkpoint(str(source), str(tmp_path / "many"), device="cpu", shard_bytes=30_000)
    assert [p.name for p in (tmp_path / "one").glob("*.safetensors*")] == ["model.safetensors"]
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    files = sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2 and files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    one, many = read_all(tmp_path / "one"), ShardReader(tmp_path / "many")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in one.values())
    for name, tensor in one.items():
        assert torch.equal(many.get(name).view(torch.uint8), tensor.view(torch.uint8))


def test_tokenizer_and_generation_config_come_along_and_nothing_else(tiny_hf_folder, tmp_path):
    source, out = damage(tiny_hf_folder("qwen3"), tmp_path), tmp_path / "out"
    (source / "evil.py").write_text("raise SystemExit")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    quantize_checkpoint(str(source), str(out), device="cpu")
    names = {path.name for path in out.iterdir()}
    assert names >= {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json", "model.safetensors"}
    assert not names & {"evil.py", "pytorch_model.bin", INDEX}
    assert (out / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16"  # the source was fp32


def test_an_output_that_holds_something_is_refused_and_kept(tiny_hf_folder, tmp_path):
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        quantize_checkpoint(str(tiny_hf_folder("llama")), str(tmp_path), device="cpu")
    assert [p.name for p in tmp_path.iterdir()] == ["precious.txt"]


def test_an_nvfp4_source_is_refused(tiny_hf_folder, tmp_path):
    quantize_checkpoint(str(tiny_hf_folder("llama")), str(tmp_path / "a"), device="cpu")
    with pytest.raises(ValueError, match="is NVFP4 already"):
        quantize_checkpoint(str(tmp_path / "a"), str(tmp_path / "b"), device="cpu")


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_nan_is_refused_by_name_and_nothing_is_left_behind(tiny_hf_folder, tmp_path, name):
    source = damage(tiny_hf_folder("llama"), tmp_path)
    tensors = read_all(source)
    tensors[name][3, 3] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="NaN") as caught:
        quantize_checkpoint(str(source), str(tmp_path / "out"), device="cpu")
    assert name.removesuffix(".weight") in one_line(caught)
    assert [p.name for p in tmp_path.iterdir()] == ["damaged"]


def test_a_full_disk_leaves_nothing_behind(tiny_hf_folder, tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(shards, "save_file", full)
    with pytest.raises(ValueError, match="is the disk full"):
        quantize_checkpoint(str(tiny_hf_folder("llama")), str(tmp_path / "out"), device="cpu")
    assert not list(tmp_path.iterdir())


def test_the_command_converts_and_reports_mistakes_with_exit_code_2(tiny_hf_folder, tmp_path):
    def run(*arguments):
        command = [sys.executable, str(ROOT / "nvfp4.py"), "quantize", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)

    done = run(tiny_hf_folder("qwen2"), tmp_path / "out", "--layout", "modelopt")
    assert done.returncode == 0, done.stderr
    assert "model.layers.0.mlp.up_proj.weight_scale_2" in ShardReader(tmp_path / "out")
    again = run(tiny_hf_folder("qwen2"), tmp_path / "out")
    assert again.returncode == 2 and again.stderr.count("\n") == 1 and "not an empty folder" in again.stderr


def test_what_is_written_has_the_users_permissions(tiny_hf_folder, tmp_path):
    """save_file and mkdtemp leave their results to the owner alone: a colleague could read config.json and no weight."""
    before = os.umask(0o027)
    try:
        quantize_checkpoint(str(tiny_hf_folder("llama")), str(tmp_path / "out"), device="cpu", shard_bytes=50_000)
        write_adapter(Adapter(1, 1, {"model.layers.0.mlp.up_proj": (torch.ones(1, 16), torch.ones(4, 1))}), tmp_path / "adapter")
    finally:
        os.umask(before)
    for folder in (tmp_path / "out", tmp_path / "adapter"):
        assert folder.stat().st_mode & 0o777 == 0o750
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o640}


def test_a_copy_without_its_companions_names_them(tmp_path):
    shutil.copy(ROOT / "nvfp4.py", tmp_path)
    command = [sys.executable, "nvfp4.py", "quantize", "a", "b"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "need the folders files/ and layers/" in done.stderr
