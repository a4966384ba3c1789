"""Latents cut into overlapping tiles whose pixels are blended."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TileConfig:
    """Tiles of a latent map.

    Attributes:
        size: latents of a tile in each direction.
        stride: latents from one tile to the next; neighbours share ``size - stride`` of them.
    """

    size: int = 16
    stride: int = 12

    def __post_init__(self) -> None:
        if not 0 < self.size <= 2 * self.stride or self.stride > self.size:
            raise ValueError(
                f"tiles of {self.size} latents every {self.stride}: the stride must be at "
                "least half the size and at most the size, so that at most two tiles overlap"
            )


@dataclass(frozen=True)
class Tile:
    """One tile.

    Attributes:
        rows: latent rows.
        columns: latent columns.
        weights: [rows, columns, 1] of its cells of 2 x 2 pixels in the blend.
    """

    rows: slice
    columns: slice
    weights: Tensor


def tiles(
    rows: int, columns: int, config: TileConfig, cells: int, device: torch.device
) -> Iterator[Tile]:
    """Yields the tiles of a map of latents; at each cell their weights add up to 1.

    Args:
        rows: of the latents.
        columns: of the latents.
        config: size and stride.
        cells: of 2 x 2 pixels along each side of a latent.
        device: of the weights.
    """
    across = [_span(place, columns, config, cells, device) for place in _starts(columns, config)]
    for place in _starts(rows, config):
        tall, down = _span(place, rows, config, cells, device)
        for broad, along in across:
            yield Tile(tall, broad, (down[:, None] * along).unsqueeze(-1))


def scaled(cells: slice, factor: int) -> slice:
    """Returns the part of a map ``factor`` times as fine."""
    return slice(factor * cells.start, factor * cells.stop)


def _starts(length: int, config: TileConfig) -> range:
    return range(0, max(1, length - (config.size - config.stride)), config.stride)


def _span(
    start: int, length: int, config: TileConfig, cells: int, device: torch.device
) -> tuple[slice, Tensor]:
    """Returns the latents of a tile along an axis, and weights of its cells: ramps in overlaps."""
    stop = min(start + config.size, length)
    weights = torch.ones((stop - start) * cells, device=device)
    overlap = (config.size - config.stride) * cells
    rising = torch.arange(overlap, device=device) / max(1, overlap)
    if start > 0:
        weights[:overlap] = rising
    if stop < length:
        weights[len(weights) - overlap :] = 1 - rising
    return slice(start, stop), weights
