"""Numeric checks of the kernels that prepare rows, against separate operations.

Run as a script with ``TRITON_INTERPRET=1``, or with ``cuda`` as its argument on a GPU.
"""

import sys

import torch
from torch.nn import functional

from piper_kernels.linear.convrot.int8 import _launch, _launch_rows, reference
from piper_kernels.linear.convrot.int8._plan import plan_input_rows

DEVICE = sys.argv[1] if sys.argv[1:] == ["cuda"] else "cpu"
# The interpreter truncates to bfloat16.
FLOATS = (torch.bfloat16, torch.float16, torch.float32)[0 if DEVICE == "cuda" else 1 :]

generator = torch.Generator().manual_seed(5)


def rows(count, width, dtype):
    """Rows of very different sizes, a view of a NaN-filled buffer; the second one is zero."""
    values = torch.randn(count, width, generator=generator)
    values *= torch.logspace(-3, 3, count)[:, None]
    values[1:2] = 0
    buffer = torch.full((count, width + 8), torch.nan, dtype=dtype, device=DEVICE)
    buffer[:, 8:] = values.to(dtype).to(DEVICE)
    return buffer[:, 8:]


def room(count, width):
    codes = torch.full((count + 1, width), 99, dtype=torch.int8, device=DEVICE)
    return codes, torch.full((count + 1,), torch.nan, device=DEVICE)


def assert_rows(found, expected, most=0.01):
    (codes, scale), (expected_codes, expected_scale) = found, expected
    assert (codes[-1] == 99).all()
    assert scale[-1].isnan()
    torch.testing.assert_close(scale[:-1].cpu(), expected_scale.cpu(), rtol=2e-5, atol=0)
    difference = (codes[:-1].cpu().int() - expected_codes.cpu().int()).abs()
    assert difference.max() <= 1, difference.max()
    assert difference.double().mean() < most


def check_norms() -> None:
    cases = [(1, 64, 16), (5, 192, 64), (7, 1280, 256), (3, 4096, 64)]
    for index, (count, width, group) in enumerate(cases):
        for added in (None, torch.float32, FLOATS[0]):
            dtype = FLOATS[index % len(FLOATS)]
            x = rows(count, width, dtype)
            residual = None if added is None else rows(count, width, added)
            weight = (torch.rand(2 * width, generator=generator).to(DEVICE) + 0.5)[::2]
            total, gemma = x, index % 2 == 1
            if residual is not None:
                total = (x.float() + residual.float()).to(residual.dtype)
            factor = weight + gemma
            normed = functional.rms_norm(total.to(dtype).float(), (width,), factor, 1e-6)
            expected = reference.prepare_input(normed.to(dtype).cpu(), group)
            codes, scale = room(count, width)
            stored = torch.full((count + 1, width), torch.nan, device=DEVICE).to(total.dtype)
            _launch_rows.norm_rows(
                x, residual, weight, 1e-6, stored[:-1], codes[:-1], scale[:-1], group,
                plan_input_rows(width), gemma=gemma,
            )  # fmt: skip
            # A last bit of the normalized values moves codes where values are few.
            assert_rows((codes, scale), expected, 0.02)
            assert stored[-1].isnan().all()
            if residual is not None:
                assert torch.equal(stored[:-1], total)


def check_heads() -> None:
    for index, (heads, width, group) in enumerate([(3, 64, 64), (32, 128, 64), (4, 16, 16)]):
        for tokens in (1, 6):
            dtype = FLOATS[index % len(FLOATS)]
            values = rows(tokens, heads * width, dtype).unflatten(1, (heads, width))
            apart = torch.full((heads, tokens + 2, width), torch.nan, dtype=dtype, device=DEVICE)
            apart[:, 1:-1] = values.transpose(0, 1)
            expected = reference.prepare_input(values.flatten(1).cpu(), group)
            for source in (values, apart[:, 1:-1].transpose(0, 1)):
                codes, scale = room(tokens, heads * width)
                plan = plan_input_rows(heads * width)
                _launch_rows.head_rows(source, codes[:-1], scale[:-1], group, plan)
                assert_rows((codes, scale), expected)


def check_gates() -> None:
    for index, (count, width, group) in enumerate([(1, 64, 16), (5, 320, 64), (2, 12_288, 64)]):
        x = rows(count, 2 * width, FLOATS[index % len(FLOATS)])
        gate, up = x.cpu().chunk(2, 1)
        expected = reference.prepare_input(torch.cat((up, gate), 1), group, "swiglu")
        codes, scale = room(count, width)
        _launch.prepare_rows(x, codes[:-1], scale[:-1], group, "silu_and_mul", None)
        assert_rows((codes, scale), expected)


check_norms()
check_heads()
check_gates()
print("row checks passed")
