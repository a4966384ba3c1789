"""Which key blocks the heads of a query block attend to, from summaries of both."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from piper_kernels._autocast import product
from piper_kernels.attention.sparse_piper_attention._blocks import block_means
from piper_kernels.attention.sparse_piper_attention._budget import LABEL, RouteLayout, route_layout

SCORE_CHUNK = 384  # query blocks whose scores exist at one time


class RoutingMode(IntEnum):
    """How a block is summarized; the numbers are private to the operators' schemas."""

    MINMAX = 0
    MEAN = 1


_MODES = {mode.name.lower(): mode for mode in RoutingMode}  # tracing cannot iterate over an enum


def routing_mode(name: str, label: str = LABEL) -> RoutingMode:
    """Return the mode of a public name.

    Raises:
        ValueError: The name is not one of them.
    """
    if name not in _MODES:
        allowed = ", ".join(repr(known) for known in _MODES)
        raise ValueError(f"{label}: routing must be one of {allowed}, got {name!r}")
    return _MODES[name]


@dataclass(frozen=True)
class RoutingRequest:
    """What of a call's routing the host knows.

    Attributes:
        units: Keep ratio of each query head in millionths.
        sparse_key_blocks: Leading complete key blocks that are routed.
        mode: How blocks are summarized.
        sparse_query_blocks: Leading query blocks that are routed; ``None``: all.
    """

    units: tuple[int, ...]
    sparse_key_blocks: int
    mode: RoutingMode
    sparse_query_blocks: int | None = None

    @classmethod
    def of(
        cls, units: Sequence[int], key_blocks: int, mode: int, query_blocks: int | None
    ) -> "RoutingRequest":
        """Return the request that the arguments of an operator stand for."""
        return cls(tuple(units), key_blocks, RoutingMode(mode), query_blocks)

    @property
    def layout(self) -> RouteLayout:
        """The packed layout of the routes."""
        return route_layout(self.units, self.sparse_key_blocks)

    def routed_blocks(self, query_blocks: int) -> int:
        """Return how many of ``query_blocks`` are routed."""
        return query_blocks if self.sparse_query_blocks is None else self.sparse_query_blocks


@dataclass(frozen=True)
class RoutingSummaries:
    """FP32 summaries of 64-row blocks of unquantized queries and keys.

    Attributes:
        query: ``[B, Hq, query blocks, D]``: maximum plus minimum, or mean.
        key: ``[B, Hkv, key blocks, D]``: maximum, or mean.
        key_aux: ``[B, Hkv, key blocks, D]``: minimum; no blocks when the mode is the mean.
    """

    query: Tensor
    key: Tensor
    key_aux: Tensor


def query_summary(blocks: Tensor, valid: Tensor | None, mode: RoutingMode) -> Tensor:
    """Return the summary of query blocks ``[B, Hq, n, 64, D]``."""
    if mode is RoutingMode.MEAN:
        return block_means(blocks, valid)
    low, high = _extrema(blocks, valid)
    return high + low


def key_summary(blocks: Tensor, valid: Tensor | None, mode: RoutingMode) -> tuple[Tensor, Tensor]:
    """Return both summaries of key blocks ``[B, Hkv, n, 64, D]``."""
    if mode is RoutingMode.MEAN:
        return block_means(blocks, valid), blocks.new_empty((*blocks.shape[:2], 0, blocks.shape[4]))
    low, high = _extrema(blocks, valid)
    return high, low


def summarize(
    query: Tensor, key: Tensor, valid: Tensor | None, mode: RoutingMode
) -> RoutingSummaries:
    """Return the summaries of blocks ``[B, H, n, 64, D]``."""
    return RoutingSummaries(query_summary(query, valid, mode), *key_summary(key, valid, mode))


def _extrema(blocks: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    if valid is None:
        return blocks.amin(-2), blocks.amax(-2)
    padded = ~valid[:, :, None]
    low = blocks.masked_fill(padded, torch.inf).amin(-2)
    return low, blocks.masked_fill(padded, -torch.inf).amax(-2)


def block_scores(
    summaries: RoutingSummaries,
    mode: RoutingMode,
    query_blocks: slice,
    key_blocks: int,
    scale: float | None = None,
) -> Tensor:
    """Return FP32 scores ``[B, Hq, queries, key_blocks]``, optionally scaled.

    Args:
        summaries: Of all blocks.
        mode: What the summaries are.
        query_blocks: The query blocks to score.
        key_blocks: Leading key blocks to score them against.
        scale: Positive factor of the scores.
    """
    query = summaries.query[:, :, query_blocks]
    heads = summaries.key.shape[1]
    # Head h scores against KV head h // groups.
    grouped = query.unflatten(1, (heads, query.shape[1] // heads))
    scores = product(grouped, summaries.key[:, :, None, :key_blocks].transpose(-1, -2))
    if mode is RoutingMode.MINMAX:
        low = product(grouped, summaries.key_aux[:, :, None, :key_blocks].transpose(-1, -2))
        scores = torch.maximum(scores, low)
    scores = scores.flatten(1, 2)
    return scores if scale is None else scores * scale


def select_routes(
    summaries: RoutingSummaries, mode: RoutingMode, layout: RouteLayout, query_blocks: int
) -> Tensor:
    """Return the best key blocks of the leading query blocks, uint16 ``[B, query_blocks, R]``.

    The routes of a head ascend; among equal scores the lower block is kept.

    Args:
        summaries: Of all blocks.
        mode: What the summaries are.
        layout: How many blocks each head keeps and where they are stored.
        query_blocks: Leading query blocks to route.
    """
    query = summaries.query
    shape = (query.shape[0], query_blocks, layout.routes_per_query)
    routes = query.new_empty(shape, dtype=torch.uint16)
    for start in range(0, query_blocks, SCORE_CHUNK):
        chunk = slice(start, min(start + SCORE_CHUNK, query_blocks))
        scores = block_scores(summaries, mode, chunk, layout.blocks)
        order = scores.argsort(dim=-1, descending=True, stable=True)
        for head, keep in enumerate(layout.keep):
            columns = slice(layout.offsets[head], layout.offsets[head + 1])
            routes[:, chunk, columns] = (
                order[:, head, :, :keep].sort(dim=-1).values.to(routes.dtype)
            )
    return routes


def fill_full_keep_routes(routes: Tensor, layout: RouteLayout) -> Tensor:
    """Fill ``[B, query blocks, R]`` with all blocks for every head and return it.

    Launches without reading anything back, so it can be captured in a graph.
    """
    every = torch.arange(layout.blocks, device=routes.device, dtype=torch.int32)
    routes.unflatten(2, (len(layout.keep), layout.blocks)).copy_(every)
    return routes
