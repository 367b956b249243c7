"""NVFP4 arithmetic against compressed-tensors and torchao, bit for bit, and the two checkpoint layouts."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nvfp4
from files import layouts
from files.layouts import from_layout, to_layout
from nvfp4 import BLOCK, NVFP4Tensor, dequantize, encode_e2m1, global_scale, quantize


def gaussian(rows: int = 48, columns: int = 128, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def with_zero_blocks() -> torch.Tensor:
    w = gaussian()
    w[::3, 16:48] = 0
    w[5] = 0
    return w


def heavy_tailed() -> torch.Tensor:
    """Cubes of cubes: block scales from 448 down through E4M3's subnormals (below 2^-6) to those that round to 0."""
    return gaussian() ** 9


FP32_CASES = {
    "gaussian": gaussian(),
    "one row, one block": gaussian(1, 16),
    "zero blocks": with_zero_blocks(),
    "all zero": torch.zeros(4, 32),
    "subnormal scales": heavy_tailed(),
    "huge": gaussian() * 5e37,
    "tiny": gaussian() * 1e-33,
    "so tiny that g overflows": gaussian() * 1e-36,
    "subnormal weights": gaussian() * 1e-40,
    "bf16 values, many exact ties": gaussian().bfloat16().float(),
    "one outlier": torch.cat((gaussian(47), torch.full((1, 128), 1000.0))),
    "levels exactly": torch.tensor(nvfp4.LEVELS).repeat(4, 4) * torch.tensor([1.0, -1.0, 2.0, 448.0])[:, None],
}


def compressed_tensors_quantize(w: torch.Tensor, g: torch.Tensor | None = None):
    """(packed, scale, g) by compressed-tensors for its preset NVFP4A16; its g unless one is given."""
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    g = generate_gparam(w.amin(), w.amax()).reshape(1) if g is None else g
    blocks = w.unflatten(1, (-1, BLOCK))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=g)
    state = {"weight": w.clone(), "weight_scale": scale, "weight_global_scale": g, "weight_zero_point": None}
    state = NVFP4PackedCompressor.compress(state, scheme)
    return state["weight_packed"], state["weight_scale"], g


def compressed_tensors_dequantize(q: NVFP4Tensor) -> torch.Tensor:
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    return NVFP4PackedCompressor.decompress(to_layout(q, "compressed-tensors"), scheme)["weight"]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# ------------------------------------------------------------------------------------------------ codes


def test_a_code_is_the_nearest_level_and_ties_go_to_the_even_code():
    """Oracle: exact rationals over a grid that holds every tie; catches a boundary on the wrong side."""
    grid = [Fraction(i, 64) for i in range(-8 * 64, 8 * 64 + 1)]
    levels = [Fraction(level) for level in nvfp4.LEVELS]
    wanted = []
    for x in grid:
        code = min(range(8), key=lambda c: (abs(abs(x) - levels[c]), c % 2))
        wanted.append(code | (8 if x < 0 else 0))
    assert encode_e2m1(torch.tensor([float(x) for x in grid])).tolist() == wanted


def test_codes_on_either_side_of_each_boundary_differ():
    """The next float above and below a tie must not be rounded as the tie is."""
    for low, high in zip(nvfp4.LEVELS, nvfp4.LEVELS[1:]):
        middle = torch.tensor((low + high) / 2)
        below, above = torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(9.0))
        values = [nvfp4.LEVELS[code] for code in encode_e2m1(torch.stack((below, above))).tolist()]
        assert values == [low, high]


def test_packing_is_the_inverse_of_unpacking_for_every_byte():
    packed = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    codes = nvfp4.unpack_codes(packed)
    assert codes[0, :4].tolist() == [0, 0, 1, 0]  # byte 0x01: code 1 is the even k, in the low nibble
    assert torch.equal(nvfp4.pack_codes(codes), packed)


# --------------------------------------------------------------------------------- bit for bit with peers


@pytest.mark.parametrize("case", FP32_CASES)
def test_fp32_weights_give_the_bits_of_compressed_tensors(case):
    w = FP32_CASES[case]
    packed, scale, g = compressed_tensors_quantize(w)
    q = quantize(w)
    assert same_bytes(q.global_scale, g)
    assert same_bytes(q.scale, scale)
    assert same_bytes(q.packed, packed)


