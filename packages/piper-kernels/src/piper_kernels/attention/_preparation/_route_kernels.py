"""Scores between summaries of blocks and the selection of the best key blocks."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-0x80000000)
_HIGHEST = tl.constexpr(0x7FFFFFFF)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
# Scores are spread like numbers; halving bits ends the search among nearly equal ones.
_NUMBER_STEPS = tl.constexpr(16)
_SCORE_SIZES = ["query_blocks", "first_query", "queries", "key_blocks", "blocks", "groups", "heads"]
_SELECT_SIZES = ["first_query", "queries", "blocks", "heads", "query_blocks", "routes_per_query"]


@triton.jit(do_not_specialize=_SCORE_SIZES)
def score_kernel(
    query,
    key,
    key_aux,
    scores,
    query_blocks,
    first_query,
    queries,
    key_blocks,
    blocks,
    heads,
    groups,
    D: tl.constexpr,
    MINMAX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Score a chunk of query blocks against key blocks.

    Args:
        query: FP32 ``[B, heads, query_blocks, D]``.
        key: FP32 ``[B, heads / groups, key_blocks, D]``.
        key_aux: The same with ``MINMAX``: the larger product is the score.
        scores: FP32 ``[B, heads, queries, blocks]``.
        query_blocks: Query blocks of the summaries.
        first_query: First query block to score.
        queries: Query blocks to score.
        key_blocks: Key blocks of the summaries.
        blocks: Leading key blocks to score.
        heads: Query heads.
        groups: Query heads of a head of keys.
        D: Features.
        MINMAX: Whether keys have two summaries.
        ROWS: Query blocks of a program.
        COLUMNS: Key blocks of a program.
        DEPTH: Features of a step.
        PRECISION: ``input_precision`` of the products.
    """
    lead = tl.program_id(2)
    key_lead = lead // heads * (heads // groups) + lead % heads // groups
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    query += (lead.to(tl.int64) * query_blocks + first_query) * D
    key += key_lead.to(tl.int64) * key_blocks * D
    key_aux += key_lead.to(tl.int64) * key_blocks * D
    high = tl.zeros((ROWS, COLUMNS), tl.float32)
    low = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, D, DEPTH):
        feature = first + tl.arange(0, DEPTH)
        q = tl.load(
            query + row[:, None] * D + feature[None, :], mask=row[:, None] < queries, other=0.0
        )
        at, mask = column[None, :] * D + feature[:, None], column[None, :] < blocks
        k = tl.load(key + at, mask=mask, other=0.0)
        high = tl.dot(q, k, high, input_precision=PRECISION)
        if MINMAX:
            k = tl.load(key_aux + at, mask=mask, other=0.0)
            low = tl.dot(q, k, low, input_precision=PRECISION)
    if MINMAX:
        high = tl.maximum(high, low)
    at = (lead.to(tl.int64) * queries + row)[:, None] * blocks + column[None, :]
    tl.store(scores + at, high, mask=(row[:, None] < queries) & (column[None, :] < blocks))


@triton.jit
def _ordered(numbers):
    """Return int32 that order like FP32 numbers; the map is its own inverse on bits."""
    bits = numbers.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _MAGNITUDE)


@triton.jit
def _number(ordered):
    """Return the FP32 number of an ordered integer."""
    return (ordered ^ ((ordered >> 31) & _MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=_SELECT_SIZES)
def select_kernel(
    scores,
    table,
    routes,
    first_query,
    queries,
    blocks,
    heads,
    query_blocks,
    routes_per_query,
    COLUMNS: tl.constexpr,
):
    """Select the best key blocks of a query block of one head, in ascending order.

    A threshold is found by bisection, first between numbers, then between their bits. It ends
    when as many scores as wanted reach it, or at the smallest selected score; lower blocks win
    among those that equal it.

    Args:
        scores: FP32 ``[B, heads, queries, blocks]``.
        table: int32 ``[2 * heads + 1]``: kept blocks of heads, then the offsets of their routes.
        routes: uint16 ``[B, query_blocks, routes_per_query]``.
        first_query: First query block of the scores.
        queries: Query blocks of the scores.
        blocks: Key blocks.
        heads: Query heads.
        query_blocks: Routed query blocks.
        routes_per_query: Routes of all heads.
        COLUMNS: Power of two that is not below ``blocks``.
    """
    row, lead = tl.program_id(0), tl.program_id(1)
    batch, head = lead // heads, lead % heads
    keep = tl.load(table + head)
    offset = tl.load(table + heads + head)
    column = tl.arange(0, COLUMNS)
    inside = column < blocks
    # Adding zero makes negative zero positive: the two are equal.
    at = (lead.to(tl.int64) * queries + row) * blocks + column
    ordered = _ordered(tl.load(scores + at, mask=inside, other=0.0) + 0.0)
    # At least ``keep`` scores reach the lower bound, fewer the upper one.
    lower = tl.min(tl.where(inside, ordered, _HIGHEST)).to(tl.int64)
    upper = tl.max(tl.where(inside, ordered, _LOWEST)).to(tl.int64) + 1
    upper = tl.where(keep < blocks, upper, lower + 1)
    ordered = tl.where(inside, ordered, _LOWEST)
    step = 0
    while upper - lower > 1:
        low, high = _number(lower.to(tl.int32)), _number((upper - 1).to(tl.int32))
        middle = _ordered(low + 0.5 * (high - low)).to(tl.int64)
        if step >= _NUMBER_STEPS:
            middle = (lower + upper) >> 1
        middle = tl.minimum(tl.maximum(middle, lower + 1), upper - 1)
        reached = tl.sum((ordered >= middle.to(tl.int32)).to(tl.int32))
        lower = tl.where(reached >= keep, middle, lower)
        upper = tl.where(reached > keep, upper, tl.where(reached == keep, middle + 1, middle))
        step += 1
    threshold = lower.to(tl.int32)
    better = (ordered > threshold).to(tl.int32)
    equal = (ordered == threshold).to(tl.int32)
    free = keep - tl.sum(better)
    rank = tl.cumsum(equal, axis=0)
    chosen = (better > 0) | ((equal > 0) & (rank <= free))
    place = tl.cumsum(better, axis=0) + tl.minimum(rank, free) - 1
    target = routes + (batch * query_blocks + first_query + row).to(tl.int64) * routes_per_query
    tl.store(target + offset + place, column.to(tl.uint16), mask=chosen & inside)


@triton.jit(do_not_specialize=["first", "heads", "count", "base", *[f"n{i}" for i in range(16)]])
def table_kernel(  # noqa: D417
    table, first, heads, count, base,
    n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12, n13, n14, n15,
):  # fmt: skip
    """Store kept blocks and offsets of up to 32 heads, which arrive as numbers of the launch.

    A captured graph replays them without memory of the host.

    Args:
        table: int32 ``[2 * heads + 1]``.
        first: First head.
        heads: All heads.
        count: Heads of this launch.
        base: Offset of the first head.
        n0: Kept blocks minus one of two heads, 16 bits each; the others alike.
    """
    index = tl.arange(0, 32)
    word, pair = tl.zeros((32,), tl.int32), index // 2
    numbers = (n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12, n13, n14, n15)
    for i in tl.static_range(16):
        word = tl.where(pair == i, numbers[i], word)
    keep = ((word >> (16 * (index % 2))) & 0xFFFF) + 1
    mask = index < count
    keep = tl.where(mask, keep, 0)
    tl.store(table + first + index, keep, mask=mask)
    tl.store(table + heads + first + index + 1, base + tl.cumsum(keep, axis=0), mask=mask)
    tl.store(table + heads + first, base)
