"""Tiles of low-rank products and the rotation of their right factor."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from piper_kernels._triton.convrot import rotate

ROTATION_TILE = 1024


@triton.jit
def product_tile(
    left,
    right,
    rows,
    columns,
    total_rows,
    features,
    rank,
    left_row_stride,
    left_column_stride,
    right_row_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the FP32 tile ``[ROWS, COLUMNS]`` of ``left @ right``.

    Args:
        left: Pointer to floating ``[total_rows, rank]``.
        right: Pointer to floating ``[rank, features]`` with columns side by side.
        rows: int64 ``[ROWS]`` row indices, those past the end are masked.
        columns: ``[COLUMNS]`` column indices, those past the end are masked.
        total_rows: Rows of ``left``.
        features: Columns of ``right``.
        rank: Inner size; 0 gives zeros.
        left_row_stride: Elements between rows of ``left``.
        left_column_stride: Elements between columns of ``left``.
        right_row_stride: Elements between rows of ``right``.
        ROWS: Rows of the tile.
        COLUMNS: Columns of the tile.
        DEPTH: Step along the rank.
        PRECISION: ``input_precision`` of the FP32 dot.
    """
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    row_mask = (rows < total_rows)[:, None]
    column_mask = (columns < features)[None, :]
    for first in range(0, rank, DEPTH):
        depth = first + tl.arange(0, DEPTH)
        inside = depth < rank
        a = tl.load(
            left + rows[:, None] * left_row_stride + depth[None, :] * left_column_stride,
            mask=row_mask & inside[None, :],
            other=0.0,
        )
        b = tl.load(
            right + depth[:, None].to(tl.int64) * right_row_stride + columns[None, :],
            mask=column_mask & inside[:, None],
            other=0.0,
        )
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), product, input_precision=PRECISION)
    return product


@triton.jit
def rotate_rows_kernel(
    source, out, row_stride, features, tiles, GROUP: tl.constexpr, SIZE: tl.constexpr
):
    """Rotate one tile of one row into FP32."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    columns = (tl.program_id(0) % tiles) * SIZE + tl.arange(0, SIZE)[None, :]
    mask = columns < features
    dense = tl.load(source + row * row_stride + columns, mask=mask, other=0.0)
    tl.store(out + row * features + columns, rotate(dense.to(tl.float32), GROUP), mask=mask)


def rows_side_by_side(matrix: Tensor) -> Tensor:
    """Return a matrix whose rows have unit stride; copies only what has not."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def rotated_right_factor(matrix: Tensor, group_size: int) -> Tensor:
    """Return ``[rank, features]`` ready for ``product_tile``.

    Args:
        matrix: Floating ``[rank, features]``, any strides.
        group_size: Rotation group, 0 for none.

    Returns:
        The rotated matrix in FP32, or ``matrix`` with unit column stride without rotation.
    """
    source = rows_side_by_side(matrix)
    if group_size == 0:
        return source
    rank, features = source.shape
    out = torch.empty((rank, features), dtype=torch.float32, device=source.device)
    tiles = triton.cdiv(features, ROTATION_TILE)
    if rank:
        rotate_rows_kernel[(rank * tiles,)](
            source, out, source.stride(0), features, tiles, GROUP=group_size, SIZE=ROTATION_TILE
        )
    return out


def depth_step(rank: int) -> int:
    """Return the step along the rank: small enough not to multiply padding."""
    return 16 if rank <= 16 else 32
