"""Kernels that merge a low-rank product into ConvRot INT8 storage. Importing needs Triton.

One pass takes the row maxima of the merged weight, the next one recomputes the tiles and
encodes them, a last one stores the new scales once nobody reads the old ones.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings

import triton
import triton.language as tl

from piper_kernels._triton.convrot_int8 import encode_rows, scale_from_amax
from piper_kernels._triton.products import product_tile
from piper_kernels._triton.reductions import row_amax_bits


@triton.jit(do_not_specialize=["seed"])
def product_kernel(
    left,
    right,
    qdata,
    scale,
    amax_bits,
    total_rows,
    features,
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
    STOCHASTIC: tl.constexpr,
    ENCODE: tl.constexpr,
):
    """Merge one tile and either add it to the row maxima or encode it for them.

    ``amax_bits`` is int32 ``[total_rows]``, zero before the pass with ``ENCODE=False``.
    """
    tiles = tl.cdiv(features, COLUMNS)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    row_mask = rows < total_rows
    mask = row_mask[:, None] & (columns < features)[None, :]
    values = product_tile(
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
        ROWS,
        COLUMNS,
        DEPTH,
        PRECISION,
    )
    values *= alpha
    offsets = rows[:, None] * features + columns[None, :]
    if READ_BASE:
        old = tl.load(scale + rows, mask=row_mask, other=0.0)
        codes = tl.load(qdata + offsets, mask=mask, other=0)
        values += codes.to(tl.float32) * old[:, None] * beta
    if ENCODE:
        amax = tl.load(amax_bits + rows, mask=row_mask, other=0)
        new = scale_from_amax(amax.to(tl.float32, bitcast=True))
        tl.store(qdata + offsets, encode_rows(values, new, seed, offsets, STOCHASTIC), mask=mask)
    else:
        tl.atomic_max(amax_bits + rows, row_amax_bits(values), mask=row_mask, sem="relaxed")


@triton.jit
def store_scales_kernel(amax_bits, scale, total_rows, SIZE: tl.constexpr):
    """Store the scales of the row maxima."""
    rows = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = rows < total_rows
    amax = tl.load(amax_bits + rows, mask=mask, other=0).to(tl.float32, bitcast=True)
    tl.store(scale + rows, scale_from_amax(amax), mask=mask)
