"""Sparse Piper attention along packed routes over prepared operands, in plain Triton."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl

from piper_kernels.attention._mixed_sign_kernels.products import (
    add_products,
    counted,
    mark,
    start_counting,
    to_codes,
)
from piper_kernels.attention._mixed_sign_kernels.recurrence import (
    load_rows,
    log_scale,
    rescale,
    tile_scores,
    value_tile,
)


@triton.jit
def routed_tile(index, keep, routes, route_blocks, ROUTED):
    """Return the key block at a position of the list: routes, then the blocks behind them."""
    if ROUTED:
        inside = index < keep
        routed = tl.load(routes + index, mask=inside, other=0).to(tl.int32)
        return tl.where(inside, routed, index - keep + route_blocks)
    return index


@triton.jit
def block_scores(
    query, query_scale, key_codes, key_scale, lengths, block, exists, rows, HEAD_DIM: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Return the logits of a block, FP32 ``[64, 64]``; negative infinity where no key exists."""
    scores = tile_scores(query, query_scale, key_codes, key_scale, block * 64, HEAD_DIM, False)
    column = tl.arange(0, 64)
    visible = block * 64 + column < rows
    if HAS_LENGTHS:
        visible = column < tl.load(lengths + block)
    return tl.where((visible & exists)[None, :], scores, float("-inf"))


