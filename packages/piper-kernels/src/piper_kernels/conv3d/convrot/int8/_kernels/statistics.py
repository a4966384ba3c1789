"""Kernels that find mean and deviation of the channel groups of single frames."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportOperatorIssue=false

import triton
import triton.language as tl


@triton.jit
def pixel_offsets(position, width, row_stride, column_stride, FLAT: tl.constexpr):
    """Return the int64 offsets of pixels in a frame; ``FLAT`` if they are equally far apart."""
    if FLAT:
        return position.to(tl.int64) * column_stride
    row = position // width
    column = position - row * width
    return row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride


@triton.jit
def statistics_kernel(
    source,
    partials,
    frames,
    width,
    positions,
    groups,
    chunks,
    batch_stride,
    frame_stride,
    channel_stride,
    row_stride,
    column_stride,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    TILES: tl.constexpr,
    FLAT: tl.constexpr,
):
    """Sum a part of the pixels of one frame and channel group.

    Values are taken relative to the first one of the group, so a mean far from zero costs no
    bits. Tiles are merged by their means and squared deviations (Chan, Golub and LeVeque, 1979).

    Args:
        source: Pointer to the floating input.
        partials: Pointer to FP32 ``[N * T * groups, 2, chunks]``: means relative to the first
            value, and sums of squared deviations.
        frames: ``T``.
        width: ``W``.
        positions: ``H * W``.
        groups: Groups of channels.
        chunks: Programs of a frame and group.
        batch_stride: Elements between samples; the other strides likewise.
        frame_stride: Between frames.
        channel_stride: Between channels.
        row_stride: Between rows.
        column_stride: Between columns.
        CHANNELS: Channels of a group.
        PIXELS: Pixels of a tile.
        TILES: Tiles of a program.
        FLAT: Whether the pixels of a frame are equally far apart.
    """
    chunk = tl.program_id(0) % chunks
    unit = tl.program_id(0) // chunks
    frame = unit // groups
    start = source + (frame // frames).to(tl.int64) * batch_stride
    start += (frame % frames).to(tl.int64) * frame_stride
    start += (unit % groups * CHANNELS).to(tl.int64) * channel_stride
    pivot = tl.load(start).to(tl.float32)
    rows = start + tl.arange(0, CHANNELS)[:, None].to(tl.int64) * channel_stride
    count = tl.zeros((1,), tl.float32)
    mean = tl.zeros((1,), tl.float32)
    squares = tl.zeros((1,), tl.float32)
    first = chunk * PIXELS * TILES
    for begin in range(first, tl.minimum(first + PIXELS * TILES, positions), PIXELS):
        position = begin + tl.arange(0, PIXELS)
        inside = (position < positions)[None, :]
        offset = pixel_offsets(position, width, row_stride, column_stride, FLAT)
        values = tl.load(rows + offset[None, :], mask=inside, other=0.0).to(tl.float32)
        values = tl.where(inside, values - pivot, 0.0)
        added = (tl.minimum(positions - begin, PIXELS) * CHANNELS).to(tl.float32)
        tile_mean = tl.sum(tl.sum(values, axis=1), axis=0) / added
        centered = tl.where(inside, values - tile_mean, 0.0)
        tile_squares = tl.sum(tl.sum(centered * centered, axis=1), axis=0)
        total = count + added
        delta = tile_mean - mean
        squares += tile_squares + delta * delta * (count * added / total)
        mean += delta * (added / total)
        count = total
    target = partials + unit.to(tl.int64) * 2 * chunks + chunk + tl.arange(0, 1)
    tl.store(target, mean)
    tl.store(target + chunks, squares)


@triton.jit
def finish_statistics_kernel(
    source,
    partials,
    mean,
    deviation,
    frames,
    positions,
    groups,
    chunks,
    epsilon,
    batch_stride,
    frame_stride,
    channel_stride,
    CHANNELS: tl.constexpr,
    CHUNK_PIXELS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Merge the parts of one frame and channel group.

    Args:
        source: Pointer to the floating input, whose first value of the group the means refer to.
        partials: See ``statistics_kernel``.
        mean: Pointer to FP32 ``[N * T * groups]``.
        deviation: Pointer to FP32 of the same shape: ``1 / sqrt(variance + epsilon)``.
        frames: ``T``.
        positions: ``H * W``.
        groups: Groups of channels.
        chunks: Parts of a frame and group.
        epsilon: Added to the variance.
        batch_stride: Elements between samples of the input.
        frame_stride: Between frames.
        channel_stride: Between channels.
        CHANNELS: Channels of a group.
        CHUNK_PIXELS: Pixels of a part, the last one excepted.
        CHUNKS: ``chunks``, rounded up to a power of two.
    """
    unit = tl.program_id(0)
    frame = unit // groups
    start = source + (frame // frames).to(tl.int64) * batch_stride
    start += (frame % frames).to(tl.int64) * frame_stride
    start += (unit % groups * CHANNELS).to(tl.int64) * channel_stride
    pivot = tl.load(start).to(tl.float32)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    parts = partials + unit.to(tl.int64) * 2 * chunks + chunk
    means = tl.load(parts, mask=inside, other=0.0)
    squares = tl.load(parts + chunks, mask=inside, other=0.0)
    pixels = tl.minimum(positions - chunk * CHUNK_PIXELS, CHUNK_PIXELS)
    counts = tl.where(inside, (pixels * CHANNELS).to(tl.float32), 0.0)
    total = tl.sum(counts, axis=0)
    center = tl.sum(means * (counts / total), axis=0)
    spread = means - center
    variance = tl.sum(squares + spread * spread * counts, axis=0) / total
    tl.store(mean + unit, pivot + center)
    tl.store(deviation + unit, 1.0 / tl.sqrt(variance + epsilon))
