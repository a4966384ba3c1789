"""The kernel that turns voxels into rows of codes: normalize, activate, rotate and quantize."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false

import triton
import triton.language as tl

from piper_kernels._triton.convrot_rows import (
    encode_mirrored_words,
    rotate_quarters_mirrored,
    split_reciprocal,
    store_mirrored_quarter,
)

_NEGATED_LOG2_E = tl.constexpr(-1.4426950408889634)


@triton.jit
def reflected(index, size):
    """Return the positions inside ``0..size - 1`` that a reflection at the border gives."""
    inner = tl.maximum(index, -index)
    inner = tl.minimum(inner, 2 * size - 2 - inner)
    # Positions that only complete a step of the stride are read, but never used.
    return tl.maximum(inner, 0)


@triton.jit
def source_offsets(
    position, height, width, stored_width, row_stride, column_stride, BEFORE: tl.constexpr,
    FLAT: tl.constexpr,
):  # fmt: skip
    """Return the int64 offsets that positions of a padded frame have in the frame itself."""
    if FLAT:
        return position.to(tl.int64) * column_stride
    y = position // stored_width
    x = position - y * stored_width
    row = reflected(y - BEFORE, height)
    column = reflected(x - BEFORE, width)
    return row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride


@triton.jit
def voxel_quarter(
    start,
    offset,
    inside,
    mean,
    deviation,
    norm_weight,
    norm_bias,
    first,
    channel_stride,
    QUARTER: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    NORM_CHANNELS: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
):
    """Return FP32 ``[VOXELS, SIZE / 4]``: one quarter of every rotation group, activated.

    Args:
        start: Pointer to the frame.
        offset: int64 ``[VOXELS]``, where voxels are in it.
        inside: ``[VOXELS]``, whether a voxel exists.
        mean: Pointer to the means of the frame, one for each channel group.
        deviation: Pointer to their reciprocal deviations.
        norm_weight: Pointer to the floating ``[C]``.
        norm_bias: Pointer to the floating ``[C]``.
        first: First channel.
        channel_stride: Elements between channels.
        QUARTER: Which quarter of the groups, 0 to 3.
        SIZE: Channels of the tile.
        GROUP: Rotation group.
        NORM_CHANNELS: Channels of a normalization group, 0 without normalization.
        CHANNELS_LAST: Whether channels, not pixels, are side by side in memory.
    """
    WIDTH: tl.constexpr = GROUP // 4
    index = tl.arange(0, SIZE // 4)
    channel = first + index // WIDTH * GROUP + QUARTER * WIDTH + index % WIDTH
    place = channel.to(tl.int64) * channel_stride
    if CHANNELS_LAST:
        loaded = tl.load(start + offset[:, None] + place[None, :], mask=inside[:, None], other=0.0)
        values = loaded.to(tl.float32)
    else:
        # Threads follow the pixels, which are side by side.
        loaded = tl.load(start + place[:, None] + offset[None, :], mask=inside[None, :], other=0.0)
        values = tl.trans(loaded).to(tl.float32)
    if NORM_CHANNELS > 0:
        group = channel // NORM_CHANNELS
        values = (values - tl.load(mean + group)[None, :]) * tl.load(deviation + group)[None, :]
        weight = tl.load(norm_weight + channel).to(tl.float32)
        bias = tl.load(norm_bias + channel).to(tl.float32)
        values = values * weight[None, :] + bias[None, :]
        values = values / (1.0 + tl.exp2(values * _NEGATED_LOG2_E))
    return values


@triton.jit
def prepare_voxels_kernel(
    source,
    words,
    input_scale,
    mean,
    deviation,
    norm_weight,
    norm_bias,
    frames,
    height,
    width,
    stored_width,
    positions,
    tiles,
    norm_groups,
    batch_stride,
    frame_stride,
    channel_stride,
    row_stride,
    column_stride,
    CHANNELS: tl.constexpr,
    VOXELS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    NORM_CHANNELS: tl.constexpr,
    BEFORE: tl.constexpr,
    FLAT: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
):
    """Prepare ``SIZE`` channels of ``VOXELS`` voxels of a padded frame.

    Args:
        source: Pointer to the floating input ``[N, C, T, H, W]``.
        words: Pointer to the codes ``[N * T, positions, C]`` as int32.
        input_scale: Pointer to one FP32 scale.
        mean: Pointer to FP32 ``[N * T, norm_groups]``; read only with normalization.
        deviation: Pointer to their reciprocal deviations.
        norm_weight: Pointer to floating ``[C]``.
        norm_bias: Pointer to floating ``[C]``.
        frames: ``T``.
        height: ``H``.
        width: ``W``.
        stored_width: Columns of a padded frame.
        positions: Voxels of a padded frame.
        tiles: Tiles of a padded frame.
        norm_groups: Groups of the normalization.
        batch_stride: Elements between samples; the other strides likewise.
        frame_stride: Between frames.
        channel_stride: Between channels.
        row_stride: Between rows.
        column_stride: Between columns.
        CHANNELS: ``C``.
        VOXELS: Voxels of a program.
        SIZE: Channels of a program.
        GROUP: Rotation group, dividing ``SIZE``.
        NORM_CHANNELS: Channels of a normalization group, 0 without normalization.
        BEFORE: Reflected pixels above and on the left.
        FLAT: Whether the frame is unpadded and its pixels are equally far apart.
        CHANNELS_LAST: Whether channels, not pixels, are side by side in memory.
    """
    first = tl.program_id(0) % (CHANNELS // SIZE) * SIZE
    tile = tl.program_id(0) // (CHANNELS // SIZE)
    frame = tile // tiles
    position = tile % tiles * VOXELS + tl.arange(0, VOXELS)
    inside = position < positions
    start = source + (frame // frames).to(tl.int64) * batch_stride
    start += (frame % frames).to(tl.int64) * frame_stride
    offset = source_offsets(
        position, height, width, stored_width, row_stride, column_stride, BEFORE, FLAT
    )
    mean += frame * norm_groups
    deviation += frame * norm_groups
    a = voxel_quarter(
        start, offset, inside, mean, deviation, norm_weight, norm_bias, first, channel_stride,
        0, SIZE, GROUP, NORM_CHANNELS, CHANNELS_LAST,
    )  # fmt: skip
    b = voxel_quarter(
        start, offset, inside, mean, deviation, norm_weight, norm_bias, first, channel_stride,
        1, SIZE, GROUP, NORM_CHANNELS, CHANNELS_LAST,
    )  # fmt: skip
    c = voxel_quarter(
        start, offset, inside, mean, deviation, norm_weight, norm_bias, first, channel_stride,
        2, SIZE, GROUP, NORM_CHANNELS, CHANNELS_LAST,
    )  # fmt: skip
    d = voxel_quarter(
        start, offset, inside, mean, deviation, norm_weight, norm_bias, first, channel_stride,
        3, SIZE, GROUP, NORM_CHANNELS, CHANNELS_LAST,
    )  # fmt: skip
    a, b, c, d = rotate_quarters_mirrored(a, b, c, d, GROUP)
    scale = tl.full((VOXELS,), 0.0, tl.float32) + tl.load(input_scale)
    high, low = split_reciprocal(scale)
    rows = frame.to(tl.int64) * positions + position
    a = encode_mirrored_words(a, scale, high, low, True)
    store_mirrored_quarter(a, words, rows, inside, first, CHANNELS, 0, GROUP)
    b = encode_mirrored_words(b, scale, high, low, True)
    store_mirrored_quarter(b, words, rows, inside, first, CHANNELS, 1, GROUP)
    c = encode_mirrored_words(c, scale, high, low, True)
    store_mirrored_quarter(c, words, rows, inside, first, CHANNELS, 2, GROUP)
    d = encode_mirrored_words(d, scale, high, low, True)
    store_mirrored_quarter(d, words, rows, inside, first, CHANNELS, 3, GROUP)
