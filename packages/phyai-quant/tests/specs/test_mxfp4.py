import pytest
import torch

from phyai_quant import QuantConfigError, QuantScheme, TensorQuant, materialize
from phyai_quant.specs.base import PhysicalSignature
from phyai_quant.specs.mxfp4 import Mxfp4Spec

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4(**fields):
    return TensorQuant("mxfp4", "block", micro_scaled=True, block_shape=(1, 32), **fields)


WEIGHT = mxfp4()
FP8 = TensorQuant("fp8_e4m3", "per_tensor")
MXFP8 = TensorQuant("fp8_e4m3", "block", dynamic=True, micro_scaled=True, block_shape=(1, 32))


def packed(rows, columns):
    return torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)


def exponents(rows, columns):
    return torch.randint(90, 150, (rows, columns // 32), dtype=torch.uint8)


def loop_dequantize(codes, scale):
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    out = torch.full((rows, columns), torch.nan)
    for n in range(rows):
        for k in range(columns):
            code = (codes[n, k // 2].item() >> (4 * (k % 2))) & 15
            value = LEVELS[code & 7] * (-1 if code & 8 else 1)
            out[n, k] = value * 2.0 ** (scale[n, k // 32].item() - 127)
    return out


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("name", ["weight", "weight_packed"])
@pytest.mark.parametrize("shape", [(1, 32), (7, 96), (33, 64)], ids=str)
def test_weights_read_back(allocated, shape, name, dtype):
    spec = Mxfp4Spec(WEIGHT)
    layer = allocated(spec, shape)
    assert spec.dequantize_weight(layer).isnan().all()
    codes, scale = packed(*shape), exponents(*shape)
    spec.load_weight(layer, name, codes)
    spec.load_weight(layer, "weight_scale", scale.view(dtype))
    spec.process_after_loading(layer)
    assert layer.weight_scale.dtype == torch.float8_e8m0fnu
    assert torch.equal(spec.dequantize_weight(layer), loop_dequantize(codes, scale))


def test_legs_in_any_order_and_views(allocated):
    spec = Mxfp4Spec(WEIGHT)
    layer = allocated(spec, (7, 64), (2, 5), (0, 1))
    codes, scale = packed(7, 64).t().contiguous().t(), exponents(7, 64).t().contiguous().t()
    for shard, rows in ((1, slice(2, 7)), (0, slice(0, 2))):
        spec.load_weight(layer, "weight_scale", scale[rows], shard)
        spec.load_weight(layer, "weight", codes[rows], shard)
    spec.process_after_loading(layer)
    assert torch.equal(spec.dequantize_weight(layer), loop_dequantize(codes, scale))


@pytest.mark.parametrize("act", [mxfp4(dynamic=True), MXFP8, FP8], ids=TensorQuant.describe)
def test_inputs(allocated, act):
    spec = Mxfp4Spec(WEIGHT, act)
    assert spec.needs_act_quant
    layer = allocated(spec, (4, 64))
    if act == FP8:
        assert "a.down_proj.input_scale" in spec.missing_parts(layer)
        spec.load_weight(layer, "input_scale", torch.tensor(0.01))
        assert "a.down_proj.input_scale" not in spec.missing_parts(layer)
    else:
        assert "input_scale" not in spec.tensor_names()
    x = torch.randn(2, 3, 64)
    fake = spec.fake_quantize_activation(x, layer)
    error = (fake - x).norm() / x.norm()
    assert 0 < error < (0.2 if act.dtype == "mxfp4" else 0.05)


def test_missing_parts_are_an_error(allocated):
    spec = Mxfp4Spec(WEIGHT)
    layer = allocated(spec, (4, 32), (2, 2), (0, 1))
    spec.load_weight(layer, "weight_packed", packed(2, 32), 0)
    spec.load_weight(layer, "weight_scale", exponents(2, 32), 0)
    missing = ["a.down_proj.weight[1]", "a.down_proj.weight_scale[1]"]
    assert spec.missing_parts(layer) == missing
    with pytest.raises(QuantConfigError, match="never loaded"):
        spec.process_after_loading(layer)
    assert spec.dequantize_weight(layer)[2:].isnan().all()
    with pytest.raises(QuantConfigError, match="is weight-only and does not quantize"):
        spec.quantize_activation(torch.ones(1, 32), layer)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("weight", torch.zeros(4, 64), r"config says 4-bit codes .* 'weight' is torch\.float32"),
        ("weight", packed(4, 32), r"\[4, 16\], the layer expects \[4, 32\]"),
        ("weight_scale", torch.ones(4, 2), r"is torch\.float32; allowed: torch\.float8_e8m0fnu"),
        ("weight_scale", exponents(4, 32), r"\[4, 1\], the layer expects \[4, 2\]"),
        ("weight_scale_2", torch.tensor(1.0), "cannot use checkpoint tensor 'weight_scale_2'"),
    ],
)
def test_bad_tensors_name_the_layer(allocated, name, value, text):
    spec = Mxfp4Spec(WEIGHT)
    layer = allocated(spec, (4, 64))
    with pytest.raises(QuantConfigError, match=rf"a\.down_proj: .*{text}"):
        spec.load_weight(layer, name, value)


def test_tensors_given_twice_are_refused(allocated):
    spec = Mxfp4Spec(WEIGHT)
    layer = allocated(spec, (4, 64))
    spec.load_weight(layer, "weight", packed(4, 64))
    with pytest.raises(QuantConfigError, match="weight is loaded twice, now as 'weight_packed'"):
        spec.load_weight(layer, "weight_packed", packed(4, 64))


@pytest.mark.parametrize("columns", [16, 31, 48])
def test_widths_that_blocks_do_not_cover(allocated, columns):
    with pytest.raises(
        QuantConfigError, match=f"K = {columns} is not divisible by the block of 32"
    ):
        allocated(Mxfp4Spec(WEIGHT), (4, columns))


@pytest.mark.parametrize("sm", [None, 120])
def test_schemes(sm):
    spec = materialize(QuantScheme(WEIGHT, mxfp4(dynamic=True)), sm)
    assert spec.physical_signature == PhysicalSignature(
        "mxfp4",
        layout="linear",
        block_shape=(1, 32),
        scale_dtype="fp8_e8m0",
        granularity="block",
        storage_dtype="uint8",
        fields=(
            ("activation", "mxfp4"),
            ("input_granularity", "block"),
            ("input_scale", "dynamic"),
        ),
    )
    assert spec.spec_id == "mxfp4_block_32_linear"


@pytest.mark.parametrize(
    ("weight", "act", "text"),
    [
        (TensorQuant("nvfp4", "block", block_shape=(1, 16)), None, "allowed: mxfp4 with block"),
        (mxfp4(act_order=True), None, "allowed: symmetric, micro-scaled, stored scales"),
        (WEIGHT, mxfp4(), "allowed: dynamic scales"),
        (
            WEIGHT,
            TensorQuant("nvfp4", "block", dynamic=True, micro_scaled=True, block_shape=(1, 16)),
            "allowed: none, mxfp4 or fp8",
        ),
    ],
)
def test_other_schemes_are_refused(weight, act, text):
    with pytest.raises(QuantConfigError, match=text):
        Mxfp4Spec(weight, act)
