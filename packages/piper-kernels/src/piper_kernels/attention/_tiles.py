"""Windows of queries and tiles of keys that portable dense attention visits."""

from collections.abc import Iterator

import torch
from torch import Tensor

from piper_kernels._autocast import product

TILE_ROWS = 64


def query_windows(sequences: int, rows: int, device: torch.device) -> Iterator[slice]:
    """Return windows of query rows that bound the memory of a tile of scores.

    Rows do not influence each other, so results do not depend on the windows. On a CPU the
    scores of a window stay in the cache; elsewhere a few large windows cost fewer launches.
    """
    elements = 2**18 if device.type == "cpu" else 2**24
    step = max(elements // (max(sequences, 1) * TILE_ROWS * TILE_ROWS), 1) * TILE_ROWS
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def score_tiles(
    query_codes: Tensor,
    query_scale: Tensor,
    key_codes: Tensor,
    key_scale: Tensor,
    *,
    positions: range,
    scale: float | None,
    is_causal: bool,
) -> Iterator[tuple[slice, Tensor]]:
    """Return tiles of keys with the logits of a window of queries.

    Query heads of one key-value head lie below one another, so keys are never repeated. The
    integer products are exact in FP32.

    Args:
        query_codes: int8 ``[B, Hq, R, D]``, a window.
        query_scale: FP32 ``[B, Hq, R]``.
        key_codes: int8 ``[B, Hkv, Sk, D]``.
        key_scale: FP32 ``[B, Hkv, Sk]``.
        positions: Positions of the ``R`` queries in their sequence.
        scale: A factor of the logits; ``None`` where the query scale contains it.
        is_causal: Whether keys after their query are masked with negative infinity.

    Yields:
        The keys of a tile and FP32 ``[B, Hkv, Hq / Hkv * R, keys]``.
    """
    kv_heads, keys = key_codes.shape[1:3]
    query = fold_groups(query_codes, kv_heads).float()
    row_scale = fold_groups(query_scale[..., None], kv_heads)
    for start in range(0, min(keys, positions.stop) if is_causal else keys, TILE_ROWS):
        tile = slice(start, min(start + TILE_ROWS, keys))
        scores = product(query, key_codes[:, :, tile].float().mT)
        scores.mul_(row_scale).mul_(key_scale[:, :, None, tile])
        if scale is not None:
            scores.mul_(scale)
        if is_causal and tile.stop - 1 > positions.start:
            _mask_later_keys(scores, positions, tile)
        yield tile, scores


def fold_groups(x: Tensor, kv_heads: int) -> Tensor:
    """Lay the query heads of a key-value head below one another.

    ``[B, groups * Hkv, R, N]`` becomes ``[B, Hkv, groups * R, N]``.
    """
    return x.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def unfold_groups(x: Tensor, heads: int) -> Tensor:
    """Undo :func:`fold_groups`: ``[B, Hkv, groups * R, N]`` becomes ``[B, heads, R, N]``."""
    return x.unflatten(2, (heads // x.shape[1], -1)).flatten(1, 2)


def _mask_later_keys(scores: Tensor, positions: range, tile: slice) -> None:
    rows = torch.arange(positions.start, positions.stop, device=scores.device)
    keys = torch.arange(tile.start, tile.stop, device=scores.device)
    later = keys > rows[:, None]
    scores.unflatten(2, (-1, len(positions))).masked_fill_(later, float("-inf"))
