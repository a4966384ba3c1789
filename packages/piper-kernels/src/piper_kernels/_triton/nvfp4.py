"""NVFP4 encoding and decoding for Triton kernels: E2M1 values, E4M3 block scales."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportAssignmentType=false

import triton
import triton.language as tl

from piper_kernels._triton.reductions import row_amax
from piper_kernels.stochastic_quantization.triton import random_uniform

_BLOCK = tl.constexpr(16)
_MIN_SCALE = tl.constexpr(0.015625)
_MAX_SCALE = tl.constexpr(448.0)
_MIN_GLOBAL_SCALE = tl.constexpr(7.52316384526264e-37)  # 2**-120
_AMAX_TO_GLOBAL = tl.constexpr(2688.0)  # 448 * 6


@triton.jit
def global_scale_from_amax(amax):
    """Return ``max(amax / 2688, 2**-120)``; NaN stays NaN. ``amax`` is a scalar or block."""
    scale = tl.div_rn(amax, tl.full(amax.shape, _AMAX_TO_GLOBAL, tl.float32))
    return tl.where(scale < _MIN_GLOBAL_SCALE, _MIN_GLOBAL_SCALE, scale)


@triton.jit
def encode_e4m3(values):
    """Round FP32 values in ``[2**-6, 448]`` to E4M3 bytes, half to even."""
    bits = values.to(tl.uint32, bitcast=True)
    rounded = bits + 0x7FFFF + ((bits >> 20) & 1)
    return ((rounded >> 20) - 960).to(tl.uint8)  # 960 = (127 - 7) << 3


@triton.jit
def decode_e4m3(codes):
    """Return the FP32 values of E4M3 bytes, subnormals and NaN included."""
    code = codes.to(tl.int32)
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(code >= 128, -value, value)


@triton.jit
def decode_e2m1(codes):
    """Return the FP32 values of E2M1 codes 0..15 (one per element)."""
    code = codes.to(tl.int32)
    magnitude = code & 7
    normal = ((magnitude << 22) + 0x3F000000).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return tl.where(code >= 8, -value, value)


@triton.jit
def encode_e2m1(values):
    """Round FP32 values to E2M1 codes 0..15, half to even, saturating at 6.

    Returns:
        int32 codes; the sign of zeros is kept and NaN saturates.
    """
    bits = values.to(tl.int32, bitcast=True)
    magnitude_bits = bits & 0x7FFFFFFF
    # Clamping the bits saturates infinities and NaN too. 0x40C00000 is 6.0.
    magnitude_bits = tl.minimum(magnitude_bits, 0x40C00000)
    magnitude = magnitude_bits.to(tl.float32, bitcast=True)
    # 1.5 * 2**22 has steps of 0.5, the step of E2M1 below 1.
    small = (magnitude + 6291456.0).to(tl.int32, bitcast=True) & 7
    large = ((magnitude_bits + 0x1FFFFF + ((magnitude_bits >> 22) & 1)) >> 22) - 252
    code = tl.where(magnitude < 1.0, small, large)
    return code | ((bits >> 28) & 8)


@triton.jit
def encode_e2m1_stochastic(values, seed, offsets):
    """Round FP32 values to one of the two adjacent E2M1 codes, unbiased in expectation.

    Exact values and values outside ``(-6, 6)`` are encoded as ``encode_e2m1`` does.

    Args:
        values: FP32 block.
        seed: Seed argument of ``stochastic_quantization.triton``.
        offsets: int64 logical element offsets with the shape of ``values``.
    """
    bits = values.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    step = tl.where(magnitude < 2.0, 2.0, tl.where(magnitude < 4.0, 1.0, 0.5))
    base = tl.where(magnitude < 2.0, 0, tl.where(magnitude < 4.0, 2, 4))
    steps = magnitude * step
    lower = tl.floor(steps)
    fraction = steps - lower
    up = (random_uniform(seed, offsets) < fraction).to(tl.int32)
    inside = (magnitude < 6.0) & (fraction > 0)
    # The conversion of a huge or NaN value is not defined; it is discarded below.
    code = tl.where(inside, lower, 0.0).to(tl.int32) + base + up
    return tl.where(inside, code | ((bits >> 28) & 8), encode_e2m1(values))


@triton.jit
def _convert_pairs(even, odd):
    """Convert and pack pairs with the instruction of SM100 and newer, even value low."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b8 pair;
            cvt.rn.satfinite.e2m1x2.f32 pair, $2, $1;
            cvt.u32.u8 $0, pair;
        }
        """,
        "=r,r,r",
        [even, odd],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def block_scales(values, global_scale, TWO_LEVEL: tl.constexpr):
    """Return the E4M3 bytes ``[BLOCKS]`` and FP32 multipliers ``[BLOCKS]`` of blocks.

    The scale is ``clamp(amax / 6 / global_scale, 2**-6, 448)``, NaN where a value is; the
    multiplier is the reciprocal of the rounded scale.

    Args:
        values: FP32 ``[BLOCKS, 16]``.
        global_scale: FP32 scalar; read only when ``TWO_LEVEL``.
        TWO_LEVEL: Whether block scales are relative to a global scale.
    """
    amax = row_amax(values)
    scale = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32))
    if TWO_LEVEL:
        scale = tl.div_rn(scale, tl.full(amax.shape, 0.0, tl.float32) + global_scale)
    bounded = tl.minimum(tl.maximum(scale, _MIN_SCALE), _MAX_SCALE)
    codes = tl.where(scale != scale, 0x7F, encode_e4m3(bounded))  # noqa: PLR0124  # NaN only
    codes = codes.to(tl.uint8)
    one = tl.full(amax.shape, 1.0, tl.float32)
    if TWO_LEVEL:
        one = tl.div_rn(one, tl.full(amax.shape, 0.0, tl.float32) + global_scale)
    return codes, tl.div_rn(one, decode_e4m3(codes))


@triton.jit
def encode_block(
    values,
    global_scale,
    seed,
    offsets,
    TWO_LEVEL: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HIGH_FIRST: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantize blocks of 16 consecutive features.

    Args:
        values: FP32 ``[BLOCKS, 16]``.
        global_scale: FP32 scalar; read only when ``TWO_LEVEL``.
        seed: Seed argument; read only when ``STOCHASTIC``.
        offsets: int64 ``[BLOCKS, 16]`` logical element offsets; read only when ``STOCHASTIC``.
        TWO_LEVEL: Whether block scales are relative to the global scale.
        STOCHASTIC: Whether to round stochastically instead of half to even.
        HIGH_FIRST: Whether the even feature is the high nibble of a byte.
        NATIVE: Whether the target has ``cvt.rn.satfinite.e2m1x2`` (SM100 and newer).

    Returns:
        Packed uint8 ``[BLOCKS, 8]`` and E4M3 scale bytes ``[BLOCKS]``.
    """
    BLOCKS: tl.constexpr = values.shape[0]
    scale_codes, multiplier = block_scales(values, global_scale, TWO_LEVEL)
    scaled = values * multiplier[:, None]
    if NATIVE and not STOCHASTIC:
        even, odd = tl.split(tl.reshape(scaled, (BLOCKS, 8, 2)))
        if HIGH_FIRST:
            even, odd = odd, even
        packed = _convert_pairs(even, odd)
    else:
        codes = encode_e2m1_stochastic(scaled, seed, offsets) if STOCHASTIC else encode_e2m1(scaled)
        even, odd = tl.split(tl.reshape(codes, (BLOCKS, 8, 2)))
        if HIGH_FIRST:
            even, odd = odd, even
        packed = even | (odd << 4)
    return packed.to(tl.uint8), scale_codes