@pytest.mark.parametrize("factor", [0.25, 4.0, 1000.0])
def test_a_foreign_global_scale_saturates_as_in_compressed_tensors(factor):
    """A g too large pushes block scales to 448 and codes to 6: clamped, not wrapped to NaN."""
    w = gaussian()
    g = global_scale(w) * factor
    packed, scale, _ = compressed_tensors_quantize(w, g)
    q = quantize(w, g)
    assert same_bytes(q.scale, scale) and same_bytes(q.packed, packed)
    assert (q.scale.float().max() == 448) or factor < 1


# torchao multiplies by the reciprocal of the scale, so an exact tie may fall either way (the bf16 case), and its scales
# are never below 2^-6 (heavy tails, and the value 0.125 of a zero block): those cases are left to compressed-tensors.
@pytest.mark.parametrize("case", ["gaussian", "one row, one block", "huge", "tiny", "one outlier"])
def test_fp32_weights_give_the_bits_of_torchao(case):
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    w = FP32_CASES[case]
    scale, packed = nvfp4_quantize(w, per_tensor_scale=per_tensor_amax_to_scale(w.abs().amax()))
    q = quantize(w)
    assert same_bytes(q.scale, scale)
    assert torch.equal(q.packed, packed.view(torch.uint8))


def test_bf16_weights_differ_from_compressed_tensors_only_by_its_bf16_rounding():
    """It rounds g and the block maxima to bf16; where we round there too, every bit agrees. We do not, and say so."""
    w = gaussian(256, 512).bfloat16()
    packed, scale, g = compressed_tensors_quantize(w)
    blocks = w.unflatten(1, (-1, BLOCK))
    g_bf16 = (2688 / w.abs().amax()).float().reshape(1)
    s = (g_bf16 * (blocks.abs().amax(-1) / 6)).clamp(max=448).to(torch.float8_e4m3fn)
    codes = encode_e2m1(blocks.float() / (s.float() / g_bf16)[..., None]).flatten(1)
    assert torch.equal(g_bf16, g) and same_bytes(s, scale) and torch.equal(nvfp4.pack_codes(codes), packed)
    ours = quantize(w)
    assert not torch.equal(ours.global_scale, g)  # fp32: 2688 / amax, unrounded
    assert torch.equal(ours.global_scale, 2688 / w.float().abs().amax().reshape(1))
    differing = (nvfp4.unpack_codes(ours.packed) != nvfp4.unpack_codes(packed)).float().mean()
    assert differing < 0.03
    error = [(x.float() - w.float()).norm() for x in (dequantize(ours), compressed_tensors_dequantize(
        NVFP4Tensor(packed, scale, g)))]  # fmt: skip
    assert error[0] < 1.01 * error[1]


@pytest.mark.parametrize("case", FP32_CASES)
def test_dequantised_weights_are_those_of_compressed_tensors(case):
    q = quantize(FP32_CASES[case])
    assert same_bytes(dequantize(q, torch.bfloat16), compressed_tensors_dequantize(q))


def test_every_code_under_every_scale_dequantises_as_in_compressed_tensors():
    codes = torch.arange(16, dtype=torch.uint8).repeat(127, 1)
    scale = torch.arange(127, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)  # all finite positive, and 0
    for g in (1.0, 2688 / 3.7, 3e-5, 7e9):
        q = NVFP4Tensor(nvfp4.pack_codes(codes), scale, torch.tensor([g]))
        assert same_bytes(dequantize(q), compressed_tensors_dequantize(q))
        exact = torch.tensor(nvfp4.LEVELS + tuple(-level for level in nvfp4.LEVELS)) * scale.double() / g
        # Two fp32 roundings: at most 2^-23 relative.
        torch.testing.assert_close(dequantize(q, torch.float64), exact, rtol=2**-22, atol=1e-44)


# ------------------------------------------------------------------------------------------ properties


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 4), st.integers(-30, 30), st.sampled_from(["16", "b16", "32"])
)
def test_the_error_is_at_most_one_unit_of_the_block(seed, rows, blocks, exponent, kind):
    """Half the widest gap (4 to 6) is one unit. A scale that rounds down by 1/16 leaves 6.375 against 6: less than that."""
    dtype = {"16": torch.float16, "b16": torch.bfloat16, "32": torch.float32}[kind]
    scale = 2.0 ** (exponent / 3 if kind == "16" else exponent)
    w = (gaussian(rows, blocks * BLOCK, seed) * scale).to(dtype)
    before = w.clone()
    q = quantize(w)
    unit = q.scale.float() / q.global_scale
    error = (dequantize(q, torch.float32) - w.float()).abs().unflatten(1, (-1, BLOCK))
    normal = q.scale.float() >= 2**-6  # below, E4M3 is subnormal and the scale itself is coarse
    assert (error.amax(-1) <= unit * 1.001)[normal].all()
    assert torch.equal(w, before)  # arguments are not written to


