"""Preparation of voxels for Hopper, in Gluon: normalize, activate, rotate, quantize and pad.

Importing needs a Triton with Gluon.
"""

# ruff: noqa: ANN001, ANN202, C901, PLR0912, PLR0915  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from piper_kernels._triton.convrot_rows import split_reciprocal
from piper_kernels.conv3d.convrot.int8._nvidia.hopper_rotation import (
    encode_block,
    h4,
    rotate_block,
    rotation_factor,
)

_NEGATED_LOG2_E = gl.constexpr(-1.4426950408889634)
BLOCK = gl.constexpr(64)
"""Channels of a block: a thread has 16 of them side by side."""


@gluon.jit
def block_channels(layout: gl.constexpr, LAST: gl.constexpr):
    """Return the channels of a block along the dimension that ``layout`` leaves."""
    index = gl.arange(0, BLOCK, layout=layout)
    if LAST:
        return index
    # Rows 16 * middle digit + index of ``rotation_factor``.
    return index // 2 % 4 * 16 + index // 16 * 4 + index // 8 % 2 * 2 + index % 2


@gluon.jit
def load_block(
    start, offset, inside, first, channel_stride, LOAD: gl.constexpr, LAST: gl.constexpr
):  # fmt: skip
    """Return one block, ``[VOXELS, 64]`` or with ``LAST`` unset ``[64, VOXELS]``.

    Args:
        start: Pointer to the frame.
        offset: int64 ``[VOXELS]``, where voxels are in it.
        inside: ``[VOXELS]``, whether a voxel exists.
        first: First channel.
        channel_stride: Elements between channels.
        LOAD: Layout of the block.
        LAST: Whether channels, not pixels, are side by side in memory.
    """
    axis: gl.constexpr = 0 if LAST else 1
    channel = first + block_channels(gl.SliceLayout(axis, LOAD), LAST)
    place = channel.to(gl.int64) * channel_stride
    at = gl.expand_dims(place, axis) + gl.expand_dims(offset, 1 - axis)
    return gl.load(start + at, mask=gl.expand_dims(inside, 1 - axis), other=0.0)


