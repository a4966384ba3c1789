"""Routing summaries of blocks of 64 rows, and sums of rows in the same pass."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from piper_kernels.attention._preparation._code_kernels import TILE

# How blocks are summarized.
MINMAX, MEAN = tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["rows", "heads", "chunk_tiles"])
def summary_kernel(
    source,
    lengths,
    first,
    second,
    partials,
    rows,
    heads,
    chunk_tiles,
    batch_stride,
    head_stride,
    row_stride,
    D: tl.constexpr,
    IS_QUERY: tl.constexpr,
    SUMMARY: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Summarize a chunk of the blocks of one head; meant for programs of one warp.

    Args:
        source: Floating ``[B, heads, rows, D]`` with contiguous features.
        lengths: int32 ``[blocks]``, rows that exist in blocks; read when ``MASKED``.
        first: FP32 ``[B * heads, blocks, D]``: maximum plus minimum of queries, maximum of keys,
            or the mean.
        second: FP32 ``[B * heads, blocks, D]``, minimum of keys with ``MINMAX``.
        partials: FP32 ``[B * heads, chunks, D]``, sums of the rows of keys.
        rows: Rows of the sequence.
        heads: Heads of the source.
        chunk_tiles: Blocks of a program.
        batch_stride: Elements between batches.
        head_stride: Elements between heads.
        row_stride: Elements between rows.
        D: Features.
        IS_QUERY: Whether the source are queries, which are not summed.
        SUMMARY: ``MINMAX`` or ``MEAN``.
        MASKED: Whether blocks have lengths.
        ROWS: Rows to read at a time.
    """
    chunk, lead = tl.program_id(0), tl.program_id(1)
    batch, head = (lead // heads).to(tl.int64), (lead % heads).to(tl.int64)
    source += batch * batch_stride + head * head_stride
    blocks = (rows + TILE - 1) // TILE
    features, row = tl.arange(0, D), tl.arange(0, ROWS)
    offsets = row.to(tl.int64)[:, None] * row_stride + features[None, :]
    chunk_sum = tl.zeros((ROWS, D), tl.float32)
    for block in range(chunk * chunk_tiles, tl.minimum(blocks, (chunk + 1) * chunk_tiles)):
        start = tl.cast(block, tl.int64) * TILE
        count = tl.minimum(rows - start, TILE)
        if MASKED:
            count = tl.minimum(count, tl.load(lengths + block))
        high = tl.full((ROWS, D), float("-inf"), tl.float32)
        low = tl.full((ROWS, D), float("inf"), tl.float32)
        block_sum = tl.zeros((ROWS, D), tl.float32)
        for step in tl.static_range(TILE // ROWS):
            mask = (step * ROWS + row < count)[:, None]
            at = source + (start + step * ROWS) * row_stride + offsets
            numbers = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            if SUMMARY == MINMAX:
                high = tl.maximum(high, tl.where(mask, numbers, float("-inf")))
                low = tl.minimum(low, tl.where(mask, numbers, float("inf")))
                if not IS_QUERY:
                    chunk_sum += numbers
            else:
                block_sum += numbers
        target = (lead.to(tl.int64) * blocks + block) * D + features
        if SUMMARY == MEAN:
            tl.store(first + target, tl.sum(block_sum, axis=0) / count.to(tl.float32))
            chunk_sum += block_sum
        elif IS_QUERY:
            tl.store(first + target, tl.max(high, axis=0) + tl.min(low, axis=0))
        else:
            tl.store(first + target, tl.max(high, axis=0))
            tl.store(second + target, tl.min(low, axis=0))
    if not IS_QUERY:
        at = partials + (lead.to(tl.int64) * tl.num_programs(0) + chunk) * D + features
        tl.store(at, tl.sum(chunk_sum, axis=0))
