"""Reductions for Triton kernels."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportAttributeAccessIssue=false

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(values):
    """Return the bits of ``|values|`` (FP32) as int32.

    They order like the magnitudes, with NaN above infinity, so an integer maximum
    propagates NaN on every target and may be taken by atomics.
    """
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def row_amax(values):
    """Return ``max(|values|)`` over axis 1 of FP32 ``[ROWS, COLS]``; NaN propagates."""
    return tl.max(magnitude_bits(values), axis=1).to(tl.float32, bitcast=True)


@triton.jit
def row_amax_bits(values):
    """Return ``row_amax`` as the int32 bits that ``magnitude_bits`` describes."""
    return tl.max(magnitude_bits(values), axis=1)
