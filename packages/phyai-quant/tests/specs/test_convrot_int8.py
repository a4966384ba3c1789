import copy

import pytest
import torch
from torch.nn.functional import linear

from phyai_quant import QuantConfigError
from phyai_quant.specs.base import AllocationRequest, PhysicalSignature
from phyai_quant.specs.convrot_int8 import ConvRotInt8Spec
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor


def hadamard(size):
    factor = torch.tensor(
        [[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64
    )
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.kron(matrix, factor)
    return matrix / size**0.5


def loop_quantize(weight, group):
    """Rotates and rounds row by row in fp64: codes [N, K] and scales [N, 1]."""
    matrix = hadamard(group)
    codes, scales = [], []
    for row in weight.double():
        rotated = torch.cat([part @ matrix for part in row.split(group)])
        scale = max(rotated.abs().max().item() / 127, 1e-30)
        scales.append([scale])
        codes.append((rotated / scale).round().clamp(-128, 127))
    return torch.stack(codes), torch.tensor(scales, dtype=torch.float64)


def loop_dequantize(codes, scales, group):
    rotated = codes.double() * scales.double()
    return torch.cat([part @ hadamard(group) for part in rotated.split(group, dim=1)], dim=1)


def loaded_layer(make_layer, spec, source, params_dtype=torch.bfloat16):
    layer = make_layer()
    spec.allocate(layer, AllocationRequest(tuple(source.shape), params_dtype))
    spec.load_weight(layer, "weight", source)
    spec.process_after_loading(layer)
    return layer


@pytest.mark.parametrize("source_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("params_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (7, 3), (17, 2)])
@pytest.mark.parametrize("group", [16, 64, 256])
def test_weights_equal_the_row_by_row_reference(
    make_layer, rows, groups, group, source_dtype, params_dtype
):
    spec = ConvRotInt8Spec(group)
    source = torch.randn(rows, groups * group).to(source_dtype)
    source[0] = 0
    layer = loaded_layer(make_layer, spec, source, params_dtype)
    codes, scales = loop_quantize(source, group)
    assert isinstance(layer.weight, ConvRotInt8Tensor)
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert layer.weight.dtype == params_dtype
    assert layer.weight.shape == source.shape
    assert not layer.weight.requires_grad
    assert (layer.weight.qdata.double() - codes).abs().max() <= 1  # fp32 against fp64 ties
    assert (layer.weight.qdata.double() != codes).double().mean() < 0.01
    torch.testing.assert_close(layer.weight.scale.double(), scales, rtol=1e-6, atol=0)
    dequantized = spec.dequantize_weight(layer)
    assert dequantized.dtype == torch.float32
    expected = loop_dequantize(layer.weight.qdata, layer.weight.scale, group)
    torch.testing.assert_close(dequantized.double(), expected, rtol=1e-5, atol=1e-5)
    error = (dequantized - source.float()).norm() / source.float().norm().clamp_min(1e-6)
    assert error < 0.02


def test_the_source_is_not_rounded_to_the_params_dtype(make_layer):
    source = torch.randn(5, 64)
    wide = loaded_layer(make_layer, ConvRotInt8Spec(64), source, torch.float32)
    narrow = loaded_layer(make_layer, ConvRotInt8Spec(64), source, torch.bfloat16)
    rounded = loaded_layer(make_layer, ConvRotInt8Spec(64), source.bfloat16(), torch.bfloat16)
    assert torch.equal(narrow.weight.scale, wide.weight.scale)
    assert torch.equal(narrow.weight.qdata, wide.weight.qdata)
    assert not torch.equal(rounded.weight.scale, wide.weight.scale)


def test_legs_in_any_order_equal_the_whole(make_layer):
    spec = ConvRotInt8Spec(16)
    source = torch.randn(32, 9).t()[:, :32]  # strided source
    whole = loaded_layer(make_layer, spec, source)
    layer = make_layer("a.qkv_proj")
    spec.allocate(layer, AllocationRequest((9, 32), torch.bfloat16, (4, 2, 3), ("q", "k", "v")))
    spec.load_weight(layer, "weight", source[6:9], "v")
    spec.load_weight(layer, "weight", source[0:4].bfloat16().float(), "q")
    spec.load_weight(layer, "weight", source[4:6], "k")
    spec.load_weight(layer, "weight", source[0:4], "q")
    spec.process_after_loading(layer)
    assert torch.equal(layer.weight.qdata, whole.weight.qdata)
    assert torch.equal(layer.weight.scale, whole.weight.scale)


def test_linear_runs_on_the_parameter(make_layer):
    source = torch.randn(7, 64)
    layer = loaded_layer(make_layer, ConvRotInt8Spec(64), source, torch.float32)
    x = torch.randn(3, 64)
    expected = x @ source.t()
    error = (linear(x, layer.weight) - expected).norm() / expected.norm()
    assert 0 < error < 0.03


def test_processing_twice_and_copies_change_nothing(make_layer):
    spec = ConvRotInt8Spec(16)
    layer = loaded_layer(make_layer, spec, torch.randn(5, 16))
    weight, before = layer.weight, spec.dequantize_weight(layer)
    spec.process_after_loading(layer)
    assert layer.weight is weight
    assert torch.equal(spec.dequantize_weight(layer), before)
    moved = copy.deepcopy(layer).to("cpu")
    assert torch.equal(spec.dequantize_weight(moved), before)


def test_missing_legs_are_an_error(make_layer):
    spec = ConvRotInt8Spec(16)
    layer = make_layer("a.gate_up_proj")
    spec.allocate(layer, AllocationRequest((5, 16), torch.float32, (2, 3), (0, 1)))
    spec.load_weight(layer, "weight", torch.randn(3, 16), 1)
    assert spec.missing_parts(layer) == ["a.gate_up_proj.weight[0]"]
    assert torch.isnan(spec.dequantize_weight(layer)[:2]).all()
    with pytest.raises(QuantConfigError, match=r"never loaded: a\.gate_up_proj\.weight\[0\]"):
        spec.process_after_loading(layer)


@pytest.mark.parametrize(("columns", "group"), [(15, 16), (17, 16), (96, 64), (4304, 256)])
def test_widths_that_are_no_multiple_name_layer_and_groups(make_layer, columns, group):
    with pytest.raises(QuantConfigError) as error:
        ConvRotInt8Spec(group).allocate(
            make_layer("a.fc2"), AllocationRequest((3, columns), torch.float32)
        )
    text = str(error.value)
    assert f"a.fc2: K = {columns} is not divisible by rotation_group {group}" in text
    assert "allowed groups: 16, 64, 256" in text


@pytest.mark.parametrize(
    ("name", "loaded", "text"),
    [
        ("weight_scale", torch.ones(5, 1), "cannot use checkpoint tensor 'weight_scale'"),
        ("weight", torch.zeros(5, 32), r"shape \[5, 32\], the layer expects \[5, 16\]"),
        ("weight", torch.zeros(5, 16, dtype=torch.int8), "checkpoint weight is torch.int8"),
        ("weight", torch.zeros(5, 16).to(torch.float8_e4m3fn), "is torch.float8_e4m3fn"),
        ("weight", torch.zeros(80), r"shape \[80\], the layer expects \[5, 16\]"),
        ("weight", torch.zeros(5, 16, 1), r"shape \[5, 16, 1\], the layer expects"),
        ("weight", torch.zeros(()), r"shape \[\], the layer expects"),
        ("weight", torch.zeros(5, 15), r"shape \[5, 15\], the layer expects"),
    ],
)
def test_bad_tensors_name_the_layer(make_layer, name, loaded, text):
    spec, layer = ConvRotInt8Spec(16), make_layer("a.fc1")
    spec.allocate(layer, AllocationRequest((5, 16), torch.float32))
    with pytest.raises(QuantConfigError, match=rf"a\.fc1: .*{text}"):
        spec.load_weight(layer, name, loaded)
    assert spec.missing_parts(layer) == ["a.fc1.weight"]


def test_params_dtype_is_closed(make_layer):
    with pytest.raises(QuantConfigError, match=r"params_dtype torch\.int8 is not supported"):
        ConvRotInt8Spec(16).allocate(make_layer(), AllocationRequest((5, 16), torch.int8))


def test_signature_and_id():
    spec = ConvRotInt8Spec(64)
    assert spec.spec_id == "convrot_int8_g64"
    assert spec.weight_dtype == torch.int8
    assert spec.physical_signature == PhysicalSignature(
        "int8",
        layout="convrot",
        granularity="per_channel",
        scale_dtype="fp32",
        storage_dtype="int8",
        fields=(
            ("activation", "int8"),
            ("input_granularity", "per_channel"),
            ("input_scale", "dynamic"),
            ("rotation_group", 64),
        ),
    )
