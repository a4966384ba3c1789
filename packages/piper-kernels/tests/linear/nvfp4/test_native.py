"""The product of PyTorch, replaced by one that decodes what it is given: no target is at hand."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.linear.nvfp4 import _native, reference, triton
from piper_kernels.linear.nvfp4._portable import PortableBackend
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

FLOATS = [torch.float16, torch.bfloat16, torch.float32]


def randn(*shape, seed=1, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def calls(monkeypatch):
    """Replace ``_scaled_mm_v2`` and the kernels; return the arguments of products."""
    calls = []

    def product(left, right, left_scales, recipe, swizzle, right_scales, *rest):
        recipe_again, swizzle_again, bias, dtype = rest
        assert recipe == recipe_again == [2, 0]  # BlockWise1x16, TensorWise
        assert swizzle == swizzle_again == [1, 0]  # SWIZZLE_32_4_4, NO_SWIZZLE
        assert left.dtype == right.dtype == torch.float4_e2m1fn_x2
        assert right.stride(0) == 1
        calls.append((tuple(left.shape), bias, dtype))
        left, right = left.view(torch.uint8), right.t().view(torch.uint8)
        operands = (left, *left_scales, right, *right_scales)
        return reference.linear_prepared(*operands, bias, dtype)

    monkeypatch.setattr(torch.ops.aten._scaled_mm_v2, "default", product)
    for name in ("prepare_input", "linear_prepared"):
        portable = getattr(PortableBackend, name)
        monkeypatch.setattr(triton.TritonBackend, name, portable)
    return calls


def operands(rows, outputs=48, features=64, *, two_level=True):
    weight = PiperNVFP4Tensor.from_hp(
        randn(outputs, features, seed=2),
        compute_per_tensor_scale=two_level,
        is_swizzled_scales=True,
    )
    prepared = reference.prepare_input(randn(rows, features), None, True)
    return *prepared, weight.qdata, weight.scale, weight.per_tensor_scale


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias_dtype", [None, *FLOATS])
@pytest.mark.parametrize("two_level", [False, True])
def test_products_and_biases(calls, dtype, bias_dtype, two_level):
    arguments = operands(130, two_level=two_level)
    bias = None if bias_dtype is None else randn(48, 2, dtype=bias_dtype)[:, 1]
    expected = reference.linear_prepared(*arguments, bias, dtype)
    actual = _native.NativeBackend().linear_prepared(*arguments, bias, dtype)
    assert torch.equal(actual, expected)
    ((shape, fused_bias, product_dtype),) = calls
    assert shape == (130, 32)
    fused = bias is None or (bias_dtype == dtype and dtype != torch.float32)
    assert product_dtype == (dtype if fused else torch.float32)
    assert (fused_bias is not None) == (fused and bias is not None)
    assert fused_bias is None or fused_bias.is_contiguous()
    wide = torch.full((130, 50), 7.0, dtype=dtype)
    out = wide[:, 1:49]
    assert _native.NativeBackend().linear_prepared(*arguments, bias, dtype, out=out) is out
    assert torch.equal(out, expected)
    assert (wide[:, [0, 49]] == 7).all()


def test_mixed_biases_take_bounded_memory(calls, monkeypatch):
    monkeypatch.setattr(_native, "MAX_WORKSPACE", 2 * 128 * 48 * 4 + 5)
    arguments, bias = operands(700), randn(48)
    expected = reference.linear_prepared(*arguments, bias, torch.bfloat16)
    actual = _native.NativeBackend().linear_prepared(*arguments, bias, torch.bfloat16)
    assert torch.equal(actual, expected)
    assert [shape[0] for shape, _, _ in calls] == [256, 256, 188]
    calls.clear()
    monkeypatch.setattr(_native, "MAX_WORKSPACE", 1)
    assert torch.equal(
        _native.NativeBackend().linear_prepared(*arguments, bias, torch.bfloat16), expected
    )
    assert [shape[0] for shape, _, _ in calls] == [128] * 5 + [60]


@pytest.mark.parametrize(("rows", "outputs", "features"), [(0, 48, 64), (3, 7, 64), (3, 48, 48)])
def test_sizes_that_the_library_refuses_go_to_the_kernels(calls, rows, outputs, features):
    arguments = operands(rows, outputs, features)
    actual = _native.NativeBackend().linear_prepared(*arguments, None, torch.bfloat16)
    assert torch.equal(actual, reference.linear_prepared(*arguments, None, torch.bfloat16))
    assert not calls


@pytest.mark.parametrize("group_size", [0, 16])
@pytest.mark.parametrize("high_first", [False, True])
def test_linear_prepares_and_multiplies(calls, group_size, high_first):
    x, bias = randn(2, 3, 64, dtype=torch.bfloat16), randn(48, dtype=torch.bfloat16)
    weight = operands(1)[3:]
    arguments = (x, *weight, None, bias, True, high_first)
    expected = reference.linear(*arguments, group_size=group_size)
    actual = _native.NativeBackend().linear(*arguments, group_size=group_size)
    assert torch.equal(actual, expected)
    assert len(calls) == 1


def test_support_names_its_reason(monkeypatch):
    for architecture in ("sm_90", "sm_89", "sm_121", "gfx1201"):
        backend = "hip" if architecture.startswith("gfx") else "cuda"
        usable, reason = _native.support(AcceleratorTarget(backend, architecture))
        assert not usable
        assert architecture in reason
    assert not _native.support(None)[0]
    for architecture in ("sm_100", "sm_120"):
        target = AcceleratorTarget("cuda", architecture)
        monkeypatch.setattr(torch, "__version__", "2.14.1+cu130")
        assert _native.support(target)[0] == hasattr(torch.ops.aten, "_scaled_mm_v2")
        monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
        usable, reason = _native.support(target)
        assert not usable
        assert "torch 2.14" in reason
