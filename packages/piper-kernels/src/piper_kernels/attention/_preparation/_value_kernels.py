"""Quantization and transposition of tiles of values."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from piper_kernels.attention._preparation._code_kernels import (
    TILE,
    code_bits,
    byte_sums,
    int8_scale,
)

# What becomes of values: INT8 with a scale per key (centered or not) or per tile, or E4M3.
PER_KEY, CENTERED, PER_TILE, E4M3 = (tl.constexpr(i) for i in range(4))


@triton.jit
def _key_of_slot(slot, PERMUTED: tl.constexpr):
    """Return the key within 64 that a slot of transposed values holds."""
    if PERMUTED:
        within = slot % 32
        key = 16 * (within // 16) + 8 * (within % 4 // 2) + 2 * (within % 16 // 4) + within % 2
        return slot - within + key
    return slot


@triton.jit
def encode_values(
    source,
    words,
    multipliers,
    logs,
    sums,
    feature_numbers,
    lengths,
    rows,
    row_stride,
    tiles,
    first_tile,
    last_tile,
    D: tl.constexpr,
    VALUES: tl.constexpr,
    PERMUTED: tl.constexpr,
    SUM_TILES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Quantize and transpose tiles of 64 keys of one head; pointers are those of the head.

    Args:
        source: Floating ``[rows, D]``.
        words: int32 ``[D, 16 * tiles]``, four codes each.
        multipliers: FP32, 255 times the scale: one per key in its order, or one per tile.
        logs: FP32 ``[tiles]``, the base-2 logarithm of the largest scale.
        sums: int32 ``[ceil(tiles / SUM_TILES), D]``, 128 times the sum of codes.
        feature_numbers: FP32 ``[D]``: the mean, or the scale for E4M3.
        lengths: int32 ``[tiles]``.
        rows: Rows of the sequence.
        row_stride: Elements between rows of the source.
        tiles: Tiles of the sequence.
        first_tile: First tile of this program, a multiple of ``SUM_TILES``.
        last_tile: Tile after its last one.
        D: 64 or 128.
        VALUES: ``PER_KEY``, ``CENTERED``, ``PER_TILE`` or ``E4M3``.
        PERMUTED: Whether slots of 32 keys are in the order of 8-bit accumulator fragments.
        SUM_TILES: Tiles of a sum; 0 stores neither sums nor logarithms.
        MASKED: Whether tiles have lengths.
    """
    # Row 16 * b + w of a tile goes to byte b of word w: one thread holds all four.
    row = tl.arange(0, TILE)
    byte = row // 16
    key = _key_of_slot(4 * (row % 16) + byte, PERMUTED)
    features = tl.arange(0, D)
    offsets = key.to(tl.int64)[:, None] * row_stride + features[None, :]
    if VALUES != PER_KEY:
        numbers = tl.load(feature_numbers + features)[None, :]
    if SUM_TILES > 0:
        total = tl.zeros((D,), tl.int32)
    for tile in range(first_tile, last_tile):
        first = tile * TILE
        exists = first + key < rows
        if MASKED:
            exists = exists & (key < tl.load(lengths + tile))
        mask = exists[:, None]
        tile_source = source + tl.cast(first, tl.int64) * row_stride
        value = tl.load(tile_source + offsets, mask=mask, other=0.0).to(tl.float32)
        if VALUES == E4M3:
            code = (value * (1.0 / numbers)).to(tl.float8e4nv)
            bits = code.to(tl.uint8, bitcast=True).to(tl.int32)
        else:
            if VALUES != PER_KEY:
                value = tl.where(mask, value - numbers, 0.0)
            amax = tl.max(tl.abs(value), axis=1)
            if VALUES == PER_TILE:
                scale = int8_scale(tl.max(amax, axis=0))
                tl.store(multipliers + tile, scale * 255.0)
                bits = code_bits(value * (1.0 / scale))
            else:
                scale = int8_scale(amax)
                tl.store(multipliers + tl.cast(first, tl.int64) + key, scale * 255.0)
                bits = code_bits(value * (1.0 / scale)[:, None])
            if SUM_TILES > 0:
                tl.store(logs + tile, tl.log2(tl.max(scale, axis=0)))
        shifted = (bits & 255) << (8 * byte)[:, None]
        packed = tl.sum(tl.reshape(shifted, (4, 16, D)), axis=0)
        if SUM_TILES > 0:
            total = tl.where(tile % SUM_TILES == 0, 0, total) + byte_sums(packed)
            if (tile % SUM_TILES == SUM_TILES - 1) | (tile + 1 == tiles):
                index = tl.cast(tile // SUM_TILES, tl.int64)
                tl.store(sums + index * D + features, total * 128)
        target = words + features.to(tl.int64)[:, None] * (tiles * 16)
        tl.store(target + tile * 16 + tl.arange(0, 16)[None, :], tl.trans(packed))
