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
