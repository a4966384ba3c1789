"""Reading and packing tiles of NVFP4 storage, for Triton kernels. Importing needs Triton."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import triton
import triton.language as tl

from piper_kernels._triton.nvfp4 import (
    decode_e2m1,
    decode_e4m3,
    encode_block,
    global_scale_from_amax,
    scale_offsets,
)
from piper_kernels._triton.reductions import magnitude_bits

AMAX_SLOTS = tl.constexpr(256)


@triton.jit
def load_base(
    qdata,
    scale,
    global_scale,
    rows,
    first,
    total_rows,
    features,
    scale_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    SWIZZLED: tl.constexpr,
    HIGH_FIRST: tl.constexpr,
):
    """Return the FP32 values ``[ROWS, COLUMNS]`` of a stored tile; zeros outside of the matrix.

    Args:
        qdata: Pointer to uint8 ``[total_rows, features / 2]``.
        scale: Pointer to the E4M3 bytes of the block scales.
        global_scale: Pointer to the FP32 global scale; read only when ``TWO_LEVEL``.
        rows: int64 ``[ROWS]`` row indices.
        first: First column, a multiple of ``COLUMNS``.
        total_rows: Rows of the matrix.
        features: Columns of the matrix, a multiple of 16.
        scale_columns: See ``scale_offsets``.
        ROWS: Rows of the tile.
        COLUMNS: Columns of the tile.
        TWO_LEVEL: Whether block scales are relative to the global scale.
        SWIZZLED: Layout of the block scales.
        HIGH_FIRST: Whether the even feature is the high nibble.
    """
    HALF: tl.constexpr = COLUMNS // 2
    BLOCKS: tl.constexpr = COLUMNS // 16
    row_mask = (rows < total_rows)[:, None]
    pairs = first // 2 + tl.arange(0, HALF)[None, :]
    pair_mask = row_mask & (pairs < features // 2)
    packed = tl.load(qdata + rows[:, None] * (features // 2) + pairs, mask=pair_mask, other=0)
    even, odd = packed & 15, packed >> 4
    if HIGH_FIRST:
        even, odd = odd, even
    values = tl.reshape(decode_e2m1(tl.join(even, odd)), (ROWS, BLOCKS, 16))
    blocks = first // 16 + tl.arange(0, BLOCKS)[None, :]
    offsets = scale_offsets(rows[:, None], blocks, scale_columns, SWIZZLED)
    block_mask = row_mask & (blocks < features // 16)
    decoded = decode_e4m3(tl.load(scale + offsets, mask=block_mask, other=0))
    if TWO_LEVEL:
        decoded = tl.load(global_scale) * decoded
    return tl.reshape(values * decoded[:, :, None], (ROWS, COLUMNS))


@triton.jit
def slots_amax(amax_bits):
    """Return the maximum of the slots as an FP32 scalar."""
    bits = tl.max(tl.load(amax_bits + tl.arange(0, AMAX_SLOTS)), axis=0)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def finish_tile(
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    SWIZZLED: tl.constexpr,
    HIGH_FIRST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    NATIVE: tl.constexpr,
    PACK: tl.constexpr,
):
    """Pack a merged tile, or with ``PACK=False`` add it to the maxima.

    Values outside of the matrix are zero. ``amax_bits`` is int32 ``[AMAX_SLOTS]``, zero before
    the first tile; it is used only when ``TWO_LEVEL``.
    """
    if PACK:
        BLOCKS: tl.constexpr = ROWS * COLUMNS // 16
        global_scale = 1.0
        if TWO_LEVEL:
            global_scale = global_scale_from_amax(slots_amax(amax_bits))
        columns = first + tl.arange(0, COLUMNS)[None, :]
        offsets = tl.reshape(rows[:, None] * features + columns, (BLOCKS, 16))
        packed, codes = encode_block(
            tl.reshape(values, (BLOCKS, 16)),
            global_scale,
            seed,
            offsets,
            TWO_LEVEL,
            STOCHASTIC,
            HIGH_FIRST,
            NATIVE,
        )
        row_mask = (rows < total_rows)[:, None]
        pairs = first // 2 + tl.arange(0, COLUMNS // 2)[None, :]
        tl.store(
            qdata + rows[:, None] * (features // 2) + pairs,
            tl.reshape(packed, (ROWS, COLUMNS // 2)),
            mask=row_mask & (pairs < features // 2),
        )
        blocks = first // 16 + tl.arange(0, COLUMNS // 16)[None, :]
        tl.store(
            scale + scale_offsets(rows[:, None], blocks, scale_columns, SWIZZLED),
            tl.reshape(codes, (ROWS, COLUMNS // 16)),
            mask=row_mask & (blocks < features // 16),
        )
    else:
        amax = tl.max(tl.max(magnitude_bits(values), axis=1), axis=0)
        tl.atomic_max(amax_bits + tl.program_id(0) % AMAX_SLOTS, amax, sem="relaxed")
