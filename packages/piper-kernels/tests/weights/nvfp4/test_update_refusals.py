"""What in-place updates of NVFP4 weights refuse, before anything is written."""

import pytest
import torch

from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor


def make(group_size=0):
    dense = torch.randn(7, 256, generator=torch.Generator().manual_seed(1))
    options = {"compute_per_tensor_scale": True, "is_swizzled_scales": True}
    if group_size:
        return ConvRotNVFP4Tensor.from_hp(dense, group_size=group_size, **options)
    return PiperNVFP4Tensor.from_hp(dense, **options)


def updates(weight):
    return (
        lambda **options: weight.add_(torch.ones(7, 256), **options),
        lambda **options: weight.addmm_(torch.ones(7, 2), torch.ones(2, 256), **options),
    )


@pytest.mark.parametrize(
    ("option", "value", "error", "match"),
    [
        ("rounding_seed", True, TypeError, "unsigned 64-bit integer"),
        ("rounding_seed", 1.5, TypeError, "unsigned 64-bit integer"),
        ("rounding_seed", -1, ValueError, "unsigned 64-bit integer"),
        ("rounding_seed", 2**64, ValueError, "unsigned 64-bit integer"),
        ("alpha", 1j, TypeError, "alpha must be a real number"),
        ("alpha", None, TypeError, "alpha must be a real number"),
        ("alpha", float("nan"), ValueError, "alpha must be finite"),
    ],
)
def test_scalar_refusals_write_nothing(option, value, error, match):
    weight = make()
    version = weight.qdata._version
    for update in updates(weight):
        with pytest.raises(error, match=match):
            update(**{option: value})
    with pytest.raises(ValueError, match="beta must be finite"):
        weight.addmm_(torch.ones(7, 2), torch.ones(2, 256), beta=float("inf"))
    assert weight.qdata._version == version


@pytest.mark.parametrize(
    ("operand", "error", "match"),
    [
        (torch.ones(7, 128), ValueError, "NVFP4 add_: other shape mismatch"),
        (torch.ones(256), ValueError, "matrices must be 2-D"),
        (torch.ones(7, 256, dtype=torch.float16), ValueError, "logical dtype"),
        (torch.ones(7, 256, device="meta"), ValueError, "share a device"),
        (torch.ones(7, 256).to_sparse(), ValueError, "strided layout"),
        (torch.ones(7, 256, requires_grad=True), RuntimeError, "does not support autograd"),
        (1.0, TypeError, "must be a tensor"),
    ],
)
def test_operand_refusals(operand, error, match):
    with pytest.raises(error, match=match):
        make().add_(operand)
    with pytest.raises(error, match="ConvRot NVFP4"):
        make(group_size=64).add_(operand)


@pytest.mark.parametrize(
    ("mat1", "mat2", "match"),
    [
        (torch.ones(8, 2), torch.ones(2, 256), "mat1 shape mismatch"),
        (torch.ones(7, 2), torch.ones(3, 256), "mat2 shape mismatch"),
        (torch.ones(7, 2), torch.ones(2, 128), "mat2 shape mismatch"),
        (torch.ones(7, 2).half(), torch.ones(2, 256), "mat1 must have the weight's logical dtype"),
    ],
)
def test_addmm_operand_refusals(mat1, mat2, match):
    with pytest.raises(ValueError, match=match):
        make().addmm_(mat1, mat2)


def strided_qdata(weight):
    weight.qdata = torch.zeros(7, 256, dtype=torch.uint8)[:, ::2]


def set_field(name, function):
    return lambda weight: setattr(weight, name, function(getattr(weight, name)))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (strided_qdata, "qdata and scale must be contiguous"),
        (set_field("scale", torch.flatten), r"requires scale of shape \(32, 64\)"),
        (set_field("scale", lambda scale: scale.float()), "requires uint8 qdata and float8_e4m3fn"),
        (set_field("qdata", lambda qdata: qdata.to(torch.int8)), "requires uint8 qdata"),
        (set_field("block_size", lambda _: 32), "blocks of 16"),
        (set_field("per_tensor_scale", lambda _: torch.ones(2)), "one element"),
        (set_field("per_tensor_scale", lambda scale: scale.double()), "FP32 per_tensor_scale"),
    ],
)
def test_storage_refusals(change, match):
    weight = make()
    change(weight)
    with pytest.raises(ValueError, match=match):
        weight.add_(torch.ones(7, 256))


def test_unsupported_weights():
    with pytest.raises(NotImplementedError, match="transposed=True"):
        make().t().add_(torch.ones(256, 7))
    with pytest.raises(ValueError, match="meta device"):
        make().to("meta").add_(torch.ones(7, 256, device="meta"))
    empty = PiperNVFP4Tensor.from_hp(torch.zeros(0, 32))
    with pytest.raises(ValueError, match="non-empty"):
        empty.add_(torch.ones(0, 32))
