"""Rows of a sequence in blocks of 64, and which of them exist."""

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 64


def block_count(rows: int) -> int:
    """Return the blocks that ``rows`` rows occupy, the last one possibly in part."""
    return (rows + BLOCK - 1) // BLOCK


def valid_rows(rows: int, block_lengths: Tensor | None, device: torch.device) -> Tensor | None:
    """Return which rows of every block exist, bool ``[blocks, 64]``; ``None``: all of them.

    Args:
        rows: Rows of the sequence.
        block_lengths: int32 ``[blocks]``, valid rows at the front of each block; ``None`` when
            every one of the ``rows`` exists.
        device: Where the mask is needed.
    """
    if block_lengths is not None:
        return torch.arange(BLOCK, device=device) < block_lengths[:, None]
    if rows % BLOCK == 0:
        return None
    padded = block_count(rows) * BLOCK
    return (torch.arange(padded, device=device) < rows).view(-1, BLOCK)


def to_blocks(rows: Tensor, valid: Tensor | None) -> Tensor:
    """Return ``[B, S, H, D]`` as FP32 blocks ``[B, H, blocks, 64, D]``, rows not valid zero."""
    padding = -rows.shape[1] % BLOCK
    padded = functional.pad(rows.to(torch.float32), (0, 0, 0, 0, 0, padding))
    blocks = padded.unflatten(1, (-1, BLOCK)).permute(0, 3, 1, 2, 4)
    # A selection, not a product: what padded rows hold may be NaN.
    return blocks if valid is None else torch.where(valid[:, :, None], blocks, 0.0)


def rows_per_block(valid: Tensor | None) -> Tensor | float:
    """Return the number of valid rows of each block, FP32 ``[blocks, 1]`` or a number."""
    return float(BLOCK) if valid is None else valid.sum(-1, keepdim=True, dtype=torch.float32)


def block_means(blocks: Tensor, valid: Tensor | None) -> Tensor:
    """Return the mean over the valid rows of blocks that are zero elsewhere, ``[B, H, n, D]``."""
    return blocks.sum(-2) / rows_per_block(valid)
