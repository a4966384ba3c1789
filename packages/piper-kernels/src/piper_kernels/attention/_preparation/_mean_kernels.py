"""Sums and maxima over the sequence of keys and values, in two deterministic stages."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportIndexIssue=false

import triton
import triton.language as tl

from piper_kernels.attention._preparation._code_kernels import TILE
from piper_kernels.attention._preparation._rotation_kernels import rotate_row


@triton.jit
def reduce_rows(
    source,
    stride,
    first,
    last,
    lengths,
    maximal,
    D: tl.constexpr,
    MASKED: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
):
    """Return the sum of rows ``first`` to ``last``, or if ``maximal`` the largest magnitudes."""
    ROWS: tl.constexpr = TILE if D == 128 else 2 * TILE
    row = tl.arange(0, ROWS)
    offsets = row.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :]
    sums = tl.zeros((ROWS, D), tl.float32)
    for start in range(first, last, ROWS):
        mask = start + row < last
        if MASKED:
            length = tl.load(lengths + (start + row) // TILE, mask=mask, other=0)
            mask = mask & (row % TILE < length)
        at = source + tl.cast(start, tl.int64) * stride + offsets
        numbers = tl.load(at, mask=mask[:, None], other=0.0).to(tl.float32)
        if VALUE_SCALES:
            sums = tl.where(maximal, tl.maximum(sums, tl.abs(numbers)), sums + numbers)
        else:
            sums += numbers
    total = tl.sum(sums, axis=0)
    if VALUE_SCALES:
        total = tl.where(maximal, tl.max(sums, axis=0), total)
    return total


@triton.jit
def combine(
    partials, chunks, maximal, D: tl.constexpr, VALUE_SCALES: tl.constexpr, CHUNKS: tl.constexpr
):
    """Return the sum, or if ``maximal`` the maximum, of FP32 ``[chunks, D]`` in their order."""
    total = tl.zeros((D,), tl.float32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)[:, None]
        at = partials + chunk * D + tl.arange(0, D)[None, :]
        part = tl.load(at, mask=chunk < chunks, other=0.0)
        if VALUE_SCALES:
            larger = tl.maximum(total, tl.max(part, axis=0))
            total = tl.where(maximal, larger, total + tl.sum(part, axis=0))
        else:
            total += tl.sum(part, axis=0)
    return total


@triton.jit
def existing_rows(rows, lengths, blocks, MASKED: tl.constexpr):
    """Return how many rows exist, in FP32."""
    count = rows
    if MASKED:
        counted = tl.zeros((1024,), tl.int32)
        for first in range(0, blocks, 1024):
            block = first + tl.arange(0, 1024)
            counted += tl.load(lengths + block, mask=block < blocks, other=0)
        count = tl.sum(counted)
    return count.to(tl.float32)


@triton.jit(do_not_specialize=["rows", "chunk_rows", "heads"])
def partial_kernel(
    key,
    value,
    lengths,
    partials,
    rows,
    chunk_rows,
    heads,
    key_batch_stride,
    key_head_stride,
    key_row_stride,
    value_batch_stride,
    value_head_stride,
    value_row_stride,
    D: tl.constexpr,
    MASKED: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
):
    """Reduce a chunk of the rows of one head of keys (``program_id(2) == 0``) or values.

    Args:
        key: Floating ``[B, heads, rows, D]`` with contiguous features.
        value: The same; not read when the grid has keys only.
        lengths: int32 ``[blocks]``, rows that exist in blocks of 64; read when ``MASKED``.
        partials: FP32 ``[operands, B * heads, chunks, D]``.
        rows: Rows of the sequence.
        chunk_rows: Rows of a chunk, a multiple of 64.
        heads: Heads of keys and values.
        key_batch_stride: Elements between batches of keys.
        key_head_stride: Elements between heads of keys.
        key_row_stride: Elements between rows of keys.
        value_batch_stride: Elements between batches of values.
        value_head_stride: Elements between heads of values.
        value_row_stride: Elements between rows of values.
        D: Features.
        MASKED: Whether blocks have lengths.
        VALUE_SCALES: Whether values give their largest magnitudes instead of their sums.
    """
    chunk, lead, operand = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = (lead // heads).to(tl.int64), (lead % heads).to(tl.int64)
    source, stride = key + batch * key_batch_stride + head * key_head_stride, key_row_stride
    if operand == 1:
        source = value + batch * value_batch_stride + head * value_head_stride
        stride = value_row_stride
    first, last = chunk * chunk_rows, tl.minimum(rows, (chunk + 1) * chunk_rows)
    maximal = VALUE_SCALES and operand == 1
    total = reduce_rows(source, stride, first, last, lengths, maximal, D, MASKED, VALUE_SCALES)
    row = (operand * tl.num_programs(1) + lead).to(tl.int64) * tl.num_programs(0) + chunk
    tl.store(partials + row * D + tl.arange(0, D), total)


@triton.jit(do_not_specialize=["rows", "chunks", "blocks"])
def finish_kernel(
    partials,
    lengths,
    means,
    rotated,
    rows,
    chunks,
    blocks,
    D: tl.constexpr,
    MASKED: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Turn the partial results of one head into its mean, or maxima into E4M3 scales.

    Args:
        partials: FP32 ``[operands, B * heads, chunks, D]`` of :func:`partial_kernel`.
        lengths: int32 ``[blocks]``; read when ``MASKED``.
        means: FP32 ``[operands, B * heads, D]``; scales instead of maxima.
        rotated: FP32 ``[B * heads, D]``, the means of keys times signs and ``H_D``, unscaled.
        rows: Rows of the sequence.
        chunks: Partial results of a head.
        blocks: Blocks of 64 rows.
        D: Features.
        MASKED: Whether blocks have lengths.
        VALUE_SCALES: Whether values gave maxima.
        CHUNKS: Partial results to read at a time.
    """
    lead, operand = tl.program_id(0), tl.program_id(1)
    features = tl.arange(0, D)
    row = (operand * tl.num_programs(0) + lead).to(tl.int64)
    maximal = VALUE_SCALES and operand == 1
    total = combine(partials + row * chunks * D, chunks, maximal, D, VALUE_SCALES, CHUNKS)
    if maximal:
        total = total / 2.25 + 1e-7
    else:
        total = total / existing_rows(rows, lengths, blocks, MASKED)
    tl.store(means + row * D + features, total)
    if operand == 0:
        tl.store(rotated + row * D + features, rotate_row(total, D))
