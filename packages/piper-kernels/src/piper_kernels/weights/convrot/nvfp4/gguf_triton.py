"""Kernels that convert packed GGUF rows to ConvRot NVFP4. Importing this requires Triton.

No value depends on its whole row, so tiles are independent. A computed global scale takes a
first pass that decodes the same tiles for their maximum.
"""

# ruff: noqa: ANN001, ANN201  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from piper_kernels._triton.nvfp4 import global_scale_from_amax, store_encoded_tile
from piper_kernels._triton.reductions import magnitude_bits
from piper_kernels._triton.runtime import as_words, launch_guard
from piper_kernels.gguf.triton import load_mirrored_tile
from piper_kernels.weights.nvfp4._encoding import MIN_PER_TENSOR_SCALE
from piper_kernels.weights.nvfp4._layout import ceil_div

MAX_TILE_COLUMNS = 1024
TILE_VALUES = 4096

_MIN_SCALE = tl.constexpr(MIN_PER_TENSOR_SCALE)


@triton.jit
def amax_kernel(
    data,
    amax_bits,
    rows,
    units_per_row,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TYPE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Raise the int32 scalar ``amax_bits`` to the bits of the largest rotated magnitude."""
    row = tl.program_id(0).to(tl.int64) * ROWS
    unit = tl.program_id(1) * (COLS // 16)
    values = load_mirrored_tile(data, row, rows, unit, units_per_row, ROWS, COLS, TYPE, GROUP)
    tl.atomic_max(amax_bits, tl.max(tl.max(magnitude_bits(values), axis=1), axis=0))


@triton.jit
def pack_kernel(
    data,
    amax_bits,
    per_tensor_scale,
    qdata_words,
    scale,
    rows,
    units_per_row,
    scale_columns,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TYPE: tl.constexpr,
    GROUP: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    COMPUTED: tl.constexpr,
    SWIZZLED: tl.constexpr,
    HIGH_FIRST: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Encode one tile; the first program stores a computed global scale."""
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    unit = tl.program_id(1) * (COLS // 16)
    values = load_mirrored_tile(data, first_row, rows, unit, units_per_row, ROWS, COLS, TYPE, GROUP)
    level = 1.0
    if COMPUTED:
        level = global_scale_from_amax(tl.load(amax_bits).to(tl.float32, bitcast=True))
        if (first_row == 0) & (unit == 0):
            tl.store(per_tensor_scale, level)
    elif TWO_LEVEL:
        level = tl.load(per_tensor_scale)
        level = tl.where(level < _MIN_SCALE, _MIN_SCALE, level)
    row = first_row + tl.arange(0, ROWS)
    store_encoded_tile(
        values,
        level,
        qdata_words,
        scale,
        row,
        row < rows,
        unit * 16,
        units_per_row * 16,
        scale_columns,
        GROUP,
        TWO_LEVEL,
        SWIZZLED,
        HIGH_FIRST,
        NATIVE,
    )


def convert(
    data: Tensor,
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor | None,
    *,
    quant_type: int,
    group_size: int,
    compute_per_tensor_scale: bool,
    swizzled: bool,
    high_first: bool,
    native: bool,
) -> None:
    """Convert packed rows into existing storage.

    Args:
        data: uint8 ``[rows, row_bytes]``, contiguous and aligned for ``decode_units``.
        qdata: uint8 ``[rows, features / 2]``, contiguous, not empty; overwritten.
        scale: uint8 bytes of the block scales, contiguous in their order; overwritten.
            Padding of swizzled scales must be zero already.
        per_tensor_scale: FP32 scalar: read, or written when it is computed.
        quant_type: Identifier of a ``GGUFQuantizationType``.
        group_size: Rotation group; divides ``features``.
        compute_per_tensor_scale: Whether the global scale comes from the data.
        swizzled: Whether the scales lie in 128 x 4 tiles.
        high_first: Whether the even feature is the high nibble of a byte.
        native: Whether the device converts to E2M1 with one instruction.
    """
    rows, units = qdata.shape[0], qdata.shape[1] // 8
    columns = min(MAX_TILE_COLUMNS, triton.next_power_of_2(units * 16))
    tile_rows = min(triton.next_power_of_2(rows), max(1, TILE_VALUES // columns))
    grid = (triton.cdiv(rows, tile_rows), triton.cdiv(units * 16, columns))
    tile = {"ROWS": tile_rows, "COLS": columns, "TYPE": int(quant_type), "GROUP": group_size}
    with launch_guard(qdata.device), as_words(qdata) as words:
        amax_bits = None
        if compute_per_tensor_scale:
            amax_bits = torch.zeros((1,), dtype=torch.int32, device=qdata.device)
            amax_kernel[grid](data, amax_bits, rows, units, **tile)
        pack_kernel[grid](
            data,
            amax_bits,
            per_tensor_scale,
            words,
            scale,
            rows,
            units,
            ceil_div(units, 4) if swizzled else units,
            TWO_LEVEL=per_tensor_scale is not None,
            COMPUTED=compute_per_tensor_scale,
            SWIZZLED=swizzled,
            HIGH_FIRST=high_first,
            NATIVE=native,
            **tile,
        )
