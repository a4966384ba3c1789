"""Device functions of attention tiles on Hopper, in Gluon: scores, probability codes, layouts.

A warpgroup owns 64 queries. Keys come in pairs of tiles of 64 that share a coordinate of the
softmax. Importing needs a Triton with Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

QUERY_ROWS = gl.constexpr(64)
TILE_KEYS = gl.constexpr(64)
PAIR_KEYS = gl.constexpr(128)
# The bits of the FP32 number 1.5 * 2**23; adding a small integer to them adds it to the number.
MAGIC_BITS = gl.constexpr(0x4B400000)
MAGIC = gl.constexpr(12582912.0)
# The low byte of MAGIC + SIGNED_OFFSET + u is u - 128.
SIGNED_OFFSET = gl.constexpr(-128.0)
# A step of one between scores may change a logarithm by this much before differences are formed
# exactly: 0.75 times as much keeps codes below 255.5.
MAX_STEP = gl.constexpr(2.0**-8)
HIDDEN = gl.constexpr(-(2**30))

_PACK = gl.constexpr("""
{
    .reg .b32 low, high;
    prmt.b32 low, $1, $2, 0x0040;
    prmt.b32 high, $3, $4, 0x0040;
    prmt.b32 $0, low, high, 0x5410;
}
""")
_PACK_FP8 = gl.constexpr("""
{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}
""")


@gluon.jit
def fast_exp2(x):
    """Return ``2 ** x`` of FP32 numbers in one instruction; results below 2**-126 are zero."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def biased_float(x):
    """Return ``MAGIC + x`` of int32 numbers within 2**22, exactly."""
    return (x + MAGIC_BITS).to(gl.float32, bitcast=True)


@gluon.constexpr_function
def operand_layout(columns):
    """Return the layout of ``[64, columns]`` 8-bit numbers as left operand in registers.

    Equal to the dot operand of a warpgroup product with four 8-bit numbers in a register.
    """
    registers = [[0, 1], [0, 2], [8, 0], [0, 16]]
    size = 32
    while size < columns:
        registers.append([0, size])
        size *= 2
    return gl.DistributedLinearLayout(
        reg_bases=registers,
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.jit
def to_operand_order(x):
    """Reorder ``[64, keys]`` from natural to permuted keys; every thread keeps its elements.

    Slot ``s`` of a group of 32 keys holds key
    ``16 * (s // 16) + 8 * (s % 4 // 2) + 2 * (s % 16 // 4) + s % 2``, the order in which values
    are stored.
    """
    ROWS: gl.constexpr = x.shape[0]
    KEYS: gl.constexpr = x.shape[1]
    x = x.reshape([ROWS, KEYS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, KEYS])
    return gl.convert_layout(x, operand_layout(KEYS), assert_trivial=True)


@gluon.jit
def pack_signed_codes(x, OPERAND: gl.constexpr):
    """Return the low bytes of biased FP32 numbers ``[64, keys]`` as a left operand."""
    packed = gl.inline_asm_elementwise(
        _PACK, "=r,r,r,r,r", [to_operand_order(x)], dtype=gl.int8, is_pure=True, pack=4
    )
    return gl.convert_layout(packed, OPERAND, assert_trivial=True)


@gluon.jit
def pack_fp8(x, OPERAND: gl.constexpr):
    """Round FP32 numbers ``[64, keys]`` to E4M3 as a left operand."""
    packed = gl.inline_asm_elementwise(
        _PACK_FP8, "=r,r,r,r,r", [to_operand_order(x)], dtype=gl.float8e4nv, is_pure=True, pack=4
    )
    return gl.convert_layout(packed, OPERAND, assert_trivial=True)


@gluon.jit
def visible_keys(rows, first_key, keys, LAYOUT: gl.constexpr, CAUSAL: gl.constexpr):
    """Return which of the 64 keys from ``first_key`` the queries at ``rows`` see."""
    key = first_key + gl.arange(0, TILE_KEYS, layout=gl.SliceLayout(0, LAYOUT))
    inside = gl.expand_dims(key < keys, 0)
    if CAUSAL:
        return inside & (gl.expand_dims(key, 0) <= gl.expand_dims(rows, 1))
    return inside & (gl.expand_dims(rows, 1) >= 0)


@gluon.jit
def hide_scores(scores, visible):
    """Return int32 scores with ``HIDDEN`` where a key is invisible."""
    return gl.where(visible, scores, gl.full_like(scores, HIDDEN))


@gluon.jit
def row_maximum(scores, scale, MASKED: gl.constexpr):
    """Return the largest int32 score of rows, and it times ``scale`` (-inf if all are hidden)."""
    largest = gl.max(scores, axis=1)
    scaled = largest.to(gl.float32) * scale
    if MASKED:
        scaled = gl.where(largest == HIDDEN, float("-inf"), scaled)
    return largest, scaled


@gluon.jit
def subtract_rows(x, rows):
    """Return ``x - rows[:, None]``; inside a branch it stays there."""
    return gl.inline_asm_elementwise(
        "sub.f32 $0, $1, $2;", "=f,f,f", [x, gl.expand_dims(rows, 1)], dtype=gl.float32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def exponents(
    first, second, largest_0, largest_1, scale_0, scale_1, exponent_0, exponent_1, steep
):  # fmt: skip
    """Return ``x`` and ``start`` of two tiles: their exponents are ``x * scale + start``.

    The exponent of the largest score of a row is ``exponent``. Unless ``steep``, ``x`` is biased
    and all exponents of a row are off by at most ``0.75 * scale``; otherwise it is the difference
    to the largest score.

    Args:
        first: int32 scores ``[64, 64]``.
        second: The same of the second tile.
        largest_0: int32 ``[64]``, the largest scores of the first tile.
        largest_1: The same of the second tile.
        scale_0: FP32 ``[64]``.
        scale_1: The same of the second tile.
        exponent_0: FP32 ``[64]``.
        exponent_1: The same of the second tile.
        steep: Whether some scale is above ``MAX_STEP``.
    """
    x_0 = biased_float(first)
    x_1 = biased_float(second)
    top_0 = biased_float(largest_0)
    top_1 = biased_float(largest_1)
    start_0 = exponent_0 - top_0 * scale_0
    start_1 = exponent_1 - top_1 * scale_1
    if steep:
        x_0 = subtract_rows(x_0, top_0)
        x_1 = subtract_rows(x_1, top_1)
        start_0 = exponent_0
        start_1 = exponent_1
    return x_0, start_0, x_1, start_1