@triton.jit
def scale_offsets(rows, blocks, columns, SWIZZLED: tl.constexpr):
    """Return the byte offsets (int64) of block scales.

    Args:
        rows: Row indices.
        blocks: Block indices along the features, broadcastable with ``rows``.
        columns: Blocks per row when plain; tiles of four blocks per row when swizzled.
        SWIZZLED: Whether scales lie in the 128 x 4 layout of block-scaled matrix products.
    """
    row = rows.to(tl.int64)
    if SWIZZLED:
        tile = (row // 128) * columns + blocks // 4
        return (tile * 32 + row % 32) * 16 + ((row % 128) // 32) * 4 + blocks % 4
    return row * columns + blocks


@triton.jit
def store_encoded_tile(
    values,
    global_scale,
    qdata_words,
    scale,
    rows,
    row_mask,
    first,
    features,
    scale_columns,
    GROUP: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    SWIZZLED: tl.constexpr,
    HIGH_FIRST: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Encode a tile to nearest and store its codes and block scales.

    Args:
        values: FP32 ``[ROWS, COLS]``, in the reverse order of ``rotate_mirrored`` unless
            ``GROUP`` is 0.
        global_scale: FP32 scalar, or ``[ROWS * COLS / 16]`` with one for each block; read only
            when ``TWO_LEVEL``.
        qdata_words: Pointer to int32 ``[total_rows, features / 8]``, eight codes in each.
        scale: Pointer to the E4M3 bytes of the block scales; padding is not written.
        rows: int64 ``[ROWS]`` row indices.
        row_mask: ``[ROWS]``, whether a row exists.
        first: First column, a multiple of 16 and of ``GROUP``.
        features: Columns of the matrix.
        scale_columns: See ``scale_offsets``.
        GROUP: Rotation group, 0 for none.
        TWO_LEVEL: Whether block scales are relative to a global scale.
        SWIZZLED: Layout of the block scales.
        HIGH_FIRST: Whether the even feature is the high nibble of a byte.
        NATIVE: Whether the target converts to E2M1 with one instruction.
    """
    ROWS: tl.constexpr = values.shape[0]
    BLOCKS: tl.constexpr = values.shape[1] // 16
    WORDS: tl.constexpr = values.shape[1] // 8
    # Masks of the indices within a group that reverse it.
    MIRROR_BLOCKS: tl.constexpr = GROUP // 16 - 1 if GROUP > 0 else 0
    MIRROR_WORDS: tl.constexpr = GROUP // 8 - 1 if GROUP > 0 else 0
    MIRROR_BYTES: tl.constexpr = 3 if GROUP > 0 else 0
    # In a mirrored block the first value of a pair belongs into the other nibble.
    SWAP: tl.constexpr = (GROUP > 0) != HIGH_FIRST
    blocks = tl.reshape(values, (ROWS * BLOCKS, 16))
    packed, codes = encode_block(blocks, global_scale, 0, 0, TWO_LEVEL, False, SWAP, NATIVE)
    shifts = 8 * (tl.arange(0, 4) ^ MIRROR_BYTES)[None, :]
    quads = tl.reshape(packed, (ROWS * WORDS, 4)).to(tl.int32) << shifts
    words = first // 8 + (tl.arange(0, WORDS) ^ MIRROR_WORDS)[None, :]
    tl.store(
        qdata_words + rows[:, None] * (features // 8) + words,
        tl.reshape(tl.sum(quads, axis=1), (ROWS, WORDS)),
        mask=row_mask[:, None] & (words < features // 8),
    )
    block = first // 16 + (tl.arange(0, BLOCKS) ^ MIRROR_BLOCKS)[None, :]
    tl.store(
        scale + scale_offsets(rows[:, None], block, scale_columns, SWIZZLED),
        tl.reshape(codes, (ROWS, BLOCKS)),
        mask=row_mask[:, None] & (block < features // 16),
    )
