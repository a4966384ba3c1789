"""Routes of sparse attention: the launches that score and select key blocks."""

# pyright: reportArgumentType=false, reportCallIssue=false

import torch
from torch import Tensor

from piper_kernels._triton.runtime import launch_guard
from piper_kernels._triton.targets import accelerator_target, dot_precision
from piper_kernels.attention._preparation._route_kernels import (
    score_kernel,
    select_kernel,
    table_kernel,
)
from piper_kernels.attention.sparse_piper_attention._budget import RouteLayout
from piper_kernels.attention.sparse_piper_attention._routing import (
    SCORE_CHUNK,
    RoutingMode,
    RoutingSummaries,
)

_TABLE_HEADS = 32
_SCORE_TILE = {"ROWS": 64, "COLUMNS": 64, "DEPTH": 32}
_NUMBERS_PER_WARP = 512


def route_table(layout: RouteLayout, device: torch.device) -> Tensor:
    """Return what kernels read of a layout, int32 ``[2 * H + 1]``, without copying from the host.

    The first ``H`` numbers are the kept blocks of the heads, the others the offsets of their
    routes and of the end.
    """
    heads = len(layout.keep)
    table = torch.empty(2 * heads + 1, dtype=torch.int32, device=device)
    with launch_guard(device):
        for first in range(0, heads, _TABLE_HEADS):
            keep = [blocks - 1 for blocks in layout.keep[first : first + _TABLE_HEADS]]
            padded = keep + [0] * (_TABLE_HEADS - len(keep))
            words = [low | high << 16 for low, high in zip(padded[::2], padded[1::2], strict=True)]
            signed = [word - (word >> 31 << 32) for word in words]
            table_kernel[(1,)](table, first, heads, len(keep), layout.offsets[first], *signed)
    return table


def select_routes(
    summaries: RoutingSummaries,
    mode: RoutingMode,
    layout: RouteLayout,
    query_blocks: int,
    table: Tensor,
) -> Tensor:
    """Return the best key blocks of the leading query blocks, uint16 ``[B, query_blocks, R]``.

    The routes of a head ascend; among equal scores the lower block is kept.

    Args:
        summaries: Of all blocks, contiguous.
        mode: What the summaries are.
        layout: How many blocks each head keeps and where they are stored.
        query_blocks: Leading query blocks to route.
        table: Result of :func:`route_table`.
    """
    query, key, blocks = summaries.query, summaries.key, layout.blocks
    batch, heads, _, head_dim = query.shape
    shape = (batch, query_blocks, layout.routes_per_query)
    routes = query.new_empty(shape, dtype=torch.uint16)
    chunk = min(SCORE_CHUNK, query_blocks)
    scores = query.new_empty((batch * heads * chunk, blocks))
    minmax = mode is RoutingMode.MINMAX
    columns = max(1 << (blocks - 1).bit_length(), 16)
    warps = min(max(columns // _NUMBERS_PER_WARP, 1), 32)
    precision = "ieee" if accelerator_target(query.device) is None else dot_precision(query.device)
    tile = _SCORE_TILE
    with launch_guard(query.device):
        for first in range(0, query_blocks, chunk):
            queries = min(chunk, query_blocks - first)
            grid = (-(-blocks // tile["COLUMNS"]), -(-queries // tile["ROWS"]), batch * heads)
            score_kernel[grid](
                query, key, summaries.key_aux if minmax else key, scores, query.shape[2], first,
                queries, key.shape[2], blocks, heads, heads // key.shape[1],
                D=head_dim, MINMAX=minmax, PRECISION=precision, **tile,
            )  # fmt: skip
            select_kernel[(queries, batch * heads)](
                scores, table, routes, first, queries, blocks, heads, query_blocks,
                layout.routes_per_query, COLUMNS=columns, num_warps=warps,
            )  # fmt: skip
    return routes
