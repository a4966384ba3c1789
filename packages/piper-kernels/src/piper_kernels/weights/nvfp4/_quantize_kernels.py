"""Kernels that quantize dense weights to NVFP4. Importing needs Triton.

No value depends on more than its block of 16 or its rotation group, so tiles are independent.
A computed global scale takes a first pass over the same tiles for their maximum.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from piper_kernels._triton.nvfp4 import encode_block, scale_offsets
from piper_kernels._triton.reductions import magnitude_bits
from piper_kernels.weights.nvfp4._encoding import MIN_PER_TENSOR_SCALE
from piper_kernels.weights.nvfp4._tiles import AMAX_SLOTS

_MIN_GLOBAL_SCALE = tl.constexpr(MIN_PER_TENSOR_SCALE)


@triton.jit
def _exchange(values, AXIS: tl.constexpr):
    """Exchange the two halves of an axis of size 2; the layout of the block is kept."""
    bits = values.to(tl.int32, bitcast=True)
    partner = tl.sum(bits, axis=AXIS, keep_dims=True) - bits  # exact, as integers wrap
    return partner.to(tl.float32, bitcast=True)


@triton.jit
def _mirrored_butterfly(values, STRIDE: tl.constexpr):
    """Apply H4 (unnormalised) to quartets ``STRIDE`` apart, each result in reverse order."""
    OUTER: tl.constexpr = values.numel // (4 * STRIDE)
    quartets = tl.reshape(values, (OUTER, 2, 2, STRIDE))
    partner = _exchange(quartets, 2)
    # The result of x[3 - i] at i: the sum of the other pair, plus partner, minus itself.
    return _exchange(quartets + partner, 1) + (partner - quartets)


@triton.jit
def rotate_mirrored(values, GROUP: tl.constexpr):
    """Rotate groups of axis 1 and reverse each of them.

    The values are those of ``_triton.convrot.rotate`` bit by bit. Left in reverse order they
    need no permutation, only exchanges between the threads of a warp, so a tile is never
    written to shared memory.

    Args:
        values: FP32 ``[ROWS, COLS]``; both sizes powers of two, ``GROUP`` divides ``COLS``.
        GROUP: 16, 64 or 256.
    """
    tl.static_assert(GROUP == 16 or GROUP == 64 or GROUP == 256)  # noqa: PLR1714  # no "in" here
    # Scaling first is exact and keeps the sums of values near the FP32 limit finite.
    SCALE: tl.constexpr = 0.25 if GROUP == 16 else (0.125 if GROUP == 64 else 0.0625)
    rotated = values * SCALE
    rotated = _mirrored_butterfly(_mirrored_butterfly(rotated, 1), 4)
    if GROUP >= 64:
        rotated = _mirrored_butterfly(rotated, 16)
    if GROUP == 256:
        rotated = _mirrored_butterfly(rotated, 64)
    return tl.reshape(rotated, values.shape)


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
    WORDS: tl.constexpr = COLUMNS // 8
    # Masks of the indices within a group that reverse it.
    MIRROR_BLOCKS: tl.constexpr = GROUP // 16 - 1 if GROUP > 0 else 0
    MIRROR_WORDS: tl.constexpr = GROUP // 8 - 1 if GROUP > 0 else 0
    MIRROR_BYTES: tl.constexpr = 3 if GROUP > 0 else 0
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
    # In a mirrored block the first value of a pair belongs into the high nibble.
    packed, codes = encode_block(
        tl.reshape(values, (ROWS * BLOCKS, 16)), level, 0, 0, TWO_LEVEL, False, GROUP > 0, NATIVE
    )
    shifts = 8 * (tl.arange(0, 4) ^ MIRROR_BYTES)[None, :]
    quads = tl.reshape(packed, (ROWS * WORDS, 4)).to(tl.int32) << shifts
    words = first // 8 + (tl.arange(0, WORDS) ^ MIRROR_WORDS)[None, :]
    tl.store(
        qdata_words + rows[:, None] * (features // 8) + words,
        tl.reshape(tl.sum(quads, axis=1), (ROWS, WORDS)),
        mask=row_mask[:, None] & (words < features // 8),
    )
    blocks = first // 16 + (tl.arange(0, BLOCKS) ^ MIRROR_BLOCKS)[None, :]
    tl.store(
        scale + scale_offsets(rows[:, None], blocks, scale_columns, SWIZZLED),
        tl.reshape(codes, (ROWS, BLOCKS)),
        mask=row_mask[:, None] & (blocks < features // 16),
    )
