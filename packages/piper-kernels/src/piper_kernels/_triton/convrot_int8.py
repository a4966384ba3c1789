"""INT8 quantization of rotated rows, for Triton kernels."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false

import triton
import triton.language as tl

from piper_kernels._triton.reductions import row_amax
from piper_kernels.stochastic_quantization.triton import stochastic_round_to_int


@triton.jit
def scale_from_amax(amax):
    """Return ``max(amax / 127, 1e-30)`` in FP32; NaN stays NaN."""
    scale = tl.div_rn(amax, tl.full(amax.shape, 127.0, tl.float32))
    return tl.where(scale < 1e-30, 1e-30, scale)


@triton.jit
def divide_rows(values, scale):
    """Return FP32 ``values [ROWS, COLS] / scale [ROWS]``, rounded as a division is.

    One division a row: a quotient from the rounded reciprocal, corrected once by its exact
    remainder, is the correctly rounded one (Markstein, IA-64 and Elementary Functions, 2000).
    That holds while reciprocal and remainder are normal numbers, which scales of at least 1e-30
    ensure for every quotient that matters to a code. Infinite and NaN scales give NaN.
    """
    divisor = tl.broadcast_to(scale[:, None], values.shape)
    row_reciprocal = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    reciprocal = tl.broadcast_to(row_reciprocal[:, None], values.shape)
    quotient = values * reciprocal
    return tl.fma(tl.fma(-quotient, divisor, values), reciprocal, quotient)


@triton.jit
def encode_rows(values, scale, seed, offsets, STOCHASTIC: tl.constexpr):
    """Return the int8 codes of FP32 rows for given row scales.

    Args:
        values: FP32 ``[ROWS, COLS]`` in the rotated basis.
        scale: FP32 ``[ROWS]``.
        seed: Seed argument; read only when ``STOCHASTIC``.
        offsets: int64 ``[ROWS, COLS]`` logical element offsets; read only when ``STOCHASTIC``.
        STOCHASTIC: Whether to round stochastically instead of half to even.

    Returns:
        int8 ``[ROWS, COLS]``. Values that are NaN after scaling become 0.
    """
    scaled = divide_rows(values, scale)
    scaled = tl.where(scaled == scaled, scaled, 0.0)  # noqa: PLR0124  # NaN only
    bounded = tl.minimum(tl.maximum(scaled, -128.0), 127.0)
    # 1.5 * 2**23 leaves no fraction bits: the addition rounds half to even.
    nearest = ((bounded + 12582912.0) - 12582912.0).to(tl.int8)
    if STOCHASTIC:
        return stochastic_round_to_int(scaled, nearest, seed, offsets, -128, 127)
    return nearest


@triton.jit
def quantize_rows(values, seed, offsets, STOCHASTIC: tl.constexpr):
    """Quantize complete rows by their own maximum, as ``dynamic_quantize_rows`` does.

    Args:
        values: FP32 ``[ROWS, COLS]`` holding whole rows; padding columns are zero.
        seed: Seed argument, see ``encode_rows``.
        offsets: Logical offsets, see ``encode_rows``.
        STOCHASTIC: Whether to round stochastically.

    Returns:
        int8 codes ``[ROWS, COLS]`` and FP32 scales ``[ROWS]``.
    """
    scale = scale_from_amax(row_amax(values))
    return encode_rows(values, scale, seed, offsets, STOCHASTIC), scale


@triton.jit
def store_mirrored_codes(codes, words, rows, row_mask, first, features, GROUP: tl.constexpr):
    """Store codes of ``rotate_mirrored`` values in their order, four to a word.

    Args:
        codes: int8 ``[ROWS, COLS]``, groups reversed.
        words: int32 pointer to the codes ``[rows, features]``.
        rows: int64 ``[ROWS]`` row indices.
        row_mask: ``[ROWS]``, whether a row exists.
        first: First column, a multiple of ``GROUP``; columns past ``features`` are not stored.
        features: Columns of the matrix, a multiple of ``GROUP``.
        GROUP: Rotation group.
    """
    ROWS: tl.constexpr = codes.shape[0]
    WORDS: tl.constexpr = codes.shape[1] // 4
    bytes_ = tl.reshape(codes, (ROWS * WORDS, 4)).to(tl.int32) & 0xFF
    packed = tl.sum(bytes_ << (8 * (tl.arange(0, 4) ^ 3))[None, :], axis=1)
    word = first // 4 + (tl.arange(0, WORDS) ^ (GROUP // 4 - 1))[None, :]
    target = words + rows[:, None] * (features // 4) + word
    mask = row_mask[:, None] & (word < features // 4)
    tl.store(target, tl.reshape(packed, (ROWS, WORDS)), mask=mask)


@triton.jit
def load_mirrored_codes(
    words, rows, row_mask, first, features, COLS: tl.constexpr, GROUP: tl.constexpr
):
    """Load what ``store_mirrored_codes`` stored, as int32 ``[ROWS, COLS]``, groups reversed."""
    ROWS: tl.constexpr = rows.shape[0]
    WORDS: tl.constexpr = COLS // 4
    word = first // 4 + (tl.arange(0, WORDS) ^ (GROUP // 4 - 1))[None, :]
    source = words + rows[:, None] * (features // 4) + word
    packed = tl.load(source, mask=row_mask[:, None] & (word < features // 4), other=0)
    quads = tl.broadcast_to(tl.reshape(packed, (ROWS * WORDS, 1)), (ROWS * WORDS, 4))
    # The mirrored byte comes to the top, and down again with its sign.
    codes = (quads << (8 * tl.arange(0, 4))[None, :]) >> 24
    return tl.reshape(codes, (ROWS, COLS))
