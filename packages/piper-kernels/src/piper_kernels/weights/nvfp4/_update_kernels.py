"""Kernels that merge updates into NVFP4 storage. Importing needs Triton.

With one scale level a tile is merged and packed in one pass. With two levels a first pass
takes the maximum of the merged weight, a second one recomputes the tiles and packs them, and
the new global scale is stored once nobody reads the old one.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import triton
import triton.language as tl

from piper_kernels._triton.convrot import rotate
from piper_kernels._triton.nvfp4 import global_scale_from_amax
from piper_kernels._triton.products import product_tile
from piper_kernels.weights.nvfp4._tiles import finish_tile, load_base, slots_amax


@triton.jit(do_not_specialize=["seed"])
def dense_kernel(
    source,
    qdata,
    scale,
    global_scale,
    amax_bits,
    total_rows,
    features,
    scale_columns,
    row_stride,
    alpha,
    seed,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    SWIZZLED: tl.constexpr,
    HIGH_FIRST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    NATIVE: tl.constexpr,
    PACK: tl.constexpr,
):
    """Merge ``alpha`` times a dense tile, rotated by ``GROUP`` unless that is 0."""
    tiles = tl.cdiv(features, COLUMNS)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = (tl.program_id(0) % tiles) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)[None, :]
    mask = (rows < total_rows)[:, None] & (columns < features)
    dense = tl.load(source + rows[:, None] * row_stride + columns, mask=mask, other=0.0)
    values = dense.to(tl.float32)
    if GROUP > 0:
        values = rotate(values, GROUP)
    values = values * alpha + load_base(
        qdata,
        scale,
        global_scale,
        rows,
        first,
        total_rows,
        features,
        scale_columns,
        ROWS,
        COLUMNS,
        TWO_LEVEL,
        SWIZZLED,
        HIGH_FIRST,
    )
    finish_tile(
        values,
        qdata,
        scale,
        amax_bits,
        rows,
        first,
        total_rows,
        features,
        scale_columns,
        seed,
        ROWS,
        COLUMNS,
        TWO_LEVEL,
        SWIZZLED,
        HIGH_FIRST,
        STOCHASTIC,
        NATIVE,
        PACK,
    )


@triton.jit(do_not_specialize=["seed"])
def product_kernel(
    left,
    right,
    qdata,
    scale,
    global_scale,
    amax_bits,
    total_rows,
    features,
    scale_columns,
    rank,
    left_row_stride,
    left_column_stride,
    right_row_stride,
    beta,
    alpha,
    seed,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    READ_BASE: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    SWIZZLED: tl.constexpr,
    HIGH_FIRST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    NATIVE: tl.constexpr,
    PACK: tl.constexpr,
):
    """Merge ``beta`` times the stored tile and ``alpha`` times a tile of ``left @ right``."""
    tiles = tl.cdiv(features, COLUMNS)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = (tl.program_id(0) % tiles) * COLUMNS
    values = product_tile(
        left,
        right,
        rows,
        first + tl.arange(0, COLUMNS),
        total_rows,
        features,
        rank,
        left_row_stride,
        left_column_stride,
        right_row_stride,
        ROWS,
        COLUMNS,
        DEPTH,
        PRECISION,
    )
    values *= alpha
    if READ_BASE:
        base = load_base(
            qdata,
            scale,
            global_scale,
            rows,
            first,
            total_rows,
            features,
            scale_columns,
            ROWS,
            COLUMNS,
            TWO_LEVEL,
            SWIZZLED,
            HIGH_FIRST,
        )
        values += base * beta
    finish_tile(
        values,
        qdata,
        scale,
        amax_bits,
        rows,
        first,
        total_rows,
        features,
        scale_columns,
        seed,
        ROWS,
        COLUMNS,
        TWO_LEVEL,
        SWIZZLED,
        HIGH_FIRST,
        STOCHASTIC,
        NATIVE,
        PACK,
    )


@triton.jit
def store_global_scale_kernel(amax_bits, global_scale):
    """Store the global scale of the maxima."""
    tl.store(global_scale, global_scale_from_amax(slots_amax(amax_bits)))
