"""In-register decoding of GGML blocks, for Triton kernels. Importing this requires Triton.

Blocks are decoded in units of 16 consecutive values: no unit mixes two scales, so that all
block factors are loaded and combined once per unit instead of once per value.
"""

# ruff: noqa: ANN001, ANN201, ANN202  # the types of device functions are their docstrings
# ruff: noqa: PLR1714, SIM109  # Triton compares constexpr values one by one
# pyright: reportArgumentType=false, reportAssignmentType=false

import triton
import triton.language as tl

from piper_kernels._triton.convrot import rotate_mirrored

__all__ = ["decode_units", "load_mirrored_tile"]

# Identifiers of GGUFQuantizationType.
_F32 = tl.constexpr(0)
_F16 = tl.constexpr(1)
_Q4_0 = tl.constexpr(2)
_Q4_1 = tl.constexpr(3)
_Q5_0 = tl.constexpr(6)
_Q5_1 = tl.constexpr(7)
_Q8_0 = tl.constexpr(8)
_Q2_K = tl.constexpr(10)
_Q3_K = tl.constexpr(11)
_Q4_K = tl.constexpr(12)
_Q5_K = tl.constexpr(13)
_Q6_K = tl.constexpr(14)
_IQ4_NL = tl.constexpr(20)
_IQ4_XS = tl.constexpr(23)
_BF16 = tl.constexpr(30)

# The sixteen int8 values of the IQ4 codebook, eight in each word, first value lowest.
_CODEBOOK_LOW = tl.constexpr(-654466911485192063)
_CODEBOOK_HIGH = tl.constexpr(8167635493787864321)


