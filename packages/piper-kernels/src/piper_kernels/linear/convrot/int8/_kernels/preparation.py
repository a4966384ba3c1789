"""Kernels that activate, rotate and quantize the rows of an input in one pass."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false

import triton
import triton.language as tl

from piper_kernels._triton.convrot_rows import (
    encode_mirrored_words,
    quarters_amax_bits,
    rotate_quarters_mirrored,
    row_scales,
    split_reciprocal,
    store_mirrored_quarter,
)

_NEGATED_LOG2_E = tl.constexpr(-1.4426950408889634)
_NEGATED_GELU = tl.constexpr(-2.302208198144325)  # 2 * sqrt(2 / pi) * log2(e)


@triton.jit
def activated_quarter(
    source_rows,
    row_mask,
    first,
    features,
    QUARTER: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Return FP32 ``[ROWS, SIZE / 4]``: one quarter of every group of a chunk, activated.

    Args:
        source_rows: Pointers ``[ROWS, 1]`` to the rows of the source.
        row_mask: ``[ROWS]``, whether a row exists.
        first: First column of the chunk; columns past ``features`` give zeros.
        features: Columns after the activation.
        QUARTER: Which quarter of the groups, 0 to 3.
        SIZE: Columns of the chunk.
        GROUP: Rotation group.
        ACTIVATION: ``None``, ``"gelu_tanh"``, ``"swiglu"``, or ``"silu_and_mul"``, which is
            ``"swiglu"`` of a source whose gates come first.
    """
    WIDTH: tl.constexpr = GROUP // 4
    index = tl.arange(0, SIZE // 4)
    columns = (first + index // WIDTH * GROUP + QUARTER * WIDTH + index % WIDTH)[None, :]
    mask = row_mask[:, None] & (columns < features)
    values = tl.load(source_rows + columns, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)); an infinite exponential gives the limit 0.
        cubic = values + 0.044715 * (values * values * values)
        values = values / (1.0 + tl.exp2(cubic * _NEGATED_GELU))
    if ACTIVATION == "swiglu":
        gate = tl.load(source_rows + features + columns, mask=mask, other=0.0).to(tl.float32)
        values = values * (gate / (1.0 + tl.exp2(gate * _NEGATED_LOG2_E)))
    if ACTIVATION == "silu_and_mul":
        up = tl.load(source_rows + features + columns, mask=mask, other=0.0).to(tl.float32)
        values = up * (values / (1.0 + tl.exp2(values * _NEGATED_LOG2_E)))
    return values


@triton.jit
def rotated_chunk(
    source_rows,
    row_mask,
    first,
    features,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Return a chunk in activated and rotated quarters, groups reversed; see the loads for it."""
    a = activated_quarter(source_rows, row_mask, first, features, 0, SIZE, GROUP, ACTIVATION)
    b = activated_quarter(source_rows, row_mask, first, features, 1, SIZE, GROUP, ACTIVATION)
    c = activated_quarter(source_rows, row_mask, first, features, 2, SIZE, GROUP, ACTIVATION)
    d = activated_quarter(source_rows, row_mask, first, features, 3, SIZE, GROUP, ACTIVATION)
    return rotate_quarters_mirrored(a, b, c, d, GROUP)


@triton.jit
def store_chunk(
    a,
    b,
    c,
    d,
    scale,
    words,
    rows,
    row_mask,
    first,
    features,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
):
    """Encode the quarters of a chunk for the scales ``[ROWS]`` and store the codes."""
    high, low = split_reciprocal(scale)
    a = encode_mirrored_words(a, scale, high, low, STATIC)
    store_mirrored_quarter(a, words, rows, row_mask, first, features, 0, GROUP)
    b = encode_mirrored_words(b, scale, high, low, STATIC)
    store_mirrored_quarter(b, words, rows, row_mask, first, features, 1, GROUP)
    c = encode_mirrored_words(c, scale, high, low, STATIC)
    store_mirrored_quarter(c, words, rows, row_mask, first, features, 2, GROUP)
    d = encode_mirrored_words(d, scale, high, low, STATIC)
    store_mirrored_quarter(d, words, rows, row_mask, first, features, 3, GROUP)


@triton.jit(do_not_specialize=["total_rows"])
def prepare_rows_kernel(
    source,
    words,
    scale,
    static_scale,
    row_stride,
    total_rows,
    features,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STATIC: tl.constexpr,
):
    """Prepare ``ROWS`` whole rows that are held in ``COUNT`` register chunks.

    Args:
        source: Pointer to the floating source, rows ``row_stride`` (int64) apart.
        words: Pointer to the codes ``[total_rows, features]`` as int32.
        scale: Pointer to the FP32 row scales ``[total_rows]``.
        static_scale: Pointer to one FP32 scale; read only when ``STATIC``.
        row_stride: Elements between rows of the source.
        total_rows: Rows.
        features: Columns after the activation.
        GROUP: Rotation group.
        ROWS: Rows of a program.
        SIZE: Columns of a chunk.
        COUNT: Chunks of a row, 1 to 3.
        ACTIVATION: As in ``activated_quarter``.
        STATIC: Whether the rows share ``static_scale``.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = rows < total_rows
    start = source + rows[:, None] * row_stride
    a0, b0, c0, d0 = rotated_chunk(start, mask, 0, features, SIZE, GROUP, ACTIVATION)
    if COUNT > 1:
        a1, b1, c1, d1 = rotated_chunk(start, mask, SIZE, features, SIZE, GROUP, ACTIVATION)
    if COUNT > 2:
        a2, b2, c2, d2 = rotated_chunk(start, mask, 2 * SIZE, features, SIZE, GROUP, ACTIVATION)
    if STATIC:
        new = tl.full((ROWS,), 0.0, tl.float32) + tl.load(static_scale)
    else:
        amax = quarters_amax_bits(a0, b0, c0, d0)
        if COUNT > 1:
            amax = tl.maximum(amax, quarters_amax_bits(a1, b1, c1, d1))
        if COUNT > 2:
            amax = tl.maximum(amax, quarters_amax_bits(a2, b2, c2, d2))
        new = row_scales(amax.to(tl.float32, bitcast=True))
    store_chunk(a0, b0, c0, d0, new, words, rows, mask, 0, features, GROUP, STATIC)
    if COUNT > 1:
        store_chunk(a1, b1, c1, d1, new, words, rows, mask, SIZE, features, GROUP, STATIC)
    if COUNT > 2:
        store_chunk(a2, b2, c2, d2, new, words, rows, mask, 2 * SIZE, features, GROUP, STATIC)
    tl.store(scale + rows, new, mask=mask)


@triton.jit
def prepare_wide_rows_kernel(
    source,
    words,
    scale,
    static_scale,
    row_stride,
    features,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STATIC: tl.constexpr,
):
    """Prepare one row of any width: a sweep for its maximum, a sweep to encode it."""
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    mask = rows >= 0
    start = source + rows[:, None] * row_stride
    if STATIC:
        new = tl.full((1,), 0.0, tl.float32) + tl.load(static_scale)
    else:
        amax = tl.zeros((1,), tl.int32)
        for first in range(0, features, SIZE):
            a, b, c, d = rotated_chunk(start, mask, first, features, SIZE, GROUP, ACTIVATION)
            amax = tl.maximum(amax, quarters_amax_bits(a, b, c, d))
        new = row_scales(amax.to(tl.float32, bitcast=True))
    for first in range(0, features, SIZE):
        a, b, c, d = rotated_chunk(start, mask, first, features, SIZE, GROUP, ACTIVATION)
        store_chunk(a, b, c, d, new, words, rows, mask, first, features, GROUP, STATIC)
    tl.store(scale + rows, new)