@triton.jit
def attend_list(
    query,
    query_scale,
    key_codes,
    key_scale,
    value_codes,
    value_multiplier,
    lengths,
    routes,
    count,
    keep,
    route_blocks,
    rows,
    stored,
    HEAD_DIM: tl.constexpr,
    ROUTED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    PACKED: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Visit ``count`` blocks in pairs that share a coordinate; return numerator, denominator."""
    numerator = tl.zeros((64, HEAD_DIM), tl.float32)
    denominator = tl.zeros((64,), tl.float32)
    maximum = tl.full((64,), float("-inf"), tl.float32)
    offset = tl.zeros((64,), tl.float32)
    for index in range(0, count, 2):
        paired = index + 1 < count
        block = routed_tile(index, keep, routes, route_blocks, ROUTED)
        other = routed_tile(tl.where(paired, index + 1, index), keep, routes, route_blocks, ROUTED)
        scores = block_scores(
            query, query_scale, key_codes, key_scale, lengths, block, True, rows, HEAD_DIM,
            HAS_LENGTHS,
        )  # fmt: skip
        others = block_scores(
            query, query_scale, key_codes, key_scale, lengths, other, paired, rows, HEAD_DIM,
            HAS_LENGTHS,
        )  # fmt: skip
        multiplier = tl.load(value_multiplier + block)
        other_multiplier = tl.load(value_multiplier + other)
        first_maximum, second_maximum = tl.max(scores, 1), tl.max(others, 1)
        pair_maximum = tl.maximum(first_maximum, second_maximum)
        pair_offset = tl.maximum(
            first_maximum - pair_maximum + log_scale(multiplier, False),
            second_maximum - pair_maximum + log_scale(other_multiplier, False),
        )
        # Subtracted one after the other: a large score would absorb the offset.
        p = tl.exp2(scores - pair_maximum[:, None] - pair_offset[:, None])
        q = tl.exp2(others - pair_maximum[:, None] - pair_offset[:, None])
        old_weight, weight, maximum, offset = rescale(maximum, offset, pair_maximum, pair_offset)
        denominator = denominator * old_weight + (tl.sum(p, 1) + tl.sum(q, 1)) * weight
        values = value_tile(value_codes, block * 64, stored, 0, HEAD_DIM)
        sums = start_counting(64, HEAD_DIM)
        sums = add_products(sums, to_codes(p * multiplier, PACKED), values, PRODUCT)
        values = value_tile(value_codes, other * 64, stored, 0, HEAD_DIM)
        sums = add_products(sums, to_codes(q * other_multiplier, PACKED), values, PRODUCT)
        sums = mark(sums, PRODUCT)
        numerator = numerator * old_weight[:, None] + counted(sums) * weight[:, None]
    return numerator, denominator


@triton.jit(
    do_not_specialize=[
        "rows", "blocks", "first_block", "range_blocks", "routed_blocks", "route_blocks",
        "routes_per_query", "heads", "query_blocks", "query_rows",
    ]
)  # fmt: skip
def sparse_kernel(
    query_codes,
    query_scale,
    key_codes,
    key_scale,
    value_codes,
    value_multiplier,
    value_mean,
    lengths,
    routes,
    table,
    coarse,
    gate,
    out,
    rows,
    blocks,
    first_block,
    range_blocks,
    routed_blocks,
    route_blocks,
    routes_per_query,
    heads,
    query_blocks,
    query_rows,
    gate_batch_stride,
    gate_row_stride,
    gate_head_stride,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    ROUTED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_COARSE: tl.constexpr,
    PACKED: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Attend from one block of 64 queries of one head to its blocks of keys.

    Args:
        query_codes: Pointer to int8 ``[B, heads, 64 * query_blocks, HEAD_DIM]``.
        query_scale: Pointer to FP32 ``[B, heads, 2 * query_blocks]`` with logit factor and
            ``log2(e)``.
        key_codes: Pointer to int8 ``[B, heads / GROUPS, 64 * blocks, HEAD_DIM]``.
        key_scale: Pointer to FP32 ``[B, heads / GROUPS, blocks]``.
        value_codes: Pointer to int8 ``[B, heads / GROUPS, HEAD_DIM, 64 * blocks]``.
        value_multiplier: Pointer to FP32 ``[B, heads / GROUPS, blocks]``.
        value_mean: Pointer to FP32 ``[B, heads / GROUPS, HEAD_DIM]``.
        lengths: Pointer to int32 ``[blocks]``; read with ``HAS_LENGTHS``.
        routes: Pointer to uint16 ``[B, routed_blocks, routes_per_query]``; read with ``ROUTED``.
        table: Pointer to int32, the kept blocks of the heads and the offsets of their routes.
        coarse: Pointer to FP32 ``[B, heads, query_blocks, HEAD_DIM]``; read with ``HAS_COARSE``.
        gate: Pointer to floating ``[B, query_rows, heads, HEAD_DIM]``; read with ``HAS_COARSE``.
        out: Pointer to floating ``[B, rows of the range, heads, HEAD_DIM]``.
        rows: Keys that exist, or all of them with ``HAS_LENGTHS``.
        blocks: Blocks of keys.
        first_block: First block of queries of the range.
        range_blocks: Blocks of queries of the range.
        routed_blocks: Leading blocks of queries that are routed.
        route_blocks: Leading blocks of keys that are routed.
        routes_per_query: Columns of the routes.
        heads: Query heads.
        query_blocks: Stored blocks of queries.
        query_rows: Queries that exist.
        gate_batch_stride: Elements between sequences of the gate.
        gate_row_stride: Elements between rows of the gate.
        gate_head_stride: Elements between heads of the gate.
        HEAD_DIM: 64 or 128.
        GROUPS: Query heads per key-value head.
        ROUTED: Whether any block of queries is routed; else all see all blocks.
        HAS_LENGTHS: Whether blocks have lengths.
        HAS_COARSE: Whether the gated coarse result is added.
        PACKED: Whether codes are converted four at a time.
        PRODUCT: How codes are multiplied; see ``products``.
    """
    lead = (tl.program_id(0) // range_blocks).to(tl.int64)
    query_block = tl.program_id(0) % range_blocks + first_block
    batch = lead // heads
    head = lead % heads
    kv_lead = batch * (heads // GROUPS) + head // GROUPS
    stored = blocks * 64
    keep, behind, count = 0, 0, blocks
    if ROUTED:
        # Blocks of queries behind the routed ones see all blocks of keys: none by a route.
        dense = query_block >= routed_blocks
        keep = tl.where(dense, 0, tl.load(table + head))
        behind = tl.where(dense, 0, route_blocks)
        count = keep + blocks - behind
        routes += (batch * routed_blocks + query_block) * routes_per_query
        routes += tl.load(table + heads + head)
    start = query_block * 64
    row = start + tl.arange(0, 64)
    stored_queries = query_blocks * 64
    query_codes += lead * stored_queries * HEAD_DIM
    query = load_rows(query_codes, start, stored_queries, HEAD_DIM, 64)
    scale = tl.load(query_scale + lead * (query_blocks * 2) + row // 32)
    key_codes += kv_lead * stored * HEAD_DIM
    key_scale += kv_lead * blocks
    value_codes += kv_lead * stored * HEAD_DIM
    value_multiplier += kv_lead * blocks
    numerator, denominator = attend_list(
        query, scale, key_codes, key_scale, value_codes, value_multiplier, lengths, routes, count,
        keep, behind, rows, stored, HEAD_DIM, ROUTED, HAS_LENGTHS, PACKED, PRODUCT,
    )  # fmt: skip
    feature = tl.arange(0, HEAD_DIM)
    result = numerator / (tl.maximum(denominator, 1e-30) * 255.0)[:, None]
    result += tl.load(value_mean + kv_lead * HEAD_DIM + feature)[None, :]
    inside = (row < query_rows)[:, None]
    if HAS_COARSE:
        gate += batch * gate_batch_stride + head * gate_head_stride
        gate_at = gate + row.to(tl.int64)[:, None] * gate_row_stride + feature[None, :]
        gates = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
        coarse_at = coarse + (lead * query_blocks + query_block) * HEAD_DIM + feature
        result += gates * tl.load(coarse_at)[None, :]
    range_rows = tl.minimum(range_blocks * 64, query_rows - first_block * 64)
    at = (batch * range_rows + (row - first_block * 64).to(tl.int64))[:, None] * heads + head
    at = at * HEAD_DIM + feature[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
