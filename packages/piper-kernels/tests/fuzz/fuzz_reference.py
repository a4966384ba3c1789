"""Float64 references of the formats, from their definitions and not from the package."""

import torch

H4 = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64)
EPS = 2.0**-23


def rotate(values, group):
    """Rotate float64 groups of the last axis by butterflies of H4; ``group`` 0 does not."""
    if group == 0:
        return values.double()
    shape = values.shape
    blocks = values.double().reshape(-1, group)
    stride = 1
    while stride < group:
        quartets = blocks.reshape(-1, group // (4 * stride), 4, stride)
        blocks = torch.einsum("ij,bqjs->bqis", H4, quartets).reshape(-1, group)
        stride *= 4
    return (blocks / group**0.5).reshape(shape)


def int8_scale(rotated):
    """Return ``max(amax / 127, 1e-30)`` by rows ``[R, 1]``."""
    return (rotated.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)


def assert_int8_codes(codes, scale, rotated, magnitude, group, *, stochastic=False):
    """Check codes and scales of rows whose exact rotated values are known.

    FP32 arithmetic errs by a small multiple of eps times the size of what was summed, so a
    code may differ from the exact ratio by half a step and that error.

    Args:
        codes: int8 ``[R, K]``.
        scale: FP32 ``[R, 1]``.
        rotated: float64 ``[R, K]``.
        magnitude: float64 ``[R, 1]``, a bound of the summands of ``rotated``.
        group: Rotation group.
        stochastic: Whether either neighbour of the exact ratio is right.
    """
    exact = int8_scale(rotated)
    slack = 8 * EPS * group**0.5 * magnitude
    difference = (scale.double() - exact).abs()
    assert (difference <= slack / 127 + 4 * EPS * exact).all(), (scale, exact)
    ratio = rotated / scale.double()
    allowed = (1 if stochastic else 0.5) + 127 * 4 * EPS + slack / scale.double()
    worst = (codes.double() - ratio).abs() - allowed
    assert (worst <= 0).all(), (codes[worst > 0], ratio[worst > 0])


def int8_dense(codes, scale, group):
    return rotate(codes.double() * scale.double(), group)


def assert_rounded(actual, exact, magnitude, dtype, group=256):
    """Check values that were computed in FP32 from ``exact`` and rounded to ``dtype`` once."""
    info = torch.finfo(dtype)
    slack = 8 * EPS * group**0.5 * magnitude
    allowed = exact.abs() * info.eps + slack + info.smallest_normal * info.eps
    found = actual.double()
    overflow = exact.abs() + slack >= info.max * (1 - info.eps)
    close = (found - exact).abs() <= allowed
    assert (close | (overflow & (found.isinf() | close))).all(), (
        actual[~close & ~overflow],
        exact[~close & ~overflow],
    )
