"""Quantization and transposition of tiles of values."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from piper_kernels.attention._preparation._code_kernels import (
    TILE,
    biased_sums,
    byte_sums,
    code_bits,
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
def _load_byte(source, row_stride, length, byte, D: tl.constexpr, PERMUTED: tl.constexpr):
    """Return the raw keys of one byte of 16 words, zero past ``length``."""
    key = _key_of_slot(4 * tl.arange(0, 16) + byte, PERMUTED)
    offsets = key.to(tl.int64)[:, None] * row_stride + tl.arange(0, D)[None, :]
    return tl.load(source + offsets, mask=(key < length)[:, None], other=0.0)


@triton.jit
def _smoothed(raw, length, numbers, byte, VALUES: tl.constexpr, PERMUTED: tl.constexpr):
    """Return FP32 keys, centered or in units of E4M3; zero past ``length``."""
    values = raw.to(tl.float32)
    if VALUES == E4M3:
        values = values * (1.0 / numbers)[None, :]
    elif VALUES != PER_KEY:
        key = _key_of_slot(4 * tl.arange(0, 16) + byte, PERMUTED)
        values = tl.where((key < length)[:, None], values - numbers[None, :], 0.0)
    return values


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
    SUMS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Quantize and transpose tiles of 64 keys of one head; pointers are those of the head.

    Args:
        source: Floating ``[rows, D]``.
        words: int32 ``[D, 16 * tiles]``, four codes each.
        multipliers: FP32, 255 times the scale: one per key in its order, or one per tile.
        logs: FP32 ``[tiles]``, the base-2 logarithm of the largest scale.
        sums: int32 ``[ceil(tiles / 2), D]`` of ``biased_sums`` of two tiles.
        feature_numbers: FP32 ``[D]``: the mean, or the scale for E4M3.
        lengths: int32 ``[tiles]``.
        rows: Rows of the sequence.
        row_stride: Elements between rows of the source.
        tiles: Tiles of the sequence.
        first_tile: First tile of this program, an even one.
        last_tile: Tile after its last one.
        D: 64 or 128.
        VALUES: ``PER_KEY``, ``CENTERED``, ``PER_TILE`` or ``E4M3``.
        PERMUTED: Whether slots of 32 keys are in the order of 8-bit accumulator fragments.
        SUMS: Whether sums and logarithms are stored.
        MASKED: Whether tiles have lengths.
    """
    word, features = tl.arange(0, 16), tl.arange(0, D)
    target = words + features.to(tl.int64)[:, None] * (tiles * 16) + word[None, :]
    numbers = tl.zeros((D,), tl.float32)
    if VALUES != PER_KEY:
        numbers = tl.load(feature_numbers + features)
    total = tl.zeros((D,), tl.int32)
    for tile in range(first_tile, last_tile):
        first = tl.cast(tile, tl.int64) * TILE
        length = tl.minimum(rows - first, TILE)
        if MASKED:
            length = tl.minimum(length, tl.load(lengths + tile))
        tile_source = source + first * row_stride
        # Byte b of word w is key 4 w + b, or the one in its place.
        raw = (
            _load_byte(tile_source, row_stride, length, 0, D, PERMUTED),
            _load_byte(tile_source, row_stride, length, 1, D, PERMUTED),
            _load_byte(tile_source, row_stride, length, 2, D, PERMUTED),
            _load_byte(tile_source, row_stride, length, 3, D, PERMUTED),
        )
        largest_scale = tl.zeros((16,), tl.float32)
        if VALUES == PER_TILE:
            largest = tl.zeros((16,), tl.float32)
            for byte in tl.static_range(4):
                values = _smoothed(raw[byte], length, numbers, byte, VALUES, PERMUTED)
                largest = tl.maximum(largest, tl.max(tl.abs(values), axis=1))
            tile_scale = int8_scale(tl.max(largest, axis=0))
            tl.store(multipliers + tile, tile_scale * 255.0)
            largest_scale += tile_scale
        packed = tl.zeros((16, D), tl.int32)
        for byte in tl.static_range(4):
            values = _smoothed(raw[byte], length, numbers, byte, VALUES, PERMUTED)
            if VALUES == E4M3:
                bits = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
            elif VALUES == PER_TILE:
                bits = code_bits(values * (1.0 / tile_scale))
            else:
                scale = int8_scale(tl.max(tl.abs(values), axis=1))
                key = _key_of_slot(4 * word + byte, PERMUTED)
                tl.store(multipliers + first + key, scale * 255.0)
                largest_scale = tl.maximum(largest_scale, scale)
                bits = code_bits(values * (1.0 / scale)[:, None])
            packed |= (bits & 255) << (8 * byte)
        tl.store(target + tile * 16, tl.trans(packed))
        if SUMS:
            tl.store(logs + tile, tl.log2(tl.max(largest_scale, axis=0)))
            # Read again: a thread then has whole words of a feature, and no warp needs another.
            tl.debug_barrier()
            total = tl.where(tile % 2 == 0, 0, total) + byte_sums(tl.load(target + tile * 16))
            if (tile % 2 == 1) | (tile + 1 == tiles):
                pair = tl.cast(tile // 2, tl.int64)
                tl.store(sums + pair * D + features, biased_sums(total, pair))
