"""Quantization, reconstruction and portable updates on a CUDA or ROCm device."""

import pytest
import torch

from piper_kernels.weights.nvfp4 import _update_reference
from piper_kernels.weights.nvfp4._encoding import decode_codes

pytestmark = pytest.mark.gpu


def test_dequantize_is_exact(make_weight):
    weight = make_weight(130, 80, torch.bfloat16)
    moved = weight.to("cuda")
    assert torch.equal(moved.get_hp_scales().cpu(), weight.get_hp_scales())
    if not hasattr(weight, "group_size"):
        assert torch.equal(moved.dequantize().cpu(), weight.dequantize())
    assert torch.equal(moved.t().dequantize(), moved.dequantize().t())


@pytest.mark.parametrize("two_level", [False, True])
@pytest.mark.parametrize("name", ["nvfp4", "convrot"])
def test_from_hp_agrees_with_the_cpu(plain, name, two_level):
    weight = plain(130, 256, torch.bfloat16, name=name, two_level=two_level)
    source = torch.randn(130, 256, generator=torch.Generator().manual_seed(130256))
    options = {"group_size": 16} if name == "convrot" else {}
    moved = type(weight).from_hp(
        source.bfloat16().cuda(), compute_per_tensor_scale=two_level, **options
    )
    codes, expected = decode_codes(moved.qdata.cpu()), decode_codes(weight.qdata)
    # Rotations add in another order there: neighbouring scales and codes.
    assert (codes != expected).double().mean() < 0.01
    error = (moved.dequantize().float().cpu() - weight.dequantize().float()).norm()
    assert error < 0.02 * weight.dequantize().float().norm()


@pytest.mark.parametrize("rounding_seed", [None, 5])
def test_portable_updates_agree_with_the_cpu(plain, rounding_seed):
    weight = plain(130, 256, swizzled=True)
    moved = weight.to("cuda")
    before = weight.dequantize()
    update = torch.randn(130, 256, generator=torch.Generator().manual_seed(2)) * 0.1
    for target, operand in ((weight, update), (moved, update.cuda())):
        _update_reference.add_(
            target.qdata,
            target.scale,
            target.per_tensor_scale,
            operand,
            0,
            1.0,
            True,
            False,
            rounding_seed,
        )
    exact = before + update
    ours, theirs = (
        (target.dequantize().cpu() - exact).norm() / exact.norm() for target in (moved, weight)
    )
    # Generators differ between devices, so stochastic codes are compared by their error.
    assert abs(ours / theirs - 1) < (0.01 if rounding_seed is None else 0.05)
    if rounding_seed is None:
        torch.testing.assert_close(moved.dequantize().cpu(), weight.dequantize(), rtol=0, atol=0.1)
