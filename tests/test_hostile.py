"""Model folders from strangers: links, pipes, lying headers, pickles. One line and exit code 2, and nothing leaks."""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import eval as evaluation
import train
from convert import merge
from convert.loader import load_model
from files import hub, peft_files, shards
from files.hub import load_tokenizer, read_config, resolve_model
from files.peft_files import Adapter, write_adapter
from files.shards import ShardReader, quantize_checkpoint
from lora import check_fit
from problems.tasks import Problem, encode_prompts
from training import config


def refused(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    return str(caught.value)


@pytest.fixture
def folder(tiny_hf_folder, tmp_path) -> Path:
    return shutil.copytree(tiny_hf_folder("llama"), tmp_path / "model")


# ------------------------------------------------------------------------------------------------ links and pipes


@pytest.mark.parametrize("name", ["notes.txt", "tokenizer.json", "config.json", "model.safetensors", "extra"])
def test_a_link_that_leads_out_of_the_folder_is_refused(folder, tmp_path, name):
    """A converted or merged checkpoint copies the text files beside the weights: a link would publish one's key."""
    secret = tmp_path / "id_rsa"
    secret.write_text("secret")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret if name != "extra" else tmp_path)
    assert "leads out of the model folder" in refused(folder) and name in refused(folder)
    for command in (lambda out: quantize_checkpoint(str(folder), str(out), device="cpu"),
                    lambda out: merge.merge(str(folder), str(folder), str(out), device="cpu")):
        with pytest.raises(ValueError, match="adapter_config|leads out"):
            command(tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_links_within_the_folder_and_a_folder_that_is_a_link_are_fine(folder, tmp_path):
    (folder / "weights.bin.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("weights.bin.safetensors")
    (tmp_path / "alias").symlink_to(folder)
    load_model(str(tmp_path / "alias"))


def test_the_hub_caches_own_links_are_followed(folder, tmp_path):
    """models--org--name/snapshots/<revision>/config.json -> ../../blobs/<hash>."""
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, path in enumerate(folder.iterdir()):
        path.rename(cache / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    load_model(str(snapshot))
    (snapshot / "notes.txt").symlink_to("../../../id_rsa")
    assert "leads out" in refused(snapshot)


def test_a_pipe_does_not_hang_the_loader(folder):
    (folder / "generation_config.json").unlink()
    os.mkfifo(folder / "generation_config.json")
    assert "neither a file nor a folder" in refused(folder)


# ------------------------------------------------------------------------------------------------ lying headers


def with_header(folder: Path, change) -> Path:
    """The weights' file with its header altered by change(dict) and the data as they are."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    return folder


NAME, OTHER = "model.norm.weight", "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize("change", [
    lambda h: h[NAME].update(data_offsets=h[OTHER]["data_offsets"]),  # two tensors, one place
    lambda h: h[NAME].update(data_offsets=[0, 1 << 60]),
    lambda h: h[NAME].update(data_offsets=[-4, 252]),
    lambda h: h[NAME].update(data_offsets=h[NAME]["data_offsets"][::-1]),
    lambda h: h[NAME].update(data_offsets=[1 << 63, 1 << 64]),
    lambda h: h[NAME].update(shape=[1 << 62]),
    lambda h: h[NAME].update(shape=[1 << 32, 1 << 32]),  # the product wraps to 0
    lambda h: h[NAME].update(shape=[-64]),
    lambda h: h[NAME].update(shape=[]),
    lambda h: h[NAME].update(shape="64"),
    lambda h: h[NAME].update(dtype="F64"),
    lambda h: h[NAME].update(dtype="pickle"),
    lambda h: h.pop(NAME),  # a hole in the data
    lambda h: h.update({NAME: [1, 2]}),
    lambda h: h.update(__metadata__={"format": 7}),
], ids=range(15))  # fmt: skip
def test_a_header_that_lies_is_refused_before_anything_is_read(folder, change):
    assert "truncated or corrupt" in refused(with_header(folder, change))


@pytest.mark.parametrize("change", [
    lambda h: h[NAME].update(shape=[8, 8]),
    lambda h: h[NAME].update(dtype="I32"),
    lambda h: h[NAME].update(dtype="BF16", shape=[128]),
    lambda h: h[NAME].update(dtype="U8", shape=[256]),
    lambda h: h.update({"\u202egpj.exe": h.pop(NAME)}),
], ids=range(5))  # fmt: skip
def test_a_header_that_is_well_formed_and_wrong_is_refused_by_the_tensors_name(folder, change):
    assert NAME in refused(with_header(folder, change))


def test_a_header_of_a_twenty_thousand_tensors_is_read_or_refused_at_once(folder):
    def swell(header):
        header.update({f"t{i}" * 10: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(20_000)})

    try:
        ShardReader(with_header(folder, swell))
    except ValueError as error:
        assert "truncated or corrupt" in str(error)


def test_an_nvfp4_checkpoint_whose_shapes_lie_is_refused_by_name(tiny_hf_folder, tmp_path):
    quantize_checkpoint(str(tiny_hf_folder("llama")), str(tmp_path / "q"), device="cpu")
    tensors = load_file(tmp_path / "q/model.safetensors")
    linear = "model.layers.1.mlp.up_proj"
    lies = {"weight_packed": [torch.zeros(96, 16, dtype=torch.uint8), torch.zeros(96, 64, dtype=torch.uint8), torch.zeros(96, 0,
                              dtype=torch.uint8), torch.zeros(96, 32), torch.zeros(96 * 32, dtype=torch.uint8)],
            "weight_scale": [torch.zeros(96, 4), torch.zeros(4, 96).to(torch.float8_e4m3fn),
                             torch.full((96, 4), torch.nan).to(torch.float8_e4m3fn)],
            "weight_global_scale": [torch.tensor([]), torch.tensor([1.0, 2.0]), torch.tensor([torch.inf]), torch.tensor([-1.0])]}
    for part, values in lies.items():
        for value in values:
            save_file(tensors | {f"{linear}.{part}": value}, tmp_path / "q/model.safetensors", metadata={"format": "pt"})
            assert linear in refused(tmp_path / "q"), (part, value)
    for part in lies:
        kept = {name: tensor for name, tensor in tensors.items() if name != f"{linear}.{part}"}
        save_file(kept, tmp_path / "q/model.safetensors", metadata={"format": "pt"})
        assert linear in refused(tmp_path / "q"), part


# ------------------------------------------------------------------------------------------------ what fuzzing found


ESCAPE = "\x1b[2J\rx\x85y\u202e"  # clears the screen, goes back, breaks the line, writes from the right


CT = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"type": ESCAPE}}}}
MODELOPT = {"quant_method": "modelopt", "quant_algo": ESCAPE, "group_size": ESCAPE}


@pytest.mark.parametrize("file, changes", [
    *[("config.json", changes) for changes in (
        {"model_type": ESCAPE}, {"hidden_size": ESCAPE}, {"hidden_act": ESCAPE},
        {"quantization_config": {"quant_method": ESCAPE}},
        {"quantization_config": CT}, {"quantization_config": MODELOPT}, {"rope_parameters": {"rope_type": ESCAPE}},
        {"rope_theta": ESCAPE, "rope_parameters": None},
        {"rms_norm_eps": ESCAPE}, {"head_dim": ESCAPE})],
    ("generation_config.json", {"eos_token_id": ESCAPE}), ("tokenizer.json", {"version": ESCAPE}),
    ("model.safetensors.index.json", {"weight_map": {ESCAPE: ESCAPE}}), ("model.safetensors.index.json", {"weight_map": ESCAPE}),
    *[("adapter_config.json", changes) for changes in (
        {ESCAPE: True}, {"lora_alpha": ESCAPE}, {"bias": ESCAPE}, {"target_modules": [ESCAPE]}, {"peft_type": ESCAPE})],
], ids=range(19))  # fmt: skip
def test_what_a_file_says_never_reaches_the_terminal_as_commands(folder, tiny_model, tmp_path, file, changes):
    """Found by a coverage-guided fuzzer: names and values of a hostile file were printed as they are."""
    from lora import add_adapters, load_adapter, save_adapter

    if file.startswith("adapter"):
        model = tiny_model("llama")
        add_adapters(model, 2, 2, {"q_proj"}, generator=torch.Generator())
        save_adapter(model, folder := tmp_path / "adapter", "base")
    path = folder / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))
    with pytest.raises(ValueError) as caught:
        load_adapter(model, folder) if file.startswith("adapter") else load_model(str(folder))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 800


@pytest.mark.parametrize("changes", [{"model_max_length": []}, {"model_max_length": "many"}, {"eos_token": {"content": []}},
                                     {"chat_template": 7}, {"chat_template": [{}]}, {"added_tokens_decoder": {"x": 1}}], ids=str)
def test_a_tokenizer_config_of_the_wrong_kinds_is_one_line_or_harmless(folder, changes):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    try:
        tokenizer = load_tokenizer(folder)
        encode_prompts([Problem("one", "2 + 2", "4")], tokenizer)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 600


@pytest.mark.parametrize("file, changes", [
    ("tokenizer_config.json", {"added_tokens_decoder": {"0": {"content": "x", ESCAPE: 1}}}),
    ("tokenizer_config.json", {"eos_token": {"__type": "AddedToken", "content": "x", ESCAPE: 1}}),
    ("special_tokens_map.json", {"eos_token": {"content": "x", ESCAPE: 1}}),
    ("tokenizer.json", {"added_tokens": [{"id": 0, "content": "x", ESCAPE: 1}]})])  # fmt: skip
def test_an_added_tokens_option_never_reaches_the_terminal_as_a_command(folder, capfd, file, changes):
    """The tokenizers package prints the name of an option that it does not know, from Rust, past Python's stdout."""
    path = folder / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))
    with pytest.raises(ValueError) as caught:
        load_tokenizer(folder)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600
    assert "\x1b" not in "".join(capfd.readouterr())


def test_what_the_inspecting_commands_print_is_text(folder, tmp_path, capsys):
    """`python -m files.hub`, `files.shards` and `files.peft_files` printed tokens, tensors' and bases' names as they were."""
    tensors = load_file(folder / "model.safetensors") | {ESCAPE: torch.zeros(1)}
    save_file(tensors, folder / "model.safetensors")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["content"] = ESCAPE if token["id"] == 258 else token["content"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    write_adapter(Adapter(1, 1, {"model.x.up_proj": (torch.zeros(1, 4), torch.zeros(4, 1))}, ESCAPE), tmp_path / "adapter")
    assert hub.main([str(folder)]) == 0
    said = capsys.readouterr().out + shards.describe(folder) + peft_files.describe(tmp_path / "adapter")
    assert said.replace("\n", "").isprintable() and said.count("\\x1b[2J") == 3
    with pytest.raises(ValueError) as caught:
        check_fit(peft_files.read_adapter(tmp_path / "adapter"), {}, tmp_path / "adapter")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("changes", [
    {"[" * 3000: 1}, {"targets": "[" * 3000}, {"model": ["[" * 3000]}, {"lr": ESCAPE}, {ESCAPE: 1},
    {"adapter": "[" * 3000, "beta": []}], ids=range(6))  # fmt: skip
def test_a_record_of_a_run_that_cannot_be_resumed_is_refused_in_one_bounded_line(tmp_path, changes):
    """Found by bench/fuzz.py: the name of an unknown setting was printed whole, 3,000 characters of it."""
    settings = vars(config.resolve({"out": str(tmp_path)})) | changes
    (tmp_path / "config.json").write_text(json.dumps({"config": settings}))
    with pytest.raises(ValueError) as caught:
        config.prepare({"resume": True, "out": str(tmp_path)})
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize("rope", [
    {"rope_type": "llama3"}, {"rope_type": "linear", "factor": 0}, {"rope_type": "yarn", "factor": "x"}, {"rope_theta": -1.0},
    {"rope_type": "yarn", "factor": 4, "beta_fast": -1}, {"rope_theta": 1e-300}, {"rope_type": ["default"]},
    {"rope_type": "longrope"}], ids=str)  # fmt: skip
def test_rope_that_cannot_be_computed_is_refused_at_the_door_not_in_the_first_rollout(folder, rope):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_parameters": rope}))
    assert "rope" in refused(folder)


# ------------------------------------------------------------------------------------------------ the programs


def test_a_pickled_model_is_refused_by_name_by_every_program(folder, tmp_path, capsys):
    """The pickle would create a file when loaded."""
    (folder / "model.safetensors").unlink()
    code = b"cposix\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR."
    (folder / "pytorch_model.bin").write_bytes(code)
    import nvfp4

    assert train.main(["--model", str(folder), "--data", "arithmetic", "--eval-data", "none", "--out", str(tmp_path / "run"),
                       "--device", "cpu"]) == 2
    assert evaluation.main(["--model", str(folder), "--data", "arithmetic", "--limit", "1", "--device", "cpu"]) == 2
    assert nvfp4.main(["quantize", str(folder), str(tmp_path / "out")]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 3 and all("pytorch_model.bin" in line and "never loaded" in line for line in lines)
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


def test_a_name_with_dots_or_a_scheme_is_no_way_out():
    for name in ("../../etc", "file:///etc", "http://x/y", "a/../../b", "-rf"):
        with pytest.raises(ValueError) as caught:
            read_config(resolve_model(name))
        assert "\n" not in str(caught.value)
