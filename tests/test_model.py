"""model.py and layers/shapes.py against transformers, and against themselves packed, alone, checkpointed and noisy."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import KINDS, make_config, read_model
from torch.nn import functional as F

from lora import add_adapters, lora_layers
from model import SHAPES, ModelConfig, PackedAttention, random_model


def tokens(count: int, seed: int = 0, vocab: int = 259) -> torch.Tensor:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed))


def hf_logits(folder, ids: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids[None]).logits[0]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind, tiny_hf_folder, tiny_model):
    """Wrong rope pairing, a lost bias, untied heads, q/k norms after rope, llama3 frequencies: each shows at once."""
    ids = tokens(130)  # beyond the 64 positions where llama3's scaling begins to bend
    model = tiny_model(kind)
    with torch.no_grad():
        ours = model.logits(model(ids, model.packed([130])))
    # fp32, logits of size 10, two layers: transformers and we differ by reassociation only, a few 1e-5.
    torch.testing.assert_close(ours, hf_logits(tiny_hf_folder(kind), ids), atol=1e-4, rtol=0)


def test_logits_with_attention_biases_and_one_kv_head(tiny_hf_folder):
    """Llama files with attention_bias carry a bias on o_proj too; Qwen2's never do."""
    folder = tiny_hf_folder("llama", attention_bias=True, num_key_value_heads=1)
    model, ids = read_model(folder), tokens(9)
    with torch.no_grad():
        ours = model.logits(model(ids, model.packed([9])))
    torch.testing.assert_close(ours, hf_logits(folder, ids), atol=1e-4, rtol=0)


def test_gradients_of_every_parameter_are_those_of_transformers(tiny_hf_folder):
    """--full: embeddings (tied: used twice), norms, biases and projections, in ordinary autograd."""
    from transformers import AutoModelForCausalLM

    for kind in ("qwen2-tied", "qwen3"):
        folder, ids = tiny_hf_folder(kind), tokens(20)
        peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        F.cross_entropy(peer(ids[None]).logits[0, :-1], ids[1:]).backward()
        model = read_model(folder, full=True)
        F.cross_entropy(model.logits(model(ids, model.packed([20])))[:-1], ids[1:]).backward()
        theirs = dict(peer.named_parameters())
        pairs = [(model.embed, theirs["model.embed_tokens.weight"]), (model.final_norm, theirs["model.norm.weight"])]
        for i, layer in enumerate(model.layers):
            path = f"model.layers.{i}."
            pairs.append((layer.input_norm, theirs[path + "input_layernorm.weight"]))
            pairs.append((layer.post_norm, theirs[path + "post_attention_layernorm.weight"]))
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
                grads = [theirs[f"{linear.path}.{part}.weight"].grad for part in linear.parts]
                torch.testing.assert_close(linear.weight.tensor.grad, torch.cat(grads), atol=1e-5, rtol=1e-4)
        if not kind.endswith("tied"):
            pairs.append((model.head, theirs["lm_head.weight"]))
        for ours, their in pairs:
            torch.testing.assert_close(ours.grad, their.grad, atol=1e-5, rtol=1e-4)
        assert all(p.grad is not None for p in model.parameters())


def test_packed_sequences_do_not_see_each_other(tiny_model):
    """Pitfall 7: batch against alone. One token, equal lengths, and a long one beside short ones."""
    model = tiny_model("qwen2")
    for lengths in ([1], [7, 7, 7], [5, 1, 33, 2], [1, 1]):
        sequences = [tokens(n, seed=i) for i, n in enumerate(lengths)]
        with torch.no_grad():
            together = model(torch.cat(sequences), model.packed(lengths)).split(lengths)
            for ids, hidden in zip(sequences, together):
                alone = model(ids, model.packed([len(ids)]))
                torch.testing.assert_close(hidden, alone, atol=1e-5, rtol=1e-5)


