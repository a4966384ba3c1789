"""Kernels that requantize whole rows of ConvRot INT8 storage. Importing needs Triton.

Values stay in the reverse order of ``rotate_mirrored``; codes are read and written in words whose
addresses undo it.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from piper_kernels._triton.convrot import rotate_mirrored
from piper_kernels._triton.convrot_int8 import (
    encode_rows,
    load_mirrored_codes,
    scale_from_amax,
    store_mirrored_codes,
)
from piper_kernels._triton.reductions import row_amax_bits


@triton.jit
def merged_chunk(
    source_rows,
    words,
    old_scale,
    rows,
    row_mask,
    first,
    features,
    alpha,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    READ_BASE: tl.constexpr,
):
    """Return FP32 ``[ROWS, SIZE]``: ``alpha`` times the rotated source, plus the old weight.

    Args:
        source_rows: Pointers ``[ROWS, 1]`` to the rows of the dense source.
        words: Pointer to the codes as int32.
        old_scale: FP32 ``[ROWS]``; read only when ``READ_BASE``.
        rows: int64 ``[ROWS]`` row indices.
        row_mask: ``[ROWS]``, whether a row exists.
        first: First column; those past ``features`` give zeros.
        features: Columns of the matrix.
        alpha: Coefficient of the source.
        SIZE: Columns of the chunk.
        GROUP: Rotation group.
        READ_BASE: Whether the old weight is added.
    """
    columns = first + tl.arange(0, SIZE)[None, :]
    mask = row_mask[:, None] & (columns < features)
    dense = tl.load(source_rows + columns, mask=mask, other=0.0)
    values = rotate_mirrored(dense.to(tl.float32), GROUP) * alpha
    if READ_BASE:
        codes = load_mirrored_codes(words, rows, row_mask, first, features, SIZE, GROUP)
        values += codes.to(tl.float32) * old_scale[:, None]
    return values


@triton.jit
def store_chunk(
    values,
    scale,
    words,
    rows,
    row_mask,
    first,
    features,
    seed,
    GROUP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Encode FP32 ``[ROWS, SIZE]`` for the scales ``[ROWS]`` and store the codes."""
    columns = first + (tl.arange(0, values.shape[1]) ^ (GROUP - 1))[None, :]
    offsets = rows[:, None] * features + columns
    codes = encode_rows(values, scale, seed, offsets, STOCHASTIC)
    store_mirrored_codes(codes, words, rows, row_mask, first, features, GROUP)


@triton.jit(do_not_specialize=["seed"])
def fused_rows_kernel(
    source,
    words,
    scale,
    row_stride,
    total_rows,
    features,
    alpha,
    seed,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    READ_BASE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Requantize ``ROWS`` whole rows that are held in ``COUNT`` register chunks."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = rows < total_rows
    old = tl.load(scale + rows, mask=mask, other=0.0) if READ_BASE else 0.0
    start = source + rows[:, None] * row_stride
    v0 = merged_chunk(start, words, old, rows, mask, 0, features, alpha, SIZE, GROUP, READ_BASE)
    amax = row_amax_bits(v0)
    if COUNT > 1:
        v1 = merged_chunk(
            start, words, old, rows, mask, SIZE, features, alpha, SIZE, GROUP, READ_BASE
        )
        amax = tl.maximum(amax, row_amax_bits(v1))
    if COUNT > 2:
        v2 = merged_chunk(
            start, words, old, rows, mask, 2 * SIZE, features, alpha, SIZE, GROUP, READ_BASE
        )
        amax = tl.maximum(amax, row_amax_bits(v2))
    new = scale_from_amax(amax.to(tl.float32, bitcast=True))
    store_chunk(v0, new, words, rows, mask, 0, features, seed, GROUP, STOCHASTIC)
    if COUNT > 1:
        store_chunk(v1, new, words, rows, mask, SIZE, features, seed, GROUP, STOCHASTIC)
    if COUNT > 2:
        store_chunk(v2, new, words, rows, mask, 2 * SIZE, features, seed, GROUP, STOCHASTIC)
    tl.store(scale + rows, new, mask=mask)


@triton.jit(do_not_specialize=["seed"])
def wide_rows_kernel(
    source,
    words,
    scale,
    row_stride,
    features,
    alpha,
    seed,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    READ_BASE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Requantize one row of any width: a sweep for its maximum, a sweep to encode it."""
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    mask = rows >= 0
    old = tl.load(scale + rows) if READ_BASE else 0.0
    start = source + rows[:, None] * row_stride
    amax = tl.zeros((1,), tl.int32)
    for first in range(0, features, SIZE):
        values = merged_chunk(
            start, words, old, rows, mask, first, features, alpha, SIZE, GROUP, READ_BASE
        )
        amax = tl.maximum(amax, row_amax_bits(values))
    new = scale_from_amax(amax.to(tl.float32, bitcast=True))
    for first in range(0, features, SIZE):
        # Every code is read before the same program overwrites it; the old scale is in a
        # register since before the first store.
        values = merged_chunk(
            start, words, old, rows, mask, first, features, alpha, SIZE, GROUP, READ_BASE
        )
        store_chunk(values, new, words, rows, mask, first, features, seed, GROUP, STOCHASTIC)
    tl.store(scale + rows, new)
