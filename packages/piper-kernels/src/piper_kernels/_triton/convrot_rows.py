"""Rotation and INT8 encoding of rows with few instructions, for Triton kernels."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false

import triton
import triton.language as tl

# 1.5 * 2**23 leaves no fraction bits, so adding it rounds half to even; 128 makes codes unsigned.
_ROUND_TO_BYTE = tl.constexpr(12583040.0)
# What the exponent bits of four rounded values sum to in a word, negated.
_REMOVE_EXPONENTS = tl.constexpr(0x74C00000)
_SIGNED_BYTES = tl.constexpr(-0x7F7F7F80)  # 0x80808080


@triton.jit
def _mirrored_h4(values, STRIDE: tl.constexpr):
    """Apply H4 (unnormalised) to quartets ``STRIDE`` apart, each result in reverse order.

    The sum of a quartet minus twice one of its values is what H4 gives for the value opposite.
    """
    OUTER: tl.constexpr = values.numel // (4 * STRIDE)
    quartets = tl.reshape(values, (OUTER, 4, STRIDE))
    total = tl.broadcast_to(tl.sum(quartets, axis=1, keep_dims=True), quartets.shape)
    return tl.fma(quartets, tl.full(quartets.shape, -2.0, tl.float32), total)


@triton.jit
def rotate_rows_mirrored(values, GROUP: tl.constexpr):
    """Rotate consecutive groups of axis 1 and reverse each of them.

    Args:
        values: FP32 ``[ROWS, COLS]``; both sizes powers of two, ``GROUP`` divides ``COLS``.
        GROUP: 16, 64 or 256.

    Returns:
        FP32 ``[ROWS, COLS]``, as ``convrot.rotate_mirrored`` up to the order of additions.
    """
    tl.static_assert(GROUP == 16 or GROUP == 64 or GROUP == 256)  # noqa: PLR1714  # no "in" here
    # Scaling first is exact and keeps the sums of values near the FP32 limit finite.
    SCALE: tl.constexpr = 0.25 if GROUP == 16 else (0.125 if GROUP == 64 else 0.0625)
    rotated = _mirrored_h4(_mirrored_h4(values * SCALE, 1), 4)
    if GROUP >= 64:
        rotated = _mirrored_h4(rotated, 16)
    if GROUP == 256:
        rotated = _mirrored_h4(rotated, 64)
    return tl.reshape(rotated, values.shape)


@triton.jit
def corrected_quotient(values, divisor, reciprocal):
    """Return the FP32 quotient, rounded as a division is where all steps are normal numbers.

    The product with the rounded reciprocal is corrected once by its exact remainder (Markstein,
    IA-64 and Elementary Functions, 2000).
    """
    quotient = values * reciprocal
    return tl.fma(tl.fma(-quotient, divisor, values), reciprocal, quotient)


@triton.jit
def row_scales(amax):
    """Return ``max(amax / 127, 1e-30)`` of FP32 ``[ROWS]``; NaN where ``amax`` is not finite."""
    divisor = tl.full(amax.shape, 127.0, tl.float32)
    scale = corrected_quotient(amax, divisor, tl.full(amax.shape, 1.0 / 127.0, tl.float32))
    return tl.where(scale < 1e-30, 1e-30, scale)


@triton.jit
def encode_mirrored_words(values, scale, CLAMP: tl.constexpr):
    """Return the codes of mirrored rows, four to a word and in their order within it.

    Args:
        values: FP32 ``[ROWS, COLS]`` of ``rotate_rows_mirrored``.
        scale: FP32 ``[ROWS]``.
        CLAMP: Whether values may exceed 127 scales, as with a scale that is not their maximum.

    Returns:
        int32 ``[ROWS, COLS / 4]``, zero where a scale is not finite.
    """
    ROWS: tl.constexpr = values.shape[0]
    WORDS: tl.constexpr = values.shape[1] // 4
    # One Newton step rounds the approximate reciprocal of a row.
    approximate = 1.0 / scale
    exact = tl.fma(tl.fma(-scale, approximate, 1.0), approximate, approximate)
    divisor = tl.broadcast_to(scale[:, None], values.shape)
    scaled = corrected_quotient(values, divisor, tl.broadcast_to(exact[:, None], values.shape))
    if CLAMP:
        scaled = tl.minimum(tl.maximum(scaled, -128.0), 127.0)
    bits = (scaled + _ROUND_TO_BYTE).to(tl.int32, bitcast=True)
    shifted = tl.reshape(bits, (ROWS * WORDS, 4)) << (8 * (tl.arange(0, 4) ^ 3))[None, :]
    words = (tl.sum(shifted, axis=1) + _REMOVE_EXPONENTS) ^ _SIGNED_BYTES
    finite = tl.broadcast_to((scale - scale == 0.0)[:, None], (ROWS, WORDS))
    return tl.where(finite, tl.reshape(words, (ROWS, WORDS)), 0)


@triton.jit
def store_mirrored_words(words, target, rows, row_mask, first, features, GROUP: tl.constexpr):
    """Store ``encode_mirrored_words`` so that the groups come into their order.

    Args:
        words: int32 ``[ROWS, COLS / 4]``.
        target: int32 pointer to the codes ``[rows, features]``.
        rows: int64 ``[ROWS]`` row indices.
        row_mask: ``[ROWS]``, whether a row exists.
        first: First column, a multiple of ``GROUP``; columns past ``features`` are not stored.
        features: Columns of the matrix, a multiple of ``GROUP``.
        GROUP: Rotation group.
    """
    word = first // 4 + (tl.arange(0, words.shape[1]) ^ (GROUP // 4 - 1))[None, :]
    mask = row_mask[:, None] & (word < features // 4)
    tl.store(target + rows[:, None] * (features // 4) + word, words, mask=mask)
