"""Rotation, quantization and summaries of tiles of queries or keys."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from piper_kernels.attention._preparation._code_kernels import TILE, code_bits, int8_scale, row_mask
from piper_kernels.attention._preparation._rotation_kernels import signed_hadamard


@triton.constexpr_function
def hadamard_type(source, wide):
    """Return the type of the other factor of a rotation."""
    if wide:
        return tl.float32
    return tl.bfloat16 if source == tl.float32 else source


@triton.jit
def rotated(part, hadamard, WIDE: tl.constexpr, TERMS: tl.constexpr = 3):
    """Return ``part @ hadamard`` in FP32; an FP32 part is the sum of ``TERMS`` BF16 numbers.

    Three are exact, two leave a relative error of ``2**-17`` of each number.
    """
    if WIDE:
        product = tl.dot(part.to(tl.float32), hadamard, input_precision="ieee")
    elif part.dtype == tl.float32 and TERMS == 3:
        high = part.to(tl.bfloat16)
        rest = part - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        product = tl.dot(low, hadamard)
        product = tl.dot(middle, hadamard, product)
        product = tl.dot(high, hadamard, product)
    elif part.dtype == tl.float32:
        # Cut off, not rounded: fewer conversions.
        high = (part.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        product = tl.dot((part - high).to(tl.bfloat16), hadamard)
        product = tl.dot(high.to(tl.bfloat16), hadamard, product)
    else:
        product = tl.dot(part, hadamard)
    return product


@triton.constexpr_function
def _group_shape(groups):
    """Return 64 rows as ``(blocks, repeats, groups, width)``."""
    repeats, count, width = groups
    return (64 // (repeats * count * width), repeats, count, width)


@triton.constexpr_function
def scales_per_tile(groups):
    """Return how many scales 64 rows store; ``groups`` is ``(repeats, groups, width)``."""
    return _group_shape(groups)[0] if groups[1] == 1 else 64


@triton.jit
def _group_scales(amax, SHAPE: tl.constexpr):
    """Return the scales of groups, ``[blocks, 1, groups, 1]``, of the maxima of 64 rows."""
    grouped = tl.max(tl.reshape(amax, SHAPE), axis=3, keep_dims=True)
    return int8_scale(tl.max(grouped, axis=1, keep_dims=True))


@triton.jit
def _store_scales(scales, tile, scale, SHAPE: tl.constexpr):
    """Store one scale per block of one group, else one per row."""
    if SHAPE[2] == 1:
        index = tl.cast(tile, tl.int64) * SHAPE[0] + tl.arange(0, SHAPE[0])
        tl.store(scales + index, tl.reshape(scale, (SHAPE[0],)))
    else:
        index = tl.cast(tile, tl.int64) * TILE + tl.arange(0, TILE)
        tl.store(scales + index, tl.reshape(tl.broadcast_to(scale, SHAPE), (TILE,)))


@triton.jit
def _store_half(target, values, APART: tl.constexpr):
    """Store the codes of 64 features; with ``APART`` no load takes over the layout of the store."""
    codes = code_bits(values).to(tl.int8)
    if APART:
        tl.store(tl.expand_dims(target, 1), tl.expand_dims(codes, 1))
    else:
        tl.store(target, codes)


@triton.jit
def store_codes(
    low,
    high,
    codes,
    scales,
    tile,
    factor,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    APART: tl.constexpr = False,
):
    """Quantize 64 rotated rows of one head and store them.

    Args:
        low: FP32 ``[64, 64]``, features 0 to 63 without the factor ``1 / sqrt(D)``.
        high: The other features; not read unless ``D`` is 128.
        codes: int8 ``[64 * tiles, D]``.
        scales: FP32, one per group and 64 rows, or one per row where ``GROUPS > 1``.
        tile: Which 64 rows they are.
        factor: Factor of the stored scales.
        D: 64 or 128.
        GROUPS: ``(repeats, groups, width)``; see ``_quantization.RowGroups``.
        APART: Whether 16 codes of a thread must not become 16 numbers side by side in loads.
    """
    NORM: tl.constexpr = 0.125 if D == 64 else 0.08838834764831845
    SHAPE: tl.constexpr = _group_shape(GROUPS)
    features, row = tl.arange(0, 64)[None, :], tl.arange(0, TILE)
    amax = tl.max(tl.abs(low), axis=1)
    if D == 128:
        amax = tl.maximum(amax, tl.max(tl.abs(high), axis=1))
    scale = _group_scales(amax * NORM, SHAPE)
    inverse = (NORM / tl.reshape(tl.broadcast_to(scale, SHAPE), (TILE,)))[:, None]
    _store_scales(scales, tile, scale * factor, SHAPE)
    target = codes + tl.cast(tile, tl.int64) * (TILE * D) + row[:, None] * D + features
    _store_half(target, low * inverse, APART)
    if D == 128:
        _store_half(target + 64, high * inverse, APART)


@triton.jit
def encode_rows(
    source,
    codes,
    scales,
    center,
    lengths,
    rows,
    row_stride,
    first_tile,
    last_tile,
    factor,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_QUERY: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rotate and quantize tiles of 64 rows of one head; pointers are those of the head.

    Args:
        source: Floating ``[rows, D]``.
        codes: int8 ``[64 * tiles, D]``.
        scales: FP32, one per group and 64 rows, or one per row where ``GROUPS > 1``.
        center: FP32 ``[D]``, the unscaled rotated mean of keys.
        lengths: int32 ``[tiles]``.
        rows: Rows of the sequence.
        row_stride: Elements between rows of the source.
        first_tile: First tile of this program.
        last_tile: Tile after its last one.
        factor: Factor of the stored scales.
        D: 64 or 128.
        GROUPS: ``(repeats, groups, width)``; see ``_quantization.RowGroups``.
        IS_QUERY: Whether rows are queries, which are not centered.
        MASKED: Whether tiles have lengths.
        WIDE: Whether products are FP32 products, as in the interpreter.
        STAGES: Tiles in flight.
    """
    DTYPE: tl.constexpr = hadamard_type(source.dtype.element_ty, WIDE)
    hadamard_low = signed_hadamard(0, DTYPE)
    features, row = tl.arange(0, 64)[None, :], tl.arange(0, TILE)
    offsets = row.to(tl.int64)[:, None] * row_stride + features
    if D == 128:
        hadamard_high = signed_hadamard(64, DTYPE)
    if not IS_QUERY:
        center_low = tl.load(center + features)
        if D == 128:
            center_high = tl.load(center + 64 + features)
    for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
        first = tile * TILE
        exists = row_mask(first, rows, lengths, MASKED)
        mask = exists[:, None]
        tile_source = source + tl.cast(first, tl.int64) * row_stride
        raw = tl.load(tile_source + offsets, mask=mask, other=0.0)
        low = rotated(raw, hadamard_low, WIDE)
        if D == 128:
            raw = tl.load(tile_source + 64 + offsets, mask=mask, other=0.0)
            other = rotated(raw, hadamard_high, WIDE)
            high = low - other
            low = low + other
        if not IS_QUERY:
            low = tl.where(mask, low - center_low, 0.0)
            if D == 128:
                high = tl.where(mask, high - center_high, 0.0)
        store_codes(low, high if D == 128 else low, codes, scales, tile, factor, D, GROUPS)
