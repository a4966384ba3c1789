"""What finishes a tile of a convolution on Hopper, in Gluon: scale, bias, residual and stores.

Importing needs a Triton with Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma


@gluon.jit
def load_row_numbers(
    input_scale, weight_scale, bias, output, outputs, bias_stride, HAS_BIAS: gl.constexpr
):
    """Return FP32 input scale, scales and biases of output channels; those past the end get 0."""
    scales = gl.load(weight_scale + output, mask=output < outputs, other=0.0)
    biases = scales
    if HAS_BIAS:
        biases = gl.load(bias + output * bias_stride, mask=output < outputs, other=0.0)
        biases = biases.to(gl.float32)
    return gl.load(input_scale), scales, biases


@gluon.jit
def store_tile(
    accumulator,
    input_scale,
    scales,
    biases,
    residual,
    out,
    first_output,
    first_row,
    first_column,
    frame,
    outputs,
    out_frames,
    out_height,
    out_width,
    STORE: gl.constexpr,
    BOX_WIDTH: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Scale, bias, add, round and store a tile; threads exchange values to store 16 bytes each."""
    OUTPUTS: gl.constexpr = accumulator.shape[0]
    VOXELS: gl.constexpr = accumulator.shape[1]
    values = accumulator.to(gl.float32) * input_scale
    values = values * gl.expand_dims(scales, 1)
    if HAS_BIAS:
        values += gl.expand_dims(biases, 1)
    voxel = gl.arange(0, VOXELS, layout=gl.SliceLayout(0, STORE))
    row = first_row + voxel // BOX_WIDTH
    column = first_column + voxel % BOX_WIDTH
    # Sizes of one are constants, which have no conversions.
    pixels = out_height * out_width
    start = (frame // out_frames * outputs + first_output).to(gl.int64) * out_frames * pixels
    start += (frame % out_frames).to(gl.int64) * pixels
    local = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, STORE))
    if WIDE:
        place = gl.expand_dims(local.to(gl.int64) * out_frames * pixels, 1)
    else:
        place = gl.expand_dims(local * out_frames * pixels, 1)
    place += gl.expand_dims(row * out_width + column, 0)
    mask = gl.expand_dims(local < outputs - first_output, 1)
    mask &= gl.expand_dims((row < out_height) & (column < out_width), 0)
    if HAS_RESIDUAL:
        values = gl.convert_layout(values, STORE)
        values += gl.load(residual + start + place, mask=mask, other=0.0).to(gl.float32)
        gl.store(out + start + place, values.to(gl.float16), mask=mask)
    else:
        rounded = gl.convert_layout(values.to(gl.float16), STORE)
        gl.store(out + start + place, rounded, mask=mask)


@gluon.jit
def _halves(values):
    """Return the columns of the first and of the second half."""
    ROWS: gl.constexpr = values.shape[0]
    COLUMNS: gl.constexpr = values.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(values, (ROWS, 2, COLUMNS)), (0, 2, 1)))


@gluon.jit
def send_columns(
    accumulator, input_scale, scales, biases, out_desc, buffers, sample, output, frame, row,
    column, AT: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Scale and round ``[OUTPUTS, columns]`` and let TMA store them from a buffer."""
    BUFFERS: gl.constexpr = buffers.shape[0]
    block: gl.constexpr = out_desc.block_type.shape
    layout: gl.constexpr = gl.SliceLayout(1, accumulator.type.layout)
    values = accumulator.to(gl.float32) * input_scale
    values = values * gl.expand_dims(gl.convert_layout(scales, layout), 1)
    if HAS_BIAS:
        values += gl.expand_dims(gl.convert_layout(biases, layout), 1)
    buffer = buffers.index(AT % BUFFERS)
    # What was sent from this buffer before has left it.
    tma.store_wait(pendings=BUFFERS - 1)
    buffer.store(gl.reshape(values.to(gl.float16), block))
    fence_async_shared()
    at = [sample, output, frame, row + AT * block[3], column]
    tma.async_copy_shared_to_global(out_desc, at, buffer)


@gluon.jit
def send_tile(
    accumulator, input_scale, scales, biases, out_desc, buffers, output, row, column, frame,
    out_frames, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Scale, bias, round and store a tile, 64 voxels at a time; see ``store_tile``."""
    VOXELS: gl.constexpr = accumulator.shape[1]
    sample = frame // out_frames
    time = frame % out_frames
    numbers = (input_scale, scales, biases, out_desc, buffers, sample, output, time, row, column)
    if VOXELS == 64:
        send_columns(accumulator, *numbers, 0, HAS_BIAS)
    if VOXELS == 128:
        a, b = _halves(accumulator)
        send_columns(a, *numbers, 0, HAS_BIAS)
        send_columns(b, *numbers, 1, HAS_BIAS)
    if VOXELS == 256:
        left, right = _halves(accumulator)
        a, b = _halves(left)
        send_columns(a, *numbers, 0, HAS_BIAS)
        send_columns(b, *numbers, 1, HAS_BIAS)
        a, b = _halves(right)
        send_columns(a, *numbers, 2, HAS_BIAS)
        send_columns(b, *numbers, 3, HAS_BIAS)
