"""Device code of the coarse residual: summaries of 64-row blocks, their attention, and the gate."""

# ruff: noqa: ANN001, ANN202, D417, PLR0124  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportOperatorIssue=false

import triton
import triton.language as tl

BLOCK = tl.constexpr(64)


@triton.jit(do_not_specialize=["rows", "heads"])
def summarize_kernel(
    query,
    key,
    value,
    lengths,
    query_summary,
    key_summary,
    key_aux,
    value_mean,
    rows,
    heads,
    query_batch_stride,
    query_row_stride,
    query_head_stride,
    key_batch_stride,
    key_row_stride,
    key_head_stride,
    value_batch_stride,
    value_row_stride,
    value_head_stride,
    D: tl.constexpr,
    MINMAX: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
    """Summarize one block of one head of an operand; the grid is ``(blocks, B * H, 3)``.

    Args:
        query: Floating ``[B, rows, H, D]`` with contiguous features.
        key: The same.
        value: The same.
        lengths: int32 ``[blocks]``, rows that exist, read only when ``HAS_LENGTHS``.
        query_summary: FP32 ``[B, H, blocks, D]``: maximum plus minimum, or mean.
        key_summary: The same: maximum, or mean.
        key_aux: The same: minimum, written only when ``MINMAX``.
        value_mean: The same: mean.
        rows: Rows of the sequence.
        heads: ``H``.
        D: Features.
        MINMAX: Whether queries and keys are summarized by their extrema.
        HAS_LENGTHS: Whether blocks have lengths.
    """
    block = tl.program_id(0)
    lead = tl.program_id(1).to(tl.int64)
    operand = tl.program_id(2)
    batch = lead // heads
    head = lead % heads
    length = tl.minimum(rows - block * BLOCK, BLOCK)
    if HAS_LENGTHS:
        length = tl.load(lengths + block)
    feature = tl.arange(0, D)
    target = (lead * tl.num_programs(0) + block) * D + feature
    row = tl.arange(0, BLOCK)
    inside = row[:, None] < length
    at = block.to(tl.int64) * BLOCK + row
    if operand == 0:
        source = query + batch * query_batch_stride + head * query_head_stride
        x = tl.load(
            source + at[:, None] * query_row_stride + feature[None, :], mask=inside, other=0.0
        ).to(tl.float32)
        if MINMAX:
            high, low = _extrema(x, inside)
            tl.store(query_summary + target, high + low)
        else:
            tl.store(query_summary + target, tl.sum(x, axis=0) / length.to(tl.float32))
    elif operand == 1:
        source = key + batch * key_batch_stride + head * key_head_stride
        x = tl.load(
            source + at[:, None] * key_row_stride + feature[None, :], mask=inside, other=0.0
        ).to(tl.float32)
        if MINMAX:
            high, low = _extrema(x, inside)
            tl.store(key_summary + target, high)
            tl.store(key_aux + target, low)
        else:
            tl.store(key_summary + target, tl.sum(x, axis=0) / length.to(tl.float32))
    else:
        source = value + batch * value_batch_stride + head * value_head_stride
        x = tl.load(
            source + at[:, None] * value_row_stride + feature[None, :], mask=inside, other=0.0
        ).to(tl.float32)
        tl.store(value_mean + target, tl.sum(x, axis=0) / length.to(tl.float32))


@triton.jit
def _extrema(x, inside):
    """Return maximum and minimum of the rows inside; NaN wins, as in PyTorch."""
    high = tl.max(tl.where(inside, x, float("-inf")), axis=0)
    low = tl.min(tl.where(inside, x, float("inf")), axis=0)
    unknown = tl.max((x != x).to(tl.int32), axis=0) != 0
    return tl.where(unknown, float("nan"), high), tl.where(unknown, float("nan"), low)


@triton.jit(do_not_specialize=["query_blocks", "key_blocks", "blocks"])
def attend_kernel(
    query,
    key,
    key_aux,
    value_mean,
    out,
    query_blocks,
    key_blocks,
    blocks,
    scale,
    D: tl.constexpr,
    MINMAX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend from query blocks of one head to the means of value blocks, with an online softmax.

    The grid is ``(ceil(query_blocks / ROWS), B * H)``. A row of the result depends neither on
    the other rows nor on how many there are.

    Args:
        query: FP32 ``[B, H, query_blocks, D]``, contiguous.
        key: FP32 ``[B, H, key_blocks, D]``, contiguous.
        key_aux: The same with ``MINMAX``: the larger product is the score.
        value_mean: The same.
        out: FP32 ``[B, H, query_blocks, D]``, contiguous.
        query_blocks: Query blocks.
        key_blocks: Key blocks of the summaries.
        blocks: Leading key blocks that are attended to.
        scale: Factor of the scores.
        D: Features.
        MINMAX: Whether keys have two summaries.
        ROWS: Query blocks of a program.
        COLUMNS: Key blocks of a step.
        DEPTH: Features of a step of the scores.
        PRECISION: ``input_precision`` of the products.
    """
    lead = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row[:, None] < query_blocks
    query += lead * query_blocks * D
    key += lead * key_blocks * D
    key_aux += lead * key_blocks * D
    value_mean += lead * key_blocks * D
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, D), tl.float32)
    for first in range(0, blocks, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        across = column[None, :] < blocks
        scores = tl.zeros((ROWS, COLUMNS), tl.float32)
        others = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, D, DEPTH):
            part = start + tl.arange(0, DEPTH)
            queries = tl.load(query + row[:, None] * D + part[None, :], mask=inside, other=0.0)
            at = column[None, :] * D + part[:, None]
            keys = tl.load(key + at, mask=across, other=0.0)
            scores = tl.dot(queries, keys, scores, input_precision=PRECISION)
            if MINMAX:
                keys = tl.load(key_aux + at, mask=across, other=0.0)
                others = tl.dot(queries, keys, others, input_precision=PRECISION)
        if MINMAX:
            scores = tl.maximum(scores, others, propagate_nan=tl.PropagateNan.ALL)
        scores = tl.where(across, scores * scale, float("-inf"))
        above = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp(scores - above[:, None])
        kept = tl.exp(highest - above)
        means = tl.load(
            value_mean + column[:, None] * D + tl.arange(0, D)[None, :],
            mask=column[:, None] < blocks,
            other=0.0,
        )
        sums = tl.dot(weights, means, sums * kept[:, None], input_precision=PRECISION)
        total = total * kept + tl.sum(weights, axis=1)
        highest = above
    at = (lead * query_blocks + row)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out + at, sums / total[:, None], mask=inside)


@triton.jit(do_not_specialize=["rows", "heads", "blocks"])
def gate_kernel(
    coarse,
    gate,
    out,
    rows,
    heads,
    blocks,
    gate_batch_stride,
    gate_row_stride,
    gate_head_stride,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Multiply gates of ``ROWS`` rows of one head by the coarse row of their block.

    The grid is ``(blocks * 64 / ROWS, B * H)``.

    Args:
        coarse: FP32 ``[B, H, blocks, D]``, contiguous.
        gate: Floating ``[B, rows, H, D]`` with contiguous features.
        out: The same, contiguous.
        rows: Rows of the sequence.
        heads: ``H``.
        blocks: Blocks of 64 rows.
        D: Features.
        ROWS: Rows of a program, at most 64.
    """
    first = tl.program_id(0) * ROWS
    lead = tl.program_id(1).to(tl.int64)
    batch = lead // heads
    head = lead % heads
    feature = tl.arange(0, D)
    row = first.to(tl.int64) + tl.arange(0, ROWS)
    inside = row[:, None] < rows
    source = gate + batch * gate_batch_stride + head * gate_head_stride
    gates = tl.load(
        source + row[:, None] * gate_row_stride + feature[None, :], mask=inside, other=0.0
    )
    added = tl.load(coarse + (lead * blocks + first // BLOCK) * D + feature)
    product = gates.to(tl.float32) * added[None, :]
    at = ((batch * rows + row) * heads + head) * D
    tl.store(out + at[:, None] + feature[None, :], product.to(out.dtype.element_ty), mask=inside)
