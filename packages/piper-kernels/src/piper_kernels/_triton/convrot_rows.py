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
def rotate_quarters_mirrored(a, b, c, d, GROUP: tl.constexpr):
    """Rotate consecutive groups that are held in quarters, and reverse each of them.

    The quarters of a group are separate values of one thread, so the longest stage of the
    rotation exchanges nothing.

    Args:
        a: FP32 ``[ROWS, COLS / 4]``: the first quarter of every group. Sizes are powers of two.
        b: The second quarters.
        c: The third quarters.
        d: The last quarters.
        GROUP: 16, 64 or 256, dividing ``COLS``.

    Returns:
        FP32 quarters: column ``c`` of a row holds what ``convrot.rotate`` has in
        ``c ^ (GROUP - 1)``, up to the order of additions.
    """
    tl.static_assert(GROUP == 16 or GROUP == 64 or GROUP == 256)  # noqa: PLR1714  # no "in" here
    # Scaling first is exact and keeps the sums of values near the FP32 limit finite.
    SCALE: tl.constexpr = 0.25 if GROUP == 16 else (0.125 if GROUP == 64 else 0.0625)
    once = tl.full(a.shape, SCALE, tl.float32)
    twice = tl.full(a.shape, -2.0 * SCALE, tl.float32)
    total = tl.fma(d, once, tl.fma(c, once, tl.fma(b, once, a * once)))
    a = _rotate_rest(tl.fma(a, twice, total), GROUP)
    b = _rotate_rest(tl.fma(b, twice, total), GROUP)
    c = _rotate_rest(tl.fma(c, twice, total), GROUP)
    d = _rotate_rest(tl.fma(d, twice, total), GROUP)
    return a, b, c, d


@triton.jit
def _rotate_rest(values, GROUP: tl.constexpr):
    rotated = _mirrored_h4(values, 1)
    if GROUP >= 64:
        rotated = _mirrored_h4(rotated, 4)
    if GROUP == 256:
        rotated = _mirrored_h4(rotated, 16)
    return tl.reshape(rotated, values.shape)


@triton.jit
def quarters_amax_bits(a, b, c, d):
    """Return the largest magnitude of each row of FP32 quarters as int32 bits, NaN above all."""
    NAN: tl.constexpr = tl.PropagateNan.ALL
    low = tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=NAN)
    high = tl.maximum(tl.abs(c), tl.abs(d), propagate_nan=NAN)
    largest = tl.maximum(low, high, propagate_nan=NAN)
    return tl.max(largest.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


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
def split_reciprocal(scale):
    """Return ``1 / scale`` of FP32 ``[ROWS]`` as the sum of two FP32 numbers.

    The first one is the rounded reciprocal, the second what it lacks. ``v * first + v * second``
    with one rounding of the sum is the rounded quotient ``v / scale``, except where the true
    quotient lies within ``2**-46`` of a boundary, which a quotient of two FP32 numbers does not,
    and except for scales above ``1e29``, whose second part loses bits below the normal numbers.
    """
    approximate = 1.0 / scale
    # One Newton step rounds the approximate reciprocal.
    first = tl.fma(tl.fma(-scale, approximate, 1.0), approximate, approximate)
    return first, tl.fma(-scale, first, 1.0) * first


@triton.jit
def encode_mirrored_words(values, scale, first, second, CLAMP: tl.constexpr):
    """Return the codes of mirrored rows, four to a word and in their order within it.

    Args:
        values: FP32 ``[ROWS, COLS]`` of ``rotate_quarters_mirrored``.
        scale: FP32 ``[ROWS]``.
        first: First part of ``split_reciprocal``.
        second: Second part.
        CLAMP: Whether values may exceed 127 scales, as with a scale that is not their maximum.

    Returns:
        int32 ``[ROWS, COLS / 4]``, zero where a scale is not finite.
    """
    ROWS: tl.constexpr = values.shape[0]
    WORDS: tl.constexpr = values.shape[1] // 4
    high = tl.broadcast_to(first[:, None], values.shape)
    low = tl.broadcast_to(second[:, None], values.shape)
    scaled = tl.fma(values, high, values * low)
    if CLAMP:
        scaled = tl.minimum(tl.maximum(scaled, -128.0), 127.0)
    bits = (scaled + _ROUND_TO_BYTE).to(tl.int32, bitcast=True)
    even, odd = tl.split(tl.reshape(bits, (ROWS * WORDS, 2, 2)))
    b0, b2 = tl.split(even)
    b1, b3 = tl.split(odd)
    words = (b0 << 24) + (b1 << 16) + (b2 << 8) + (b3 + _REMOVE_EXPONENTS)
    finite = tl.where(scale - scale == 0.0, -1, 0)
    kept = tl.broadcast_to(finite[:, None], (ROWS, WORDS))
    return (tl.reshape(words, (ROWS, WORDS)) ^ _SIGNED_BYTES) & kept


@triton.jit
def store_mirrored_quarter(
    words, target, rows, row_mask, first, features, QUARTER: tl.constexpr, GROUP: tl.constexpr
):
    """Store ``encode_mirrored_words`` of a quarter so that the groups come into their order.

    Args:
        words: int32 ``[ROWS, COLS / 16]``.
        target: int32 pointer to the codes ``[rows, features]``.
        rows: int64 ``[ROWS]`` row indices.
        row_mask: ``[ROWS]``, whether a row exists.
        first: First column of the chunk, a multiple of ``GROUP``; columns past ``features`` are
            not stored.
        features: Columns of the matrix, a multiple of ``GROUP``.
        QUARTER: Which quarter of the groups, 0 to 3.
        GROUP: Rotation group.
    """
    ROWS: tl.constexpr = words.shape[0]
    COUNT: tl.constexpr = words.shape[1]
    # Words side by side are stored by one instruction: pairs, except in the shortest groups.
    WIDE: tl.constexpr = 1 if GROUP == 16 else 2
    PER_QUARTER: tl.constexpr = GROUP // (16 * WIDE)
    unit = tl.arange(0, COUNT // WIDE)
    mirrored = (QUARTER * PER_QUARTER + unit % PER_QUARTER) ^ (4 * PER_QUARTER - 1)
    column = first // 4 + WIDE * (unit // PER_QUARTER * (4 * PER_QUARTER) + mirrored)
    if WIDE == 1:
        mask = row_mask[:, None] & (column < features // 4)[None, :]
        tl.store(target + rows[:, None] * (features // 4) + column[None, :], words, mask=mask)
    else:
        left, right = tl.split(tl.reshape(words, (ROWS, COUNT // 2, 2)))
        pairs = tl.join(right, left)
        place = column[None, :, None] + tl.arange(0, 2)[None, None, :]
        mask = row_mask[:, None, None] & (place < features // 4)
        tl.store(target + rows[:, None, None] * (features // 4) + place, pairs, mask=mask)
