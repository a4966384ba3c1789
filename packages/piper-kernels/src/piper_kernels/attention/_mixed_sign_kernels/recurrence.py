"""Steps of the online softmax that the attention loops share. Logits are in base 2."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportCallIssue=false

import math

import triton
import triton.language as tl

from piper_kernels.attention._mixed_sign_kernels.products import counted, start_counting

# Bits of FP32 numbers are a logarithm that is at most 0.0861 too low; multipliers are 255 scales.
_BOUND_OFFSET = tl.constexpr(127 + math.log2(255) - 0.086085)
_LOG2_255 = tl.constexpr(math.log2(255))
_MANTISSA_STEP = tl.constexpr(2.0**-23)


@triton.jit
def load_rows(codes, first, stop, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr):
    """Return int8 ``[ROWS, HEAD_DIM]`` from row ``first`` on, zero from ``stop`` on."""
    row = first + tl.arange(0, ROWS)
    feature = tl.arange(0, HEAD_DIM)
    at = row.to(tl.int64)[:, None] * HEAD_DIM + feature[None, :]
    return tl.load(codes + at, mask=(row < stop)[:, None], other=0)


@triton.jit
def tile_scores(
    query, query_scale, key_codes, key_scale, first, HEAD_DIM: tl.constexpr, PER_ROW: tl.constexpr
):
    """Return the logits of 64 keys, FP32 ``[M, 64]``.

    Args:
        query: int8 ``[M, HEAD_DIM]``.
        query_scale: FP32 ``[M]``.
        key_codes: Pointer to the int8 rows of a head.
        key_scale: Pointer to the FP32 scales of a head, one per row or per 64 rows.
        first: First key, a multiple of 64.
        HEAD_DIM: Features.
        PER_ROW: Whether every key has its own scale.
    """
    column = tl.arange(0, 64)
    feature = tl.arange(0, HEAD_DIM)
    at = (first + column).to(tl.int64)[None, :] * HEAD_DIM + feature[:, None]
    sums = start_counting(query.shape[0], 64)
    sums = tl.dot(query, tl.load(key_codes + at), sums, out_dtype=tl.int32)
    scores = counted(sums) * query_scale[:, None]
    if PER_ROW:
        return scores * tl.load(key_scale + first + column)[None, :]
    return scores * tl.load(key_scale + first // 64)


@triton.jit
def value_tile(value_codes, first, stored_keys, FEATURE: tl.constexpr, FEATURES: tl.constexpr):
    """Return the codes of 64 values, int8 ``[64, FEATURES]``, from transposed storage.

    Args:
        value_codes: Pointer to int8 ``[D, stored_keys]`` of a head.
        first: First key.
        stored_keys: Keys of a row of the storage.
        FEATURE: First feature.
        FEATURES: Number of features.
    """
    key = first + tl.arange(0, 64)
    feature = FEATURE + tl.arange(0, FEATURES)
    return tl.load(value_codes + feature.to(tl.int64)[None, :] * stored_keys + key[:, None])


@triton.jit
def log_scale(multiplier, BOUND: tl.constexpr):
    """Return the base-2 logarithm of ``multiplier / 255``, or a close upper bound of it."""
    if BOUND:
        bits = multiplier.to(tl.int32, bitcast=True).to(tl.float32)
        return bits * _MANTISSA_STEP - _BOUND_OFFSET
    return tl.log2(multiplier) - _LOG2_255


@triton.jit
def finite_or_zero(x):
    """Replace negative infinity, so that what is relative to it stays negative infinity."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def rescale(maximum, offset, tile_maximum, tile_offset):
    """Return the weights of the state and of a tile, and the new coordinate of the state.

    The coordinate is ``maximum + offset``. The two are kept apart, because a score of millions
    would absorb the logarithm of a value scale.

    Args:
        maximum: FP32 ``[M]``, the largest score so far.
        offset: FP32 ``[M]``, what value scales add to it.
        tile_maximum: The same of the tile; negative infinity where it has no visible key.
        tile_offset: The same of the tile.
    """
    rise = (tile_maximum - maximum) + (tile_offset - offset)
    higher = rise > 0
    old_weight = tl.exp2(tl.where(higher, -rise, 0.0))
    tile_weight = tl.exp2(tl.where(higher, 0.0, rise))
    maximum = tl.where(higher, tile_maximum, maximum)
    offset = tl.where(higher, tile_offset, offset)
    return old_weight, tile_weight, maximum, offset
