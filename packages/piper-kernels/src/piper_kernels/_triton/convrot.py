"""ConvRot rotation in registers, for Triton kernels."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportAssignmentType=false

import triton
import triton.language as tl


@triton.jit
def _exchange(values, AXIS: tl.constexpr):
    """Exchange the two halves of an axis of size 2; the layout of the block is kept."""
    bits = values.to(tl.int32, bitcast=True)
    partner = tl.sum(bits, axis=AXIS, keep_dims=True) - bits  # exact, as integers wrap
    return partner.to(tl.float32, bitcast=True)


@triton.jit
def _mirrored_butterfly(values, STRIDE: tl.constexpr):
    """Apply H4 (unnormalised) to quartets ``STRIDE`` apart, each result in reverse order."""
    OUTER: tl.constexpr = values.numel // (4 * STRIDE)
    quartets = tl.reshape(values, (OUTER, 2, 2, STRIDE))
    partner = _exchange(quartets, 2)
    # The result of x[3 - i] at i: the sum of the other pair, plus partner, minus itself.
    return _exchange(quartets + partner, 1) + (partner - quartets)


@triton.jit
def rotate_mirrored(values, GROUP: tl.constexpr):
    """Rotate consecutive groups of axis 1 and reverse each of them.

    Left in reverse order the values need no permutation, only exchanges between the threads of
    a warp, so a tile is never written to shared memory. Whoever stores them reverses addresses.

    Args:
        values: FP32 ``[ROWS, COLS]``; both sizes powers of two, ``GROUP`` divides ``COLS``.
        GROUP: 16, 64 or 256.

    Returns:
        FP32 ``[ROWS, COLS]``: column ``c`` holds what ``rotate`` has in ``c ^ (GROUP - 1)``.
    """
    tl.static_assert(GROUP == 16 or GROUP == 64 or GROUP == 256)  # noqa: PLR1714  # no "in" here
    # Scaling first is exact and keeps the sums of values near the FP32 limit finite.
    SCALE: tl.constexpr = 0.25 if GROUP == 16 else (0.125 if GROUP == 64 else 0.0625)
    rotated = values * SCALE
    rotated = _mirrored_butterfly(_mirrored_butterfly(rotated, 1), 4)
    if GROUP >= 64:
        rotated = _mirrored_butterfly(rotated, 16)
    if GROUP == 256:
        rotated = _mirrored_butterfly(rotated, 64)
    return tl.reshape(rotated, values.shape)


@triton.jit
def _reverse_quartets(values, STRIDE: tl.constexpr):
    """Reverse the order within quartets that are ``STRIDE`` apart."""
    OUTER: tl.constexpr = values.numel // (4 * STRIDE)
    quartets = tl.reshape(values, (OUTER, 2, 2, STRIDE))
    return _exchange(_exchange(quartets, 1), 2)


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
    rotated = rotate_mirrored(values, GROUP)
    rotated = _reverse_quartets(_reverse_quartets(rotated, 1), 4)
    if GROUP >= 64:
        rotated = _reverse_quartets(rotated, 16)
    if GROUP == 256:
        rotated = _reverse_quartets(rotated, 64)
    return tl.reshape(rotated, values.shape)
