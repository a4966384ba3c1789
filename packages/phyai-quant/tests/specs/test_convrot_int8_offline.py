import pytest
import torch

from phyai_quant import QuantConfigError, QuantScheme, TensorQuant, materialize
from phyai_quant.specs import _rotation
from phyai_quant.specs.base import AllocationRequest, LegSlice
from phyai_quant.specs.convrot_int8 import ConvRotInt8Spec
from piper_kernels.linear.convrot import convrot_int8_linear
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

H4 = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]).double()
TOKEN = TensorQuant("int8", "per_channel", dynamic=True)
STATIC = TensorQuant("int8", "per_tensor")


def rotated(values, group):
    matrix = H4
    while len(matrix) < group:
        matrix = torch.kron(matrix, H4)
    parts = [part @ matrix / group**0.5 for part in values.double().split(group, dim=-1)]
    return torch.cat(parts, dim=-1)


def stored(rows, columns, group):
    return ConvRotInt8Tensor.from_hp(torch.randn(rows, columns), group_size=group)


def loaded(make_layer, spec, whole, scale=None, **extra):
    layer = make_layer("a.fc1")
    spec.allocate(layer, AllocationRequest(tuple(whole.shape), torch.float32))
    spec.load_weight(layer, "weight", whole.qdata)
    spec.load_weight(layer, "weight_scale", whole.scale if scale is None else scale)
    for name, value in extra.items():
        spec.load_weight(layer, name, value)
    spec.process_after_loading(layer)
    return layer


