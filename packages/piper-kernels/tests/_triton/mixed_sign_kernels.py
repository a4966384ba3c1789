"""Kernels with marked and unmarked products of 8-bit integers."""

import triton
import triton.language as tl

from piper_kernels._triton.mixed_sign import MARKER_ASM


@triton.jit
def two_products_kernel(left, right, out, REGISTER: tl.constexpr, MARK: tl.constexpr):
    """Add ``left @ right``, marked, and ``right @ left``, for matrices ``[64, 64]``."""
    rows = tl.arange(0, 64)[:, None]
    columns = tl.arange(0, 64)[None, :]
    a = tl.load(left + rows * 64 + columns)
    b = tl.load(right + rows + columns * 64)
    product = tl.dot(a, b, out_dtype=tl.int32)
    if MARK:
        product = tl.inline_asm_elementwise(
            MARKER_ASM, REGISTER, [product], dtype=tl.int32, is_pure=True, pack=1
        )
    other = tl.dot(b, a, out_dtype=tl.int32)
    tl.store(out + rows * 64 + columns, product + 3 * other)


@triton.jit
def accumulating_kernel(
    left,
    right,
    out,
    steps,
    REGISTER: tl.constexpr,
    FROM_ZERO: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sum products over a loop and mark the sum; without ``FROM_ZERO`` it starts from ``out``."""
    rows = tl.arange(0, ROWS)[:, None]
    depth = tl.arange(0, 64)[:, None]
    columns = tl.arange(0, 64)[None, :]
    total = tl.load(out + rows * 64 + columns)
    if FROM_ZERO:
        total = tl.zeros((ROWS, 64), tl.int32)
    for step in range(steps):
        a = tl.load(left + step * 4096 + rows * 64 + columns)
        b = tl.load(right + step * 4096 + depth + columns * 64)
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    total = tl.inline_asm_elementwise(
        MARKER_ASM, REGISTER, [total], dtype=tl.int32, is_pure=True, pack=1
    )
    tl.store(out + rows * 64 + columns, total)


@triton.jit
def unmarked_value_kernel(out, REGISTER: tl.constexpr):
    """Mark what no product made."""
    at = out + tl.arange(0, 64)
    value = tl.inline_asm_elementwise(
        MARKER_ASM, REGISTER, [tl.load(at)], dtype=tl.int32, is_pure=True, pack=1
    )
    tl.store(at, value)
