"""Between pixels [3, T, H, W] and frames [T, rows, columns, channels]."""

import torch
from torch import Tensor

PATCH = 2
CELL = 12
"""Channels of a cell: three colours of 2 x 2 pixels."""


def to_frames(pixels: Tensor) -> Tensor:
    """Merges 2 x 2 pixels into a cell (colour, column, row): [3, T, H, W] to [T, H/2, W/2, 12]."""
    colours, frames, height, width = pixels.shape
    cells = pixels.reshape(colours, frames, height // PATCH, PATCH, width // PATCH, PATCH)
    return cells.permute(1, 2, 4, 0, 5, 3).flatten(3).contiguous()


def to_pixels(frames: Tensor) -> Tensor:
    """Undoes `to_frames` and clips to [-1, 1]: [T, H, W, 12] to [3, T, 2H, 2W]."""
    count, rows, columns, channels = frames.shape
    cells = frames.reshape(count, rows, columns, channels // PATCH**2, PATCH, PATCH)
    pixels = cells.permute(3, 0, 1, 5, 2, 4).reshape(-1, count, PATCH * rows, PATCH * columns)
    return torch.clamp(pixels, -1.0, 1.0)
