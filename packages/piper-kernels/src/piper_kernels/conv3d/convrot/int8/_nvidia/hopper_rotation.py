"""Rotation and encoding of blocks of 64 channels, in Gluon for Hopper.

A sum over two of the three digits of a channel is a product of tensor cores, whose fragments give
a thread every channel with the same third digit; it adds those itself. Importing needs a Triton
with Gluon.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

# As in ``convrot_rows``: rounds half to even, and makes codes unsigned bytes.
_ROUND_TO_BYTE = gl.constexpr(12583040.0)
_REMOVE_EXPONENTS = gl.constexpr(0x74C00000)
_SIGNED_BYTES = gl.constexpr(-0x7F7F7F80)  # 0x80808080


@gluon.jit
def _sign(left, right):
    """Return the entries of H4."""
    return gl.where(left + right == 3, -1.0, 1.0)


@gluon.jit
def rotation_factor(GROUP: gl.constexpr, TYPE: gl.constexpr, layout: gl.constexpr):
    """Return ``[16, 16]``, which sums over the first and the last digit of 64 channels.

    Bits 1 and 2 of an index are the digit of weight 16, bits 3 and 0 the digit of weight 1:
    the fragments of a thread then have channels side by side.
    """
    k = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(1, layout)), 1)
    n = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, layout)), 0)
    factor = _sign(k // 8 * 2 + k % 2, n // 8 * 2 + n % 2)
    first_k = k // 2 % 4
    first_n = n // 2 % 4
    if GROUP == 16:
        factor = gl.where(first_k == first_n, factor, 0.0)
    else:
        factor *= _sign(first_k, first_n)
    return factor.to(TYPE)


@gluon.jit
def h4(a, b, c, d):
    """Apply H4 to four tensors."""
    total = a + b + c + d
    return total - 2.0 * d, total - 2.0 * c, total - 2.0 * b, total - 2.0 * a


@gluon.jit
def _split_digits(values, operand: gl.constexpr):
    """Return the operands of products, one for each middle digit of channels ``[VOXELS, 64]``."""
    VOXELS: gl.constexpr = values.shape[0]
    digits = gl.reshape(values, (VOXELS, 4, 2, 2, 2, 2))
    digits = gl.permute(digits, (0, 4, 1, 5, 2, 3))
    even, odd = gl.split(digits)
    a, c = gl.split(even)
    b, d = gl.split(odd)
    a = gl.convert_layout(gl.reshape(a, (VOXELS, 16)), operand, assert_trivial=True)
    b = gl.convert_layout(gl.reshape(b, (VOXELS, 16)), operand, assert_trivial=True)
    c = gl.convert_layout(gl.reshape(c, (VOXELS, 16)), operand, assert_trivial=True)
    d = gl.convert_layout(gl.reshape(d, (VOXELS, 16)), operand, assert_trivial=True)
    return a, b, c, d


@gluon.jit
def _transposed_digits(shared, operand: gl.constexpr):
    """As ``_split_digits`` for stored ``[64, VOXELS]``, whose rows have the order of products."""
    a = shared.slice(0, 16).permute((1, 0)).load(operand)
    b = shared.slice(16, 16).permute((1, 0)).load(operand)
    c = shared.slice(32, 16).permute((1, 0)).load(operand)
    d = shared.slice(48, 16).permute((1, 0)).load(operand)
    return a, b, c, d


@gluon.jit
def _multiply(values, factor, a, b, c, d, shared, layout: gl.constexpr, LAST: gl.constexpr):
    """Add the products of a block to four accumulators; ``LAST`` reads values, else shared."""
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    if LAST:
        w, x, y, z = _split_digits(values, operand)
    else:
        w, x, y, z = _transposed_digits(shared, operand)
    a = mma_v2(w, factor, a)
    b = mma_v2(x, factor, b)
    c = mma_v2(y, factor, c)
    d = mma_v2(z, factor, d)
    return a, b, c, d


@gluon.jit
def _leading_bfloat16(values):
    """Return the first 8 bits of FP32 numbers as bfloat16, and what they lack."""
    bits = values.to(gl.int32, bitcast=True)
    rest = values - (bits & -65536).to(gl.float32, bitcast=True)
    return (bits >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True), rest


@gluon.jit
def rotate_block(
    values, factor, shared, AT: gl.constexpr, layout: gl.constexpr,
    LAST: gl.constexpr,
):  # fmt: skip
    """Return four FP32 ``[VOXELS, 16]`` of a loaded block, rotated in its 64 channels.

    Args:
        values: Result of ``load_block``.
        factor: Result of ``rotation_factor`` in the layout of right operands.
        shared: Buffers ``[64, VOXELS]``, one for each block or three; not read if ``LAST``.
        AT: Index of this block.
        layout: Layout of the accumulators.
        LAST: See ``load_block``.
    """
    VOXELS: gl.constexpr = values.shape[0 if LAST else 1]
    a = gl.zeros((VOXELS, 16), gl.float32, layout)
    b = gl.zeros((VOXELS, 16), gl.float32, layout)
    c = gl.zeros((VOXELS, 16), gl.float32, layout)
    d = gl.zeros((VOXELS, 16), gl.float32, layout)
    if values.dtype == gl.float16:
        if not LAST:
            shared.index(AT).store(values)
        a, b, c, d = _multiply(values, factor, a, b, c, d, shared.index(AT), layout, LAST)
    else:
        # Three bfloat16 numbers have all bits of a value.
        high, values = _leading_bfloat16(values)
        middle, values = _leading_bfloat16(values)
        low, values = _leading_bfloat16(values)
        if not LAST:
            shared.index(0).store(low)
            shared.index(1).store(middle)
            shared.index(2).store(high)
        a, b, c, d = _multiply(low, factor, a, b, c, d, shared.index(0), layout, LAST)
        a, b, c, d = _multiply(middle, factor, a, b, c, d, shared.index(1), layout, LAST)
        a, b, c, d = _multiply(high, factor, a, b, c, d, shared.index(2), layout, LAST)
    return h4(a, b, c, d)


@gluon.jit
def _encode_digit(values, high, low, finite):
    """Return int32 ``[VOXELS, 4]``: the codes of four channels side by side in a word."""
    VOXELS: gl.constexpr = values.shape[0]
    scaled = gl.fma(values, high, values * low)
    scaled = gl.minimum(gl.maximum(scaled, -128.0), 127.0)
    bits = (scaled + _ROUND_TO_BYTE).to(gl.int32, bitcast=True)
    bits = gl.permute(gl.reshape(bits, (VOXELS, 2, 4, 2)), (0, 2, 1, 3))
    even, odd = gl.split(bits)
    b0, b2 = gl.split(even)
    b1, b3 = gl.split(odd)
    words = (b3 << 24) + (b2 << 16) + (b1 << 8) + (b0 + _REMOVE_EXPONENTS)
    return (words ^ _SIGNED_BYTES) & finite


@gluon.jit
def encode_block(a, b, c, d, high, low, finite, STORE: gl.constexpr):
    """Return the codes of a block in their order, int32 ``[VOXELS, 16]``."""
    a = _encode_digit(a, high, low, finite)
    b = _encode_digit(b, high, low, finite)
    c = _encode_digit(c, high, low, finite)
    d = _encode_digit(d, high, low, finite)
    words = gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), (a.shape[0], 16))
    return gl.convert_layout(words, STORE, assert_trivial=True)
