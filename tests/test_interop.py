"""Files that go through other programs, end to end: NVFP4 checkpoints, adapters, merged models, by the command line."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_train import REWARD, adapter_hash, argv, rows, samples

import eval as evaluation
import train
from convert import merge
from convert.loader import load_model
from files.layouts import LAYOUTS
from files.shards import FUSED, quantize_checkpoint
from lora import load_adapter

ROOT = Path(__file__).parent.parent
IDS = torch.arange(5, 45)
BF16 = 0.03  # rounding each weight by up to 2^-9 moves the logits of these wide (0.3) random layers by 1 to 2 per cent
KINDS = ("qwen2-tied", "qwen3")  # a tied and an untied head, both from shards in bf16


@torch.no_grad()
def our_logits(folder, adapter=None, weights="nvfp4") -> torch.Tensor:
    model, *_ = load_model(str(folder), weights=weights)
    if adapter:
        load_adapter(model, adapter)
    return model.logits(model(IDS, model.packed([len(IDS)])))[:, :259]


@torch.no_grad()
def their_logits(model) -> torch.Tensor:
    return model.float().eval()(IDS[None]).logits[0, :, :259]


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def run(out: Path, model: Path, **changes) -> int:
    """Two steps of train.py on four problems, with a reward that differs within every group."""
    out.parent.mkdir(exist_ok=True)
    (out.parent / "mine.py").write_text(REWARD)
    (out.parent / "data.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i} + {i} =", "answer": 2 * i}) for i in range(4)))
    flags = dict(model=model, data=out.parent / "data.jsonl", reward=f"{out.parent / 'mine.py'}:low_letters", eval_data="none",
                 instruction="", steps=2, prompts=4, group=4, max_new_tokens=6, lr=2e-2, warmup=0, rank=4, noise="none",
                 sample_every=0, device="cpu", mask_truncated=False, out=out)
    return train.main(argv({**flags, **changes}))


@pytest.fixture(scope="module")
def checkpoints(tiny_hf_folder, tmp_path_factory) -> dict[tuple[str, str], Path]:
    """(kind, layout) -> folder; layout "float" is what the others were made from."""
    made = {}
    for kind in KINDS:
        made[kind, "float"] = tiny_hf_folder(kind, dtype="bfloat16", shard_size="50KB")
        for layout in LAYOUTS:
            made[kind, layout] = tmp_path_factory.mktemp("nvfp4") / f"{kind}-{layout}"
            quantize_checkpoint(str(made[kind, "float"]), str(made[kind, layout]), layout, device="cpu", shard_bytes=60_000)
    return made


@pytest.fixture(scope="module")
def runs(checkpoints, tmp_path_factory) -> dict[tuple[str, str], Path]:
    """train.py on each of them."""
    folder = tmp_path_factory.mktemp("runs")
    for (kind, layout), model in checkpoints.items():
        assert run(folder / f"{kind}-{layout}", model) == 0
    return {key: folder / f"{key[0]}-{key[1]}" for key in checkpoints}


# ------------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("kind", KINDS)
def test_training_from_a_quantised_checkpoint_is_training_from_its_source(runs, kind):
    """compressed-tensors' layout stores g itself: the same bits. ModelOpt's stores 1/g: the same samples all the same."""
    source, stored, modelopt = (runs[kind, layout] for layout in ("float", "compressed-tensors", "modelopt"))
    assert samples(source) == samples(stored) and adapter_hash(source) == adapter_hash(stored)
    assert samples(source)[:4] == samples(modelopt)[:4]  # those of the first step
    for row in rows(modelopt)[1:]:
        assert row["sampling/sampling_logp_difference/max"] < 1e-3


def test_eval_scores_both_layouts_and_their_source_alike(checkpoints, runs, tmp_path):
    found = {}
    for layout in ("float", *LAYOUTS):
        out, adapter = tmp_path / f"{layout}.jsonl", runs["qwen3", "float"] / "adapter"
        assert evaluation.main(["--model", str(checkpoints["qwen3", layout]), "--adapter", str(adapter), "--data", "arithmetic",
                                "--limit", "2", "--max-new-tokens", "5", "--device", "cpu", "--out", str(out)]) == 0
        found[layout] = [json.loads(line)["completion"] for line in out.read_text().splitlines()]
    assert found["float"] == found["compressed-tensors"] == found["modelopt"] and len(found["float"]) == 4


@pytest.mark.parametrize("layout, scale", [("compressed-tensors", "input_global_scale"), ("modelopt", "input_scale")])
def test_a_w4a4_checkpoint_trains_and_one_line_says_what_is_left_out(checkpoints, runs, tmp_path, capsys, layout, scale):
    folder = shutil.copytree(checkpoints["qwen3", layout], tmp_path / "w4a4")
    added = {f"model.layers.{i}.{part}.{scale}": torch.tensor([3.0]) for i in range(2) for group in FUSED for part in group}
    save_file(added, folder / "scales.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(added, "scales.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run(tmp_path / "run", folder) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert len(said) == 1 and f"14 {scale} left out" in said[0]
    assert samples(tmp_path / "run") == samples(runs["qwen3", layout])


# ------------------------------------------------------------------------------------------------ adapters


@pytest.mark.parametrize("kind", KINDS)
def test_a_runs_adapter_beside_its_nvfp4_base_is_the_same_policy_in_transformers_and_peft(checkpoints, runs, kind):
    """How the README says to serve it in 4 bits."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(checkpoints[kind, "compressed-tensors"], dtype="auto")
    base(IDS[None])  # decompresses where loading did not
    theirs = their_logits(PeftModel.from_pretrained(base, runs[kind, "compressed-tensors"] / "adapter"))
    ours = our_logits(checkpoints[kind, "compressed-tensors"], runs[kind, "compressed-tensors"] / "adapter")
    without = our_logits(checkpoints[kind, "compressed-tensors"])
    assert distance(theirs, ours) < BF16 < 0.05 < distance(without, ours)


