"""Products of probability codes with value codes, and the conversion to codes."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl

from piper_kernels._triton.mixed_sign import MARKER_ASM

# How unsigned codes are multiplied.
NVIDIA = tl.constexpr("nvidia")
AMD = tl.constexpr("amd")
# By signed codes 128 lower and a sum over the values: for interpreters and as a control.
AFFINE = tl.constexpr("affine")

_PACK_FOUR_CODES = tl.constexpr("""{
.reg .s32 a, b, c, d;
cvt.rzi.s32.f32 a, $1;
cvt.rzi.s32.f32 b, $2;
cvt.rzi.s32.f32 c, $3;
cvt.rzi.s32.f32 d, $4;
cvt.pack.sat.u8.s32.b32 c, d, c, 0;
cvt.pack.sat.u8.s32.b32 $0, b, a, c;
}""")


# An FP32 number whose lowest bits count: integers within 2**22 that are added to its bits, or
# numbers that are added to it, appear in both forms.
_MAGIC = tl.constexpr(12582912.0)
_MAGIC_BITS = tl.constexpr(0x4B400000)


@triton.jit
def start_counting(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return int32 sums for :func:`counted` to which nothing was added."""
    return tl.full((ROWS, COLUMNS), _MAGIC_BITS, tl.int32)


@triton.jit
def counted(sums):
    """Return what was added to sums of :func:`start_counting`, within ``2**22``, as FP32.

    Integers become floating by one subtraction; conversion instructions are slower.
    """
    return sums.to(tl.float32, bitcast=True) - _MAGIC


@triton.jit
def to_codes(scaled, PACKED: tl.constexpr):
    """Return uint8 codes of FP32 numbers in [0, 255.5).

    Args:
        scaled: ``[M, N]``.
        PACKED: Whether four codes are converted together, by instructions of NVIDIA GPUs that
            round half up; otherwise additions round half to even.
    """
    if PACKED:
        return tl.inline_asm_elementwise(
            _PACK_FOUR_CODES, "=r,r,r,r,r", [scaled + 0.5], dtype=tl.uint8, is_pure=True, pack=4
        )
    return (tl.minimum(scaled, 255.0) + _MAGIC).to(tl.int32, bitcast=True).to(tl.uint8)


@triton.jit
def add_products(sums, codes, values, PRODUCT: tl.constexpr):
    """Return int32 ``sums + codes @ values``, ``[M, N]``.

    Args:
        sums: int32 ``[M, N]``, the same constant everywhere or a result of this function.
        codes: uint8 ``[M, K]``.
        values: int8 ``[K, N]``.
        PRODUCT: ``NVIDIA``, ``AMD`` or ``AFFINE``.
    """
    if PRODUCT == AFFINE:
        lower = (codes.to(tl.int32) - 128).to(tl.int8)
        of_values = tl.sum(values.to(tl.int32), 0)
        return tl.dot(lower, values, sums, out_dtype=tl.int32) + 128 * of_values[None, :]
    return tl.dot(codes.to(tl.int8, bitcast=True), values, sums, out_dtype=tl.int32)


@triton.jit
def mark(sums, PRODUCT: tl.constexpr):
    """Return the sums; all products that were added to them take unsigned codes."""
    if PRODUCT == NVIDIA:
        return tl.inline_asm_elementwise(
            MARKER_ASM, "=r,r", [sums], dtype=tl.int32, is_pure=True, pack=1
        )
    if PRODUCT == AMD:
        return tl.inline_asm_elementwise(
            MARKER_ASM, "=v,v", [sums], dtype=tl.int32, is_pure=True, pack=1
        )
    return sums
