"""Kernels that rotate and quantize rows as they are normalized, or read from separate heads."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false

import triton
import triton.language as tl

from piper_kernels._triton.convrot_rows import (
    quarters_amax_bits,
    rotate_quarters_mirrored,
    row_scales,
)
from piper_kernels.linear.convrot.int8._kernels.preparation import store_chunk


@triton.jit
def _columns(QUARTER: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr):
    """Return the columns ``[1, SIZE / 4]`` of one quarter of every group."""
    WIDTH: tl.constexpr = GROUP // 4
    index = tl.arange(0, SIZE // 4)
    return (index // WIDTH * GROUP + QUARTER * WIDTH + index % WIDTH)[None, :]


@triton.jit
def _store_rows(a, b, c, d, words, scale, rows, mask, features, GROUP: tl.constexpr):
    """Rotate, quantize and store whole rows that are held in quarters."""
    a, b, c, d = rotate_quarters_mirrored(a, b, c, d, GROUP)
    new = row_scales(quarters_amax_bits(a, b, c, d).to(tl.float32, bitcast=True))
    store_chunk(a, b, c, d, new, words, rows, mask, 0, features, GROUP, STATIC=False)
    tl.store(scale + rows, new, mask=mask)


@triton.jit
def _sum_quarter(
    x, residual, total, rows, row_mask, x_stride, residual_stride, features,
    QUARTER: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Return FP32 ``[ROWS, SIZE / 4]``: what is normalized; a sum is stored first."""
    columns = _columns(QUARTER, SIZE, GROUP)
    mask = row_mask[:, None] & (columns < features)
    values = tl.load(x + rows[:, None] * x_stride + columns, mask=mask, other=0.0)
    wide = values.to(tl.float32)
    if ADD:
        source = residual + rows[:, None] * residual_stride + columns
        added = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        stored = (wide + added).to(total.dtype.element_ty)
        tl.store(total + rows[:, None] * features + columns, stored, mask=mask)
        wide = stored.to(values.dtype).to(tl.float32)
    return wide


@triton.jit
def _weigh_quarter(
    values, inverse, weight, features, kind: tl.constexpr,
    QUARTER: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, GEMMA: tl.constexpr,
):  # fmt: skip
    """Return normalized values in FP32, rounded to ``kind`` as the norm alone stores them."""
    columns = _columns(QUARTER, SIZE, GROUP)
    factor = tl.load(weight + columns, mask=columns < features, other=0.0).to(tl.float32)
    if GEMMA:
        factor += 1.0
    return (values * inverse * factor).to(kind).to(tl.float32)


@triton.jit(do_not_specialize=["total_rows", "eps"])
def norm_rows_kernel(
    x, residual, weight, total, words, scale, x_stride, residual_stride, total_rows, features, eps,
    GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    ADD: tl.constexpr, GEMMA: tl.constexpr,
):  # fmt: skip
    """Add, normalize, rotate and quantize ``ROWS`` whole rows.

    Args:
        x: Pointer to floating rows, ``x_stride`` apart.
        residual: Pointer to what is added; read only when ``ADD``.
        weight: Pointer to the weight of the norm ``[features]``.
        total: Pointer to the sum ``[total_rows, features]``; written only when ``ADD``.
        words: Pointer to the codes ``[total_rows, features]`` as int32.
        scale: Pointer to the FP32 row scales ``[total_rows]``.
        x_stride: Elements between rows of ``x``.
        residual_stride: Elements between rows of the residual.
        total_rows: Rows.
        features: Columns.
        eps: FP32, added to the mean square.
        GROUP: Rotation group.
        ROWS: Rows of a program.
        SIZE: Columns of a program, a power of two of at least ``features``.
        ADD: Whether there is a residual.
        GEMMA: Whether one plus the weight multiplies.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = rows < total_rows
    a = _sum_quarter(
        x, residual, total, rows, mask, x_stride, residual_stride, features, 0, SIZE, GROUP, ADD
    )
    b = _sum_quarter(
        x, residual, total, rows, mask, x_stride, residual_stride, features, 1, SIZE, GROUP, ADD
    )
    c = _sum_quarter(
        x, residual, total, rows, mask, x_stride, residual_stride, features, 2, SIZE, GROUP, ADD
    )
    d = _sum_quarter(
        x, residual, total, rows, mask, x_stride, residual_stride, features, 3, SIZE, GROUP, ADD
    )
    squares = tl.sum(a * a + b * b + (c * c + d * d), axis=1)
    inverse = tl.math.rsqrt(squares / features + eps)[:, None]
    kind: tl.constexpr = x.dtype.element_ty
    a = _weigh_quarter(a, inverse, weight, features, kind, 0, SIZE, GROUP, GEMMA)
    b = _weigh_quarter(b, inverse, weight, features, kind, 1, SIZE, GROUP, GEMMA)
    c = _weigh_quarter(c, inverse, weight, features, kind, 2, SIZE, GROUP, GEMMA)
    d = _weigh_quarter(d, inverse, weight, features, kind, 3, SIZE, GROUP, GEMMA)
    _store_rows(a, b, c, d, words, scale, rows, mask, features, GROUP)


@triton.jit
def _head_quarter(
    source_rows, row_mask, head_stride, features,
    QUARTER: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return FP32 ``[ROWS, SIZE / 4]`` of rows whose heads are ``head_stride`` apart."""
    columns = _columns(QUARTER, SIZE, GROUP)
    mask = row_mask[:, None] & (columns < features)
    if WIDTH % GROUP == 0:
        # Quotients of whole groups, from which the compiler sees that columns are side by side.
        group = tl.arange(0, SIZE // 4) // (GROUP // 4)
        head = (group // (WIDTH // GROUP))[None, :].to(tl.int64)
        places = head * (head_stride - WIDTH) + columns
    else:
        places = (columns // WIDTH).to(tl.int64) * (head_stride - WIDTH) + columns
    return tl.load(source_rows + places, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["total_rows"])
def head_rows_kernel(
    source, words, scale, row_stride, head_stride, total_rows, features,
    GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rotate and quantize ``ROWS`` rows of heads.

    Args:
        source: Pointer to floating ``[total_rows, heads, WIDTH]`` with any distances between rows
            and between heads.
        words: Pointer to the codes ``[total_rows, features]`` as int32.
        scale: Pointer to the FP32 row scales ``[total_rows]``.
        row_stride: Elements between rows.
        head_stride: Elements between heads.
        total_rows: Rows.
        features: ``heads * WIDTH``.
        GROUP: Rotation group.
        ROWS: Rows of a program.
        SIZE: Columns of a program, a power of two of at least ``features``.
        WIDTH: Features of a head.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = rows < total_rows
    start = source + rows[:, None] * row_stride
    a = _head_quarter(start, mask, head_stride, features, 0, SIZE, GROUP, WIDTH)
    b = _head_quarter(start, mask, head_stride, features, 1, SIZE, GROUP, WIDTH)
    c = _head_quarter(start, mask, head_stride, features, 2, SIZE, GROUP, WIDTH)
    d = _head_quarter(start, mask, head_stride, features, 3, SIZE, GROUP, WIDTH)
    _store_rows(a, b, c, d, words, scale, rows, mask, features, GROUP)
