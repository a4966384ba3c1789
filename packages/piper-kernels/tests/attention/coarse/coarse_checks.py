"""Numeric checks of the coarse kernels against the reference.

Run as a script with ``TRITON_INTERPRET=1``, or with ``cuda`` as its argument on a GPU.
"""

import sys

import torch

from piper_kernels.attention.coarse import _triton_backend, reference
from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode, RoutingSummaries

DEVICE = sys.argv[1] if sys.argv[1:] == ["cuda"] else "cpu"
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


def operands(rows, head_dim, dtype=torch.float32):
    """Return query, key, value and gate, views of one projection."""
    generator = torch.Generator().manual_seed(rows)
    packed = torch.randn(1, rows, 4, 2, head_dim, generator=generator)
    return packed.to(dtype).to(DEVICE).unbind(2)


def check(rows, head_dim, mode, lengths=None, dtype=torch.float32):
    """Compare summaries, means and the residual."""
    query, key, value, gate = operands(rows, head_dim, dtype)
    if lengths is not None:
        lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        padded = (torch.arange(64, device=DEVICE) >= lengths[:, None]).flatten()
        query, key, value = (
            torch.where(padded[:, None, None], torch.nan, x) for x in (query, key, value)
        )
    blocks = max(-(-rows // 64) - 1, 1)
    arguments = (query, key, value, gate, blocks, 0.3, mode, lengths)
    wanted = reference.coarse_residual(*arguments)
    found = _triton_backend.coarse_residual(*arguments)
    assert found.dtype == dtype
    assert found.is_contiguous()
    if dtype is torch.float32:
        torch.testing.assert_close(found, wanted, **TOLERANCE)
    else:
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-3)
    value_mean = _triton_backend.summarize(query, key, value, mode, lengths)[1]
    torch.testing.assert_close(value_mean, reference.pool_values(value, lengths), **TOLERANCE)


def check_nan():
    """A NaN stays in its blocks' summaries, as in the reference."""
    query, key, value, gate = (x.clone() for x in operands(129, 64))
    query[0, 70, 1, 5] = torch.nan
    for mode in RoutingMode:
        arguments = (query, key, value, gate, 3, 0.3, mode, None)
        wanted = reference.coarse_residual(*arguments)
        found = _triton_backend.coarse_residual(*arguments)
        assert wanted.isnan().any()
        assert torch.equal(found.isnan(), wanted.isnan())


def check_ranges(head_dim, mode, scale):
    """Query blocks have one result, whichever others there are; no key block counts twice."""
    generator = torch.Generator().manual_seed(5)

    def random(blocks):
        return torch.randn(2, 3, blocks, head_dim, generator=generator).to(DEVICE)

    query, key, low, means = random(67), random(71), random(71), random(71)
    aux = low if mode is RoutingMode.MINMAX else low[:, :, :0]
    for blocks in (1, 32, 65, 71):
        given = (means, mode, blocks, scale)
        whole = _triton_backend.coarse_output(RoutingSummaries(query, key, aux), *given)
        wanted = reference.coarse_output(RoutingSummaries(query, key, aux), *given)
        torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=2e-5)
        for part in (slice(0, 1), slice(1, 34), slice(66, 67)):
            some = RoutingSummaries(query[:, :, part], key, aux)
            found = _triton_backend.coarse_output(some, *given)
            if DEVICE == "cuda":
                assert torch.equal(found, whole[:, :, part])
            else:  # products of NumPy depend on their shape
                torch.testing.assert_close(found, whole[:, :, part], rtol=1e-4, atol=2e-5)
    none = RoutingSummaries(query[:, :, :0], key, aux)
    assert _triton_backend.coarse_output(none, *given).shape == (2, 3, 0, head_dim)


for routing in RoutingMode:
    check_ranges(64, routing, 0.1)
    check_ranges(128, routing, 0.5)
    check(193, 64, routing)
    check(64, 128, routing)
    check(192, 64, routing, [64, 3, 50])
    check(65, 64, routing, dtype=torch.bfloat16)
    check(65, 64, routing, dtype=torch.float16)
check_nan()
print("coarse checks passed")
