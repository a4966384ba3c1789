"""Operands and comparisons of the preparation checks; ``cuda`` as argument of a check is a GPU."""

import sys

import torch
from torch.nn import functional

from piper_kernels.attention._quantization import Granularity
from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode

DEVICE = sys.argv[1] if sys.argv[1:] == ["cuda"] else "cpu"
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
WARP, THREAD = Granularity.PER_WARP, Granularity.PER_THREAD
MINMAX, MEAN = RoutingMode.MINMAX, RoutingMode.MEAN
# Key that every slot of 32 holds.
ORDER = [
    16 * h + 8 * a + 2 * t + b for h in (0, 1) for t in range(4) for a in (0, 1) for b in (0, 1)
]


def normal(*shape, seed=0, dtype=FULL):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(rows, key_rows, head_dim, dtype, heads=2, kv_heads=1, batch=1):
    """Return queries, keys with a bias and values with another."""
    query = normal(batch, heads, rows, head_dim, seed=1, dtype=dtype)
    bias = 3 * normal(1, kv_heads, 1, head_dim, seed=2)
    key = (normal(batch, kv_heads, key_rows, head_dim, seed=3) + bias).to(dtype)
    value = (normal(batch, kv_heads, key_rows, head_dim, seed=4) + bias).to(dtype)
    return query, key, value


def on_device(*tensors):
    """Copy to the device, keeping strides."""
    return [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE).copy_(x)
        for x in tensors
    ]


def assert_codes(actual, expected, what, fraction=1e-3):
    actual, expected = actual.cpu(), expected.cpu()
    assert actual.dtype == expected.dtype == torch.int8, (what, actual.dtype)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    difference = (actual.int() - expected.int()).abs()
    assert difference.max() <= 1, (what, difference.max())
    assert (difference > 0).double().mean() <= fraction, (what, (difference > 0).double().mean())


def assert_floats(actual, expected, what, rtol=2e-6, atol=1e-12):
    def text(message):
        return f"{what}: {message}"

    expected = expected.cpu().to(FULL)
    torch.testing.assert_close(actual.cpu(), expected, rtol=rtol, atol=atol, msg=text)


def permuted(codes):
    return codes.unflatten(-1, (-1, 32))[..., ORDER].flatten(-2)


def code_sums(codes):
    """Return 127 times the sums of 128 codes as bits of numbers near plus or minus 1.5 * 2**23."""
    padded = functional.pad(codes.cpu().int(), (0, -codes.shape[-1] % 128))
    sums = 127.0 * padded.unflatten(-1, (-1, 128)).sum(-1).mT
    odd = torch.arange(sums.shape[-2])[:, None] % 2 == 1
    return (torch.where(odd, -1.5, 1.5) * 2**23 + sums).view(torch.int32)


def log_maxima(multiplier):
    return (multiplier.cpu().unflatten(-1, (-1, 64)).amax(-1) / 255).log2()
