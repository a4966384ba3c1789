"""Epilogue of the Hopper products of NVFP4 weights, in Gluon. Importing needs Triton with Gluon."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportAssignmentType=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from piper_kernels.linear.nvfp4._nvidia.hopper_layouts import store_layout


@gluon.jit
def store_tile(
    accumulator, input_level, weight_level, bias, out, row_tile, output_tile, part, rows, outputs,
    bias_stride, out_row_stride, factor, SPLITS: gl.constexpr,
    LEVEL_X: gl.constexpr, LEVEL_W: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Scale, bias, round and store a tile, or store the FP32 sums of a part."""
    OUTPUTS: gl.constexpr = accumulator.shape[0]
    ROWS: gl.constexpr = accumulator.shape[1]
    # Threads exchange results to store 32 bytes of a row each.
    STORE: gl.constexpr = store_layout(OUTPUTS, ROWS, gl.num_warps())
    layout: gl.constexpr = accumulator.type.layout if SPLITS > 1 else STORE
    column = output_tile * OUTPUTS + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, layout))
    row = row_tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    mask = gl.expand_dims(column < outputs, 1) & gl.expand_dims(row < rows, 0)
    if SPLITS > 1:
        row = (part.to(gl.int64) * rows + row) * out_row_stride
        gl.store(out + gl.expand_dims(column, 1) + gl.expand_dims(row, 0), accumulator, mask=mask)
    else:
        level = factor
        if LEVEL_X:
            level = level * gl.load(input_level)
        if LEVEL_W:
            level = level * gl.load(weight_level)
        value = accumulator * level
        if BIAS:
            inner: gl.constexpr = gl.SliceLayout(1, accumulator.type.layout)
            at = output_tile * OUTPUTS + gl.arange(0, OUTPUTS, layout=inner)
            loaded = gl.load(bias + at * bias_stride, mask=at < outputs, other=0.0)
            value += gl.expand_dims(loaded.to(gl.float32), 1)
        rounded = gl.convert_layout(value.to(out.dtype.element_ty), STORE)
        target = gl.expand_dims(column, 1) + gl.expand_dims(row.to(gl.int64) * out_row_stride, 0)
        gl.store(out + target, rounded, mask=mask)