def test_gradient_through_packed_attention_is_that_of_a_dense_mask():
    """The padded path reads and writes by index; its gradient must not leak into padding."""
    generator = torch.Generator().manual_seed(0)
    lengths, heads, kv_heads, dim = [3, 6, 1], 4, 2, 8
    total = sum(lengths)
    q, k, v = (torch.randn(total, h, dim, generator=generator, requires_grad=True) for h in (heads, kv_heads, kv_heads))
    attend = PackedAttention(lengths, torch.ones(8, dim // 2), torch.zeros(8, dim // 2))  # no rotation
    segment = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    is_visible = (segment[:, None] == segment) & torch.ones(total, total).tril().bool()
    k_all, v_all = (t.repeat_interleave(2, dim=1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k_all) * dim**-0.5
    dense = torch.einsum("hts,shd->thd", scores.masked_fill(~is_visible, -torch.inf).softmax(-1), v_all)
    out, dy = attend(0, q, k, v), torch.randn(total, heads, dim, generator=generator)
    torch.testing.assert_close(out, dense, atol=1e-5, rtol=1e-5)
    for ours, plain in zip(torch.autograd.grad(out, (q, k, v), dy), torch.autograd.grad(dense, (q, k, v), dy)):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


def test_packed_attention_refuses_an_empty_sequence():
    with pytest.raises(ValueError, match="needs a token"):
        PackedAttention([3, 0], torch.ones(4, 4), torch.zeros(4, 4))


def test_padded_vocabulary_cannot_be_sampled(tiny_model):
    """Pitfall 10: the rows beyond the tokenizer get probability exactly 0."""
    model, ids = tiny_model("qwen2-tied"), tokens(5)
    model.valid_vocab = 259
    with torch.no_grad():
        logits = model.logits(model(ids, model.packed([5])))
    assert logits.shape == (5, 272) and logits.dtype == torch.float32
    assert torch.isinf(logits[:, 259:]).all() and torch.isfinite(logits[:, :259]).all()


def test_checkpointing_changes_no_gradient_and_reaches_every_adapter(tiny_model):
    """Pitfall 23: under checkpointing a frozen input used to cut every adapter off the graph."""
    grads = []
    for recompute in (False, True):
        model = tiny_model("qwen3", "nvfp4")
        add_adapters(model, 4, 8, generator=torch.Generator().manual_seed(1))
        model.checkpoint_layers = recompute
        model(tokens(12), model.packed([5, 7])).square().sum().backward()
        trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        assert all(grad.abs().max() > 0 for name, grad in trained.items() if "lora_B" in name)
        assert len(trained) == 2 * 7 * len(model.layers)
        grads.append(trained)
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=1e-5, rtol=1e-4)


def test_noise_enters_at_the_two_norms_of_a_layer_and_leaves_the_model_alone(tiny_model):
    """Noisy norms given as an argument are what transformers computes with those norms in its weights."""
    model, ids = tiny_model("llama"), tokens(10)
    targets = model.noisy_norms_targets()
    assert len(targets) == 4 and all(w.dtype == torch.float32 for w in targets)
    before = [w.clone() for w in targets]
    noisy = [w + 0.1 * torch.randn(w.shape, generator=torch.Generator().manual_seed(i)) for i, w in enumerate(targets)]
    with torch.no_grad():
        clean = model(ids, model.packed([10]))
        noised = model(ids, model.packed([10]), norm_weights=noisy)
        assert torch.equal(model(ids, model.packed([10])), clean)  # pitfall 24 too: two forwards are equal
        for weight, value in zip(targets, noisy):
            weight.copy_(value)
        assert torch.equal(model(ids, model.packed([10])), noised)
    assert not torch.equal(noised, clean) and not torch.equal(before[0], targets[0])
    with pytest.raises(ValueError, match="norm_weights has 3"):
        model(ids, model.packed([10]), norm_weights=noisy[:3])


def test_rope_table_grows_and_keeps_its_values(tiny_model):
    model = tiny_model("llama")
    short = model.rope(10)[0].clone()
    assert model.rope(5000)[0].shape[0] >= 5000
    torch.testing.assert_close(model.rope(1)[0][: len(short)], short, atol=0, rtol=0)


def test_config_is_read_from_transformers_4_and_5_files():
    """Old files say rope_theta and rope_scaling, new ones rope_parameters; both mean the same model."""
    new = make_config("llama").to_dict()
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    rope = dict(new["rope_parameters"])
    old["rope_theta"], old["rope_scaling"] = rope.pop("rope_theta"), rope
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new) == ModelConfig.from_hf(make_config("llama"))
    assert ModelConfig.from_hf(make_config("qwen2")).rope_scaling is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "mixtral"}, "model_type='mixtral' is not supported"),
        ({"model_type": None}, "model_type=None"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers='2'"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"hidden_act": "gelu"}, "silu"),
        ({"mlp_bias": True}, "MLP bias"),
        ({"num_key_value_heads": 3}, "multiple of kv heads"),
        ({"head_dim": 2**30}, "at most 1024"),
        ({"head_dim": 2.5}, "head_dim=2.5"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
    ],
)
def test_a_config_that_these_layers_do_not_compute_is_refused(changes, message):
    config = json.loads(json.dumps(make_config("qwen2").to_dict())) | changes
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(config)