def test_quantising_what_was_dequantised_changes_nothing():
    """Re-export of our own weights is lossless where g is kept: the block's largest code is a 6 and gives the scale."""
    q = quantize(gaussian())
    once = dequantize(q, torch.float32)
    twice = dequantize(quantize(once, q.global_scale), torch.float32)
    has_six = (nvfp4.unpack_codes(q.packed).unflatten(1, (-1, BLOCK)) & 7).amax(-1) == 7
    assert has_six.all() and torch.equal(once, twice)


def test_chunks_of_rows_change_nothing(monkeypatch):
    w = gaussian(37, 48)
    whole = quantize(w)
    monkeypatch.setattr(nvfp4, "CHUNK_ELEMENTS", 100)
    rows = quantize(w)
    assert same_bytes(whole.packed, rows.packed) and same_bytes(whole.scale, rows.scale)
    assert torch.equal(dequantize(whole), dequantize(rows))


def test_fused_projections_share_the_smallest_global_scale():
    """vLLM stacks q, k, v into one matrix with one scale; an all-zero part must not drag g to its own fallback of 1."""
    q, k, v = gaussian(seed=1), gaussian(seed=2) * 8, torch.zeros(16, 128)
    assert global_scale(q, k, v).item() == min(global_scale(q).item(), global_scale(k).item())
    shared = quantize(q, global_scale(q, k))
    assert torch.equal(shared.global_scale, global_scale(k)) and not same_bytes(shared.scale, quantize(q).scale)


def test_a_view_is_quantised_like_a_copy():
    w = gaussian(64, 64)
    assert torch.equal(quantize(w.T).packed, quantize(w.T.contiguous()).packed)


def test_it_takes_4_and_a_half_bits_a_weight():
    q = quantize(gaussian(64, 256))
    assert q.shape == (64, 256) and q.nbytes == 64 * 256 * 4.5 / 8 + 4
    assert q.to("cpu").shape == q.shape and q.device.type == "cpu"


# -------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_and_infinity_are_refused_also_under_a_given_scale(poison, dtype):
    w = gaussian().to(dtype)
    w[3, 7] = poison
    for call in (lambda: quantize(w), lambda: quantize(w, torch.ones(1)), lambda: global_scale(gaussian(), w)):
        with pytest.raises(ValueError, match="NaN or infinity"):
            call()


def test_in_features_must_be_a_multiple_of_16():
    with pytest.raises(ValueError, match="in_features=40 is not a multiple of the NVFP4 block 16; pad to 48"):
        quantize(torch.ones(4, 40))


@pytest.mark.parametrize("w", [torch.ones(16), torch.ones(0, 16), torch.ones(2, 2, 16), torch.ones(2, 16).int()])
def test_only_float_matrices_are_quantised(w):
    with pytest.raises(ValueError, match="non-empty float"):
        quantize(w)


# ---------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_a_layout_is_read_as_it_was_written(layout):
    for case in ("gaussian", "tiny", "huge", "all zero"):
        q = quantize(FP32_CASES[case])
        tensors = to_layout(q, layout)
        assert set(tensors) == set(layouts.NAMES[layout])
        back = from_layout(tensors, layout, "linear")
        assert same_bytes(back.packed, q.packed) and same_bytes(back.scale, q.scale)
        # ModelOpt stores 1/g: two fp32 divisions, each half a unit in the last place.
        tolerance = 0 if layout == "compressed-tensors" else 2**-23
        torch.testing.assert_close(back.global_scale, q.global_scale, rtol=tolerance, atol=0)


def test_modelopt_stores_a_multiplier_and_compressed_tensors_a_divisor():
    q = quantize(gaussian())
    assert to_layout(q, "modelopt")["weight_scale_2"].shape == ()
    assert to_layout(q, "modelopt")["weight_scale_2"].item() == pytest.approx(gaussian().abs().max().item() / 2688)
    assert to_layout(q, "compressed-tensors")["weight_global_scale"].shape == (1,)


