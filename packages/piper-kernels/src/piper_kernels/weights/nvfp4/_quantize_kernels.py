"""Kernels that quantize dense weights to NVFP4. Importing needs Triton.

No value depends on more than its block of 16 or its rotation group, so tiles are independent.
A computed global scale takes a first pass over the same tiles for their maximum.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from piper_kernels._triton.convrot import rotate_mirrored
from piper_kernels._triton.nvfp4 import store_encoded_tile
from piper_kernels._triton.reductions import magnitude_bits
from piper_kernels.weights.nvfp4._encoding import MIN_PER_TENSOR_SCALE
from piper_kernels.weights.nvfp4._tiles import AMAX_SLOTS

_MIN_GLOBAL_SCALE = tl.constexpr(MIN_PER_TENSOR_SCALE)


@triton.jit
def _load_tile(
    source,
    program,
    total_rows,
    features,
    row_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return row indices (int64), the first column and the FP32 values of a tile.

    Values outside of the matrix are zero. With a ``GROUP`` other than 0 they are rotated, and
    column ``c`` of the tile holds the value of column ``c ^ (GROUP - 1)``.
    """
    tiles = tl.cdiv(features, COLUMNS)
    rows = (program // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = (program % tiles) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)[None, :]
    mask = (rows < total_rows)[:, None] & (columns < features)
    dense = tl.load(source + rows[:, None] * row_stride + columns, mask=mask, other=0.0)
    values = dense.to(tl.float32)
    if GROUP > 0:
        values = rotate_mirrored(values, GROUP)
    return rows, first, values


@triton.jit
def amax_kernel(
    source,
    amax_bits,
    total_rows,
    features,
    row_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Raise ``amax_bits``, int32 ``[AMAX_SLOTS]``, to the bits of the largest magnitude."""
    # From the last tile to the first: packing starts with what the cache still holds.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    _, _, values = _load_tile(
        source, program, total_rows, features, row_stride, GROUP, ROWS, COLUMNS
    )
    amax = tl.max(tl.max(magnitude_bits(values), axis=1), axis=0)
    tl.atomic_max(amax_bits + program % AMAX_SLOTS, amax, sem="relaxed")


@triton.jit
def pack_kernel(
    source,
    qdata_words,
    scale,
    global_scale,
    total_rows,
    features,
    scale_columns,
    row_stride,
    expert_rows,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    EXPERTS: tl.constexpr,
    SWIZZLED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Encode one tile.

    Args:
        source: Pointer to floating ``[total_rows, features]`` with unit column stride.
        qdata_words: Pointer to int32 ``[total_rows, features / 8]``, eight codes in each.
        scale: Pointer to the E4M3 bytes of the block scales; padding is not written.
        global_scale: Pointer to the FP32 global scale; read only when ``TWO_LEVEL``.
        total_rows: Rows of the matrix.
        features: Columns of the matrix, a multiple of 16 and of ``GROUP``.
        scale_columns: See ``scale_offsets``.
        row_stride: Elements between rows of ``source``.
        expert_rows: Rows that share a global scale; read only when ``EXPERTS``.
        GROUP: Rotation group, 0 for none.
        ROWS: Rows of the tile.
        COLUMNS: Columns of the tile, a multiple of ``GROUP``.
        TWO_LEVEL: Whether block scales are relative to a global scale.
        EXPERTS: Whether every ``expert_rows`` rows have a global scale of their own.
        SWIZZLED: Layout of the block scales.
        NATIVE: Whether the target converts to E2M1 with one instruction.
    """
    BLOCKS: tl.constexpr = COLUMNS // 16
    rows, first, values = _load_tile(
        source, tl.program_id(0), total_rows, features, row_stride, GROUP, ROWS, COLUMNS
    )
    row_mask = rows < total_rows
    level = 1.0
    if TWO_LEVEL:
        if EXPERTS:
            of_rows = tl.load(global_scale + rows // expert_rows, mask=row_mask, other=1.0)
            of_blocks = tl.broadcast_to(of_rows[:, None], (ROWS, BLOCKS))
            level = tl.reshape(of_blocks, (ROWS * BLOCKS,))
        else:
            level = tl.load(global_scale)
        level = tl.where(level < _MIN_GLOBAL_SCALE, _MIN_GLOBAL_SCALE, level)
    store_encoded_tile(
        values,
        level,
        qdata_words,
        scale,
        rows,
        row_mask,
        first,
        features,
        scale_columns,
        GROUP,
        TWO_LEVEL,
        SWIZZLED,
        False,
        NATIVE,
    )
