"""Byte layout of NVFP4 storage: nibble order, and block scales in plain and swizzled order.

Swizzled scales follow the 128x4 layout of cuBLAS block-scaled GEMMs: the logical
``[rows, blocks]`` matrix is padded with zero bytes to tiles of 128 x 4, every tile takes 512
consecutive bytes, and within a tile row ``r`` and block ``c`` sit at byte
``(r % 32) * 16 + (r // 32) * 4 + c``.
"""

import torch
from torch import Tensor

BLOCK_SIZE = 16
QDATA_BLOCK_SIZE = 8
SCALE_ROW_TILE = 128
SCALE_COLUMN_TILE = 64

_TILE_BLOCKS = SCALE_COLUMN_TILE // BLOCK_SIZE


def swap_packed_pairs(qdata: Tensor) -> Tensor:
    """Exchange the two nibbles of every byte; its own inverse."""
    return ((qdata & 0x0F) << 4) | (qdata >> 4)


def pack_codes(codes: Tensor, *, high_first: bool = False) -> Tensor:
    """Pack uint8 codes ``[..., K]`` of four bits into ``[..., K / 2]`` bytes.

    The even feature takes the low nibble, or the high one with ``high_first``.
    """
    even, odd = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return odd | (even << 4) if high_first else even | (odd << 4)


def ceil_div(value: int, divisor: int) -> int:
    """Return the quotient rounded up."""
    return -(-value // divisor)


def scale_shape(rows: int, features: int, *, swizzled: bool) -> tuple[int, int]:
    """Return the canonical 2-D shape of the block scales of a ``[rows, features]`` weight."""
    if not swizzled:
        return rows, features // BLOCK_SIZE
    return (
        ceil_div(rows, SCALE_ROW_TILE) * 32,
        ceil_div(features, SCALE_COLUMN_TILE) * BLOCK_SIZE,
    )


def stacked_scale_shape(shape: tuple[int, ...], *, swizzled: bool) -> tuple[int, ...]:
    """Return the canonical shape of the block scales of a ``[..., rows, features]`` weight."""
    return *shape[:-2], *scale_shape(shape[-2], shape[-1], swizzled=swizzled)


def swizzle_scale(scale: Tensor) -> Tensor:
    """Reorder plain scales into 128x4 tiles, padding with zero bytes.

    Args:
        scale: ``[rows, blocks]`` of a dtype of one byte.

    Returns:
        A new tensor of the same dtype, ``[ceil(rows / 128) * 32, ceil(blocks / 4) * 16]``.
    """
    rows, blocks = scale.shape
    row_tiles = ceil_div(rows, SCALE_ROW_TILE)
    column_tiles = ceil_div(blocks, _TILE_BLOCKS)
    # Bytes: the padding must be exact zeros and float8 has few operators.
    padded = scale.new_zeros(
        (row_tiles * SCALE_ROW_TILE, column_tiles * _TILE_BLOCKS), dtype=torch.uint8
    )
    padded[:rows, :blocks] = scale.view(torch.uint8)
    tiles = padded.view(row_tiles, 4, 32, column_tiles, _TILE_BLOCKS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(row_tiles * 32, column_tiles * BLOCK_SIZE).view(scale.dtype)


def unswizzle_scale(scale: Tensor, rows: int, blocks: int) -> Tensor:
    """Restore plain scales ``[rows, blocks]`` from 128x4 tiles, dropping the padding.

    Args:
        scale: Tiles of a dtype of one byte, in any shape with the right number of bytes.
        rows: Logical rows.
        blocks: Logical blocks per row.
    """
    row_tiles = ceil_div(rows, SCALE_ROW_TILE)
    column_tiles = ceil_div(blocks, _TILE_BLOCKS)
    tiles = scale.contiguous().view(torch.uint8).view(row_tiles, column_tiles, 32, 4, _TILE_BLOCKS)
    padded = tiles.permute(0, 3, 2, 1, 4).reshape(
        row_tiles * SCALE_ROW_TILE, column_tiles * _TILE_BLOCKS
    )
    return padded[:rows, :blocks].contiguous().view(scale.dtype)
