"""Kernels that convert packed GGUF rows to ConvRot INT8. Importing this requires Triton."""

# ruff: noqa: ANN001, ANN201, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from piper_kernels._triton.convrot_int8 import (
    encode_rows,
    scale_from_amax,
    store_mirrored_codes,
)
from piper_kernels._triton.reductions import row_amax, row_amax_bits
from piper_kernels._triton.row_chunks import RowChunks
from piper_kernels._triton.runtime import as_words, launch_guard
from piper_kernels.gguf.triton import load_mirrored_tile
from piper_kernels.weights.convrot.int8._gguf_policy import TiledRows


@triton.jit
def _store_codes(
    words, values, scale, first_row, rows, first_unit, units_per_row, GROUP: tl.constexpr
):
    codes = encode_rows(values, scale, 0, 0, False)
    row = first_row + tl.arange(0, values.shape[0])
    features = units_per_row * 16
    store_mirrored_codes(codes, words, row, row < rows, first_unit * 16, features, GROUP)


@triton.jit
def convert_rows_kernel(
    data,
    words,
    scale,
    rows,
    units_per_row,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    TYPE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Convert ``ROWS`` whole rows; ``COUNT`` chunks of ``SIZE`` values stay in registers."""
    UNITS: tl.constexpr = SIZE // 16
    row = tl.program_id(0).to(tl.int64) * ROWS
    first = load_mirrored_tile(data, row, rows, 0, units_per_row, ROWS, SIZE, TYPE, GROUP)
    bits = row_amax_bits(first)
    if COUNT > 1:
        second = load_mirrored_tile(data, row, rows, UNITS, units_per_row, ROWS, SIZE, TYPE, GROUP)
        bits = tl.maximum(bits, row_amax_bits(second))
    if COUNT > 2:
        third = load_mirrored_tile(
            data, row, rows, 2 * UNITS, units_per_row, ROWS, SIZE, TYPE, GROUP
        )
        bits = tl.maximum(bits, row_amax_bits(third))
    row_scale = scale_from_amax(bits.to(tl.float32, bitcast=True))
    index = row + tl.arange(0, ROWS)
    tl.store(scale + index, row_scale, mask=index < rows)
    _store_codes(words, first, row_scale, row, rows, 0, units_per_row, GROUP)
    if COUNT > 1:
        _store_codes(words, second, row_scale, row, rows, UNITS, units_per_row, GROUP)
    if COUNT > 2:
        _store_codes(words, third, row_scale, row, rows, 2 * UNITS, units_per_row, GROUP)


@triton.jit
def tile_maxima_kernel(
    data,
    maxima,
    first_row,
    rows,
    units_per_row,
    tiles,
    TILE: tl.constexpr,
    TYPE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write the maximum magnitude of every tile of a pass, FP32 ``[pass rows, tiles]``."""
    local = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    first_unit = tile * (TILE // 16)
    values = load_mirrored_tile(
        data, first_row + local, rows, first_unit, units_per_row, 1, TILE, TYPE, GROUP
    )
    tl.store(maxima + local * tiles + tile + tl.arange(0, 1), row_amax(values))


@triton.jit
def convert_tiles_kernel(
    data,
    maxima,
    words,
    scale,
    first_row,
    rows,
    units_per_row,
    tiles,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    TYPE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Convert one tile of a row with the maximum of all its tiles."""
    local = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    index = tl.arange(0, TILES)[None, :]
    partial = tl.load(maxima + local * tiles + index, mask=index < tiles, other=0.0)
    row_scale = scale_from_amax(row_amax(partial))
    row = first_row + local
    if tile == 0:
        tl.store(scale + row + tl.arange(0, 1), row_scale)
    first_unit = tile * (TILE // 16)
    values = load_mirrored_tile(data, row, rows, first_unit, units_per_row, 1, TILE, TYPE, GROUP)
    _store_codes(words, values, row_scale, row, rows, first_unit, units_per_row, GROUP)


def convert(
    data: Tensor,
    qdata: Tensor,
    scale: Tensor,
    *,
    quant_type: int,
    group_size: int,
    plan: RowChunks | TiledRows,
) -> None:
    """Convert packed rows into existing storage.

    Args:
        data: uint8 ``[rows, row_bytes]``, contiguous and aligned for ``decode_units``.
        qdata: int8 ``[rows, features]``, contiguous, not empty; overwritten.
        scale: FP32 ``[rows, 1]``, contiguous; overwritten.
        quant_type: Identifier of a ``GGUFQuantizationType``.
        group_size: Rotation group; divides ``features``.
        plan: Schedule from ``select_conversion_plan``.
    """
    rows, features = qdata.shape
    units = features // 16
    constants = {"TYPE": int(quant_type), "GROUP": group_size, "num_warps": plan.num_warps}
    with launch_guard(qdata.device), as_words(qdata) as words:
        if isinstance(plan, RowChunks):
            grid = (triton.cdiv(rows, plan.rows),)
            shape = {"ROWS": plan.rows, "SIZE": plan.size, "COUNT": plan.count}
            convert_rows_kernel[grid](data, words, scale, rows, units, **shape, **constants)
            return
        per_pass = min(rows, plan.rows_per_pass)
        maxima = torch.empty((per_pass, plan.tiles), dtype=torch.float32, device=qdata.device)
        constants["TILE"] = plan.tile
        padded = triton.next_power_of_2(plan.tiles)
        for first in range(0, rows, per_pass):
            grid = (min(per_pass, rows - first), plan.tiles)
            sizes = (first, rows, units, plan.tiles)
            tile_maxima_kernel[grid](data, maxima, *sizes, **constants)
            convert_tiles_kernel[grid](
                data, maxima, words, scale, *sizes, TILES=padded, **constants
            )
