"""Device functions of attention tiles on Hopper, in Gluon: scores, probability codes, layouts.

A warpgroup owns 64 queries. Keys come in pairs of tiles of 64 that share a coordinate of the
softmax. Importing needs a Triton with Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportAssignmentType=false

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
# exactly: 0.75 times as much changes a code by less than one.
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
# Low bytes of FP16 numbers 1536 + c are c: the code is 254 times a probability, less 127.
_PACK_HALF = gl.constexpr("""
{
    .reg .b32 low, high;
    cvt.rn.f16x2.f32 low, $2, $1;
    cvt.rn.f16x2.f32 high, $4, $3;
    fma.rn.f16x2 low, low, $5, $9;
    fma.rn.f16x2 high, high, $5, $9;
    prmt.b32 $0, low, high, 0x6420;
}
""")
_PACK_SCALED_HALF = gl.constexpr("""
{
    .reg .b32 low, high, low_factor, high_factor;
    cvt.rn.f16x2.f32 low, $2, $1;
    cvt.rn.f16x2.f32 high, $4, $3;
    cvt.rn.f16x2.f32 low_factor, $6, $5;
    cvt.rn.f16x2.f32 high_factor, $8, $7;
    fma.rn.f16x2 low, low, low_factor, $9;
    fma.rn.f16x2 high, high, high_factor, $9;
    prmt.b32 $0, low, high, 0x6420;
}
""")
_SUM_FOUR = gl.constexpr("""
    dp4a.s32.s32 $0, $4, 0x01010101, 0;
    mov.b32 $1, 0;
    mov.b32 $2, 0;
    mov.b32 $3, 0;
""")


@gluon.jit
def fast_exp2(x):
    """Return ``2 ** x`` of FP32 numbers in one instruction; results below 2**-126 are zero."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


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
def pack_half_codes(p, sign, OPERAND: gl.constexpr):
    """Return ``sign * (254 * p - 127)`` of FP32 ``p`` in [0, 1] as int8 left operand.

    Probabilities are rounded to FP16 first, which moves a code by 1/16 at most.

    Args:
        p: FP32 ``[64, keys]``.
        sign: 1 or -1.
        OPERAND: Layout of the result.
    """
    p = to_operand_order(p)
    # Pairs of FP16 numbers: 254 or -254, and 1536 - 127 or 1536 + 127.
    factor = gl.where(sign > 0, 0x5BF05BF0, 0xDBF0DBF0 - 2**32).to(gl.int32)
    start = gl.where(sign > 0, 0x65816581, 0x667F667F).to(gl.int32)
    zeros = gl.full(p.shape, 0, gl.int32, p.type.layout)
    packed = gl.inline_asm_elementwise(
        _PACK_HALF, "=r,r,r,r,r,r,r,r,r,r,r,r,r", [p, zeros + factor, zeros + start],
        dtype=gl.int8, is_pure=True, pack=4,
    )  # fmt: skip
    return gl.convert_layout(packed, OPERAND, assert_trivial=True)


@gluon.jit
def pack_scaled_half_codes(p, factor, sign, OPERAND: gl.constexpr):
    """Return ``factor * p - 127 * sign`` of FP32 ``p`` in [0, 1] as int8 left operand.

    Both are rounded to FP16 first, which moves a code by 1/8 at most.

    Args:
        p: FP32 ``[64, keys]``.
        factor: FP32 ``[keys]``, at most ``254 * sign`` in size and of its sign.
        sign: 1 or -1.
        OPERAND: Layout of the result.
    """
    factor = to_operand_order(gl.expand_dims(factor, 0) + gl.zeros_like(p))
    start = gl.where(sign > 0, 0x65816581, 0x667F667F).to(gl.int32)
    p = to_operand_order(p)
    start = gl.full(p.shape, 0, gl.int32, p.type.layout) + start
    packed = gl.inline_asm_elementwise(
        _PACK_SCALED_HALF, "=r,r,r,r,r,r,r,r,r,r,r,r,r", [p, factor, start], dtype=gl.int8,
        is_pure=True, pack=4,
    )  # fmt: skip
    return gl.convert_layout(packed, OPERAND, assert_trivial=True)


