"""The generic implicit product of a filter and the voxels under it.

``[O, 27 * C] @ [voxels, 27 * C].T`` with INT32 accumulation. The rows of the right operand are
never written: each step gathers, for one position of the filter, the codes of the voxels there.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportOperatorIssue=false

import triton
import triton.language as tl


@triton.jit
def conv3d_kernel(
    codes,
    weight,
    input_scale,
    weight_scale,
    bias,
    residual,
    out,
    voxels,
    outputs,
    frames,
    out_frames,
    out_height,
    out_width,
    stored_height,
    stored_width,
    bias_stride,
    STRIDE_T: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    CHANNELS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    VOXELS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute one tile ``[OUTPUTS, VOXELS]``.

    Args:
        codes: Pointer to int8 ``[N * T, stored_height, stored_width, C]``, contiguous.
        weight: Pointer to int8 ``[O, 3, 3, 3, C]``, contiguous.
        input_scale: Pointer to one FP32 scale.
        weight_scale: Pointer to FP32 ``[O]``.
        bias: Pointer to float16 ``[O]``.
        residual: Pointer to float16 of the output's shape, contiguous.
        out: Pointer to float16 ``[N, O, T', H', W']``, contiguous.
        voxels: ``N * T' * H' * W'``.
        outputs: ``O``.
        frames: ``T``.
        out_frames: ``T'``.
        out_height: ``H'``.
        out_width: ``W'``.
        stored_height: Rows of a padded frame of codes.
        stored_width: Columns of a padded frame of codes.
        bias_stride: Elements between biases.
        STRIDE_T: Step along time.
        STRIDE_H: Step along the height.
        STRIDE_W: Step along the width.
        CHANNELS: ``C``.
        OUTPUTS: Output channels of the tile.
        VOXELS: Output voxels of the tile.
        DEPTH: Channels of a step, dividing ``C``.
        HAS_BIAS: Whether there is a bias.
        HAS_RESIDUAL: Whether there is a residual.
        WIDE: Whether the output has 2**31 elements or more.
    """
    STEPS: tl.constexpr = CHANNELS // DEPTH
    tiles = tl.cdiv(outputs, OUTPUTS)
    output = tl.program_id(0) % tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    voxel = tl.program_id(0) // tiles * VOXELS + tl.arange(0, VOXELS)
    # Voxels past the end repeat others; they are not stored.
    place = voxel % voxels
    x = place % out_width
    y = place // out_width % out_height
    frame = place // (out_width * out_height)
    t = frame % out_frames * STRIDE_T - 2
    row = (frame // out_frames * frames + t).to(tl.int64) * stored_height + y * STRIDE_H
    row = row * stored_width + x * STRIDE_W
    channel = tl.arange(0, DEPTH)
    left_rows = weight + (output % outputs).to(tl.int64)[:, None] * (27 * CHANNELS)
    left_rows += channel[None, :]
    right_columns = codes + row[None, :] * CHANNELS + channel[:, None]
    # Filter positions in front of the first frame of every voxel of the tile give nothing.
    first = tl.maximum(-tl.max(t, axis=0), 0) * (9 * STEPS)
    accumulator = tl.zeros((OUTPUTS, VOXELS), tl.int32)
    for step in range(first, 27 * STEPS):
        tap = step // STEPS
        at = step % STEPS * DEPTH
        dt = tap // 9
        offset = (dt * stored_height + tap // 3 % 3).to(tl.int64) * stored_width + tap % 3
        inside = (t + dt >= 0)[None, :]
        left = tl.load(left_rows + (tap * CHANNELS + at))
        right = tl.load(right_columns + (offset * CHANNELS + at), mask=inside, other=0)
        accumulator = tl.dot(left, right, accumulator, out_dtype=tl.int32)
    output_mask = output < outputs
    scales = tl.load(weight_scale + output, mask=output_mask, other=0.0)
    values = (accumulator.to(tl.float32) * tl.load(input_scale)) * scales[:, None]
    if HAS_BIAS:
        biases = tl.load(bias + output * bias_stride, mask=output_mask, other=0.0)
        values += biases.to(tl.float32)[:, None]
    plane = out_height * out_width * out_frames
    sample = frame // out_frames
    if WIDE:
        columns = sample.to(tl.int64) * (outputs - 1) * plane + place
        target = output.to(tl.int64)[:, None] * plane + columns[None, :]
    else:
        target = output[:, None] * plane + (sample * (outputs - 1) * plane + place)[None, :]
    mask = output_mask[:, None] & (voxel < voxels)[None, :]
    if HAS_RESIDUAL:
        values += tl.load(residual + target, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + target, values.to(tl.float16), mask=mask)
