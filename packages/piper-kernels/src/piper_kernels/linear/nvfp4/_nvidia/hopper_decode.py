"""Decoding of NVFP4 weights into left operands of Hopper's WGMMA, in Gluon.

A step is 256 features. Lane ``c`` of four that share a row has its features ``64 * c`` to
``64 * c + 63``, which are 16 words of four codes and one word of four block scales. The nibbles
``p`` of the words are multiplied together: feature ``64 * c + 8 * j + 4 * b + p`` is at depth
``8 * j + 2 * c + b`` of product ``p``, in which order the input has to be arranged. Importing
needs a Triton with Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportAssignmentType=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from piper_kernels.linear.nvfp4._nvidia.hopper_layouts import scale_layout, word_layout


@gluon.jit
def _scale_pairs(scale_words):
    """Return four int32: each E4M3 byte times ``2 ** 118`` as bf16, twice."""
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b16 p, q, h;
            .reg .b32 a, b;
            .reg .f32 f;
            mov.b32 {p, q}, $4;
            cvt.rn.f16x2.e4m3x2 a, p;
            cvt.rn.f16x2.e4m3x2 b, q;
            mov.b32 {p, q}, a;
            cvt.f32.f16 f, p;
            mul.f32 f, f, 0f7A800000;
            cvt.rn.bf16x2.f32 $0, f, f;
            cvt.f32.f16 f, q;
            mul.f32 f, f, 0f7A800000;
            cvt.rn.bf16x2.f32 $1, f, f;
            mov.b32 {p, q}, b;
            cvt.f32.f16 f, p;
            mul.f32 f, f, 0f7A800000;
            cvt.rn.bf16x2.f32 $2, f, f;
            cvt.f32.f16 f, q;
            mul.f32 f, f, 0f7A800000;
            cvt.rn.bf16x2.f32 $3, f, f;
        }
        """,
        "=&r,=&r,=&r,=&r,r",
        [scale_words],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _decode(words, pairs, p: gl.constexpr):
    """Return nibble ``p`` of int16 words times their scales, as bf16 divided by ``2 ** 8``."""
    # A product puts two copies of the code where its sign and its magnitude belong.
    if p == 0:
        place: gl.constexpr = "and.b32 m, $1, 0x000F000F; mul.lo.u32 m, m, 0x1040;"
    elif p == 1:
        place: gl.constexpr = "and.b32 m, $1, 0x00F000F0; mul.lo.u32 m, m, 0x0104;"
    elif p == 2:
        place: gl.constexpr = "shr.u32 m, $1, 8; and.b32 m, m, 0x000F000F; mul.lo.u32 m, m, 0x1040;"
    else:
        place: gl.constexpr = "shr.u32 m, $1, 8; and.b32 m, m, 0x00F000F0; mul.lo.u32 m, m, 0x0104;"
    code: gl.constexpr = (
        "{ .reg .b32 m, z; mov.b32 z, 0x80008000; "
        + place
        + "and.b32 m, m, 0x81C081C0; fma.rn.bf16x2 $0, m, $2, z; }"
    )
    return gl.inline_asm_elementwise(
        code, "=r,r,r,r", [words, pairs], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def load_step(word_slot, scale_slot):
    """Return the words ``[OUTPUTS, 64]`` of a step and the bf16 pairs of their scales."""
    OUTPUTS: gl.constexpr = word_slot.shape[0]
    layout: gl.constexpr = word_layout(OUTPUTS, gl.num_warps())
    words = word_slot.load(layout)
    raw = scale_slot.load(scale_layout(OUTPUTS, gl.num_warps()))
    raw = raw.reshape([OUTPUTS // 128, 4, 4, 8, 4]).permute((0, 4, 2, 3, 1))
    s0, s1, s2, s3 = _scale_pairs(raw.reshape([OUTPUTS, 4]))
    wide = gl.join(gl.join(s0, s2), gl.join(s1, s3))
    wide = gl.join(wide, wide)
    pairs = gl.convert_layout(gl.join(wide, wide).reshape([OUTPUTS, 64]), layout)
    return words, pairs


@gluon.jit
def left_operand(words, pairs, p: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the left operand ``[OUTPUTS, 64]`` of product ``p``."""
    OUTPUTS: gl.constexpr = words.shape[0]
    values = _decode(words, pairs, p).reshape([OUTPUTS, 4, 8, 2]).permute((0, 2, 1, 3))
    return gl.convert_layout(values.reshape([OUTPUTS, 64]), LAYOUT)
