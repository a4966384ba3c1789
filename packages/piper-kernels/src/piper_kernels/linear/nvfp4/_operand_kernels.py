"""Kernels that prepare NVFP4 linear inputs. Importing needs Triton.

An input is activated, rotated and quantized in one pass, or brought into the operands of
``_product_kernels``: rotated, or as the exact values of its NVFP4 codes.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from piper_kernels._triton.convrot import rotate, rotate_mirrored
from piper_kernels._triton.convrot_rows import rotate_quarters_mirrored
from piper_kernels._triton.nvfp4 import (
    block_scales,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    scale_offsets,
    store_encoded_tile,
)
from piper_kernels._triton.reductions import magnitude_bits
from piper_kernels.weights.nvfp4._encoding import MIN_PER_TENSOR_SCALE
from piper_kernels.weights.nvfp4._tiles import AMAX_SLOTS

_MIN_GLOBAL_SCALE = tl.constexpr(MIN_PER_TENSOR_SCALE)


@triton.jit
def _tile(program, total_rows, features, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return row indices (int64), their mask and the first column of a tile."""
    tiles = tl.cdiv(features, COLUMNS)
    rows = (program // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return rows, rows < total_rows, tl.multiple_of((program % tiles) * COLUMNS, COLUMNS)


@triton.jit
def _load_activated(
    source, rows, row_mask, first, features, row_stride, COLUMNS: tl.constexpr, GELU, SWIGLU
):
    """Return the activated FP32 tile ``[ROWS, COLUMNS]``; zeros outside of the matrix."""
    columns = first + tl.arange(0, COLUMNS)[None, :]
    mask = row_mask[:, None] & (columns < features)
    start = source + rows[:, None] * row_stride + columns
    values = tl.load(start, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (values + 0.044715 * values * values * values)
        # 0.5 * (1 + tanh(u)) is the logistic function of 2 u.
        values = values * tl.sigmoid(2.0 * inner)
    if SWIGLU:
        gate = tl.load(start + features, mask=mask, other=0.0).to(tl.float32)
        values = values * (gate * tl.sigmoid(gate))
    return values


@triton.jit
def input_amax_kernel(
    source,
    amax_bits,
    total_rows,
    features,
    row_stride,
    GROUP: tl.constexpr,
    GELU: tl.constexpr,
    SWIGLU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Raise ``amax_bits``, int32 ``[AMAX_SLOTS]``, to the bits of the largest magnitude."""
    # From the last tile to the first: encoding starts with what the cache still holds.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    rows, row_mask, first = _tile(program, total_rows, features, ROWS, COLUMNS)
    values = _load_activated(
        source, rows, row_mask, first, features, row_stride, COLUMNS, GELU, SWIGLU
    )
    if GROUP > 0:
        values = rotate_mirrored(values, GROUP)
    amax = tl.max(tl.max(magnitude_bits(values), axis=1), axis=0)
    tl.atomic_max(amax_bits + program % AMAX_SLOTS, amax, sem="relaxed")


@triton.jit
def _second_level(given, amax_bits, level, DYNAMIC: tl.constexpr):
    """Return the second scale level to encode with; the first program stores what it is."""
    if DYNAMIC:
        bits = tl.max(tl.load(amax_bits + tl.arange(0, AMAX_SLOTS)), axis=0)
        value = tl.div_rn(bits.to(tl.float32, bitcast=True), 2688.0)
    else:
        value = tl.load(given)
    if tl.program_id(0) == 0:
        tl.store(level, value)
    return tl.where(value < _MIN_GLOBAL_SCALE, _MIN_GLOBAL_SCALE, value)


@triton.jit
def encode_input_kernel(
    source,
    qdata_words,
    scale,
    given,
    amax_bits,
    level,
    total_rows,
    features,
    scale_columns,
    row_stride,
    GROUP: tl.constexpr,
    GELU: tl.constexpr,
    SWIGLU: tl.constexpr,
    DYNAMIC: tl.constexpr,
    HIGH_FIRST: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Activate, rotate and encode one tile.

    Args:
        source: Pointer to floating ``[total_rows, factor * features]``, unit column stride.
        qdata_words: Pointer to int32 ``[total_rows, features / 8]``, eight codes in each.
        scale: Pointer to the swizzled E4M3 bytes; padding is not written.
        given: Pointer to the FP32 second level; read unless ``DYNAMIC``.
        amax_bits: See ``input_amax_kernel``; read only when ``DYNAMIC``.
        level: Pointer to the FP32 second level to store.
        total_rows: Rows of the input.
        features: Columns of the codes, a multiple of 16 and of ``GROUP``.
        scale_columns: See ``scale_offsets``.
        row_stride: Elements between rows of ``source``.
        GROUP: Rotation group, 0 for none.
        GELU: Whether the activation is GELU with the tanh approximation.
        SWIGLU: Whether it is ``up * silu(gate)`` of ``[up | gate]``.
        DYNAMIC: Whether the second level is ``amax / 2688``.
        HIGH_FIRST: Whether the even feature is the high nibble of a byte.
        NATIVE: Whether the target converts to E2M1 with one instruction.
        ROWS: Rows of the tile.
        COLUMNS: Columns of the tile, a multiple of ``GROUP``.
    """
    rows, row_mask, first = _tile(tl.program_id(0), total_rows, features, ROWS, COLUMNS)
    values = _load_activated(
        source, rows, row_mask, first, features, row_stride, COLUMNS, GELU, SWIGLU
    )
    if GROUP > 0:
        values = rotate_mirrored(values, GROUP)
    second = _second_level(given, amax_bits, level, DYNAMIC)
    store_encoded_tile(
        values,
        second,
        qdata_words,
        scale,
        rows,
        row_mask,
        first,
        features,
        scale_columns,
        GROUP,
        True,
        True,
        HIGH_FIRST,
        NATIVE,
    )


@triton.jit
def _store_operand(values, out, rows, row_mask, first, width, ARRANGEMENT: tl.constexpr):
    """Store FP32 ``[ROWS, COLUMNS]``, arranged for a product.

    ``_product_kernels`` says what an arrangement of 64 features is, ``_nvidia.hopper_decode``
    what one of 256 is; 0 is none.
    """
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    if ARRANGEMENT == 64:
        parts = tl.reshape(values, (ROWS, COLUMNS // 64, 16, 4))
        values = tl.reshape(tl.permute(parts, (0, 1, 3, 2)), (ROWS, COLUMNS))
    if ARRANGEMENT == 256:
        parts = tl.reshape(values, (ROWS, COLUMNS // 256, 4, 8, 2, 4))
        values = tl.reshape(tl.permute(parts, (0, 1, 5, 3, 2, 4)), (ROWS, COLUMNS))
    columns = first + tl.arange(0, COLUMNS)[None, :]
    tl.store(
        out + rows[:, None] * width + columns,
        values.to(out.dtype.element_ty),
        mask=row_mask[:, None] & (columns < width),
    )


@triton.jit(do_not_specialize=["total_rows"])
def dense_operand_kernel(
    source,
    out,
    total_rows,
    features,
    width,
    row_stride,
    factor,
    GROUP: tl.constexpr,
    ARRANGEMENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LEADS: tl.constexpr,
):
    """Rotate a dense input, multiply it by ``factor`` and arrange it; pads to ``width``.

    With ``LEADS`` a kernel that waits for this one may start before it ends.
    """
    if LEADS:
        gdc_launch_dependents()
    rows, row_mask, first = _tile(tl.program_id(0), total_rows, width, ROWS, COLUMNS)
    values = _load_activated(
        source, rows, row_mask, first, features, row_stride, COLUMNS, False, False
    )
    if GROUP > 0:
        values = rotate(values * factor, GROUP)
    _store_operand(values, out, rows, row_mask, first, width, ARRANGEMENT)


@triton.jit
def _quarter(row_starts, row_mask, first, features, QUARTER: tl.constexpr, SIZE: tl.constexpr):
    """Return FP32 ``[ROWS, SIZE / 4]``: one quarter of every group of 256 of a tile."""
    index = tl.arange(0, SIZE // 4)
    columns = (first + index // 64 * 256 + QUARTER * 64 + index % 64)[None, :]
    mask = row_mask[:, None] & (columns < features)
    return tl.load(row_starts + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["total_rows"])
def rotated_operand_kernel(
    source,
    out,
    total_rows,
    features,
    row_stride,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    LEADS: tl.constexpr,
):
    """Rotate a dense input by groups of 256 and arrange it by 256, with few exchanges.

    The quarters of a group are separate values of a thread, which therefore has whole 16 bytes
    of the arranged operand; see ``convrot_rows.rotate_quarters_mirrored``.

    Args:
        source: Pointer to floating ``[total_rows, features]``, unit column stride.
        out: Pointer to floating ``[total_rows, features]``, contiguous.
        total_rows: Rows of the input.
        features: Columns, a multiple of 256.
        row_stride: Elements between rows of ``source``.
        ROWS: Rows of a tile.
        SIZE: Columns of a tile, a multiple of 256.
        LEADS: See ``dense_operand_kernel``.
    """
    if LEADS:
        gdc_launch_dependents()
    rows, row_mask, first = _tile(tl.program_id(0), total_rows, features, ROWS, SIZE)
    start = source + rows[:, None] * row_stride
    a = _quarter(start, row_mask, first, features, 0, SIZE)
    b = _quarter(start, row_mask, first, features, 1, SIZE)
    c = _quarter(start, row_mask, first, features, 2, SIZE)
    d = _quarter(start, row_mask, first, features, 3, SIZE)
    a, b, c, d = rotate_quarters_mirrored(a, b, c, d, 256)
    dtype = out.dtype.element_ty
    # Groups are reversed: the last quarter is the first, and so on within it.
    quarters = tl.join(
        tl.join(d.to(dtype), b.to(dtype)), tl.join(c.to(dtype), a.to(dtype))
    )  # fmt: skip
    parts = tl.reshape(quarters, (ROWS, SIZE // 256, 8, 2, 4, 4))
    second, first_of_pair = tl.split(tl.permute(parts, (0, 1, 2, 4, 5, 3)))
    values = tl.reshape(tl.join(first_of_pair, second), (ROWS, SIZE // 256, 8, 4, 8))
    group = first + 256 * tl.arange(0, SIZE // 256)[None, :, None, None, None]
    column = group + (7 - tl.arange(0, 8)[None, None, :, None, None]) * 8
    column += (3 - tl.arange(0, 4)[None, None, None, :, None]) * 64
    column += tl.arange(0, 8)[None, None, None, None, :]
    mask = row_mask[:, None, None, None, None] & (column < features)
    tl.store(out + rows[:, None, None, None, None] * features + column, values, mask=mask)


@triton.jit
def quantized_operand_kernel(
    source,
    out,
    given,
    amax_bits,
    level,
    total_rows,
    features,
    width,
    row_stride,
    GROUP: tl.constexpr,
    DYNAMIC: tl.constexpr,
    ARRANGEMENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store what the codes and block scales of an input stand for, without packing them.

    See ``encode_input_kernel``; the second level is left out of the values.
    """
    rows, row_mask, first = _tile(tl.program_id(0), total_rows, width, ROWS, COLUMNS)
    values = _load_activated(
        source, rows, row_mask, first, features, row_stride, COLUMNS, False, False
    )
    if GROUP > 0:
        values = rotate(values, GROUP)
    second = _second_level(given, amax_bits, level, DYNAMIC)
    blocks = tl.reshape(values, (ROWS * (COLUMNS // 16), 16))
    codes, multiplier = block_scales(blocks, second, True)
    decoded = decode_e2m1(encode_e2m1(blocks * multiplier[:, None]))
    decoded = tl.reshape(decoded * decode_e4m3(codes)[:, None], (ROWS, COLUMNS))
    _store_operand(decoded, out, rows, row_mask, first, width, ARRANGEMENT)


@triton.jit
def packed_operand_kernel(
    qdata,
    scale,
    out,
    first_row,
    total_rows,
    features,
    width,
    scale_columns,
    SWIZZLED: tl.constexpr,
    HIGH_FIRST: tl.constexpr,
    ARRANGEMENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Decode ``total_rows`` rows of codes from ``first_row`` on, with their block scales."""
    rows, row_mask, first = _tile(tl.program_id(0), total_rows, width, ROWS, COLUMNS)
    source_rows = (first_row + rows)[:, None]
    pairs = first // 2 + tl.arange(0, COLUMNS // 2)[None, :]
    block = first // 16 + tl.arange(0, COLUMNS // 16)[None, :]
    packed = tl.load(
        qdata + source_rows * (features // 2) + pairs,
        mask=row_mask[:, None] & (pairs < features // 2),
        other=0,
    )
    scales = tl.load(
        scale + scale_offsets(source_rows, block, scale_columns, SWIZZLED),
        mask=row_mask[:, None] & (block < features // 16),
        other=0,
    )
    low, high = packed & 15, packed >> 4
    if HIGH_FIRST:
        low, high = high, low
    values = decode_e2m1(tl.interleave(low, high))
    wide = tl.broadcast_to(decode_e4m3(scales)[:, :, None], (ROWS, COLUMNS // 16, 16))
    decoded = values * tl.reshape(wide, (ROWS, COLUMNS))
    _store_operand(decoded, out, rows, row_mask, first, width, ARRANGEMENT)
