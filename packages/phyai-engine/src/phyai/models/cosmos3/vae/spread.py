"""The end of a decoder block: outputs of each cell between each other, plus the block's input."""

import torch
from torch import Tensor

from phyai.models.cosmos3.vae.config import Factors, spread_axes
from phyai.models.cosmos3.vae.rows import fused


def spread(phases: Tensor, bias: Tensor, source: Tensor, factors: Factors) -> Tensor:
    """Interleaves the outputs of cells and adds bias and the block's input, in fp32 on a GPU.

    Channels of the input are repeated until they fill the cells (channel, frame, row, column). In
    the first chunk, whose frame is not multiplied, the last frame of the cell counts.

    Args:
        phases: [T', H + 1, W + 1, 4 * C], contiguous: for output rows and columns of even and odd
            index (row parity, column parity, channel); those of odd index begin one cell later.
        bias: [C].
        source: [T, H, W, I], contiguous.
        factors: frames, rows and columns of a cell; rows and columns are 2.

    Returns:
        [T', 2H, 2W, C].
    """
    if fused(phases):
        from phyai.triton import channel_rows

        return channel_rows.spread(phases, bias, source, factors[0])
    frames, rows, columns, _ = source.shape
    steps, width = phases.shape[0] // frames, len(bias)
    kept = spread_axes(width, source.shape[-1], factors)
    cells = source.view(frames, rows, columns, width, *kept).expand(-1, -1, -1, -1, *factors)
    cells = cells.permute(0, 4, 1, 5, 2, 6, 3)  # [T, time, H, 2, W, 2, C]
    cells = cells[:, factors[0] - steps :]
    places = phases.view(frames, steps, rows + 1, columns + 1, 2, 2, width)
    out = source.new_empty(frames, steps, rows, 2, columns, 2, width)
    for row in range(2):
        for column in range(2):
            seen = places[:, :, row : row + rows, column : column + columns, row, column] + bias
            torch.add(seen, cells[:, :, :, row, :, column], out=out[:, :, :, row, :, column])
    return out.view(frames * steps, 2 * rows, 2 * columns, width)