@pytest.mark.parametrize("group", [16, 64, 256])
@pytest.mark.parametrize("shape", [(1, 256), (3, 2, 512), (0, 256)])
def test_rotation(group, shape):
    x = torch.randn(shape).to(torch.bfloat16)
    out = _rotation.rotate(x, group)
    torch.testing.assert_close(out.double(), rotated(x, group), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(_rotation.rotate(out, group), x.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize(("rows", "columns", "group"), [(1, 16, 16), (7, 128, 64), (5, 512, 256)])
def test_stored_weights_read_back(make_layer, rows, columns, group, column):
    whole = stored(rows, columns, group)
    spec = ConvRotInt8Spec(group, online=False)
    scale = whole.scale if column else whole.scale.view(-1).bfloat16()
    layer = loaded(make_layer, spec, whole, scale)
    expected = rotated(whole.qdata.double() * scale.double().view(-1, 1), group)
    torch.testing.assert_close(
        spec.dequantize_weight(layer).double(), expected, rtol=1e-5, atol=1e-5
    )
    assert layer.input_scale is None


def test_a_single_scale_fills_the_rows_of_its_leg(make_layer):
    spec, layer = ConvRotInt8Spec(16, online=False), make_layer("a.qkv_proj")
    spec.allocate(layer, AllocationRequest((7, 32), torch.float32, (4, 3), ("q", "k")))
    spec.load_weight(layer, "weight_scale", torch.tensor(0.5), "k")
    assert layer.weight.scale[:4].isnan().all()
    assert layer.weight.scale[4:].tolist() == [[0.5]] * 3
    spec.load_weight(layer, "weight_scale", torch.arange(4.0), "q")
    assert layer.weight.scale[:4, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert spec.missing_parts(layer) == ["a.qkv_proj.weight[q]", "a.qkv_proj.weight[k]"]
    with pytest.raises(QuantConfigError, match="weight_scale is loaded twice"):
        spec.load_weight(layer, "weight_scale", torch.tensor(0.5), "q")


@pytest.mark.parametrize("scale", [None, 0.02])
def test_inputs_are_those_of_the_linear(make_layer, scale):
    whole = stored(6, 64, 16)
    spec = ConvRotInt8Spec(16, online=False)
    extra = {} if scale is None else {"input_scale": torch.tensor(scale)}
    layer = loaded(make_layer, spec, whole, **extra)
    x = torch.randn(2, 3, 64)
    x[0, 1] = 0
    view = spec.quantize_activation(x, layer)
    rows = rotated(x.view(6, 64), 16)
    scales = torch.full((6,), scale) if scale else rows.abs().amax(1).float() / 127
    codes = (rows / scales[:, None].clamp_min(1e-30)).round().clamp(-128, 127)
    assert view.x.dtype == torch.int8
    assert (view.x - codes).abs().max() <= 1  # fp32 against fp64 ties
    assert (view.x != codes).float().mean() < 0.02
    fake = spec.fake_quantize_activation(x, layer)
    product = fake @ spec.dequantize_weight(layer).t()
    expected = convrot_int8_linear(x, layer.weight)
    error = (product - expected).norm() / expected.norm()
    assert error < 2e-3  # a code may differ by one
    plain = x @ whole.dequantize(torch.float32).t()
    assert error < 0.5 * (expected - plain).norm() / plain.norm()


@pytest.mark.parametrize("required", [False, True])
def test_input_scales_come_for_all_legs_or_none(make_layer, required):
    spec, layer = (
        ConvRotInt8Spec(16, online=False, static_input=required),
        make_layer("a.gate_up_proj"),
    )
    spec.allocate(layer, AllocationRequest((4, 16), torch.float32, (2, 2), (0, 1)))
    for shard in (0, 1):
        spec.load_weight(layer, "weight", torch.ones(2, 16, dtype=torch.int8), shard)
        spec.load_weight(layer, "weight_scale", torch.ones(2), shard)
    spec.load_weight(layer, "input_scale", torch.tensor([0.5]), 1)
    text = r"input_scale\[0\]" if required else "input_scale was loaded .* never for 0; "
    with pytest.raises(QuantConfigError, match=text):
        spec.process_after_loading(layer)
    spec.load_weight(layer, "input_scale", torch.tensor([0.25]), 0)
    spec.process_after_loading(layer)
    assert layer.weight.act_per_tensor_scale.item() == 0.5
    weight = layer.weight
    spec.process_after_loading(layer)
    assert layer.weight is weight


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("weight", torch.zeros(5, 16), r"'weight' is torch\.float32; allowed: torch\.int8"),
        ("weight", torch.zeros(5, 32).to(torch.int8), r"shape \[5, 32\], .* expects \[5, 16\]"),
        ("weight_scale", torch.ones(4), r"shape \[4\], the layer expects \[5\] or \[5, 1\]"),
        ("weight_scale", torch.ones(5, dtype=torch.int8), r"'weight_scale' is torch\.int8"),
        ("input_scale", torch.ones(5), r"'input_scale' has shape \[5\]"),
        ("input_scale", torch.tensor(torch.nan), "'input_scale' is nan; allowed: a finite"),
        ("weight_zero_point", torch.ones(5), "cannot use checkpoint tensor 'weight_zero_point'"),
    ],
)
def test_bad_tensors_name_the_layer(make_layer, name, value, text):
    spec, layer = ConvRotInt8Spec(16, online=False), make_layer("a.fc1")
    spec.allocate(layer, AllocationRequest((5, 16), torch.float32))
    with pytest.raises(QuantConfigError, match=rf"a\.fc1: .*{text}"):
        spec.load_weight(layer, name, value)


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize(
    ("columns", "part", "text"),
    [
        (64, LegSlice((5, 192), 0, 64), None),
        (64, LegSlice((5, 192), 0, 16), "elements 16 to 80 of 192 do not fit .* 64 each"),
        (32, LegSlice((5, 64), 0, 32), "K = 32 is not divisible by rotation_group 64"),
        (64, LegSlice((5, 96), 0, 0), "K = 96 is not divisible by rotation_group 64"),
    ],
)
def test_slices_keep_rotation_groups_whole(make_layer, online, columns, part, text):
    request = AllocationRequest((5, columns), torch.float32, slices=(part,))
    spec = ConvRotInt8Spec(64, online=online)
    if text is None:
        spec.allocate(make_layer(), request)
        return
    with pytest.raises(QuantConfigError, match=text):
        spec.allocate(make_layer("a.down_proj"), request)


def test_schemes():
    weight = TensorQuant("int8", "per_channel", rotation_group=64)
    spec = materialize(QuantScheme(weight, TOKEN))
    assert isinstance(spec, ConvRotInt8Spec)
    assert not spec.online
    assert spec.tensor_names() == ("weight", "weight_scale", "input_scale")
    static = materialize(QuantScheme(weight, STATIC), 90)
    assert static.static_input
    assert dict(static.physical_signature.fields)["input_scale"] == "static"
    assert materialize(QuantScheme(weight, TOKEN, online=True)).tensor_names() == ("weight",)
    for act in (None, TensorQuant("int8", "per_tensor", dynamic=True)):
        with pytest.raises(QuantConfigError, match="no weight format stores"):
            materialize(QuantScheme(weight, act))
