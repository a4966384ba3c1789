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


# Added to a number below 2**22, it leaves the nearest integer in the lowest bits.
_MAGIC = tl.constexpr(12582912.0)


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
def code_product(codes, values, PRODUCT: tl.constexpr):
    """Return ``codes @ values``, int32 ``[M, N]``.

    Args:
        codes: uint8 ``[M, K]``.
        values: int8 ``[K, N]``.
        PRODUCT: ``NVIDIA``, ``AMD`` or ``AFFINE``.
    """
    if PRODUCT == AFFINE:
        lower = (codes.to(tl.int32) - 128).to(tl.int8)
        sums = tl.sum(values.to(tl.int32), 0)
        return tl.dot(lower, values, out_dtype=tl.int32) + 128 * sums[None, :]
    product = tl.dot(codes.to(tl.int8, bitcast=True), values, out_dtype=tl.int32)
    if PRODUCT == AMD:
        return tl.inline_asm_elementwise(
            MARKER_ASM, "=v,v", [product], dtype=tl.int32, is_pure=True, pack=1
        )
    return tl.inline_asm_elementwise(
        MARKER_ASM, "=r,r", [product], dtype=tl.int32, is_pure=True, pack=1
    )
