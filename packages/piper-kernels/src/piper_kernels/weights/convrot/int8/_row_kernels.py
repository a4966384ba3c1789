"""Kernels that requantize whole rows of ConvRot INT8 storage. Importing needs Triton."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from piper_kernels._triton.convrot import rotate
from piper_kernels._triton.convrot_int8 import encode_rows, scale_from_amax
from piper_kernels._triton.reductions import row_amax_bits


@triton.jit
def merged_chunk(
    source_rows,
    qdata_rows,
    old_scale,
    row_mask,
    columns,
    features,
    alpha,
    GROUP: tl.constexpr,
    READ_BASE: tl.constexpr,
):
    """Return FP32 ``[ROWS, COLS]``: ``alpha`` times the rotated source, plus the old weight.

    Args:
        source_rows: Pointers ``[ROWS, 1]`` to the rows of the dense source.
        qdata_rows: Pointers ``[ROWS, 1]`` to the rows of the codes.
        old_scale: FP32 ``[ROWS]``; read only when ``READ_BASE``.
        row_mask: ``[ROWS]``, whether a row exists.
        columns: ``[COLS]`` column indices; those past ``features`` give zeros.
        features: Columns of the matrix.
        alpha: Coefficient of the source.
        GROUP: Rotation group.
        READ_BASE: Whether the old weight is added.
    """
    mask = row_mask[:, None] & (columns < features)[None, :]
    dense = tl.load(source_rows + columns[None, :], mask=mask, other=0.0)
    values = rotate(dense.to(tl.float32), GROUP) * alpha
    if READ_BASE:
        codes = tl.load(qdata_rows + columns[None, :], mask=mask, other=0)
        values += codes.to(tl.float32) * old_scale[:, None]
    return values


@triton.jit
def store_codes(
    values,
    scale,
    qdata,
    rows,
    row_mask,
    columns,
    features,
    seed,
    STOCHASTIC: tl.constexpr,
):
    """Encode FP32 ``[ROWS, COLS]`` for the scales ``[ROWS]`` and store the codes."""
    offsets = rows[:, None] * features + columns[None, :]
    codes = encode_rows(values, scale, seed, offsets, STOCHASTIC)
    mask = row_mask[:, None] & (columns < features)[None, :]
    tl.store(qdata + offsets, codes, mask=mask)


@triton.jit(do_not_specialize=["seed"])
def fused_rows_kernel(
    source,
    qdata,
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
    row_mask = rows < total_rows
    old = tl.load(scale + rows, mask=row_mask, other=0.0) if READ_BASE else 0.0
    source_rows = source + rows[:, None] * row_stride
    qdata_rows = qdata + rows[:, None] * features
    c0 = tl.arange(0, SIZE)
    c1, c2 = c0 + SIZE, c0 + 2 * SIZE
    v0 = merged_chunk(source_rows, qdata_rows, old, row_mask, c0, features, alpha, GROUP, READ_BASE)
    amax = row_amax_bits(v0)
    if COUNT > 1:
        v1 = merged_chunk(
            source_rows, qdata_rows, old, row_mask, c1, features, alpha, GROUP, READ_BASE
        )
        amax = tl.maximum(amax, row_amax_bits(v1))
    if COUNT > 2:
        v2 = merged_chunk(
            source_rows, qdata_rows, old, row_mask, c2, features, alpha, GROUP, READ_BASE
        )
        amax = tl.maximum(amax, row_amax_bits(v2))
    new = scale_from_amax(amax.to(tl.float32, bitcast=True))
    store_codes(v0, new, qdata, rows, row_mask, c0, features, seed, STOCHASTIC)
    if COUNT > 1:
        store_codes(v1, new, qdata, rows, row_mask, c1, features, seed, STOCHASTIC)
    if COUNT > 2:
        store_codes(v2, new, qdata, rows, row_mask, c2, features, seed, STOCHASTIC)
    tl.store(scale + rows, new, mask=row_mask)


@triton.jit(do_not_specialize=["seed"])
def wide_rows_kernel(
    source,
    qdata,
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
    row_mask = rows >= 0
    old = tl.load(scale + rows) if READ_BASE else 0.0
    source_rows = source + rows[:, None] * row_stride
    qdata_rows = qdata + rows[:, None] * features
    amax = tl.zeros((1,), tl.int32)
    for first in range(0, features, SIZE):
        columns = first + tl.arange(0, SIZE)
        values = merged_chunk(
            source_rows, qdata_rows, old, row_mask, columns, features, alpha, GROUP, READ_BASE
        )
        amax = tl.maximum(amax, row_amax_bits(values))
    new = scale_from_amax(amax.to(tl.float32, bitcast=True))
    for first in range(0, features, SIZE):
        columns = first + tl.arange(0, SIZE)
        # Every code is read before the same program overwrites it; the old scale is in a
        # register since before the first store.
        values = merged_chunk(
            source_rows, qdata_rows, old, row_mask, columns, features, alpha, GROUP, READ_BASE
        )
        store_codes(values, new, qdata, rows, row_mask, columns, features, seed, STOCHASTIC)
    tl.store(scale + rows, new)
