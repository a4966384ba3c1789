"""Epilogues of the Hopper matrix product, in Gluon. Importing needs a Triton with Gluon."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def store_tile(
    accumulator,
    x_scale,
    w_scale,
    second_w_scale,
    bias,
    second_bias,
    out,
    first_row,
    first_column,
    second,
    rows,
    columns,
    out_row_stride,
    bias_stride,
    second_bias_stride,
    STORE: gl.constexpr,
    PAIRED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_SECOND_BIAS: gl.constexpr,
):
    """Scale, bias, round and store a tile; threads exchange values to store 16 bytes each."""
    BLOCK_M: gl.constexpr = accumulator.shape[0]
    BLOCK_N: gl.constexpr = accumulator.shape[1]
    layout: gl.constexpr = accumulator.type.layout
    row = first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    column = first_column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    column_mask = column < columns
    x_scales = gl.load(x_scale + row, mask=row < rows, other=0.0)
    if PAIRED:
        inside = column_mask & (second == 0)
        w_scales = gl.load(w_scale + column, mask=inside, other=0.0)
        inside = column_mask & (second != 0)
        w_scales += gl.load(second_w_scale + column, mask=inside, other=0.0)
    else:
        w_scales = gl.load(w_scale + column, mask=column_mask, other=0.0)
    values = accumulator.to(gl.float32) * gl.expand_dims(x_scales, 1)
    values = values * gl.expand_dims(w_scales, 0)
    if HAS_BIAS:
        inside = column_mask & (second == 0) if PAIRED else column_mask
        biases = gl.load(bias + column * bias_stride, mask=inside, other=0.0)
        values += gl.expand_dims(biases.to(gl.float32), 0)
    if HAS_SECOND_BIAS:
        inside = column_mask & (second != 0)
        biases = gl.load(second_bias + column * second_bias_stride, mask=inside, other=0.0)
        values += gl.expand_dims(biases.to(gl.float32), 0)
    rounded = gl.convert_layout(values.to(out.dtype.element_ty), STORE)
    row = first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, STORE))
    column = first_column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, STORE))
    start = out + second * columns
    target = gl.expand_dims(row.to(gl.int64) * out_row_stride, 1) + gl.expand_dims(column, 0)
    mask = gl.expand_dims(row < rows, 1) & gl.expand_dims(column < columns, 0)
    gl.store(start + target, rounded, mask=mask)


@gluon.jit
def store_part(accumulator, out, first_row, first_column, rows, columns, all_columns, offset):
    """Store an int32 tile of one part of ``K``; ``offset`` (int64) is where its columns start."""
    layout: gl.constexpr = accumulator.type.layout
    row = first_row + gl.arange(0, accumulator.shape[0], layout=gl.SliceLayout(1, layout))
    column = first_column + gl.arange(0, accumulator.shape[1], layout=gl.SliceLayout(0, layout))
    target = gl.expand_dims(row.to(gl.int64) * all_columns, 1) + gl.expand_dims(column, 0)
    mask = gl.expand_dims(row < rows, 1) & gl.expand_dims(column < columns, 0)
    gl.store(out + offset + target, accumulator, mask=mask)
