"""Numeric checks of the NVFP4 quantization kernels against the portable reference on the CPU.

Run as a script with ``TRITON_INTERPRET=1``, or with ``cuda`` as its argument on a GPU.
"""

import sys
from contextlib import contextmanager
from itertools import product

import pytest
import torch
import triton
import triton.language as tl

from piper_kernels._triton.convrot import rotate
from piper_kernels.weights.nvfp4 import _quantize_reference, quantize_triton
from piper_kernels.weights.nvfp4._layout import swizzle_scale, unswizzle_scale
from piper_kernels.weights.nvfp4._quantize_kernels import rotate_mirrored

DEVICE = sys.argv[1] if sys.argv[1:] == ["cuda"] else "cpu"
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
MODES = ("none", "given", "computed")
SHAPES = [
    (1, 16, 0), (3, 48, 16), (17, 272, 0), (9, 320, 64), (129, 256, 0), (2, 768, 256),
    (33, 80, 16), (130, 64, 64), (1, 256, 256), (5, 1040, 0),
]  # fmt: skip


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(*shape, seed=0):
    # Their rotations and sums are exact, so the order of additions does not matter.
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-40, 41, shape, generator=generator).float()


@contextmanager
def poisoned_allocations():
    """Fill what ``torch.empty`` returns, so that an unwritten byte is seen."""
    empty = torch.empty

    def poisoned(*arguments, **options):
        tensor = empty(*arguments, **options)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 0xEE)

    torch.empty = poisoned
    try:
        yield
    finally:
        torch.empty = empty


def run(backend, source, mode, group, swizzled, level=0.003):
    """Return ``(qdata, scale, level or None)`` of one implementation, on the CPU."""
    if mode == "computed":
        result = backend.quantize_two_level(source, group, swizzled)
    else:
        given = None
        if mode == "given":
            given = torch.as_tensor(level, dtype=torch.float32, device=source.device)
        result = *backend.quantize(source, given, group, swizzled), None
    assert all(part is None or part.is_contiguous() for part in result)
    return tuple(None if part is None else part.cpu() for part in result)


