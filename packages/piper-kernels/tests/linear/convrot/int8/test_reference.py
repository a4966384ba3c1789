import pytest
import torch

from piper_kernels.linear.convrot.int8 import reference
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

FLOATS = [torch.float16, torch.bfloat16, torch.float32]


def golden_operands():
    index = torch.arange(64).view(2, 32)
    weight = ((7 * index) % 23 - 11).to(torch.float32)
    index = torch.arange(96).view(3, 32)
    x = ((5 * index) % 17 - 8).to(torch.float32) / 4
    return x, weight


def rotate_float64(value, size):
    h4 = torch.tensor(
        [[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64
    )
    matrix = h4
    while matrix.shape[0] < size:
        matrix = torch.kron(matrix, h4)
    groups = value.double().reshape(*value.shape[:-1], -1, size)
    return (groups @ matrix / size**0.5).flatten(-2)


def float64_oracle(x, weight, bias=None, input_scale=None, activation=None):
    """Rotate, quantize and multiply in float64, with the FP32 scales of the weight."""
    value = x.double()
    if activation == "gelu_tanh":
        value = torch.nn.functional.gelu(value, approximate="tanh")
    elif activation == "swiglu":
        up, gate = value.chunk(2, -1)
        value = up * gate * torch.sigmoid(gate)
    rotated = rotate_float64(value, weight.group_size)
    if input_scale is None:
        scale = (rotated.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    else:
        scale = input_scale.double()
    codes = (rotated / scale).round().clamp(-128, 127)
    result = (codes * scale) @ (weight.qdata.double() * weight.scale.double()).t()
    return result if bias is None else result + bias.double()


def test_golden_linear():
    x, dense = golden_operands()
    weight = ConvRotInt8Tensor.from_hp(dense, group_size=16)
    codes, scale = reference.prepare_input(x, 16)
    expected_scale = ["0x1.72e5cc0000000p-6", "0x1.3264ca0000000p-6", "0x1.72e5cc0000000p-6"]
    assert [value.hex() for value in scale.tolist()] == expected_scale
    accumulator = codes.int() @ weight.qdata.int().t()
    assert accumulator.tolist() == [[32234, 46387], [-9943, -53326], [-27809, 39416]]
    y = reference.linear(x, weight.qdata, weight.scale, 16)
    assert [[value.hex() for value in row] for row in y.tolist()] == [
        ["0x1.3c03c60000000p+6", "0x1.d74df20000000p+6"],
        ["-0x1.421aaa0000000p+4", "-0x1.bf94500000000p+6"],
        ["-0x1.10a2100000000p+6", "0x1.907a2c0000000p+6"],
    ]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group_size", [16, 64, 256])
@pytest.mark.parametrize("activation", [None, "gelu_tanh", "swiglu"])
@pytest.mark.parametrize("static", [False, True])
def test_close_to_the_float64_oracle(dtype, group_size, activation, static):
    generator = torch.Generator().manual_seed(group_size)
    dense = torch.randn(11, 512, generator=generator)
    weight = ConvRotInt8Tensor.from_hp(dense, group_size=group_size)
    width = 1024 if activation == "swiglu" else 512
    x = torch.randn(5, width, generator=generator).to(dtype)
    bias = torch.randn(11, generator=generator)
    scale = torch.tensor(0.03) if static else None
    result = reference.linear(
        x,
        weight.qdata,
        weight.scale,
        group_size,
        bias,
        activation_fn=activation,
        input_scale=scale,
    )
    expected = float64_oracle(x, weight, bias, scale, activation)
    assert result.dtype == dtype
    # A code on a rounding boundary may differ by one between FP32 and float64.
    error = (result.double() - expected).norm() / expected.norm()
    assert error < max(2e-3, torch.finfo(dtype).eps)


@pytest.mark.parametrize("width", [512, 5376])
def test_static_codes_equal_the_oracle(width):
    x = torch.randint(-64, 64, (3, width)).to(torch.float32)  # exact in the rotated basis
    codes, rows = reference.prepare_input(x, 256, None, torch.tensor(0.5))
    expected = (rotate_float64(x, 256) / 0.5).round().clamp(-128, 127)
    assert torch.equal(codes.double(), expected)
    assert codes.min() == -128  # reachable with a static scale only
    assert torch.equal(rows, torch.full((3,), 0.5))


@pytest.mark.parametrize("lead", [(), (1,), (0,), (2, 3), (2, 0)])
def test_static_row_scales_do_not_alias_the_scalar(lead):
    scale = torch.tensor(0.5)
    codes, rows = reference.prepare_input(torch.ones(*lead, 16), 16, None, scale)
    assert codes.shape == (*lead, 16)
    assert rows.shape == lead
    assert rows.is_contiguous()
    rows.zero_()
    assert scale.item() == 0.5


@pytest.mark.parametrize("lead", [(), (1,), (0,), (2, 3), (2, 0)])
@pytest.mark.parametrize("out_features", [0, 1, 7])
def test_shapes(lead, out_features):
    weight = ConvRotInt8Tensor.from_hp(torch.randn(out_features, 32), group_size=16)
    y = reference.linear(torch.randn(*lead, 32), weight.qdata, weight.scale, 16)
    assert y.shape == (*lead, out_features)


def test_inputs_are_kept():
    weight = ConvRotInt8Tensor.from_hp(torch.randn(3, 32), group_size=16)
    x, bias = torch.randn(4, 32), torch.randn(3)
    copies = [t.clone() for t in (x, bias, weight.qdata, weight.scale)]
    reference.linear(x, weight.qdata, weight.scale, 16, bias)
    for actual, before in zip((x, bias, weight.qdata, weight.scale), copies, strict=True):
        assert torch.equal(actual, before)


@pytest.mark.parametrize("dtype", FLOATS)
def test_zero_rows_give_exactly_the_bias(dtype):
    weight = ConvRotInt8Tensor.from_hp(torch.randn(5, 64), group_size=64)
    x = torch.randn(3, 64).to(dtype)
    x[1] = 0
    bias = torch.randn(5).to(dtype)
    y = reference.linear(x, weight.qdata, weight.scale, 64, bias)
    assert torch.equal(y[1], bias)
    assert torch.isfinite(y).all()


def test_half_precision_outliers_stay_finite_inside():
    weight = ConvRotInt8Tensor.from_hp(torch.randn(5, 256) * 1e-3, group_size=256)
    x = torch.full((2, 256), 65504.0, dtype=torch.float16)
    codes, scale = reference.prepare_input(x, 256)
    assert torch.isfinite(scale).all()
    y = reference.linear(x, weight.qdata, weight.scale, 256)
    assert torch.isfinite(y).all()
    assert codes.abs().max() == 127


def test_bias_is_added_in_fp32_before_the_single_rounding():
    qdata = torch.zeros(1, 16, dtype=torch.int8)
    qdata[0, 0] = 1
    codes = qdata.clone()
    y = reference.linear_prepared(
        codes,
        torch.tensor([1.0]),
        qdata,
        torch.tensor([[256.0]]),
        torch.bfloat16,
        torch.tensor([-255.999]),
    )
    assert y.item() == pytest.approx(0.001, rel=0.02)