@gluon.constexpr_function
def local_layout():
    """Return the layout ``[64, 4]`` of one number for each of the four threads of a row."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )


@gluon.jit
def per_thread(row):
    """Return ``[64]`` as ``[64, 1]`` for ``[64, 4]`` in ``local_layout``."""
    LAYOUT: gl.constexpr = local_layout()
    return gl.expand_dims(gl.convert_layout(row, gl.SliceLayout(1, LAYOUT), assert_trivial=True), 1)


@gluon.jit
def local_sums(x):
    """Return ``[64, 4]``: what each of the four threads of a row sums, without shuffles."""
    x = x.reshape([QUERY_ROWS, x.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(x, axis=3), axis=1)


@gluon.jit
def local_maximum(x):
    """Return ``[64, 4]``: the largest number of a row that each of its four threads holds."""
    x = x.reshape([QUERY_ROWS, x.shape[1] // 8, 4, 2])
    return gl.convert_layout(gl.max(gl.max(x, axis=3), axis=1), local_layout(), assert_trivial=True)


@gluon.jit
def sum_packed_codes(codes):
    """Return int32 ``[64, 4]``: the sums of an int8 left operand that each thread holds."""
    KEYS: gl.constexpr = codes.shape[1]
    LAYOUT: gl.constexpr = operand_layout(KEYS)
    codes = gl.convert_layout(codes, LAYOUT, assert_trivial=True)
    sums = gl.inline_asm_elementwise(
        _SUM_FOUR, "=r,=r,=r,=r,r", [codes], dtype=gl.int32, is_pure=True, pack=4
    )
    sums = sums.reshape([QUERY_ROWS, KEYS // 16, 4, 4])
    return gl.sum(gl.sum(sums, axis=3), axis=1)


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
def rounded_product(a, b):
    """Return ``a * b`` of FP32 numbers, rounded: never a part of a fused multiply-add.

    Where a score is compared with itself, the rounding error that a fused operation keeps would
    be the exponent of a probability: hundreds, for scores of billions.
    """
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def row_maximum(scores, scale, MASKED: gl.constexpr):
    """Return the largest int32 score of rows, and it times ``scale`` (-inf if all are hidden)."""
    largest = gl.max(scores, axis=1)
    scaled = rounded_product(largest.to(gl.float32), scale)
    if MASKED:
        scaled = gl.where(largest == HIDDEN, float("-inf"), scaled)
    return largest, scaled


@gluon.jit
def biased_differences(scores, largest):
    """Return the bits of ``scores - largest`` from biased ones."""
    return gl.inline_asm_elementwise(
        "sub.f32 $0, $1, $2;", "=r,r,r", [scores, gl.expand_dims(largest, 1)], dtype=gl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def biased_maximum(scores, scale, MASKED: gl.constexpr):
    """Return the largest biased score of rows, and it without bias times ``scale``.

    Args:
        scores: int32 bits of ``MAGIC`` plus scores ``[64, keys]``; ``HIDDEN`` where masked.
        scale: FP32 ``[64]``.
        MASKED: Whether there may be rows without a visible key, whose result is -inf.
    """
    largest = gl.max(scores, axis=1)
    scaled = rounded_product(largest.to(gl.float32, bitcast=True) - MAGIC, scale)
    if MASKED:
        scaled = gl.where(largest == HIDDEN, float("-inf"), scaled)
    return largest, scaled


@gluon.jit
def biased_exponentials(scores, scale, start):
    """Return ``2 ** (scores * scale + start)`` of biased scores.

    With ``start = exponent - biased largest * scale``, which is rounded, all exponents of a row are
    off by a common ``0.75 * scale`` at most.

    Args:
        scores: int32 bits of FP32 numbers ``[64, keys]``.
        scale: FP32 ``[64]``.
        start: FP32 ``[64]``.
    """
    x = scores.to(gl.float32, bitcast=True)
    return fast_exp2(x * gl.expand_dims(scale, 1) + gl.expand_dims(start, 1))