def both(source, mode, group, swizzled, level=0.003):
    with poisoned_allocations():
        actual = run(quantize_triton, source.to(DEVICE), mode, group, swizzled, level)
    expected = run(_quantize_reference, source, mode, group, swizzled, level)
    for got, wanted in zip(actual, expected, strict=True):
        assert (got is None) == (wanted is None)
        assert got is None or (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    return actual, expected


def as_bytes(tensor):
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def assert_equal(actual, expected, label=""):
    for index, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        assert wanted is None or torch.equal(as_bytes(got), as_bytes(wanted)), (label, index)


def assert_close(actual, expected, label):
    """Compare rotated values: neighbouring scales and codes may differ where FP32 sums do."""
    (qdata, scale, level), (wanted, wanted_scale, wanted_level) = actual, expected
    if level is not None:
        torch.testing.assert_close(level, wanted_level, rtol=2e-6, atol=0)
    steps = (as_bytes(scale).int() - as_bytes(wanted_scale).int()).abs()
    assert steps.max() <= 1, label
    assert (steps != 0).float().mean() < 0.02, label
    codes, wanted_codes = (
        torch.stack((part & 15, part >> 4), dim=-1).int() for part in (qdata, wanted)
    )
    assert ((codes & 7) - (wanted_codes & 7)).abs().max() <= 1, label
    assert (codes != wanted_codes).float().mean() < 0.005, label


def check_shapes() -> None:
    for index, (rows, features, group) in enumerate(SHAPES):
        dtype = FLOATS[index % 3]
        for offset, mode in enumerate(MODES):
            swizzled = (index + offset) % 2 == 0
            label = rows, features, group, mode, swizzled, dtype
            exact = normal if group == 0 else integers
            assert_equal(*both(exact(rows, features).to(dtype), mode, group, swizzled), label)
            if group:
                assert_close(*both(normal(rows, features).to(dtype), mode, group, swizzled), label)


def check_magnitudes() -> None:
    for magnitude, mode in product((1e-38, 1e-20, 1e4, 1e30), MODES):
        source = normal(4, 96) * magnitude
        source[1] = 0
        source[2, :32] = 0
        source[3, ::2] *= -1e-3
        for level in (0.003, 1e-40, -1.0, 1e20) if mode == "given" else (None,):
            assert_equal(*both(source, mode, 0, False, level), (magnitude, mode, level))


def check_strides() -> None:
    wide = integers(40, 600, seed=2).bfloat16().to(DEVICE)
    views = {
        "rows apart": wide[::3, :320],
        "transposed": wide[:, :37].t()[:, :32],
        "columns apart": wide[:, ::2][:, :256],
        "unaligned": wide[:7, 1:257],
        "unaligned by rows": wide.flatten()[: 39 * 599].view(39, 599)[:, :64],
        "repeated": wide[:1, :64].expand(9, 64),
        "overlapping": wide.flatten().as_strided((33, 64), (1, 1)),
        "one column block of one row": wide[5:6, 16:32],
    }
    for name, view in views.items():
        group = 0 if view.shape[1] % 64 else 64
        for mode in MODES:
            actual = run(quantize_triton, view, mode, group, True)
            expected = run(_quantize_reference, view.cpu().contiguous(), mode, group, True)
            assert_equal(actual, expected, (name, mode))


def check_stacks() -> None:
    stack = normal(3, 128, 48)
    levels = torch.tensor([0.001, 0.1, 2e-45]).view(3, 1, 1)
    sources = (stack, stack.transpose(0, 1)[:3].half(), stack.mT.contiguous().mT, stack[::2])
    for source in sources:
        swizzles = (False, True) if source.shape[1] % 128 == 0 else (False,)
        for swizzled in swizzles:
            for mode in MODES:
                assert_equal(*both(source, mode, 0, swizzled), (source.shape, mode))
            experts = source.shape[0]
            one_each = levels.repeat(experts, 1, 1)[:experts]
            for level in (one_each, levels[:1], levels[:1].expand(experts, 1, 1)):
                assert_equal(*both(source, "given", 0, swizzled, level), source.shape)


def check_padding_is_zero() -> None:
    for rows, features in ((1, 16), (130, 80), (128, 48), (100, 64)):
        with poisoned_allocations():
            source = normal(rows, features).to(DEVICE)
            _, scale, _ = run(quantize_triton, source, "computed", 0, True)
        plain = unswizzle_scale(scale.view(torch.uint8), rows, features // 16)
        assert (plain != 0).all()
        assert torch.equal(swizzle_scale(plain), scale.view(torch.uint8))


def check_special_values() -> None:
    zero = torch.zeros(3, 64)
    for group in (0, 64):
        actual, expected = both(zero, "computed", group, False)
        assert_equal(actual, expected)
        assert actual[2].item() == 2.0**-120
        assert as_bytes(actual[1]).unique().tolist() == [8]
    # A NaN marks its block or group; an infinity saturates it; the rest is unharmed.
    source = integers(6, 128, seed=3)
    source[1, 20], source[2, 40], source[3, 5], source[4, 70] = (
        torch.nan,
        torch.inf,
        1e30,
        -torch.inf,
    )
    for group, mode in product((0, 16, 64), ("none", "given")):
        (qdata, scale, _), (wanted, wanted_scale, _) = both(source, mode, group, False, level=1.0)
        bytes_of_scale, wanted_bytes = scale.view(torch.uint8), wanted_scale.view(torch.uint8)
        assert torch.equal(bytes_of_scale & 0x7F, wanted_bytes & 0x7F)
        marked = (bytes_of_scale & 0x7F) == 0x7F
        assert marked[1].sum() == max(1, group // 16)
        assert marked.sum() == marked[1].sum()
        assert (bytes_of_scale == 0x7E).any(1).tolist() == [False, False, True, True, True, False]
        kept = ~marked.repeat_interleave(8, 1)
        kept[3] = group == 0  # the sums of 1e30 and small integers are rounded
        assert torch.equal(qdata[kept], wanted[kept])
    # A given level that is not a number reaches every block.
    _, scale, _ = run(quantize_triton, zero.to(DEVICE), "given", 0, False, torch.nan)
    assert ((scale.view(torch.uint8) & 0x7F) == 0x7F).all()


def check_non_finite_maxima() -> None:
    for group, value in product((0, 64), (torch.inf, -torch.inf, torch.nan)):
        source = integers(20, 320)
        source[19, 300] = value
        for backend, device in ((quantize_triton, DEVICE), (_quantize_reference, "cpu")):
            with pytest.raises(ValueError, match=rf"non-finite amax \({abs(value)}\)"):
                backend.quantize_two_level(source.to(device), group, True)
    # A rotation may overflow though its input does not.
    huge = torch.full((1, 64), 3e38, device=DEVICE)
    huge[0, 3] = -3e38
    with pytest.raises(ValueError, match=r"non-finite amax \(inf\)"):
        quantize_triton.quantize_two_level(huge, 64, False)


@triton.jit
def rotations_kernel(source, forward, mirrored, COLS: tl.constexpr, GROUP: tl.constexpr):
    columns = tl.arange(0, COLS)[None, :]
    values = tl.load(source + columns)
    tl.store(forward + columns, rotate(values, GROUP))
    tl.store(mirrored + (columns ^ (GROUP - 1)), rotate_mirrored(values, GROUP))


def check_rotations_are_the_same() -> None:
    source = normal(512, seed=4).to(DEVICE)
    for group in (16, 64, 256):
        forward, mirrored = torch.zeros_like(source), torch.zeros_like(source)
        rotations_kernel[(1,)](source, forward, mirrored, COLS=512, GROUP=group)
        assert torch.equal(forward, mirrored)


def main() -> None:
    check_rotations_are_the_same()
    check_shapes()
    check_magnitudes()
    check_strides()
    check_stacks()
    check_padding_is_zero()
    check_special_values()
    check_non_finite_maxima()


if __name__ == "__main__":
    main()
    print("kernel checks passed")
