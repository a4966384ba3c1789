"""Checks of kernels whose element offsets pass 32 bits; run as a script with TRITON_INTERPRET=1.

Rows lie 2**30 elements apart in a file without contents, of which only the pages of three rows are
ever touched. An offset that wraps reads or writes outside of it.
"""

import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl

from piper_kernels.attention._preparation import dense
from piper_kernels.linear.convrot.int8._triton_backend import TritonBackend
from piper_kernels.stochastic_quantization.triton import random_uniform, seed_argument

ROWS, STRIDE = 3, 2**30


def far_apart(folder, columns, dtype):
    """Return a tensor [3, columns] whose rows lie 2**30 elements apart."""
    size = (ROWS - 1) * STRIDE + columns
    name = str(Path(folder) / f"{len(list(Path(folder).iterdir()))}.bin")
    flat = torch.from_file(name, shared=True, size=size, dtype=dtype)
    return flat.as_strided((ROWS, columns), (STRIDE, 1))


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def check_linear(folder):
    """Case 46: sources and results of an INT8 product."""
    backend = TritonBackend()
    x = far_apart(folder, 256, torch.float16)
    x.copy_(normal(ROWS, 256))
    codes, scale = backend.prepare_input(x, 64)
    expected_codes, expected_scale = backend.prepare_input(x.contiguous(), 64)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scale, expected_scale)
    assert codes[-1].any()
    weight = torch.randint(-128, 128, (40, 256), dtype=torch.int8)
    scales = torch.rand(40, 1) + 0.5
    out = far_apart(folder, 40, torch.float16)
    backend.linear_prepared(codes, scale, weight, scales, None, torch.float16, out=out)
    products = codes.float() @ weight.float().t()  # exact: below 2**24
    expected = (products * scale[:, None]) * scales.t()
    torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=1e-3)


def check_attention(folder):
    """Case 47: queries and keys that are views of a fused projection."""
    packed = far_apart(folder, 3 * 64, torch.float16)
    packed.copy_(normal(ROWS, 3 * 64))
    views = [packed[None, None, :, first : first + 64] for first in (0, 64, 128)]
    options = {"scale": 0.125, "is_causal": False}
    found = dense.prepare_piper(*views, **options)
    expected = dense.prepare_piper(*(view.contiguous() for view in views), **options)
    assert found.query_codes[0, 0, ROWS - 1].any()
    assert torch.equal(found.query_codes, expected.query_codes)
    for name in ("key_codes", "key_scale", "value_codes", "value_multiplier", "value_mean"):
        ours, theirs = (getattr(item.key_value, name) for item in (found, expected))
        assert torch.equal(ours, theirs), name


@triton.jit
def draw_kernel(out, seed, first, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    offsets = tl.full((BLOCK,), first, tl.int64) + index
    tl.store(out + index, random_uniform(seed, offsets))


def check_draws(folder):
    """Case 49: numbers of stochastic rounding beyond 2**31 and 2**32 elements."""

    def draw(first):
        out = torch.full((64,), torch.nan)
        draw_kernel[(1,)](out, seed_argument(3), first, BLOCK=64)
        return out

    for first in (2**31 - 32, 2**32 - 32):
        whole = draw(first)
        assert torch.equal(whole[32:], draw(first + 32)[:32])
        assert whole.unique().numel() == 64
    starts = torch.stack([draw(first) for first in (0, 2**31, 2**31 + 1024, 2**32, 2**40)])
    assert starts.unique().numel() == starts.numel()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for name, check in (
            ("linear", check_linear),
            ("attention", check_attention),
            ("draws", check_draws),
        ):
            check(scratch)
            print(f"{name} passed", flush=True)
