"""Portable quantization of projected value heads: the contract of the kernels."""

import torch
from torch import Tensor

from piper_kernels.attention._online_softmax import PROBABILITY_LEVELS
from piper_kernels.attention._quantization import (
    Granularity,
    quantize_groups,
    quantize_value_rows,
)
from piper_kernels.attention.sparse_piper_attention._blocks import block_means, to_blocks


def encode_value(
    heads: Tensor, mean: Tensor | None, valid: Tensor | None, *, per_tile: bool
) -> tuple[Tensor, Tensor]:
    """Center, quantize and transpose value heads.

    Args:
        heads: FP32 ``[B, S, H, D]`` as projected.
        mean: FP32 ``[B, H, D]`` to subtract; ``None``: nothing.
        valid: Which rows exist, bool ``[blocks, 64]``; ``None``: all.
        per_tile: Whether 64 rows share a scale instead of every row having one.

    Returns:
        int8 codes ``[B, H, D, S']`` with ``S'`` rounded up to 64 and rows that do not exist zero,
        and FP32 255 times the scales: ``[B, H, S' / 64, 1]`` per tile, else ``[B, H, S']``.
    """
    blocks = to_blocks(heads, valid)
    if mean is not None:
        blocks = blocks - mean[:, :, None, None]
        if valid is not None:
            blocks = torch.where(valid[:, :, None], blocks, 0.0)
    rows = blocks.flatten(2, 3)
    if per_tile:
        codes, scale = quantize_groups(rows, Granularity.PER_WARP.key)
        scale = scale[..., ::64, None].contiguous()
    else:
        codes, scale = quantize_value_rows(rows)
    return codes.mT.contiguous(), scale * PROBABILITY_LEVELS


def value_block_means(heads: Tensor, valid: Tensor | None) -> Tensor:
    """Return the means of blocks of 64 rows over those that exist, FP32 ``[B, H, blocks, D]``."""
    return block_means(to_blocks(heads, valid), valid)