def damaged(**changes) -> dict:
    return to_layout(quantize(gaussian(4, 32)), "compressed-tensors") | changes


NAN_SCALE = torch.full((4, 2), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "tensors, complaint",
    [
        (damaged(weight_packed=torch.zeros(4, 16, dtype=torch.int32)), "codes are torch.int32"),
        (damaged(weight_packed=torch.zeros(4, 15, dtype=torch.uint8)), "K a multiple of 16"),
        (damaged(weight_packed=torch.zeros(64, dtype=torch.uint8)), "codes are torch.uint8 of shape"),
        (damaged(weight_scale=torch.ones(4, 2)), "block scales are torch.float32"),
        (damaged(weight_scale=torch.ones(4, 3).to(torch.float8_e4m3fn)), "they should be float8_e4m3fn"),
        (damaged(weight_scale=NAN_SCALE), "NaN or negative"),
        (damaged(weight_scale=-torch.ones(4, 2).to(torch.float8_e4m3fn).float()), "block scales"),
        (damaged(weight_global_scale=torch.tensor([0.0])), "one positive number"),
        (damaged(weight_global_scale=torch.tensor([float("nan")])), "one positive number"),
        (damaged(weight_global_scale=torch.ones(3)), "one positive number"),
    ],
)
def test_a_damaged_linear_is_refused_by_name(tensors, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        from_layout(tensors, "compressed-tensors", "model.layers.0.mlp.up_proj")
    assert str(caught.value).startswith("model.layers.0.mlp.up_proj") and "\n" not in str(caught.value)


def test_our_quantization_config_is_compressed_tensors_own_preset():
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    ours = layouts.quantization_config("compressed-tensors", ["lm_head"])
    parsed = QuantizationConfig.model_validate(ours)
    preset = preset_name_to_scheme("NVFP4A16", ["Linear"])
    assert parsed.config_groups["group_0"].weights == preset.weights
    assert parsed.config_groups["group_0"].input_activations is None and parsed.ignore == ["lm_head"]
    assert parsed.format == "nvfp4-pack-quantized"


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_our_quantization_config_names_its_layout(layout):
    assert layouts.read_layout(layouts.quantization_config(layout, ["lm_head"])) == layout


def test_w4a4_and_hf_quant_config_are_understood():
    assert layouts.read_layout({"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}) == "modelopt"
    w4a4 = layouts.quantization_config("compressed-tensors", [])
    w4a4["config_groups"]["group_0"]["input_activations"] = {"num_bits": 4, "type": "float", "dynamic": "local"}
    assert layouts.read_layout(w4a4) == "compressed-tensors"


@pytest.mark.parametrize(
    "config, named",
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "FP8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group 32"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8}}}}, "8, None"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "nothing"),
        ({"quant_method": "compressed-tensors", "config_groups": ["x"]}, "nothing"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 7}}}, "None"),
        ({"quant_algo": ["NVFP4"]}, "NVFP4"),
        ({}, "modelopt"),
    ],
)
def test_another_quantisation_is_refused_by_name(config, named):
    with pytest.raises(ValueError, match="NVFP4") as caught:
        layouts.read_layout(config)
    assert named in str(caught.value) and "\n" not in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "quant_method": st.sampled_from(["modelopt", "compressed-tensors"]) | JSON,
            "quant_algo": st.just("NVFP4") | JSON,
            "group_size": st.just(16) | JSON,
            "config_groups": st.dictionaries(st.text(max_size=3), st.fixed_dictionaries({"weights": JSON}) | JSON) | JSON,
        },
    )
)
def test_any_json_is_a_layout_or_one_clear_line(config):
    try:
        assert layouts.read_layout(config) in layouts.LAYOUTS
    except ValueError as error:
        assert "NVFP4" in str(error)


@pytest.mark.gpu
@pytest.mark.parametrize("case", FP32_CASES)
def test_a_gpu_gives_the_bits_of_the_cpu(case):
    w = FP32_CASES[case]
    cpu, gpu = quantize(w), quantize(w.cuda())
    assert gpu.device.type == "cuda"
    assert same_bytes(cpu.packed, gpu.packed.cpu()) and same_bytes(cpu.scale, gpu.scale.cpu())
    assert same_bytes(dequantize(cpu), dequantize(gpu).cpu())