@gluon.jit
def _approximate(NAME: gl.constexpr, values):
    """Return ``2**values`` for ``ex2``, ``1 / values`` for ``rcp``; subnormal numbers are zeros."""
    return gl.inline_asm_elementwise(
        NAME + ".approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def normalize_block(
    values, mean, deviation, norm_weight, norm_bias, first, LOAD: gl.constexpr,
    NORM_CHANNELS: gl.constexpr, SCALE: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """Return a loaded block in FP32: normalized and activated, or times ``SCALE``.

    Args:
        values: Result of ``load_block``.
        mean: Pointer to the means of the frame, one for each channel group.
        deviation: Pointer to their reciprocal deviations.
        norm_weight: Pointer to the floating ``[C]``.
        norm_bias: Pointer to the floating ``[C]``.
        first: First channel.
        LOAD: Layout of the block.
        NORM_CHANNELS: Channels of a normalization group, 0 without normalization.
        SCALE: A power of two.
        LAST: See ``load_block``.
    """
    axis: gl.constexpr = 0 if LAST else 1
    values = values.to(gl.float32)
    if NORM_CHANNELS > 0:
        channel = first + block_channels(gl.SliceLayout(axis, LOAD), LAST)
        group = channel // NORM_CHANNELS
        center = gl.expand_dims(gl.load(mean + group), axis)
        spread = gl.expand_dims(gl.load(deviation + group), axis)
        weight = gl.expand_dims(gl.load(norm_weight + channel).to(gl.float32), axis)
        bias = gl.expand_dims(gl.load(norm_bias + channel).to(gl.float32), axis)
        values = (values - center) * (spread * weight) + bias
        # One instruction each, to the last bit or the one before it.
        power = _approximate("ex2", values * _NEGATED_LOG2_E)
        values *= _approximate("rcp", 1.0 + power)
    else:
        # Sums of values near the FP32 limit stay finite.
        values *= SCALE
    return values


@gluon.jit
def store_blocks(
    target, rows, mask, w0, w1, w2, w3, CHANNELS: gl.constexpr, BLOCKS: gl.constexpr,
    STORE: gl.constexpr,
):  # fmt: skip
    """Store the codes of voxels in the rows ``[VOXELS]`` of ``[rows, CHANNELS / 4]`` words."""
    column = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, STORE)), 0)
    place = target + gl.expand_dims(rows.to(gl.int64) * (CHANNELS // 4), 1) + column
    mask = gl.expand_dims(mask, 1)
    gl.store(place, w0, mask=mask)
    if BLOCKS > 1:
        gl.store(place + 16, w1, mask=mask)
    if BLOCKS > 2:
        gl.store(place + 32, w2, mask=mask)
        gl.store(place + 48, w3, mask=mask)


@gluon.jit
def store_rows(
    target, row, x, mask, width, w0, w1, w2, w3, CHANNELS: gl.constexpr, BLOCKS: gl.constexpr,
    BEFORE: gl.constexpr, AFTER: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """Store voxels in the column ``x`` of padded rows, and in the columns that reflect it."""
    store_blocks(target, row + x + BEFORE, mask, w0, w1, w2, w3, CHANNELS, BLOCKS, STORE)
    if BEFORE == 1:
        store_blocks(target, row, mask & (x == 1), w0, w1, w2, w3, CHANNELS, BLOCKS, STORE)
    if AFTER == 1:
        last = mask & (x == width - 2)
        store_blocks(target, row + width + BEFORE, last, w0, w1, w2, w3, CHANNELS, BLOCKS, STORE)


@gluon.jit
def store_voxels(
    target, begin, height, width, stored_width, w0, w1, w2, w3, CHANNELS: gl.constexpr,
    BLOCKS: gl.constexpr, BEFORE: gl.constexpr, AFTER: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """Store voxels from ``begin`` on wherever the padded frame at ``target`` has them."""
    VOXELS: gl.constexpr = w0.shape[0]
    position = begin + gl.arange(0, VOXELS, layout=gl.SliceLayout(1, STORE))
    inside = position < height * width
    y = position // width
    x = position - y * width
    store_rows(
        target, (y + BEFORE) * stored_width, x, inside, width, w0, w1, w2, w3,
        CHANNELS, BLOCKS, BEFORE, AFTER, STORE,
    )  # fmt: skip
    # Few tiles have a row that is reflected above or below.
    top = begin // width
    bottom = (begin + VOXELS - 1) // width
    if BEFORE == 1 and (top <= 1) & (bottom >= 1):
        store_rows(
            target, y - y, x, inside & (y == 1), width, w0, w1, w2, w3,
            CHANNELS, BLOCKS, BEFORE, AFTER, STORE,
        )  # fmt: skip
    row = height - 2
    if AFTER == 1 and (top <= row) & (bottom >= row):
        store_rows(
            target, (y - y + height + BEFORE) * stored_width, x, inside & (y == row),
            width, w0, w1, w2, w3, CHANNELS, BLOCKS, BEFORE, AFTER, STORE,
        )  # fmt: skip


@gluon.jit
def hopper_prepare_kernel(
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
    stored_positions,
    tiles,
    norm_groups,
    batch_stride,
    frame_stride,
    channel_stride,
    row_stride,
    column_stride,
    CHANNELS: gl.constexpr,
    VOXELS: gl.constexpr,
    BLOCKS: gl.constexpr,
    GROUP: gl.constexpr,
    NORM_CHANNELS: gl.constexpr,
    BEFORE: gl.constexpr,
    AFTER: gl.constexpr,
    FLAT: gl.constexpr,
    LAST: gl.constexpr,
    LOAD: gl.constexpr,
    SHARED: gl.constexpr,
    STORE: gl.constexpr,
):
    """Prepare ``64 * BLOCKS`` channels of ``VOXELS`` voxels of a frame, reflected ones included.

    Every voxel is read once and its codes are stored wherever the padded frame has them. What
    only completes a step of the stride is not written.

    Args:
        source: Pointer to the floating input ``[N, C, T, H, W]``.
        words: Pointer to the codes ``[N * T, stored_positions, C]`` as int32.
        input_scale: Pointer to one FP32 scale.
        mean: Pointer to FP32 ``[N * T, norm_groups]``; read only with normalization.
        deviation: Pointer to their reciprocal deviations.
        norm_weight: Pointer to floating ``[C]``.
        norm_bias: Pointer to floating ``[C]``.
        frames: ``T``.
        height: ``H``.
        width: ``W``.
        stored_width: Columns of a padded frame.
        stored_positions: Voxels of a padded frame.
        tiles: Tiles of a frame.
        norm_groups: Groups of the normalization.
        batch_stride: Elements between samples; the other strides likewise.
        frame_stride: Between frames.
        channel_stride: Between channels.
        row_stride: Between rows.
        column_stride: Between columns.
        CHANNELS: ``C``.
        VOXELS: Voxels of a program, 16 for each warp.
        BLOCKS: Blocks of 64 channels of a program: 1, 2, or 4.
        GROUP: Rotation group: 16, 64, or with four blocks 256.
        NORM_CHANNELS: Channels of a normalization group, 0 without normalization.
        BEFORE: Reflected pixels above and on the left.
        AFTER: Reflected pixels below and on the right.
        FLAT: Whether the pixels of a frame are equally far apart.
        LAST: Whether channels, not pixels, are side by side in memory.
        LOAD: Layout of a block as it is loaded.
        SHARED: Layout of a transposed block in shared memory.
        STORE: Layout of the words of a block, ``[VOXELS, 16]``.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 8]
    )
    EXACT: gl.constexpr = NORM_CHANNELS == 0 and source.dtype.element_ty == gl.float16
    TYPE: gl.constexpr = gl.float16 if EXACT else gl.bfloat16
    SCALE: gl.constexpr = 0.25 if GROUP == 16 else (0.125 if GROUP == 64 else 0.0625)
    axis: gl.constexpr = 0 if LAST else 1
    factor = rotation_factor(GROUP, TYPE, gl.DotOperandLayout(1, layout, 2))
    first = gl.program_id(0) % (CHANNELS // (BLOCK * BLOCKS)) * (BLOCK * BLOCKS)
    tile = gl.program_id(0) // (CHANNELS // (BLOCK * BLOCKS))
    frame = tile // tiles
    begin = tile % tiles * VOXELS
    start = source + (frame // frames).to(gl.int64) * batch_stride
    start += (frame % frames).to(gl.int64) * frame_stride
    position = begin + gl.arange(0, VOXELS, layout=gl.SliceLayout(1 - axis, LOAD))
    inside = position < height * width
    if FLAT:
        offset = position.to(gl.int64) * column_stride
    else:
        row = position // width
        offset = row.to(gl.int64) * row_stride
        offset += (position - row * width).to(gl.int64) * column_stride
    mean += frame * norm_groups
    deviation += frame * norm_groups
    COUNT: gl.constexpr = 3 if not EXACT else BLOCKS
    shared = gl.allocate_shared_memory(TYPE, [COUNT, BLOCK, VOXELS], SHARED)
    x0 = load_block(start, offset, inside, first, channel_stride, LOAD, LAST)
    if BLOCKS > 1:
        x1 = load_block(start, offset, inside, first + 64, channel_stride, LOAD, LAST)
    if BLOCKS > 2:
        x2 = load_block(start, offset, inside, first + 128, channel_stride, LOAD, LAST)
        x3 = load_block(start, offset, inside, first + 192, channel_stride, LOAD, LAST)
    if not EXACT:
        x0 = normalize_block(
            x0, mean, deviation, norm_weight, norm_bias, first, LOAD, NORM_CHANNELS, SCALE, LAST
        )
    a0, b0, c0, d0 = rotate_block(x0, factor, shared, 0, layout, LAST)
    if BLOCKS > 1:
        if not EXACT:
            x1 = normalize_block(
                x1, mean, deviation, norm_weight, norm_bias, first + 64, LOAD, NORM_CHANNELS,
                SCALE, LAST,
            )  # fmt: skip
        a1, b1, c1, d1 = rotate_block(x1, factor, shared, 1, layout, LAST)
    if BLOCKS > 2:
        if not EXACT:
            x2 = normalize_block(
                x2, mean, deviation, norm_weight, norm_bias, first + 128, LOAD, NORM_CHANNELS,
                SCALE, LAST,
            )  # fmt: skip
            x3 = normalize_block(
                x3, mean, deviation, norm_weight, norm_bias, first + 192, LOAD, NORM_CHANNELS,
                SCALE, LAST,
            )  # fmt: skip
        a2, b2, c2, d2 = rotate_block(x2, factor, shared, 2, layout, LAST)
        a3, b3, c3, d3 = rotate_block(x3, factor, shared, 3, layout, LAST)
    if GROUP == 256:
        a0, a1, a2, a3 = h4(a0, a1, a2, a3)
        b0, b1, b2, b3 = h4(b0, b1, b2, b3)
        c0, c1, c2, c3 = h4(c0, c1, c2, c3)
        d0, d1, d2, d3 = h4(d0, d1, d2, d3)
    scale = gl.load(input_scale)
    high, low = split_reciprocal(scale)
    if EXACT or NORM_CHANNELS > 0:
        high *= SCALE
        low *= SCALE
    finite = gl.where(scale - scale == 0.0, -1, 0)
    w0 = encode_block(a0, b0, c0, d0, high, low, finite, STORE)
    w1 = w0
    w2 = w0
    w3 = w0
    if BLOCKS > 1:
        w1 = encode_block(a1, b1, c1, d1, high, low, finite, STORE)
    if BLOCKS > 2:
        w2 = encode_block(a2, b2, c2, d2, high, low, finite, STORE)
        w3 = encode_block(a3, b3, c3, d3, high, low, finite, STORE)
    target = words + frame.to(gl.int64) * stored_positions * (CHANNELS // 4)
    target += gl.program_id(0) % (CHANNELS // (BLOCK * BLOCKS)) * (16 * BLOCKS)
    store_voxels(
        target, begin, height, width, stored_width, w0, w1, w2, w3, CHANNELS, BLOCKS, BEFORE,
        AFTER, STORE,
    )  # fmt: skip
