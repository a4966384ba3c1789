"""Kernels that activate, rotate and quantize the rows of an input in one pass."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false

import triton
import triton.language as tl

from piper_kernels._triton.convrot_rows import (
    encode_mirrored_words,
    rotate_rows_mirrored,
    row_scales,
    store_mirrored_words,
)
from piper_kernels._triton.reductions import row_amax_bits


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
    """Return FP32 ``[ROWS, SIZE]`` of activated and rotated columns, groups reversed.

    Args:
        source_rows: Pointers ``[ROWS, 1]`` to the rows of the source.
        row_mask: ``[ROWS]``, whether a row exists.
        first: First column; those past ``features`` give zeros.
        features: Columns after the activation.
        SIZE: Columns of the chunk.
        GROUP: Rotation group.
        ACTIVATION: ``None``, ``"gelu_tanh"`` or ``"swiglu"``.
    """
    columns = first + tl.arange(0, SIZE)[None, :]
    mask = row_mask[:, None] & (columns < features)
    values = tl.load(source_rows + columns, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)); an infinite exponential gives the limit 0.
        doubled = 1.5957691216057308 * (values + 0.044715 * (values * values * values))
        values = values / (1.0 + tl.exp(-doubled))
    if ACTIVATION == "swiglu":
        gate = tl.load(source_rows + features + columns, mask=mask, other=0.0).to(tl.float32)
        values = values * (gate / (1.0 + tl.exp(-gate)))
    return rotate_rows_mirrored(values, GROUP)


@triton.jit
def store_codes(
    values,
    scale,
    words,
    rows,
    row_mask,
    first,
    features,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
):
    """Encode FP32 ``[ROWS, SIZE]`` for the scales ``[ROWS]`` and store the codes."""
    codes = encode_mirrored_words(values, scale, STATIC)
    store_mirrored_words(codes, words, rows, row_mask, first, features, GROUP)


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
        ACTIVATION: ``None``, ``"gelu_tanh"`` or ``"swiglu"``.
        STATIC: Whether the rows share ``static_scale``.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = rows < total_rows
    start = source + rows[:, None] * row_stride
    v0 = rotated_chunk(start, mask, 0, features, SIZE, GROUP, ACTIVATION)
    if COUNT > 1:
        v1 = rotated_chunk(start, mask, SIZE, features, SIZE, GROUP, ACTIVATION)
    if COUNT > 2:
        v2 = rotated_chunk(start, mask, 2 * SIZE, features, SIZE, GROUP, ACTIVATION)
    if STATIC:
        new = tl.full((ROWS,), 0.0, tl.float32) + tl.load(static_scale)
    else:
        amax = row_amax_bits(v0)
        if COUNT > 1:
            amax = tl.maximum(amax, row_amax_bits(v1))
        if COUNT > 2:
            amax = tl.maximum(amax, row_amax_bits(v2))
        new = row_scales(amax.to(tl.float32, bitcast=True))
    store_codes(v0, new, words, rows, mask, 0, features, GROUP, STATIC)
    if COUNT > 1:
        store_codes(v1, new, words, rows, mask, SIZE, features, GROUP, STATIC)
    if COUNT > 2:
        store_codes(v2, new, words, rows, mask, 2 * SIZE, features, GROUP, STATIC)
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
            values = rotated_chunk(start, mask, first, features, SIZE, GROUP, ACTIVATION)
            amax = tl.maximum(amax, row_amax_bits(values))
        new = row_scales(amax.to(tl.float32, bitcast=True))
    for first in range(0, features, SIZE):
        values = rotated_chunk(start, mask, first, features, SIZE, GROUP, ACTIVATION)
        store_codes(values, new, words, rows, mask, first, features, GROUP, STATIC)
    tl.store(scale + rows, new)
