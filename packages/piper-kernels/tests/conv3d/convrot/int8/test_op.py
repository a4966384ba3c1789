"""The contract of ConvRot INT8 convolution on the CPU."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from piper_kernels.conv3d.convrot.int8 import (
    ConvRotInt8Conv3d,
    conv3d,
    group_norm_silu_conv3d,
    reference,
)
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

PADS = {"none": (0, 0, 0, 0), "reflect": (1, 1, 1, 1), "reflect_right": (0, 1, 0, 1)}
CASES = [
    ((1, 64, 1, 3, 3), 1, "none", (1, 1, 1)),
    ((2, 64, 3, 5, 7), 5, "reflect", (1, 1, 1)),
    ((1, 128, 4, 6, 5), 33, "reflect_right", (2, 2, 2)),
    ((1, 64, 5, 4, 9), 17, "reflect", (3, 1, 2)),
    ((1, 64, 2, 2, 2), 3, "reflect", (1, 1, 1)),
    ((1, 64, 2, 7, 4), 16, "none", (1, 2, 3)),
]


def make_weight(outputs, channels, group_size=64, scale=0.03125, seed=0):
    """Random full-range codes: every term of a sum counts."""
    generator = torch.Generator().manual_seed(seed)
    qdata = torch.randint(-128, 128, (outputs, 3, 3, 3, channels), generator=generator)
    scales = torch.rand(outputs, generator=generator) * 1e-4 + 1e-5
    return ConvRotInt8Tensor.from_quantized(
        qdata.to(torch.int8),
        scales,
        group_size=group_size,
        logical_dtype=torch.float16,
        act_per_tensor_scale=torch.tensor(scale),
    )


def dense_convolution(x, weight, bias, stride, padding, residual):
    """FP64: dequantized codes of the input, dequantized filter, explicit padding."""
    codes = reference.prepare_input(x, weight.group_size, weight.act_per_tensor_scale)
    codes = codes.double().permute(0, 4, 1, 2, 3)
    spatial = (*PADS[padding], 0, 0)
    padded = functional.pad(codes, spatial, mode="reflect") if any(PADS[padding]) else codes
    padded = functional.pad(padded, (0, 0, 0, 0, 2, 0))
    filters = weight.qdata.double() * weight.scale.double().view(-1, 1, 1, 1, 1)
    filters = filters.permute(0, 4, 1, 2, 3) * weight.act_per_tensor_scale.double()
    result = functional.conv3d(padded, filters, None, stride)
    result = result + bias.double().view(1, -1, 1, 1, 1)
    return result + residual.double()


@pytest.mark.parametrize(("shape", "outputs", "padding", "stride"), CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_equals_the_dense_convolution_of_the_codes(shape, outputs, padding, stride, dtype):
    generator = torch.Generator().manual_seed(1)
    weight = make_weight(outputs, shape[1])
    x = torch.randn(shape, generator=generator).to(dtype).transpose(3, 4).contiguous()
    x = x.transpose(3, 4)  # strided
    bias = torch.randn(2 * outputs, generator=generator).half()[::2]
    with torch.no_grad():
        plain = conv3d(x, weight, stride=stride, padding=padding)
        residual = torch.randn(plain.shape, generator=generator).half()
        residual = residual.transpose(2, 3).contiguous().transpose(2, 3)
        actual = conv3d(x, weight, bias, stride=stride, padding=padding, residual=residual)
    expected = dense_convolution(x, weight, bias, stride, padding, residual)
    assert actual.dtype == torch.float16
    assert actual.is_contiguous()
    torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-4)
    exact = dense_convolution(
        x, weight, torch.zeros(outputs), stride, padding, torch.zeros(plain.shape)
    )
    torch.testing.assert_close(plain.double(), exact, rtol=1e-3, atol=1e-4)


def test_distance_to_the_convolution_it_stands_for():
    generator = torch.Generator().manual_seed(2)
    dense = torch.randn((48, 128, 3, 3, 3), generator=generator) * 0.05
    x = torch.randn((1, 128, 3, 8, 8), generator=generator).half()
    weight = ConvRotInt8Tensor.from_hp(
        dense, group_size=64, act_per_tensor_scale=torch.tensor(4.2 / 127)
    )
    actual = conv3d(x, weight, padding="reflect").double()
    padded = functional.pad(x.double(), (1, 1, 1, 1, 0, 0), mode="reflect")
    expected = functional.conv3d(functional.pad(padded, (0, 0, 0, 0, 2, 0)), dense.double())
    error = (actual - expected).norm() / expected.norm()
    assert error < 0.014, error  # two uniform errors of 0.94 %


def test_the_past_is_zero_and_the_future_unseen():
    weight = make_weight(4, 64)
    x = torch.randn(1, 64, 6, 4, 4).half()
    full = conv3d(x, weight, padding="reflect")
    for frames in (1, 3):
        assert torch.equal(conv3d(x[:, :, :frames], weight, padding="reflect"), full[:, :, :frames])
    changed = x.clone()
    changed[:, :, 3:] *= 32
    again = conv3d(changed, weight, padding="reflect")
    assert torch.equal(again[:, :, :3], full[:, :, :3])
    assert not torch.equal(again[:, :, 3], full[:, :, 3])


def test_codes_round_half_to_even_and_saturate():
    # One channel per group: its rotation has the magnitude value / 8.
    x = torch.zeros(1, 64, 1, 1, 4)
    for place, value in enumerate((8 * 0.5, 8 * 1.5, 1e6, 8 * 127.6)):
        x[0, 0, 0, 0, place] = value
    codes = reference.prepare_input(x, 64, torch.tensor(1.0))[0, 0, 0]
    signs = torch.sign(reference.prepare_input(x[..., 3:], 64, torch.tensor(1.0))[0, 0, 0, 0])
    assert torch.equal(codes[0].float(), torch.zeros(64))
    assert torch.equal(codes[1].float(), 2 * signs)
    for row in codes[2:]:
        assert torch.equal(row.float(), torch.where(signs > 0, 127.0, -128.0))


def test_zero_input_gives_bias_and_residual():
    weight, bias = make_weight(6, 64), torch.randn(6).half()
    x = torch.zeros(1, 64, 2, 3, 3, dtype=torch.float16)
    residual = torch.randn(1, 6, 2, 3, 3).half()
    actual = conv3d(x, weight, bias, padding="reflect", residual=residual)
    assert torch.equal(actual, (bias.view(1, -1, 1, 1, 1).float() + residual).half())


@pytest.mark.parametrize(("channels", "groups"), [(64, 32), (128, 1), (64, 64)])
@pytest.mark.parametrize("offset", [0.0, 1000.0, -1000.0])
def test_normalization_of_single_frames(channels, groups, offset):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((2, channels, 3, 5, 4), generator=generator) * 0.5 + offset
    norm = torch.randn((2, channels), generator=generator)
    weight, bias = make_weight(5, channels), torch.randn(5, generator=generator).half()
    actual = group_norm_silu_conv3d(
        x, norm[0], norm[1].half(), groups, 1e-6, weight, bias, padding="reflect"
    )
    frames = x.double().permute(0, 2, 1, 3, 4).flatten(0, 1).unsqueeze(2)
    values = functional.group_norm(frames, groups, norm[0].double(), norm[1].half().double(), 1e-6)
    values = functional.silu(values).view(2, 3, channels, 5, 4).permute(0, 2, 1, 3, 4)
    codes = reference.prepare_input(values.float(), 64, weight.act_per_tensor_scale)
    found = reference.prepare_input(
        x,
        64,
        weight.act_per_tensor_scale,
        reference.Normalization(norm[0], norm[1].half(), groups, 1e-6),
    )
    difference = (codes.int() - found.int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).double().mean() < 0.01
    expected = conv3d(values.float(), weight, bias, padding="reflect")
    torch.testing.assert_close(actual.float(), expected.float(), rtol=4e-3, atol=4e-3)


def test_a_flat_frame_is_normalized_to_the_bias():
    weight = make_weight(3, 64)
    x = torch.full((1, 64, 2, 3, 3), 7.0).half()
    ones, zeros = torch.ones(64), torch.zeros(64)
    assert not group_norm_silu_conv3d(x, ones, zeros, 8, 1e-6, weight, padding="reflect").any()


@pytest.mark.parametrize(("padding", "size"), [("none", (3, 2)), ("reflect", (5, 4)),
                                               ("reflect_right", (4, 3))])  # fmt: skip
@pytest.mark.parametrize("device", ["meta", "fake"])
def test_shapes_without_data(padding, size, device):
    mode = FakeTensorMode()
    with mode if device == "fake" else torch.device("meta"):
        x = torch.empty(2, 64, 3, 5, 4)
        qdata = torch.empty(7, 3, 3, 3, 64, dtype=torch.int8)
        scale, number = torch.empty(7), torch.empty(())
        weight = ConvRotInt8Tensor.from_quantized(
            qdata, scale, group_size=64, act_per_tensor_scale=number
        )
        result = conv3d(x, weight, padding=padding)
        again = group_norm_silu_conv3d(
            x, torch.empty(64), torch.empty(64), 8, 1e-5, weight, padding=padding
        )
    for value in (result, again):
        assert value.shape == (2, 7, 3, *size)
        assert value.dtype == torch.float16
        assert value.device == x.device


def valid(device):
    weight = make_weight(5, 64).to(device)
    return {
        "input": torch.zeros(1, 64, 2, 4, 4, dtype=torch.float16, device=device),
        "weight": weight,
        "bias": torch.zeros(5, dtype=torch.float16, device=device),
        "stride": (1, 1, 1),
        "padding": "reflect",
        "residual": torch.zeros(1, 5, 2, 4, 4, dtype=torch.float16, device=device),
    }


def zeros(*shape, dtype=torch.float16):
    return lambda device: torch.zeros(shape, dtype=dtype, device=device)


def other_device(*shape):
    return lambda device: torch.zeros(
        shape, dtype=torch.float16, device="cpu" if device == "meta" else "meta"
    )


REJECTS = {
    "input dtype": ("input", zeros(1, 64, 2, 4, 4, dtype=torch.bfloat16), "must be float16"),
    "input rank": ("input", zeros(64, 2, 4, 4), r"\[N, 64, T, H, W\]"),
    "channels": ("input", zeros(1, 128, 2, 4, 4), r"\[N, 64, T, H, W\]"),
    "no frames": ("input", zeros(1, 64, 0, 4, 4), "dimensions must be positive"),
    "no samples": ("input", zeros(0, 64, 2, 4, 4), "dimensions must be positive"),
    "input device": ("input", other_device(1, 64, 2, 4, 4), "input must be on the device"),
    "one row": ("input", zeros(1, 64, 2, 1, 4), "height and width > 1"),
    "bias dtype": ("bias", zeros(5, dtype=torch.float32), "bias must be float16"),
    "bias shape": ("bias", zeros(4), "bias must be float16"),
    "bias device": ("bias", other_device(5), "bias must be on the device"),
    "residual shape": ("residual", zeros(1, 5, 2, 4, 3), "residual must be float16"),
    "residual dtype": ("residual", zeros(1, 5, 2, 4, 4, dtype=torch.float32), "residual must be"),
    "residual device": ("residual", other_device(1, 5, 2, 4, 4), "residual must be on"),
    "stride zero": ("stride", (1, 0, 1), "three positive integers"),
    "stride length": ("stride", (1, 1), "three positive integers"),
    "stride of floats": ("stride", (1, 1.0, 1), "three positive integers"),
    "padding": ("padding", "zeros", "padding must be one of"),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", REJECTS)
def test_rejects(name, device):
    argument, value, message = REJECTS[name]
    arguments = valid(device)
    arguments[argument] = value(device) if callable(value) else value
    with pytest.raises(ValueError, match=message):
        conv3d(**arguments)
    assert conv3d(**valid(device)).shape == (1, 5, 2, 4, 4)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_filter_that_does_not_fit(device):
    arguments = valid(device) | {"padding": "none", "residual": None}
    arguments["input"] = torch.zeros(1, 64, 2, 2, 4, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match="does not fit"):
        conv3d(**arguments)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rejects_of_weights(device):
    arguments = valid(device)
    for channels in (48, 96, 8192):
        qdata = torch.empty(2, 3, 3, 3, channels, dtype=torch.int8, device=device)
        with pytest.raises(ValueError, match="power-of-two"):
            ConvRotInt8Tensor.from_quantized(qdata, torch.empty(2, device=device), group_size=16)
    operator = torch.ops.piper_kernels.convrot_int8_conv3d
    x = torch.zeros(1, 96, 2, 4, 4, dtype=torch.float16, device=device)
    qdata = torch.zeros(2, 3, 3, 3, 96, dtype=torch.int8, device=device)
    numbers = torch.ones(2, device=device), torch.ones((), device=device)
    with pytest.raises(ValueError, match="power-of-two"):
        operator(x, qdata, numbers[0], None, 16, numbers[1], [1, 1, 1], True, False, None)
    weight = arguments["weight"]
    without = ConvRotInt8Tensor.from_quantized(weight.qdata, weight.scale, group_size=64)
    matrix = ConvRotInt8Tensor.from_quantized(
        weight.qdata.view(5, -1)[:, :64].contiguous(), weight.scale, group_size=64
    )
    for wrong, error, message in (
        (without, ValueError, "act_per_tensor_scale"),
        (matrix, TypeError, r"\[O, C, 3, 3, 3\]"),
        (torch.zeros(5, 64, 3, 3, 3, device=device), TypeError, "ConvRotInt8Tensor"),
        (None, TypeError, "NoneType"),
    ):
        with pytest.raises(error, match=message):
            conv3d(**arguments | {"weight": wrong})
        with pytest.raises(error, match=message):
            ConvRotInt8Conv3d(wrong, padding="reflect")


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_weight": zeros(63)}, "norm_weight must be"),
        ({"norm_bias": zeros(64, dtype=torch.bfloat16)}, "norm_bias must be"),
        ({"norm_bias": other_device(64)}, "norm_bias must be on"),
        ({"norm_groups": 5}, "norm_groups must divide"),
        ({"norm_groups": 0}, "norm_groups must divide"),
        ({"norm_epsilon": 0.0}, "norm_epsilon must be finite"),
        ({"norm_epsilon": math.inf}, "norm_epsilon must be finite"),
        ({"norm_epsilon": math.nan}, "norm_epsilon must be finite"),
    ],
)
def test_rejects_of_normalizations(changes, message, device):
    norm = {
        "norm_weight": torch.ones(64, device=device),
        "norm_bias": torch.ones(64, device=device),
        "norm_groups": 8,
        "norm_epsilon": 1e-6,
    }
    group_norm_silu_conv3d(**valid(device), **norm)
    changed = {name: v(device) if callable(v) else v for name, v in changes.items()}
    with pytest.raises(ValueError, match=message):
        group_norm_silu_conv3d(**valid(device), **norm | changed)


def test_both_paddings_at_once_are_refused():
    weight, x = make_weight(5, 64), torch.zeros(1, 64, 2, 4, 4, dtype=torch.float16)
    arguments = (weight.qdata, weight.scale, None, 64, weight.act_per_tensor_scale, [1, 1, 1])
    with pytest.raises(ValueError, match="at once"):
        torch.ops.piper_kernels.convrot_int8_conv3d(x, *arguments, True, True, None)


@pytest.mark.parametrize("name", ["input", "bias", "residual"])
def test_inference_only(name):
    arguments = valid("cpu")
    arguments[name].requires_grad_()
    norm = (torch.ones(64), torch.ones(64), 8, 1e-6)
    with pytest.raises(RuntimeError, match="inference-only"):
        conv3d(**arguments)
    x = arguments.pop("input")
    with pytest.raises(RuntimeError, match="inference-only"):
        group_norm_silu_conv3d(x, *norm, **arguments)
    with torch.inference_mode():
        conv3d(x, **arguments)
        group_norm_silu_conv3d(x, *norm, **arguments)


def test_a_norm_that_requires_gradients_is_refused():
    arguments = valid("cpu")
    x = arguments.pop("input")
    with pytest.raises(RuntimeError, match="inference-only"):
        group_norm_silu_conv3d(
            x, torch.ones(64, requires_grad=True), torch.ones(64), 8, 1e-6, **arguments
        )
