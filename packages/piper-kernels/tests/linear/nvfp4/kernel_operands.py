"""Operands and comparisons of the NVFP4 kernel checks."""

import sys
from contextlib import contextmanager

import torch

from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor
from piper_kernels.weights.nvfp4._layout import swap_packed_pairs, unswizzle_scale

DEVICE = "cuda" if sys.argv[1:2] == ["cuda"] else "cpu"
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@contextmanager
def poisoned_allocations():
    """Fill new memory, so that an element that is not written is seen."""
    originals = torch.empty, torch.Tensor.new_empty

    def poison(allocate):
        def poisoned(*arguments, **options):
            tensor = allocate(*arguments, **options)
            raw = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
            raw.fill_(torch.nan if raw.is_floating_point() else 0x6E)
            return tensor

        return poisoned

    torch.empty, torch.Tensor.new_empty = map(poison, originals)
    try:
        yield
    finally:
        torch.empty, torch.Tensor.new_empty = originals


def make_weight(outputs, features, *, swizzled=True, two_level=True, high_first=False):
    weight = PiperNVFP4Tensor.from_hp(
        normal(outputs, features, seed=2),
        compute_per_tensor_scale=two_level,
        is_swizzled_scales=swizzled,
    )
    scale = weight.scale.view(torch.uint8)
    if swizzled:
        # Block scales below the normal numbers of E4M3, which other writers store.
        scale.view(-1)[0] = 3
    else:
        scale[0, 0] = 3
    exact = weight.dequantize(torch.float32).double()
    if high_first:
        weight.qdata = swap_packed_pairs(weight.qdata)
    return weight, exact


def move(*tensors):
    return tuple(None if tensor is None else tensor.to(DEVICE) for tensor in tensors)


def assert_close(actual, exact, reduced=torch.float32):
    """Compare with FP64: half a unit of the dtype, plus FP32 sums and rounded operands."""
    actual = actual.cpu().double()
    error = (actual - exact).norm() / exact.norm()
    unit = max(torch.finfo(dtype).eps for dtype in (reduced, torch.float32))
    assert error < unit + 4e-6, error


def bias_of(outputs, dtype):
    """Return a bias that is neither contiguous nor of the dtype of the input."""
    return None if dtype is None else normal(outputs, 3, seed=4, dtype=dtype).to(DEVICE)[:, 1]


def as_bytes(tensor):
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def compare_codes(actual, expected, rows, features, *, exact):
    qdata, scale, level = (part.cpu() for part in actual)
    torch.testing.assert_close(level, expected[2], rtol=0 if exact else 3e-6, atol=0)
    different = (qdata != expected[0]).double().mean()
    scales = as_bytes(scale) != as_bytes(expected[1])
    assert different <= (0 if exact else 0.01), different
    assert scales.double().mean() <= (0 if exact else 0.01)
    padding = torch.ones_like(unswizzle_scale(scale.view(torch.uint8), rows, features // 16))
    assert scale.view(torch.uint8).bool().sum() == padding.sum()
