import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from piper_kernels._input_activations import apply_activation
from piper_kernels.linear.nvfp4 import reference
from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor
from piper_kernels.weights.nvfp4._layout import swap_packed_pairs

FLOATS = [torch.float16, torch.bfloat16, torch.float32]


def randn(*shape, seed=1, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wrap(qdata, scale, level):
    return PiperNVFP4Tensor(qdata, scale, 16, torch.float32, level, None, True)


class OnlyAten(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.namespace in ("aten", "prims"), func
        return func(*args, **(kwargs or {}))


def test_bias_stays_fp32_until_the_cast():
    qdata = torch.full((1, 128), 0x22, dtype=torch.uint8)
    weight = qdata.clone()
    qdata[0, 0] = 0x12
    scale = PiperNVFP4Tensor.from_hp(torch.full((1, 256), 6.0), is_swizzled_scales=True).scale
    result = reference.linear_prepared(
        qdata,
        scale,
        torch.tensor(1 / 16),
        weight,
        scale,
        torch.tensor(1 / 16),
        torch.tensor([-1.0009765625]),
        torch.bfloat16,
    )
    assert result.dtype == torch.bfloat16
    assert result.item() == -0.0029296875


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("dynamic", "group_size", "high_first"),
    list(itertools.product((False, True), (0, 16, 64), (False, True))),
)
def test_prepare_input_is_the_weight_quantizer(dtype, dynamic, group_size, high_first):
    x = randn(3, 5, 64, dtype=dtype)
    static = torch.tensor(0.002)
    with OnlyAten():
        qdata, scale, level = reference.prepare_input(
            x, None if dynamic else static, dynamic, None, high_first, group_size=group_size
        )
    source = x.float().view(15, 64)
    source = rotate_groups(source, group_size) if group_size else source
    expected = PiperNVFP4Tensor.from_hp(
        source,
        per_tensor_scale=None if dynamic else static,
        compute_per_tensor_scale=dynamic,
        is_swizzled_scales=True,
    )
    assert torch.equal(swap_packed_pairs(qdata) if high_first else qdata, expected.qdata)
    assert torch.equal(scale.view(torch.uint8), expected.scale.view(torch.uint8))
    assert torch.equal(level, expected.per_tensor_scale)
    assert level.shape == ()


def test_without_a_second_level_blocks_scale_alone():
    x = randn(5, 64)
    qdata, scale, level = reference.prepare_input(x, None, False)
    expected = PiperNVFP4Tensor.from_hp(x, is_swizzled_scales=True)
    assert level.item() == 1
    assert torch.equal(qdata, expected.qdata)
    assert torch.equal(scale.view(torch.uint8), expected.scale.view(torch.uint8))


@pytest.mark.parametrize(("activation_fn", "width"), [("gelu_tanh", 1), ("swiglu", 2)])
def test_activations_run_before_the_rotation(activation_fn, width):
    x = randn(5, 64 * width, dtype=torch.bfloat16)
    actual = reference.prepare_input(x, None, True, activation_fn, group_size=64)
    expected = reference.prepare_input(
        apply_activation(x, activation_fn), None, True, group_size=64
    )
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("two_level", [False, True])
@pytest.mark.parametrize("group_size", [0, 64])
@pytest.mark.parametrize("high_first", [False, True])
def test_linear_against_float64(dtype, dynamic, two_level, group_size, high_first):
    x, bias = randn(2, 3, 64, dtype=dtype), randn(130, seed=3)
    dense = randn(130, 64, seed=2)
    dense = rotate_groups(dense, group_size) if group_size else dense
    weight = PiperNVFP4Tensor.from_hp(
        dense, compute_per_tensor_scale=two_level, is_swizzled_scales=True
    )
    static = None if dynamic else torch.tensor(0.002)
    arguments = (static, dynamic, None, high_first)
    qdata, scale, level = reference.prepare_input(x, *arguments, group_size=group_size)
    prepared = wrap(swap_packed_pairs(qdata) if high_first else qdata, scale, level)
    exact = prepared.dequantize().double() @ weight.dequantize().double().t() + bias.double()
    weight_qdata = swap_packed_pairs(weight.qdata) if high_first else weight.qdata
    with OnlyAten():
        actual = reference.linear(
            x,
            weight_qdata,
            weight.scale,
            weight.per_tensor_scale,
            static,
            bias,
            dynamic,
            high_first,
            group_size=group_size,
        )
    assert actual.dtype == dtype
    assert actual.shape == (2, 3, 130)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(actual.double().view(6, 130), exact, rtol=2 * eps, atol=2e-5)
    quantized = (exact - bias) - x.double().view(6, 64) @ (
        rotate_groups(dense, group_size) if group_size else dense
    ).double().t()
    assert quantized.norm() / (exact - bias).norm() < 0.25


@pytest.mark.parametrize("bias_dtype", [None, *FLOATS])
def test_zero_inputs_return_the_bias(bias_dtype):
    weight = PiperNVFP4Tensor.from_hp(randn(7, 64), is_swizzled_scales=True)
    bias = None if bias_dtype is None else randn(7, dtype=bias_dtype)
    for dynamic in (False, True):
        result = reference.linear(
            torch.zeros(3, 64, dtype=torch.bfloat16),
            weight.qdata,
            weight.scale,
            None,
            None,
            bias,
            dynamic,
        )
        expected = torch.zeros(7) if bias is None else bias
        assert torch.equal(result, expected.to(torch.bfloat16).expand(3, 7))


def test_zero_input_has_a_zero_dynamic_scale():
    qdata, _, level = reference.prepare_input(torch.zeros(2, 32), None, True)
    assert level.item() == 0
    assert qdata.unique().tolist() == [0]


@pytest.mark.parametrize("dynamic", [False, True])
def test_empty_rows(dynamic):
    weight = PiperNVFP4Tensor.from_hp(randn(7, 64), is_swizzled_scales=True)
    result = reference.linear(
        torch.zeros(2, 0, 64), weight.qdata, weight.scale, None, None, None, dynamic
    )
    assert result.shape == (2, 0, 7)


def test_autocast_does_not_change_the_product():
    weight = PiperNVFP4Tensor.from_hp(randn(7, 64), is_swizzled_scales=True)
    arguments = (randn(3, 64), weight.qdata, weight.scale, None, None, None, True)
    expected = reference.linear(*arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(reference.linear(*arguments), expected)
