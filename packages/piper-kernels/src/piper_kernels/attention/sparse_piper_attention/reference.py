"""Portable sparse Piper attention: the numeric contract that backends reproduce.

All in FP32; integer products are exact because no sum of codes reaches 2**24. The exact
attention along the same routes measures what the quantization costs.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from piper_kernels._autocast import product
from piper_kernels.attention._online_softmax import PROBABILITY_LEVELS, OnlineSoftmax
from piper_kernels.attention.sparse_piper_attention._blocks import (
    BLOCK,
    block_count,
    to_blocks,
    valid_rows,
)
from piper_kernels.attention.sparse_piper_attention._preparation import PreparedOperands, prepare
from piper_kernels.attention.sparse_piper_attention._routing import (
    RoutingRequest,
    RoutingSummaries,
    fill_full_keep_routes,
    select_routes,
    summarize,
)

TILES_TOGETHER = 1024  # tiles of logits of one head that exist at one time


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    request: RoutingRequest,
    scale: float,
    block_lengths: Tensor | None = None,
) -> Tensor:
    """Route, quantize and attend.

    Args:
        query: Floating ``[B, S, Hq, D]``.
        key: Floating ``[B, S, Hkv, D]``.
        value: Floating ``[B, S, Hkv, D]``.
        request: Budgets and routing of the call.
        scale: Scale of the softmax.
        block_lengths: int32 ``[S / 64]``, or ``None``.

    Returns:
        FP32 ``[B, S, Hq, D]``.
    """
    rows = query.shape[1]
    valid = valid_rows(rows, block_lengths, query.device)
    q, k, v = (to_blocks(operand, valid) for operand in (query, key, value))
    summaries = None
    if needs_routing(request, block_count(rows)):
        summaries = summarize(q, k, valid, request.mode)
    routes = routes_of(request, summaries, q)
    return attend(prepare(q, k, v, valid, rows, scale), request, routes, valid)[:, :rows]


def needs_routing(request: RoutingRequest, query_blocks: int) -> bool:
    """Return whether blocks have to be scored: not when all are kept or no query is routed."""
    return request.routed_blocks(query_blocks) > 0 and not request.layout.keeps_all


def routes_of(request: RoutingRequest, summaries: RoutingSummaries | None, query: Tensor) -> Tensor:
    """Return the routes of the leading query blocks, uint16 ``[B, routed blocks, R]``.

    Args:
        request: Budgets and routing of the call.
        summaries: Of all blocks; not read when every block is kept.
        query: Blocks ``[B, Hq, n, 64, D]`` of any dtype, for the shape and device.
    """
    routed, layout = request.routed_blocks(query.shape[2]), request.layout
    if summaries is not None and needs_routing(request, query.shape[2]):
        return select_routes(summaries, request.mode, layout, routed)
    shape = (query.shape[0], routed, layout.routes_per_query)
    routes = query.new_empty(shape, dtype=torch.uint16)
    return fill_full_keep_routes(routes, layout) if layout.keeps_all else routes  # no rows


def attend(
    operands: PreparedOperands,
    request: RoutingRequest,
    routes: Tensor,
    valid: Tensor | None,
    query_block_offset: int = 0,
    query_block_count: int | None = None,
) -> Tensor:
    """Return the attention of a range of query blocks, FP32 ``[B, 64 * count, Hq, D]``.

    Args:
        operands: Codes and scales; the queries may be others than the keys.
        request: Budgets and routing of the queries.
        routes: uint16 ``[B, routed blocks, R]``, of all routed query blocks.
        valid: Which rows exist, bool ``[blocks, 64]``; ``None``: all.
        query_block_offset: First query block to compute.
        query_block_count: Query blocks to compute; ``None``: all that follow.
    """
    batch, heads, queries, features = operands.query.shape
    blocks, query_blocks = operands.key.shape[2] // BLOCK, queries // BLOCK
    stop = query_blocks if query_block_count is None else query_block_offset + query_block_count
    layout, routed = request.layout, request.routed_blocks(query_blocks)
    every = torch.arange(blocks, device=routes.device)
    suffix = every[layout.blocks :]
    shape = (batch, heads, stop - query_block_offset, BLOCK, features)
    output = operands.value_mean.new_empty(shape)
    for head in range(heads):
        columns = slice(layout.offsets[head], layout.offsets[head + 1])
        kept = layout.keep[head] + blocks - layout.blocks
        for first, last in _chunks(query_block_offset, stop, routed, kept, blocks):
            lead = (batch, last - first, -1)
            tiles = every.expand(lead)
            if first < routed:
                selected = routes[:, first:last, columns].to(torch.int64)
                tiles = torch.cat((selected, suffix.expand(lead)), dim=2)
            target = slice(first - query_block_offset, last - query_block_offset)
            output[:, head, target] = _attend_tiles(
                operands, head, slice(first, last), tiles, valid
            )
    return output.permute(0, 2, 3, 1, 4).flatten(1, 2)


def _chunks(
    start: int, stop: int, routed: int, routed_tiles: int, tiles: int
) -> Iterator[tuple[int, int]]:
    """Yield ranges of query blocks that are either all routed or all dense."""
    while start < stop:
        step = max(TILES_TOGETHER // (routed_tiles if start < routed else tiles), 1)
        end = min(start + step, stop, routed if start < routed else stop)
        yield start, end
        start = end


def _attend_tiles(
    operands: PreparedOperands, head: int, queries: slice, tiles: Tensor, valid: Tensor | None
) -> Tensor:
    """Return FP32 ``[B, Q, 64, D]`` of one head; ``tiles`` int64 ``[B, Q, T]`` are its keys.

    The softmax is online over pairs of tiles, which share one coordinate: the maximum of the
    base-2 logits plus the logarithm of the value scales. Numerator and denominator are relative
    to the largest coordinate so far; only the numerator sees rounded probabilities. Logits are
    taken relative to the largest of their row first, or large ones would absorb the logarithm.
    """
    groups = operands.query.shape[1] // operands.key.shape[1]
    kv_head = head // groups
    query = operands.query[:, head].unflatten(1, (-1, BLOCK))[:, queries].to(torch.float32)
    query_scale = operands.query_scale[:, head].unflatten(1, (-1, 2))[:, queries]
    query_scale = query_scale.repeat_interleave(BLOCK // 2, dim=-1)[..., None]  # [B, Q, 64, 1]
    keys = operands.key[:, kv_head].unflatten(1, (-1, BLOCK))
    values = operands.value[:, kv_head].unflatten(2, (-1, BLOCK)).permute(0, 2, 3, 1)
    multipliers = operands.value_multiplier[:, kv_head, :, 0]
    key_scales = operands.key_scale[:, kv_head]
    sequence = torch.arange(tiles.shape[0], device=tiles.device)[:, None, None]

    selected = (sequence, tiles)
    key = keys[selected].flatten(2, 3).to(torch.float32)  # [B, Q, 64 * T, D]
    scores = product(query, key.transpose(-1, -2)) * query_scale * _per_row(key_scales[selected])
    if valid is not None:
        scores = scores.masked_fill(~valid[tiles].flatten(2, 3)[:, :, None], -torch.inf)
    scores = scores - scores.amax(-1, keepdim=True)

    state = OnlineSoftmax.start(query.shape[:3], query.shape[3], query.device)
    for start in range(0, tiles.shape[2], 2):
        pair = (sequence, tiles[:, :, start : start + 2])
        multiplier = multipliers[pair]
        state.add(
            scores[..., start * BLOCK : (start + 2) * BLOCK],
            values[pair].flatten(2, 3),
            _per_row((multiplier / PROBABILITY_LEVELS).log2()),
            [_per_row(multiplier)],
            torch.exp2,
        )
    return state.output(operands.value_mean[:, None, kv_head])


def _per_row(per_tile: Tensor) -> Tensor:
    """Return ``[B, Q, 1, 64 * tiles]`` of ``[B, Q, tiles]``."""
    return per_tile.repeat_interleave(BLOCK, dim=-1)[:, :, None]


def exact_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    request: RoutingRequest,
    scale: float,
    block_lengths: Tensor | None = None,
) -> Tensor:
    """Attend along the same routes without quantization: the oracle of the quality.

    Holds all logits; arguments and result are those of :func:`sparse_attention`.
    """
    rows = query.shape[1]
    valid = valid_rows(rows, block_lengths, query.device)
    blocks = [to_blocks(operand, valid) for operand in (query, key, value)]
    summaries = summarize(blocks[0], blocks[1], valid, request.mode)
    routes = routes_of(request, summaries, blocks[0])
    q, k, v = (block.flatten(2, 3) for block in blocks)
    k, v = (kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1) for kv in (k, v))
    attended = _attended_blocks(request, routes, q.shape[1], blocks[0].shape[2])
    attended = attended.repeat_interleave(BLOCK, dim=2).repeat_interleave(BLOCK, dim=3)
    if valid is not None:
        attended = attended & valid.flatten()
    logits = (product(q, k.transpose(-1, -2)) * scale).masked_fill(~attended, -torch.inf)
    return product(logits.softmax(dim=-1), v).transpose(1, 2)[:, :rows]


def _attended_blocks(request: RoutingRequest, routes: Tensor, heads: int, blocks: int) -> Tensor:
    """Return which key blocks a query block attends to, bool ``[B, Hq, blocks, blocks]``."""
    shape = (routes.shape[0], heads, blocks, blocks)
    attended = torch.ones(shape, dtype=torch.bool, device=routes.device)
    layout, routed = request.layout, request.routed_blocks(blocks)
    attended[:, :, :routed, : layout.blocks] = False
    for head in range(heads):
        kept = routes[..., layout.offsets[head] : layout.offsets[head + 1]].to(torch.int64)
        attended[:, head, :routed].scatter_(2, kept, True)
    return attended