@triton.jit
def _half(data, offset, valid):
    pointer = (data + offset).to(tl.pointer_type(tl.float16), bitcast=True)
    return tl.load(pointer, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def _word(data, offset, valid):
    """Load 16 bits from an even byte offset."""
    pointer = (data + offset).to(tl.pointer_type(tl.int16), bitcast=True)
    return tl.load(pointer, mask=valid, other=0).to(tl.int32) & 0xFFFF


@triton.jit
def _byte(data, offset, valid):
    return tl.load(data + offset, mask=valid, other=0).to(tl.int32)


@triton.jit
def _signed_byte(data, offset, valid):
    pointer = (data + offset).to(tl.pointer_type(tl.int8), bitcast=True)
    return tl.load(pointer, mask=valid, other=0).to(tl.float32)


@triton.jit
def _codebook(codes):
    words = tl.where(codes < 8, _CODEBOOK_LOW, _CODEBOOK_HIGH)
    return (words >> ((codes & 7) * 8).to(tl.int64)).to(tl.int8).to(tl.float32)


@triton.jit
def _decode_plain(data, unit, lane, valid, TYPE: tl.constexpr):
    index = unit * 16 + lane
    if TYPE == _F32:
        pointer = data.to(tl.pointer_type(tl.float32), bitcast=True)
        values = tl.load(pointer + index, mask=valid, other=0.0)
    elif TYPE == _F16:
        pointer = data.to(tl.pointer_type(tl.float16), bitcast=True)
        values = tl.load(pointer + index, mask=valid, other=0.0).to(tl.float32)
    else:
        pointer = data.to(tl.pointer_type(tl.int16), bitcast=True)
        bits = tl.load(pointer + index, mask=valid, other=0).to(tl.int32)
        values = (bits << 16).to(tl.float32, bitcast=True)
    return values


@triton.jit
def _decode_32(data, unit, lane, valid, TYPE: tl.constexpr):
    """Decode units of the types with 32 values per block: one factor, sometimes an offset."""
    # Bytes of a block, of the high bits of its values, and of the values.
    if TYPE == _Q8_0:
        BYTES: tl.constexpr = 34
    elif TYPE == _Q4_0 or TYPE == _IQ4_NL:
        BYTES: tl.constexpr = 18
    elif TYPE == _Q4_1:
        BYTES: tl.constexpr = 20
    elif TYPE == _Q5_0:
        BYTES: tl.constexpr = 22
    else:
        tl.static_assert(TYPE == _Q5_1, "unsupported GGUF type")
        BYTES: tl.constexpr = 24
    start = (unit >> 1) * BYTES
    half = (unit & 1).to(tl.int32)
    factor = _half(data, start, valid)
    if TYPE == _Q8_0:
        values = factor * _signed_byte(data, start + 2 + half * 16 + lane, valid)
    else:
        # The nibbles are the last 16 bytes; the high bits come just before them.
        codes = (_byte(data, start + BYTES - 16 + lane, valid) >> (half * 4)) & 15
        if TYPE == _Q5_0 or TYPE == _Q5_1:
            high = _word(data, start + BYTES - 20 + half * 2, valid)
            codes |= ((high >> lane) & 1) << 4
        if TYPE == _IQ4_NL:
            values = factor * _codebook(codes)
        elif TYPE == _Q4_0:
            values = factor * (codes - 8).to(tl.float32)
        elif TYPE == _Q5_0:
            values = factor * (codes - 16).to(tl.float32)
        else:
            values = factor * codes.to(tl.float32) + _half(data, start + 2, valid)
    return values


@triton.jit
def _decode_affine_k(data, unit, lane, valid, TYPE: tl.constexpr):
    """Decode units of Q4_K and Q5_K: 6-bit scales and minima per 32 values."""
    BYTES: tl.constexpr = 144 if TYPE == _Q4_K else 176
    QUANTS: tl.constexpr = 16 if TYPE == _Q4_K else 48
    start = (unit >> 4) * BYTES
    inner = (unit & 15).to(tl.int32)
    group = inner >> 1
    position = lane + (inner & 1) * 16  # among the 32 values of the group
    codes = _byte(data, start + QUANTS + (group >> 1) * 32 + position, valid)
    codes = (codes >> ((group & 1) * 4)) & 15
    if TYPE == _Q5_K:
        codes |= ((_byte(data, start + 16 + position, valid) >> group) & 1) << 4
    # Groups 4 to 7 keep two bits in the bytes of groups 0 to 3 and four bits in the rest.
    first = _byte(data, start + group, valid)
    second = _byte(data, start + 4 + group, valid)
    third = _byte(data, start + 8 + group, valid)
    scale = tl.where(group < 4, second & 63, (third & 15) | ((first >> 2) & 0x30))
    minimum = tl.where(group < 4, third & 63, (third >> 4) | ((second >> 2) & 0x30))
    factor = _half(data, start, valid) * scale.to(tl.float32)
    offset = _half(data, start + 2, valid) * minimum.to(tl.float32)
    return factor * codes.to(tl.float32) - offset


@triton.jit
def _decode_k(data, unit, lane, valid, TYPE: tl.constexpr):
    """Decode units of the other types with 256 values per block."""
    block = unit >> 4
    inner = (unit & 15).to(tl.int32)
    group = inner >> 1  # of 32 values
    position = lane + (inner & 1) * 16  # among them
    quarter = group & 3
    half = group >> 2  # of 128 values
    if TYPE == _Q2_K:
        start = block * 84
        codes = (_byte(data, start + 16 + half * 32 + position, valid) >> (quarter * 2)) & 3
        packed = _byte(data, start + inner, valid)
        factor = _half(data, start + 80, valid) * (packed & 15).to(tl.float32)
        offset = _half(data, start + 82, valid) * (packed >> 4).to(tl.float32)
        values = factor * codes.to(tl.float32) - offset
    elif TYPE == _Q3_K:
        start = block * 110
        codes = (_byte(data, start + 32 + half * 32 + position, valid) >> (quarter * 2)) & 3
        codes += ((_byte(data, start + position, valid) >> group) & 1) * 4 - 4
        low = _byte(data, start + 96 + (inner & 7), valid) >> ((inner >> 3) * 4)
        high = _byte(data, start + 104 + (inner & 3), valid) >> ((inner >> 2) * 2)
        scale = ((low & 15) | ((high & 3) << 4)) - 32
        factor = _half(data, start + 108, valid) * scale.to(tl.float32)
        values = factor * codes.to(tl.float32)
    elif TYPE == _Q6_K:
        start = block * 210
        low = _byte(data, start + half * 64 + (group & 1) * 32 + position, valid)
        high = _byte(data, start + 128 + half * 32 + position, valid) >> (quarter * 2)
        codes = ((low >> ((quarter >> 1) * 4)) & 15) | ((high & 3) << 4)
        factor = _half(data, start + 208, valid) * _signed_byte(data, start + 192 + inner, valid)
        values = factor * (codes - 32).to(tl.float32)
    else:
        tl.static_assert(TYPE == _IQ4_XS, "unsupported GGUF type")
        start = block * 136
        codes = (_byte(data, start + 8 + group * 16 + lane, valid) >> ((inner & 1) * 4)) & 15
        low = _byte(data, start + 4 + (group >> 1), valid) >> ((group & 1) * 4)
        high = _word(data, start + 2, valid) >> (group * 2)
        scale = ((low & 15) | ((high & 3) << 4)) - 32
        values = _half(data, start, valid) * scale.to(tl.float32) * _codebook(codes)
    return values


@triton.jit
def decode_units(data, unit, valid, TYPE: tl.constexpr):
    """Decode units of 16 consecutive values.

    Args:
        data: uint8 pointer to contiguous packed rows, 4-byte aligned for F32 and 2-byte
            aligned otherwise.
        unit: int64 ``[UNITS]``, element offset in the whole tensor divided by 16. Rows must
            hold a multiple of 16 values.
        valid: bool ``[UNITS]``; nothing is read for the others and their values are zero.
        TYPE: Identifier of a ``GGUFQuantizationType``.

    Returns:
        FP32 ``[UNITS, 16]``.
    """
    index = unit[:, None]
    lane = tl.arange(0, 16)[None, :]
    read = valid[:, None]
    if TYPE == _F32 or TYPE == _F16 or TYPE == _BF16:
        values = _decode_plain(data, index, lane, read, TYPE)
    elif TYPE == _Q4_K or TYPE == _Q5_K:
        values = _decode_affine_k(data, index, lane, read, TYPE)
    elif TYPE == _Q2_K or TYPE == _Q3_K or TYPE == _Q6_K or TYPE == _IQ4_XS:
        values = _decode_k(data, index, lane, read, TYPE)
    else:
        values = _decode_32(data, index, lane, read, TYPE)
    return values


@triton.jit
def load_mirrored_tile(
    data,
    first_row,
    rows,
    first_unit,
    units_per_row,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TYPE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Decode a tile of a packed matrix, rotate its groups and reverse each of them.

    Args:
        data: Packed rows, see ``decode_units``.
        first_row: int64 row of the tile.
        rows: Rows of the matrix.
        first_unit: First column of the tile divided by 16; a multiple of ``GROUP / 16``.
        units_per_row: Columns of the matrix divided by 16.
        ROWS: Rows of the tile.
        COLS: Columns of the tile.
        TYPE: Identifier of a ``GGUFQuantizationType``.
        GROUP: Rotation group.

    Returns:
        FP32 ``[ROWS, COLS]``, zero outside of the matrix; see ``rotate_mirrored``.
    """
    UNITS: tl.constexpr = COLS // 16
    index = tl.arange(0, ROWS * UNITS)
    row = first_row + index // UNITS
    column = first_unit + index % UNITS
    valid = (row < rows) & (column < units_per_row)
    values = decode_units(data, row * units_per_row + column, valid, TYPE)
    return rotate_mirrored(tl.reshape(values, (ROWS, COLS)), GROUP)
