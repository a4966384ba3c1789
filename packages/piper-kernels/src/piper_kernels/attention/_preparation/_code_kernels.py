"""INT8 codes and scales in Triton kernels, and which rows of a tile exist."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

TILE = tl.constexpr(64)
# 1.5 * 2**23 leaves no fraction bits, so adding it rounds half to even.
_ROUND = tl.constexpr(12582912.0)
# The bits of that number and of its negative.
_BIAS, _NEGATIVE_BIAS = tl.constexpr(0x4B400000), tl.constexpr(0x4B400000 - 2**31)


@triton.jit
def row_mask(first, rows, lengths, MASKED: tl.constexpr):
    """Return which of 64 rows from ``first`` exist; ``lengths`` are those of tiles of 64."""
    row = tl.arange(0, TILE)
    mask = first + row < rows
    if MASKED:
        mask = mask & (row < tl.load(lengths + first // TILE))
    return mask


@triton.jit
def int8_scale(amax):
    """Return the scale of numbers with the largest magnitude ``amax``; never zero."""
    return amax / 127.0 + 1e-7


@triton.jit
def code_bits(scaled):
    """Return int32 whose low byte is the INT8 code of a number within 127.5."""
    return (scaled + _ROUND).to(tl.int32, bitcast=True)


@triton.jit
def byte_sums(words):
    """Return the sums over axis 1 of the four INT8 codes in every int32 word."""
    pairs = (words >> 24) + (words << 8 >> 24)
    return tl.sum(pairs + (words << 16 >> 24) + (words << 24 >> 24), axis=1)


@triton.jit
def biased_sums(sums, pair):
    """Return 127 times sums of codes as bits of FP32 numbers, for an accumulator to start from.

    ``1.5 * 2**23`` is added for even pairs of tiles and subtracted for odd ones.
    """
    return tl.where(pair % 2 == 0, _BIAS + 127 * sums, _NEGATIVE_BIAS - 127 * sums)
