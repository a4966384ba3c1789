"""Fuzz of the ConvRot INT8 convolution against FP64, and of operands that do not fit."""

import pytest
import torch
from fuzz_files import run_cases
from torch.nn import functional

from piper_kernels.conv3d.convrot.int8 import conv3d, group_norm_silu_conv3d
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

PADDINGS = {"none": (0, 0), "reflect": (1, 1), "reflect_right": (0, 1)}
CHANNELS = 64
INPUT_RANGE = 6.0
FAULTS = (
    "dtype", "rank", "channels", "bias dtype", "bias length", "residual dtype", "residual shape",
    "stride", "padding", "no scale", "small", "gradient", "empty", "matrix",
)  # fmt: skip


def seeded(draw):
    return torch.Generator().manual_seed(draw.randrange(2**32))


def conv_case(draw):
    """Return an input, a weight and the options of a call."""
    generator = seeded(draw)
    outputs = draw.choice([1, 3, 8, 17])
    dense = torch.randn(outputs, CHANNELS, 3, 3, 3, generator=generator).half()
    sizes = [draw.choice([1, 2, 3, 4]), *(draw.choice([3, 4, 5, 7]) for _ in range(2))]
    x = torch.randn(draw.choice([1, 2]), CHANNELS, *sizes, generator=generator)
    x = x.to(draw.choice([torch.float16, torch.float32]))
    kind = draw.choice(["normal", "normal", "zeros", "outlier"])
    if kind == "zeros":
        x.zero_()
    elif kind == "outlier":
        x[:, 3] *= 30
    group = draw.choice([16, 64])
    weight = ConvRotInt8Tensor.from_hp(
        dense, group_size=group, act_per_tensor_scale=torch.tensor(INPUT_RANGE / 127)
    )
    stride = [draw.choice([1, 2]) for _ in range(3)]
    padding = draw.choice(sorted(PADDINGS))
    options = {"stride": stride, "padding": padding}
    if draw.random() < 0.5:
        options["bias"] = torch.randn(outputs, generator=generator).half()
    if draw.random() < 0.4:
        x = x.transpose(3, 4).contiguous().transpose(3, 4)
    return x, weight, options


def exact(x, weight, options):
    """Convolve the exact input with the dense weight, in FP64."""
    before, after = PADDINGS[options["padding"]]
    x = functional.pad(x.double(), (before, after) * 2 + (0, 0), mode="reflect") if after else x
    x = functional.pad(x.double(), (0, 0, 0, 0, 2, 0))
    bias = options.get("bias")
    bias = None if bias is None else bias.double()
    dense = weight.dequantize(torch.float32).double()
    return functional.conv3d(x, dense, bias, stride=tuple(options["stride"]))


def assert_near(found, expected, weight):
    """Check a result whose inputs are off by up to half a step and whose weights are exact."""
    assert found.dtype == torch.float16
    assert found.shape == expected.shape
    assert found.is_contiguous()
    assert found.isfinite().all()
    filters = weight.dequantize(torch.float32).double().flatten(1).norm(dim=1).max()
    deviation = float(weight.act_per_tensor_scale) / 12**0.5 * filters
    distance = (found.double() - expected).norm()
    assert distance <= 5 * deviation * expected.numel() ** 0.5 + 1e-3 * expected.norm()


def test_convolutions():
    def check(draw):
        x, weight, options = conv_case(draw)
        expected = exact(x, weight, options)
        if draw.random() < 0.5:
            residual = torch.randn(expected.shape, generator=seeded(draw)).half()
            options["residual"] = residual
            expected = expected + residual.double()
        found = conv3d(x, weight, **options)
        if x.abs().amax() < INPUT_RANGE:  # otherwise codes saturate
            assert_near(found, expected, weight)
        assert torch.equal(found, conv3d(x.contiguous(), weight, **options))

    run_cases("conv3d", 0.06, check, __file__)


def test_convolutions_behind_a_normalization():
    def check(draw):
        x, weight, options = conv_case(draw)
        generator, groups = seeded(draw), draw.choice([1, 2, 8, 64])
        scale, shift = (torch.randn(CHANNELS, generator=generator) for _ in range(2))
        frames = x.double().transpose(1, 2).flatten(0, 1)
        normal = functional.group_norm(frames, groups, scale.double(), shift.double(), 1e-5)
        normal = functional.silu(normal).unflatten(0, (x.shape[0], -1)).transpose(1, 2)
        found = group_norm_silu_conv3d(x, scale, shift, groups, 1e-5, weight, **options)
        assert found.isfinite().all()
        if normal.abs().amax() < INPUT_RANGE:
            assert_near(found, exact(normal, weight, options), weight)

    run_cases("conv3d-norm", 0.04, check, __file__)


def break_options(fault, draw, outputs):
    """Return the options that are wrong, none for a fault of the operands."""
    half = torch.float16
    return {
        "bias dtype": {"bias": torch.zeros(outputs)},
        "bias length": {"bias": torch.zeros(outputs + 1, dtype=half)},
        "residual dtype": {"residual": torch.zeros(1)},
        "residual shape": {"residual": torch.zeros(1, outputs, 1, 1, 9, dtype=half)},
        "stride": {"stride": draw.choice([[1, 1], [0, 1, 1], [1, -1, 1]])},
        "padding": {"padding": draw.choice(["same", "", "zeros"])},
        "small": {"padding": "none"},
    }.get(fault, {})


def break_call(draw, x, weight, options):
    """Return the call with one thing wrong."""
    fault = draw.choice(FAULTS)
    options = options | break_options(fault, draw, weight.shape[0])
    if fault == "dtype":
        x = x.to(draw.choice([torch.bfloat16, torch.float64, torch.int8]))
    elif fault == "rank":
        x = draw.choice([x[0], x[None], x.flatten()])
    elif fault == "channels":
        x = x[:, : draw.choice([1, 16, 63])]
    elif fault == "no scale":
        weight = ConvRotInt8Tensor.from_hp(weight.dequantize(), group_size=16)
    elif fault == "small":
        x = x[..., :2, :1]
    elif fault == "gradient":
        x = x.float().requires_grad_()
    elif fault == "empty":
        x = x[:0]
    elif fault == "matrix":
        weight = ConvRotInt8Tensor.from_hp(torch.zeros(8, CHANNELS), group_size=16)
    return fault, x, weight, options


def test_calls_that_do_not_fit_are_refused():
    def check(draw):
        fault, x, weight, options = break_call(draw, *conv_case(draw))
        error = {"gradient": RuntimeError, "matrix": TypeError}.get(fault, ValueError)
        with pytest.raises(error) as caught:
            conv3d(x, weight, **options)
        assert len(str(caught.value)) > 25, fault

    run_cases("conv3d-faults", 0.12, check, __file__)
