import math

import pytest
import torch

from phyai_quant import QuantConfigError, TensorQuant
from phyai_quant.specs.base import PhysicalSignature
from phyai_quant.specs.fp8 import Fp8Spec

E4M3 = torch.float8_e4m3fn
TENSOR = TensorQuant("fp8_e4m3", "per_tensor")
CHANNEL = TensorQuant("fp8_e4m3", "per_channel")
TOKEN = TensorQuant("fp8_e4m3", "per_channel", dynamic=True)


def block(block_n, block_k):
    return TensorQuant("fp8_e4m3", "block", block_shape=(block_n, block_k))


def codes(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * 30).to(E4M3)


def scales(*shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.01


def loop_dequantize(weight, scale_of):
    rows, columns = weight.shape
    out = torch.full((rows, columns), torch.nan)
    values = weight.float()
    for n in range(rows):
        for k in range(columns):
            out[n, k] = values[n, k] * scale_of(n, k)
    return out


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (17, 31)], ids=str)
@pytest.mark.parametrize("scale_shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_per_tensor(allocated, shape, scale_shape, name):
    spec = Fp8Spec(TENSOR)
    layer = allocated(spec, shape)
    weight, scale = codes(*shape), scales(1)
    spec.load_weight(layer, "weight", weight)
    spec.load_weight(layer, name, scale.reshape(scale_shape))
    spec.process_after_loading(layer)
    assert layer.weight_scale.shape == (shape[0],)
    expected = loop_dequantize(weight, lambda n, k: scale[0])
    assert torch.equal(spec.dequantize_weight(layer), expected)


@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("shape", [(1, 3), (13, 7)], ids=str)
def test_per_channel(allocated, shape, column):
    spec = Fp8Spec(CHANNEL, TOKEN)
    layer = allocated(spec, shape)
    weight, scale = codes(*shape), scales(shape[0])
    spec.load_weight(layer, "weight_scale", scale[:, None] if column else scale)
    spec.load_weight(layer, "weight", weight)
    spec.process_after_loading(layer)
    expected = loop_dequantize(weight, lambda n, k: scale[n])
    assert torch.equal(spec.dequantize_weight(layer), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize(
    ("shape", "sizes"),
    [((1, 1), (4, 8)), ((8, 16), (4, 8)), ((9, 17), (4, 8)), ((7, 15), (4, 8)), ((5, 20), (1, 8))],
    ids=str,
)
def test_block_with_partial_last_blocks(allocated, shape, sizes, dtype):
    spec = Fp8Spec(block(*sizes), TOKEN)
    layer = allocated(spec, shape)
    blocks = (math.ceil(shape[0] / sizes[0]), math.ceil(shape[1] / sizes[1]))
    weight, scale = codes(*shape), scales(*blocks).to(dtype)
    spec.load_weight(layer, "weight", weight)
    spec.load_weight(layer, "weight_scale_inv", scale)
    spec.process_after_loading(layer)
    values = scale.float()
    expected = loop_dequantize(weight, lambda n, k: values[n // sizes[0], k // sizes[1]])
    assert torch.equal(spec.dequantize_weight(layer), expected)


def test_fused_per_tensor_scales_fan_out(allocated):
    spec = Fp8Spec(TENSOR, TENSOR)
    layer = allocated(spec, (10, 3), (5, 2, 3), ("q", "k", "v"), "a.qkv_proj")
    weight = codes(10, 3)
    legs = {"v": (7, 10, 0.5, 0.2), "q": (0, 5, 2.0, 0.9), "k": (5, 7, 3.0, 0.4)}
    for shard, (start, stop, scale, input_scale) in legs.items():
        spec.load_weight(layer, "weight", weight[start:stop], shard)
        spec.load_weight(layer, "weight_scale", torch.tensor(scale), shard)
        spec.load_weight(layer, "input_scale", torch.tensor([input_scale]), shard)
    spec.process_after_loading(layer)
    assert layer.weight_scale.shape == (10,)
    assert layer.input_scale.tolist() == pytest.approx([0.9])
    row_scales = [2.0] * 5 + [3.0] * 2 + [0.5] * 3
    expected = loop_dequantize(weight, lambda n, k: row_scales[n])
    assert torch.equal(spec.dequantize_weight(layer), expected)


def test_fused_per_channel_scales_take_their_rows(allocated):
    spec = Fp8Spec(CHANNEL, TOKEN)
    layer = allocated(spec, (8, 3), (5, 3), (0, 1), "a.gate_up_proj")
    spec.load_weight(layer, "weight_scale", torch.tensor(0.25), 1)
    spec.load_weight(layer, "weight_scale", torch.arange(1.0, 6.0)[:, None], 0)
    assert layer.weight_scale.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 0.25, 0.25, 0.25]


def test_fused_block_scales_start_at_their_block(allocated):
    spec = Fp8Spec(block(4, 8), TOKEN)
    layer = allocated(spec, (15, 9), (8, 4, 3), ("q", "k", "v"), "a.qkv_proj")
    weight, scale = codes(15, 9), scales(4, 2)
    for shard, rows, blocks in [
        ("k", slice(8, 12), slice(2, 3)),
        ("v", slice(12, 15), slice(3, 4)),
        ("q", slice(0, 8), slice(0, 2)),
    ]:
        spec.load_weight(layer, "weight", weight[rows], shard)
        spec.load_weight(layer, "weight_scale_inv", scale[blocks], shard)
    spec.process_after_loading(layer)
    expected = loop_dequantize(weight, lambda n, k: scale[n // 4, k // 8])
    assert torch.equal(spec.dequantize_weight(layer), expected)


def test_a_natively_fused_checkpoint_fills_all_legs(allocated):
    spec = Fp8Spec(TENSOR)
    layer = allocated(spec, (5, 3), (2, 3), (0, 1), "a.gate_up_proj")
    spec.load_weight(layer, "weight", codes(5, 3))
    spec.load_weight(layer, "weight_scale", torch.tensor(0.5))
    assert spec.missing_parts(layer) == []
    spec.process_after_loading(layer)
    assert layer.weight_scale.tolist() == [0.5] * 5


def test_legs_must_end_on_blocks(allocated):
    with pytest.raises(QuantConfigError, match=r"a\.qkv: leg 'k', elements 4 to 10 of 15 .* for 4"):
        allocated(Fp8Spec(block(4, 8)), (15, 9), (4, 6, 5), ("q", "k", "v"), "a.qkv")


def test_processing_twice_changes_nothing(allocated):
    spec = Fp8Spec(TENSOR)
    layer = allocated(spec, (3, 2), (2, 1), (0, 1))
    for shard, rows in ((0, 2), (1, 1)):
        spec.load_weight(layer, "weight", codes(rows, 2), shard)
        spec.load_weight(layer, "weight_scale", torch.tensor(shard + 1.0), shard)
    spec.process_after_loading(layer)
    scale = layer.weight_scale
    spec.process_after_loading(layer)
    assert layer.weight_scale is scale
    assert scale.tolist() == [1.0, 1.0, 2.0]
    assert not scale.requires_grad


@pytest.mark.parametrize("weight", [TENSOR, CHANNEL, block(2, 2)], ids=TensorQuant.describe)
def test_scales_that_never_arrive_are_an_error(allocated, weight):
    spec = Fp8Spec(weight, TENSOR)
    layer = allocated(spec, (4, 2), (2, 2), (0, 1), "a.gate_up_proj")
    assert torch.isnan(layer.weight_scale).all()
    spec.load_weight(layer, "weight", codes(2, 2), 0)
    spec.load_weight(layer, "weight", codes(2, 2), 1)
    shape = {"per_tensor": (), "per_channel": (2,), "block": (1, 1)}[weight.granularity]
    spec.load_weight(layer, "weight_scale", torch.ones(shape), 0)
    spec.load_weight(layer, "input_scale", torch.ones(1), 0)
    missing = ["a.gate_up_proj.weight_scale[1]", "a.gate_up_proj.input_scale[1]"]
    assert spec.missing_parts(layer) == missing
    with pytest.raises(QuantConfigError, match="never loaded") as error:
        spec.process_after_loading(layer)
    assert all(name in str(error.value) for name in missing)
    with pytest.raises(QuantConfigError, match="call process_after_loading before reading"):
        spec.dequantize_weight(layer)


@pytest.mark.parametrize(
    ("quant", "name", "loaded", "text"),
    [
        (CHANNEL, "weight", torch.zeros(4, 6), "config says fp8_e4m3 but the checkpoint weight is"),
        (CHANNEL, "weight", torch.zeros(4, 6, dtype=torch.uint8), "weight is torch.uint8"),
        (CHANNEL, "weight", codes(4, 5), r"shape \[4, 5\], the layer expects \[4, 6\]"),
        (
            CHANNEL,
            "weight_scale",
            torch.ones(5),
            r"'weight_scale' has shape \[5\].*\[4\] or \[4, 1\]",
        ),
        (CHANNEL, "weight_scale", torch.ones(1, 4), r"has shape \[1, 4\]"),
        (
            CHANNEL,
            "weight_scale",
            torch.ones(4, dtype=torch.int32),
            "'weight_scale' is torch.int32",
        ),
        (
            TENSOR,
            "weight_scale",
            torch.ones(4),
            r"has shape \[4\], the layer expects \[\] or \[1\]",
        ),
        (TENSOR, "input_scale", torch.ones(4), r"'input_scale' has shape \[4\]"),
        (block(2, 4), "weight_scale", torch.ones(2, 1), r"shape \[2, 1\], .* expects \[2, 2\]"),
        (block(2, 4), "weight_scale", torch.ones(()), r"shape \[1, 1\], .* expects \[2, 2\]"),
        (block(2, 4), "weight_scale", torch.ones(2, 2, 2, 1), r"shape \[2, 2, 2, 1\]"),
        (
            CHANNEL,
            "weight_g_idx",
            torch.ones(6),
            "'weight_g_idx' with this format; allowed: weight",
        ),
    ],
)
def test_bad_tensors_name_the_layer(allocated, quant, name, loaded, text):
    spec = Fp8Spec(quant, TENSOR)
    layer = allocated(spec, (4, 6))
    with pytest.raises(QuantConfigError, match=rf"a\.down_proj: .*{text}"):
        spec.load_weight(layer, name, loaded)
    assert len(spec.missing_parts(layer)) == 3


def test_two_names_of_one_scale_are_refused(allocated):
    spec = Fp8Spec(TENSOR)
    layer = allocated(spec, (4, 6))
    spec.load_weight(layer, "weight_scale", torch.ones(()))
    with pytest.raises(QuantConfigError, match="loaded twice, now as 'weight_scale_inv'"):
        spec.load_weight(layer, "weight_scale_inv", torch.ones(()))


def test_tensor_names_follow_the_input():
    assert Fp8Spec(CHANNEL).tensor_names() == ("weight", "weight_scale", "weight_scale_inv")
    assert Fp8Spec(CHANNEL, TOKEN).tensor_names() == Fp8Spec(CHANNEL).tensor_names()
    assert Fp8Spec(CHANNEL, TENSOR).tensor_names()[-1] == "input_scale"


def test_signature():
    signature = Fp8Spec(block(128, 64), TENSOR).physical_signature
    assert signature == PhysicalSignature(
        "fp8_e4m3",
        block_shape=(128, 64),
        scale_dtype="fp32",
        granularity="block",
        storage_dtype="fp8_e4m3",
        fields=(
            ("activation", "fp8_e4m3"),
            ("input_granularity", "per_tensor"),
            ("input_scale", "static"),
        ),
    )
    assert Fp8Spec(CHANNEL).physical_signature.fields == (("activation", "a16"),)
    assert Fp8Spec(CHANNEL).physical_signature != Fp8Spec(CHANNEL, TOKEN).physical_signature


@pytest.mark.parametrize(
    ("weight", "act", "text"),
    [
        (TensorQuant("int8", "per_channel"), None, "weight is int8 per_channel; allowed: sym"),
        (
            TensorQuant("fp8_e4m3", "block", micro_scaled=True, block_shape=(1, 16)),
            None,
            r"allowed: micro-scaled blocks of \(1, 32\)",
        ),
        (TensorQuant("fp8_e4m3", "block", block_shape=(1, 2), act_order=True), None, "order of K"),
        (
            CHANNEL,
            TensorQuant("nvfp4", "block", dynamic=True, micro_scaled=True, block_shape=(1, 16)),
            "input is nvfp4 .*allowed: none, fp8_e4m3 or fp8_e5m2",
        ),
        (TensorQuant("fp8_e4m3", "per_channel", symmetric=False), None, "weight is .*asymmetric"),
        (TOKEN, None, "weight is fp8_e4m3 per_channel dynamic"),
        (CHANNEL, TensorQuant("int8", "per_channel", dynamic=True), "input is int8"),
        (CHANNEL, CHANNEL, "a static scale is allowed per_tensor only"),
        (
            CHANNEL,
            TensorQuant("fp8_e4m3", "block", dynamic=True, block_shape=(2, 8)),
            r"allowed block_shape: \(1, group along K\)",
        ),
    ],
)
def test_other_schemes_are_refused(weight, act, text):
    with pytest.raises(QuantConfigError, match=text):
        Fp8Spec(weight, act)


@pytest.mark.parametrize("quant", ["per_tensor", "per_channel"])
@pytest.mark.parametrize("act", [None, TensorQuant("fp8_e5m2", "per_channel", dynamic=True)])
def test_e5m2(allocated, quant, act):
    spec = Fp8Spec(TensorQuant("fp8_e5m2", quant), act)
    assert spec.spec_id == f"fp8_e5m2_{quant}"
    assert spec.physical_signature.format == "fp8_e5m2"
    assert spec.physical_signature.storage_dtype == "fp8_e5m2"
    layer = allocated(spec, (3, 5))
    weight = torch.randn(3, 5).mul(1e4).to(torch.float8_e5m2)
    spec.load_weight(layer, "weight", weight)
    spec.load_weight(layer, "weight_scale", torch.tensor(0.5))
    spec.process_after_loading(layer)
    assert torch.equal(spec.dequantize_weight(layer), weight.float() * 0.5)
    with pytest.raises(QuantConfigError, match="says fp8_e5m2 but the checkpoint weight is"):
        spec.load_weight(layer, "weight", codes(3, 5))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("shape", [(1, 32), (7, 96), (5, 33), (3, 31)], ids=str)
def test_micro_scaled(allocated, shape, dtype):
    spec = Fp8Spec(TensorQuant("fp8_e4m3", "block", micro_scaled=True, block_shape=(1, 32)))
    assert spec.spec_id == "mxfp8_block_1_32"
    assert spec.physical_signature.scale_dtype == "fp8_e8m0"
    layer = allocated(spec, shape)
    assert layer.weight_scale.float().isnan().all()
    weight = codes(*shape)
    exponents = torch.randint(100, 140, (shape[0], math.ceil(shape[1] / 32)), dtype=torch.uint8)
    spec.load_weight(layer, "weight", weight)
    spec.load_weight(layer, "weight_scale", exponents.view(dtype))
    spec.process_after_loading(layer)
    assert layer.weight_scale.dtype == torch.float8_e8m0fnu
    expected = loop_dequantize(weight, lambda n, k: 2.0 ** (int(exponents[n, k // 32]) - 127))
    assert torch.equal(spec.dequantize_weight(layer), expected)
    layer = allocated(spec, shape)
    with pytest.raises(QuantConfigError, match=r"is torch\.float32; allowed: torch\.uint8"):
        spec.load_weight(layer, "weight_scale", torch.ones(exponents.shape))


@pytest.mark.parametrize("shape", [(7, 20), (4, 8)], ids=str)
def test_block_scales_of_modelopt(allocated, shape):
    spec = Fp8Spec(block(4, 8))
    layer = allocated(spec, shape)
    weight, scale = codes(*shape), scales(math.ceil(shape[0] / 4), math.ceil(shape[1] / 8))
    spec.load_weight(layer, "weight", weight)
    single = scale.numel() == 1
    spec.load_weight(layer, "weight_scale", scale[0, 0] if single else scale[:, None, :, None])
    spec.process_after_loading(layer)
    expected = loop_dequantize(weight, lambda n, k: scale[n // 4, k // 8])
    assert torch.equal(spec.dequantize_weight(layer), expected)