def test_an_adapter_made_by_peft_starts_a_run_and_is_its_reference(checkpoints, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(checkpoints["qwen3", "float"], dtype=torch.float32)
    torch.manual_seed(0)
    settings = LoraConfig(r=4, lora_alpha=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(base, settings).save_pretrained(tmp_path / "theirs")
    assert run(tmp_path / "run", checkpoints["qwen3", "float"], adapter=tmp_path / "theirs", beta=0.1) == 0
    first, second = rows(tmp_path / "run")[1:]
    assert abs(first["kl"]) < 1e-6 < second["kl"]  # KL 0 at step 0, because the reference is that adapter
    config = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 2, ["down_proj", "q_proj"])


@pytest.mark.parametrize("option, value", [("rank_pattern", {"q_proj": 8}), ("target_modules", ".*_proj"), ("use_dora", True)])
def test_train_and_eval_refuse_an_adapter_that_they_cannot_honour_by_name(checkpoints, runs, tmp_path, capsys, option, value):
    folder = shutil.copytree(runs["qwen3", "float"] / "adapter", tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {option: value}))
    model = checkpoints["qwen3", "float"]
    assert run(tmp_path / "run", model, adapter=folder) == 2
    assert evaluation.main(["--model", str(model), "--adapter", str(folder), "--data", "arithmetic", "--limit", "1",
                            "--max-new-tokens", "2", "--device", "cpu", "--no-base"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if option in line]
    assert len(lines) == 2 and all(str(value) in line for line in lines)


# ------------------------------------------------------------------------------------------------ merged models


@pytest.mark.parametrize("kind, dtype", [("qwen2-tied", "float16"), ("qwen3", "float32"), ("llama", "bfloat16")])
def test_the_merge_command_gives_transformers_the_logits_that_were_trained(tiny_hf_folder, tmp_path, kind, dtype):
    """Sources in shards, of every float type, heads tied and untied; python train.py, then python lora.py merge."""
    from transformers import AutoModelForCausalLM

    source, out = tiny_hf_folder(kind, dtype=dtype, shard_size="50KB"), tmp_path / "merged"
    assert run(tmp_path / "run", source) == 0
    arguments = [str(source), str(tmp_path / "run/adapter"), str(out)]
    for options, limit in ((["--dtype", "float32"], 1e-4), ([], BF16)):
        if kind == "llama":
            command = [sys.executable, str(ROOT / "lora.py"), "merge", *arguments, *options]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
        else:  # the same without a start of Python and torch
            assert merge.main(arguments + options) == 0
        merged = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
        assert merged.dtype == (torch.float32 if options else torch.bfloat16)
        trained = our_logits(source, tmp_path / "run/adapter")
        assert distance(their_logits(merged), trained) < limit
        assert distance(our_logits(source), trained) > 0.05
        held = {name for shard in out.glob("*.safetensors") for name in load_file(shard)}
        assert ("lm_head.weight" in held) == (not kind.endswith("tied"))
        shutil.rmtree(out)
