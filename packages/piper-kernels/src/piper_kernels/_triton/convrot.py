"""ConvRot rotation in registers, for Triton kernels."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportAssignmentType=false

import triton
import triton.language as tl


@triton.jit
def _butterfly(values, STRIDE: tl.constexpr):
    """Apply H4 (unnormalised) to quartets of a flat block that are ``STRIDE`` apart."""
    OUTER: tl.constexpr = values.numel // (4 * STRIDE)
    quartets = tl.reshape(values, (OUTER, 2, 2, STRIDE))
    even, odd = tl.split(tl.permute(quartets, (0, 3, 1, 2)))  # [OUTER, STRIDE, 2]: a, c and b, d
    total, difference = even + odd, even - odd  # a + b, c + d and a - b, c - d
    # Exchange the two differences: x ^ (x ^ y) == y.
    bits = difference.to(tl.int32, bitcast=True)
    bits ^= tl.xor_sum(bits, axis=2, keep_dims=True)
    difference = bits.to(tl.float32, bitcast=True)
    return tl.permute(tl.join(total + difference, total - difference), (0, 2, 3, 1))


@triton.jit
def rotate(values, GROUP: tl.constexpr):
    """Rotate consecutive groups of axis 1, as ``weights.convrot.rotate_groups`` does.

    Args:
        values: FP32 ``[ROWS, COLS]``; both sizes powers of two, ``GROUP`` divides ``COLS``.
        GROUP: 16, 64 or 256.

    Returns:
        FP32 ``[ROWS, COLS]``: every group ``g`` becomes ``g @ H``. Equal to the matrix
        product up to the order of FP32 additions; exact on small integers.
    """
    tl.static_assert(GROUP == 16 or GROUP == 64 or GROUP == 256)  # noqa: PLR1714  # no "in" here
    # Scaling first is exact and keeps the sums of values near the FP32 limit finite.
    SCALE: tl.constexpr = 0.25 if GROUP == 16 else (0.125 if GROUP == 64 else 0.0625)
    rotated = values * SCALE
    rotated = _butterfly(_butterfly(rotated, 1), 4)
    if GROUP >= 64:
        rotated = _butterfly(rotated, 16)
    if GROUP == 256:
        rotated = _butterfly(rotated, 64)
    return tl.reshape(rotated, values.shape)