def test_published_shapes_have_the_published_parameter_counts():
    """7.62, 14.77 and 32.76 billion, of which 6.53, 13.2 and 31.2 in the seven projections."""
    for name, linears in (("Qwen2.5-7B", 6.525), ("Qwen2.5-14B", 13.212), ("Qwen2.5-32B", 31.206)):
        count = sum(rows * columns for rows, columns in SHAPES[name].projections().values())
        assert round(count / 1e9, 3) == linears


def test_random_models_are_reproducible_and_sane():
    config = ModelConfig("qwen3", 64, 2, 4, 2, 16, 96, 272, qk_norm=True)
    first, again, other = random_model(config, seed=1), random_model(config, seed=1), random_model(config, seed=2)
    with torch.no_grad():
        hidden = [m.logits(m(tokens(8), m.packed([8]))) for m in (first, again, other)]
    assert torch.equal(hidden[0], hidden[1]) and not torch.equal(hidden[0], hidden[2])
    assert 0.3 < hidden[0].std() < 3


def test_full_training_of_quantised_weights_is_refused(tiny_model):
    with pytest.raises(ValueError, match="--full trains the weights themselves, which nvfp4 freezes"):
        tiny_model("qwen2", "nvfp4", full=True)


@pytest.mark.gpu
def test_gpu_logits_and_gradients_agree_with_the_cpu(tiny_hf_folder):
    """bf16 varlen attention and the NVFP4 kernel against the fp32 CPU path on the same quantised weights."""
    calm = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.06}  # sharp attention magnifies bf16
    folder, lengths = tiny_hf_folder("qwen2", **calm), [17, 1, 40]
    ids, results = tokens(58), []
    for device in ("cpu", "cuda"):
        model = read_model(folder, "nvfp4", device=device)
        add_adapters(model, 8, 16, generator=torch.Generator().manual_seed(0))
        model(ids.to(device), model.packed(lengths)).float().square().mean().backward()
        with torch.no_grad():
            logits = model.logits(model(ids.to(device), model.packed(lengths)))
        grads = torch.cat([p.grad.flatten().cpu() for n, p in model.named_parameters() if "lora_B" in n])
        results.append((logits.cpu(), grads))
    for cpu, gpu in zip(*results):
        assert (cpu - gpu).norm() / cpu.norm() < 3e-2  # the same bf16 arithmetic on a CPU is 1.2% off its fp32


@pytest.mark.gpu
def test_gpu_packed_is_alone_in_bf16():
    model = random_model(ModelConfig("qwen2", 256, 2, 4, 2, 64, 512, 272, qkv_bias=True), device="cuda")
    lengths = [5, 300, 1]
    sequences = [tokens(n, seed=n).cuda() for n in lengths]
    with torch.no_grad():
        together = model(torch.cat(sequences), model.packed(lengths)).split(lengths)
        for ids, hidden in zip(sequences, together):
            alone = model(ids, model.packed([len(ids)]))
            assert (hidden - alone).float().norm() / alone.float().norm() < 1e-2


@pytest.mark.gpu
def test_gpu_random_model_never_holds_its_16_bit_weights():
    """A 32B shape must come into being on an 80 GB card: twelve 7B layers, 5.6 GB in bf16, 1.6 GB in NVFP4."""
    config = replace(SHAPES["Qwen2.5-7B"], layers=12, vocab=1024)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = random_model(config, device="cuda")
    stored = sum(layer.weight.nbytes for layer in lora_layers(model))
    assert stored < 1.7e9
    assert torch.cuda.memory_allocated() - before < stored + 0.1e9
    # Beside what is stored: gate and up in bf16 (0.27 GB), their codes in both layouts, and the packing's temporaries
    # (1.5 GB, measured).
    assert torch.cuda.max_memory_allocated() - before < stored + 1.8e9
