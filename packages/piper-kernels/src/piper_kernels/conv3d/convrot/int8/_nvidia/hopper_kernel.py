"""Persistent warp-specialized INT8 convolution for Hopper, in Gluon.

One warp copies the filter and the codes under it into a ring of shared memory with TMA,
warpgroups multiply them with INT32 WGMMA. Importing needs a Triton with Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from piper_kernels.conv3d.convrot.int8._nvidia.hopper_epilogue import (
    load_row_numbers,
    send_tile,
    store_tile,
)
from piper_kernels.linear.convrot.int8._nvidia.hopper_kernel import multiply_steps


@gluon.jit
def unit_position(unit, output_tiles, row_tiles, column_tiles):
    """Return output tile, row tile, column tile and output frame of a unit."""
    output_tile = unit % output_tiles
    box = unit // output_tiles
    column_tile = box % column_tiles
    row_tile = box // column_tiles % row_tiles
    return output_tile, row_tile, column_tile, box // (column_tiles * row_tiles)


@gluon.jit
def first_position(frame, out_frames, STRIDE_T: gl.constexpr):
    """Return the first position in time at which the filter meets a frame of the sample."""
    return gl.maximum(2 - frame % out_frames * STRIDE_T, 0)


@gluon.jit
def copy_partition(
    code_desc,
    weight_desc,
    code_ring,
    weight_ring,
    ready,
    empty,
    units,
    output_tiles,
    row_tiles,
    column_tiles,
    frames,
    out_frames,
    STRIDE_T: gl.constexpr,
    STRIDE_H: gl.constexpr,
    STRIDE_W: gl.constexpr,
    CHANNELS: gl.constexpr,
):
    """Fill the ring with the operands of every unit of this program."""
    STAGES: gl.constexpr = code_ring.shape[0]
    VOXELS: gl.constexpr = code_ring.shape[1]
    DEPTH: gl.constexpr = code_ring.shape[2]
    OUTPUTS: gl.constexpr = weight_ring.shape[1]
    STEPS: gl.constexpr = CHANNELS // DEPTH
    BOX_HEIGHT: gl.constexpr = code_desc.block_type.shape[1]
    BOX_WIDTH: gl.constexpr = code_desc.block_type.shape[3]
    count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        output_tile, row_tile, column_tile, frame = unit_position(
            unit, output_tiles, row_tiles, column_tiles
        )
        source = frame // out_frames * frames + frame % out_frames * STRIDE_T - 2
        first = first_position(frame, out_frames, STRIDE_T) * (9 * STEPS)
        for step in range(first, 27 * STEPS):
            slot = count % STAGES
            tap = step // STEPS
            channel = step % STEPS * DEPTH
            dy = tap // 3 % 3
            dx = tap % 3
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(slot), (OUTPUTS + VOXELS) * DEPTH)
            # A step of the stride is one row of the view, its phase another dimension.
            code_at = [
                source + tap // 9,
                row_tile * BOX_HEIGHT + dy // STRIDE_H,
                dy % STRIDE_H,
                column_tile * BOX_WIDTH + dx // STRIDE_W,
                dx % STRIDE_W * CHANNELS + channel,
            ]
            box = code_ring.index(slot)._reinterpret(
                gl.int8, code_desc.block_type.shape, code_desc.layout
            )
            tma.async_copy_global_to_shared(code_desc, code_at, ready.index(slot), box)
            weight_at = [output_tile * OUTPUTS, tap * CHANNELS + channel]
            tma.async_copy_global_to_shared(
                weight_desc, weight_at, ready.index(slot), weight_ring.index(slot)
            )
            count += 1


@gluon.jit
def multiply_partition(
    code_ring,
    weight_ring,
    ready,
    empty,
    input_scale,
    weight_scale,
    bias,
    residual,
    out,
    out_desc,
    buffers,
    units,
    output_tiles,
    row_tiles,
    column_tiles,
    outputs,
    out_frames,
    out_height,
    out_width,
    bias_stride,
    STRIDE_T: gl.constexpr,
    CHANNELS: gl.constexpr,
    STORE: gl.constexpr,
    BOX_WIDTH: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    WIDE: gl.constexpr,
    SEND: gl.constexpr,
):
    """Multiply what the ring holds and finish every unit of this program."""
    VOXELS: gl.constexpr = code_ring.shape[1]
    DEPTH: gl.constexpr = code_ring.shape[2]
    OUTPUTS: gl.constexpr = weight_ring.shape[1]
    STEPS: gl.constexpr = CHANNELS // DEPTH
    # Triton accepts integer WGMMA up to 128 columns.
    INSTRUCTION_N: gl.constexpr = min(VOXELS, 128)
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, INSTRUCTION_N, 32]
    )
    count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        output_tile, row_tile, column_tile, frame = unit_position(
            unit, output_tiles, row_tiles, column_tiles
        )
        first = first_position(frame, out_frames, STRIDE_T) * (9 * STEPS)
        output = output_tile * OUTPUTS + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, layout))
        # Read here, they arrive during the products.
        input_number, scales, biases = load_row_numbers(
            input_scale, weight_scale, bias, output, outputs, bias_stride, HAS_BIAS
        )
        accumulator = gl.zeros((OUTPUTS, VOXELS), gl.int32, layout)
        count, accumulator = multiply_steps(
            weight_ring, code_ring, ready, empty, count, accumulator, first, 27 * STEPS
        )
        row = row_tile * (VOXELS // BOX_WIDTH)
        column = column_tile * BOX_WIDTH
        if SEND:
            send_tile(
                accumulator, input_number, scales, biases, out_desc, buffers,
                output_tile * OUTPUTS, row, column, frame, out_frames, HAS_BIAS,
            )  # fmt: skip
        else:
            store_tile(
                accumulator, input_number, scales, biases, residual, out, output_tile * OUTPUTS,
                row, column, frame, outputs, out_frames, out_height, out_width, STORE, BOX_WIDTH,
                HAS_BIAS, HAS_RESIDUAL, WIDE,
            )  # fmt: skip
    if SEND:
        tma.store_wait(pendings=0)


@gluon.jit
def hopper_conv3d_kernel(
    code_desc,
    weight_desc,
    out_desc,
    input_scale,
    weight_scale,
    bias,
    residual,
    out,
    samples,
    outputs,
    frames,
    out_frames,
    out_height,
    out_width,
    bias_stride,
    STRIDE_T: gl.constexpr,
    STRIDE_H: gl.constexpr,
    STRIDE_W: gl.constexpr,
    CHANNELS: gl.constexpr,
    STAGES: gl.constexpr,
    STORE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    WIDE: gl.constexpr,
    BUFFERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    """Convolve padded codes and finish the tiles.

    Args:
        code_desc: Descriptor of the codes seen as ``[N * T, rows, row phases, columns,
            column phases * C]``, block ``[1, box height, 1, box width, depth]``.
        weight_desc: Descriptor of the filter ``[O, 27 * C]``, block ``[outputs, depth]``.
        out_desc: Descriptor of the output, block ``[1, outputs, 1, 64 / box width, box width]``;
            not read without ``BUFFERS``.
        input_scale: Pointer to one FP32 scale.
        weight_scale: Pointer to FP32 ``[O]``.
        bias: Pointer to float16 ``[O]``.
        residual: Pointer to float16 of the output's shape, contiguous.
        out: Pointer to float16 ``[N, O, T', H', W']``, contiguous.
        samples: ``N``.
        outputs: ``O``.
        frames: ``T``.
        out_frames: ``T'``.
        out_height: ``H'``.
        out_width: ``W'``.
        bias_stride: Elements between biases.
        STRIDE_T: Step along time.
        STRIDE_H: Step along the height.
        STRIDE_W: Step along the width.
        CHANNELS: ``C``.
        STAGES: Slots of the ring.
        STORE: Layout in which a tile is stored.
        HAS_BIAS: Whether there is a bias.
        HAS_RESIDUAL: Whether there is a residual.
        WIDE: Whether the outputs of a tile are spread over 2**31 elements or more.
        BUFFERS: Buffers for 64 voxels of a tile, from which TMA stores while the next tile is
            multiplied; 0 stores from registers, as ``HAS_RESIDUAL`` needs.
        COPY_REGISTERS: Registers of a thread of the copying warp.
    """
    BOX_HEIGHT: gl.constexpr = code_desc.block_type.shape[1]
    BOX_WIDTH: gl.constexpr = code_desc.block_type.shape[3]
    DEPTH: gl.constexpr = weight_desc.block_type.shape[1]
    OUTPUTS: gl.constexpr = weight_desc.block_type.shape[0]
    VOXELS: gl.constexpr = BOX_HEIGHT * BOX_WIDTH
    rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([VOXELS, DEPTH], gl.int8)
    code_ring = gl.allocate_shared_memory(gl.int8, [STAGES, VOXELS, DEPTH], rows)
    weight_ring = gl.allocate_shared_memory(gl.int8, [STAGES, OUTPUTS, DEPTH], weight_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    SEND: gl.constexpr = BUFFERS > 0
    buffers = code_ring
    if SEND:
        buffers = gl.allocate_shared_memory(
            gl.float16, [BUFFERS, 1, OUTPUTS, 1, 64 // BOX_WIDTH, BOX_WIDTH], out_desc.layout
        )
    output_tiles = gl.cdiv(outputs, OUTPUTS)
    row_tiles = gl.cdiv(out_height, BOX_HEIGHT)
    column_tiles = gl.cdiv(out_width, BOX_WIDTH)
    units = samples * out_frames * row_tiles * column_tiles * output_tiles
    gl.warp_specialize(
        [
            (
                multiply_partition,
                (
                    code_ring, weight_ring, ready, empty, input_scale, weight_scale, bias,
                    residual, out, out_desc, buffers, units, output_tiles, row_tiles,
                    column_tiles, outputs, out_frames, out_height, out_width, bias_stride,
                    STRIDE_T, CHANNELS, STORE, BOX_WIDTH, HAS_BIAS, HAS_RESIDUAL, WIDE, SEND,
                ),
            ),
            (
                copy_partition,
                (
                    code_desc, weight_desc, code_ring, weight_ring, ready, empty, units,
                    output_tiles, row_tiles, column_tiles, frames, out_frames, STRIDE_T, STRIDE_H,
                    STRIDE_W, CHANNELS,
                ),
            ),
        ],
        [1],
        [COPY_REGISTERS],
    )  # fmt: skip
