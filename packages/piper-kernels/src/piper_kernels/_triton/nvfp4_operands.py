"""NVFP4 codes as operands of matrix units, for Triton kernels.

A product of an E2M1 code and an E4M3 block scale has at most six significant bits, so bf16 and
float16 hold it exactly; the matrix units then accumulate exact products in FP32.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# ruff: noqa: SIM300  # DTYPE is no constant of Python
# pyright: reportArgumentType=false

import triton
import triton.language as tl

from piper_kernels._triton.nvfp4 import decode_e2m1, decode_e4m3

# The bits of a code placed into a float of 16 bits read as the code times 2**-126 (bf16) or
# 2**-14 (float16). Scales take a power of two that neither overflows nor leaves that range.
_BFLOAT16_SCALE = tl.constexpr(2.0**118)
_FLOAT16_SCALE = tl.constexpr(2.0**7)
_BFLOAT16_FACTOR = tl.constexpr(2.0**8)
_FLOAT16_FACTOR = tl.constexpr(2.0**7)


@triton.jit
def operand_factor(DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Return what a product with the operands of ``decode_words`` is to be multiplied by."""
    factor = 1.0
    if NATIVE:
        factor = _FLOAT16_FACTOR if DTYPE == tl.float16 else _BFLOAT16_FACTOR
    return factor


@triton.jit
def _scale_operands(scale_bytes, DTYPE: tl.constexpr, NATIVE: tl.constexpr, FP8: tl.constexpr):
    """Return block scales in the dtype of the operands, times the power that decoding needs."""
    if FP8:
        scales = scale_bytes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        scales = decode_e4m3(scale_bytes)
    if NATIVE:
        scales = scales * (_FLOAT16_SCALE if DTYPE == tl.float16 else _BFLOAT16_SCALE)
        scales = scales.to(DTYPE)
    return scales


@triton.jit
def _decode_bfloat16(words, scales):
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 a, b, c, d, s;
            mov.b32 s, 0x80008000;
            shl.b32 a, $4, 6;
            shl.b32 b, $4, 2;
            shr.b32 c, $4, 2;
            shr.b32 d, $4, 6;
            and.b32 a, a, 0x01C001C0;
            and.b32 b, b, 0x01C001C0;
            and.b32 c, c, 0x01C001C0;
            and.b32 d, d, 0x01C001C0;
            .reg .b32 e, f, g, h;
            shl.b32 e, $4, 12;
            shl.b32 f, $4, 8;
            shl.b32 g, $4, 4;
            mov.b32 h, $4;
            lop3.b32 a, e, s, a, 0xEA;
            lop3.b32 b, f, s, b, 0xEA;
            lop3.b32 c, g, s, c, 0xEA;
            lop3.b32 d, h, s, d, 0xEA;
            mov.b32 h, $5;
            fma.rn.bf16x2 $0, a, h, s;
            fma.rn.bf16x2 $1, b, h, s;
            fma.rn.bf16x2 $2, c, h, s;
            fma.rn.bf16x2 $3, d, h, s;
        }
        """,
        "=r,=r,=r,=r,r,r",
        [words, scales],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _decode_float16(words, scales):
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 a, b, c, d, s;
            mov.b32 s, 0x80008000;
            shl.b32 a, $4, 9;
            shl.b32 b, $4, 5;
            shl.b32 c, $4, 1;
            shr.b32 d, $4, 3;
            and.b32 a, a, 0x0E000E00;
            and.b32 b, b, 0x0E000E00;
            and.b32 c, c, 0x0E000E00;
            and.b32 d, d, 0x0E000E00;
            .reg .b32 e, f, g, h;
            shl.b32 e, $4, 12;
            shl.b32 f, $4, 8;
            shl.b32 g, $4, 4;
            mov.b32 h, $4;
            lop3.b32 a, e, s, a, 0xEA;
            lop3.b32 b, f, s, b, 0xEA;
            lop3.b32 c, g, s, c, 0xEA;
            lop3.b32 d, h, s, d, 0xEA;
            mov.b32 h, $5;
            fma.rn.f16x2 $0, a, h, s;
            fma.rn.f16x2 $1, b, h, s;
            fma.rn.f16x2 $2, c, h, s;
            fma.rn.f16x2 $3, d, h, s;
        }
        """,
        "=r,=r,=r,=r,r,r",
        [words, scales],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def decode_words(words, scale_bytes, DTYPE: tl.constexpr, NATIVE: tl.constexpr, FP8: tl.constexpr):
    """Decode four codes of every word, without interleaving them.

    Args:
        words: int16 ``[ROWS, WORDS]``; code ``4 * w + p`` of a row is nibble ``p`` of word ``w``.
        scale_bytes: uint8 ``[ROWS, WORDS / 4]``, E4M3.
        DTYPE: Dtype of the operands; with ``NATIVE`` bf16 or float16.
        NATIVE: Whether packed instructions of NVIDIA targets from sm_80 decode two codes each.
        FP8: Whether the target converts E4M3, which NVIDIA targets do from sm_89.

    Returns:
        Four ``[ROWS, WORDS]`` of ``DTYPE``, one for each nibble: the values divided by
        ``operand_factor``.
    """
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    scales = _scale_operands(scale_bytes, DTYPE, NATIVE, FP8)
    wide = tl.broadcast_to(scales[:, :, None], (ROWS, WORDS // 4, 4))
    wide = tl.reshape(wide, (ROWS, WORDS))
    if NATIVE:
        if DTYPE == tl.float16:
            v0, v1, v2, v3 = _decode_float16(words, wide)
        else:
            v0, v1, v2, v3 = _decode_bfloat16(words, wide)
    else:
        codes = words.to(tl.int32)
        v0 = (decode_e2m1(codes & 15) * wide).to(DTYPE)
        v1 = (decode_e2m1((codes >> 4) & 15) * wide).to(DTYPE)
        v2 = (decode_e2m1((codes >> 8) & 15) * wide).to(DTYPE)
        v3 = (decode_e2m1((codes >> 12) & 15) * wide).to(DTYPE)
    return v0, v1, v2, v3
