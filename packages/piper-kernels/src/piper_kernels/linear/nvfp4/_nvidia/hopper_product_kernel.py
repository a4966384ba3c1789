"""Persistent product of decoded NVFP4 weights for Hopper, in Gluon.

The weight is the left operand: warpgroups decode it from shared memory into their registers and
multiply from there, so decoded values never pass through memory. One warp copies codes, block
scales and the input with TMA. Importing needs a Triton with Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piper_kernels.linear.nvfp4._nvidia.hopper_decode import left_operand, load_step
from piper_kernels.linear.nvfp4._nvidia.hopper_epilogue import store_tile


@gluon.jit
def _position(unit, row_tiles, output_tiles, steps, GROUP: gl.constexpr, SPLITS: gl.constexpr):
    """Return row tile, output tile, part, and its first and last step."""
    tiles = row_tiles * output_tiles
    part = unit // tiles
    tile = unit % tiles
    per_group = GROUP * row_tiles
    first = (tile // per_group) * GROUP
    size = gl.minimum(output_tiles - first, GROUP)
    output_tile = first + (tile % per_group) % size
    row_tile = (tile % per_group) // size
    part_steps = gl.cdiv(steps, SPLITS)
    start = part * part_steps
    return row_tile, output_tile, part, start, gl.minimum(start + part_steps, steps)


@gluon.jit
def _copy_partition(
    x_desc, word_desc, scale_desc, x_ring, word_ring, scale_ring, x_ready, x_empty, w_ready,
    w_empty, units, row_tiles, output_tiles, steps, scale_columns, GROUP: gl.constexpr,
    SPLITS: gl.constexpr,
):  # fmt: skip
    """Fill the rings with the operands of every unit of this program."""
    X_STAGES: gl.constexpr = x_ring.shape[0]
    ROWS: gl.constexpr = x_ring.shape[1]
    W_STAGES: gl.constexpr = word_ring.shape[0]
    OUTPUTS: gl.constexpr = word_ring.shape[1]
    HALVES: gl.constexpr = OUTPUTS // 128
    count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row_tile, output_tile, _part, start, stop = _position(
            unit, row_tiles, output_tiles, steps, GROUP, SPLITS
        )
        for step in range(start, stop):
            slot = count % W_STAGES
            mbarrier.wait(w_empty.index(slot), ((count // W_STAGES) & 1) ^ 1)
            ready = w_ready.index(slot)
            mbarrier.expect(ready, OUTPUTS * 128 + HALVES * 2048)
            tma.async_copy_global_to_shared(
                word_desc, [output_tile * OUTPUTS, step * 64], ready, word_ring.index(slot)
            )
            for half in gl.static_range(HALVES):
                # A row tile past the end is filled with zeros.
                tile = (output_tile * HALVES + half) * scale_columns + step * 4
                tma.async_copy_global_to_shared(
                    scale_desc, [tile * 4, 0], ready, scale_ring.index(slot).slice(16 * half, 16)
                )
            for p in gl.static_range(4):
                turn = count * 4 + p
                x_slot = turn % X_STAGES
                mbarrier.wait(x_empty.index(x_slot), ((turn // X_STAGES) & 1) ^ 1)
                ready = x_ready.index(x_slot)
                mbarrier.expect(ready, ROWS * 128)
                tma.async_copy_global_to_shared(
                    x_desc, [row_tile * ROWS, step * 256 + p * 64], ready, x_ring.index(x_slot)
                )
            count += 1


@gluon.jit
def _multiply_partition(
    x_ring, word_ring, scale_ring, x_ready, x_empty, w_ready, w_empty, input_level, weight_level,
    bias, out, units, row_tiles, output_tiles, steps, rows, outputs, bias_stride, out_row_stride,
    factor, GROUP: gl.constexpr, SPLITS: gl.constexpr,
    HIGH_FIRST: gl.constexpr, LEVEL_X: gl.constexpr, LEVEL_W: gl.constexpr,
    BIAS: gl.constexpr,
):  # fmt: skip
    """Decode and multiply what the rings hold and finish every unit of this program."""
    X_STAGES: gl.constexpr = x_ring.shape[0]
    ROWS: gl.constexpr = x_ring.shape[1]
    W_STAGES: gl.constexpr = word_ring.shape[0]
    OUTPUTS: gl.constexpr = word_ring.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, ROWS, 16]
    )
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    FLIP: gl.constexpr = 1 if HIGH_FIRST else 0
    count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row_tile, output_tile, part, start, stop = _position(
            unit, row_tiles, output_tiles, steps, GROUP, SPLITS
        )
        accumulator = gl.zeros((OUTPUTS, ROWS), gl.float32, layout)
        before = gl.zeros((OUTPUTS, 64), gl.bfloat16, left)
        for step in range(start, stop):
            slot = count % W_STAGES
            mbarrier.wait(w_ready.index(slot), (count // W_STAGES) & 1)
            words, pairs = load_step(word_ring.index(slot), scale_ring.index(slot))
            for p in gl.static_range(4):
                values = left_operand(words, pairs, p ^ FLIP, left)
                turn = count * 4 + p
                x_slot = turn % X_STAGES
                mbarrier.wait(x_ready.index(x_slot), (turn // X_STAGES) & 1)
                token = warpgroup_mma(
                    values, x_ring.index(x_slot).permute((1, 0)), accumulator, is_async=True
                )
                # The product before has read its slot and its registers.
                accumulator, _ = warpgroup_mma_wait(num_outstanding=1, deps=(token, before))
                previous = (turn + X_STAGES - 1) % X_STAGES
                mbarrier.arrive(x_empty.index(previous), count=1, pred=(step > start) | (p > 0))
                if p == 0:
                    # Every word was decoded once: the loads from the slot are over.
                    mbarrier.arrive(w_empty.index(slot), count=1)
                before = values
            count += 1
        accumulator, _ = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator, before))
        mbarrier.arrive(x_empty.index((count * 4 + X_STAGES - 1) % X_STAGES), count=1)
        store_tile(
            accumulator, input_level, weight_level, bias, out, row_tile, output_tile, part, rows,
            outputs, bias_stride, out_row_stride, factor, SPLITS, LEVEL_X, LEVEL_W, BIAS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["rows"])
def hopper_product_kernel(
    x_desc,
    word_desc,
    scale_desc,
    input_level,
    weight_level,
    bias,
    out,
    rows,
    outputs,
    features,
    bias_stride,
    out_row_stride,
    factor,
    X_STAGES: gl.constexpr,
    W_STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    SPLITS: gl.constexpr,
    HIGH_FIRST: gl.constexpr,
    LEVEL_X: gl.constexpr,
    LEVEL_W: gl.constexpr,
    BIAS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    """Multiply arranged bf16 ``[rows, features]`` by the codes of ``[outputs, features]``."""
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    OUTPUTS: gl.constexpr = word_desc.block_type.shape[0]
    HALVES: gl.constexpr = OUTPUTS // 128
    if SPLITS > 1:
        gdc_launch_dependents()
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [X_STAGES, ROWS, 64], x_desc.layout)
    word_ring = gl.allocate_shared_memory(gl.int16, [W_STAGES, OUTPUTS, 64], word_desc.layout)
    scale_ring = gl.allocate_shared_memory(gl.int32, [W_STAGES, 16 * HALVES, 32], scale_desc.layout)
    x_ready = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    w_ready = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    w_empty = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(X_STAGES):
        mbarrier.init(x_ready.index(slot), count=1)
        mbarrier.init(x_empty.index(slot), count=1)
    for slot in gl.static_range(W_STAGES):
        mbarrier.init(w_ready.index(slot), count=1)
        mbarrier.init(w_empty.index(slot), count=1)
    row_tiles = gl.cdiv(rows, ROWS)
    output_tiles = gl.cdiv(outputs, OUTPUTS)
    steps = features // 256
    units = row_tiles * output_tiles * SPLITS
    # What follows reads what kernels before this one wrote.
    gdc_wait()
    gl.warp_specialize(
        [
            (
                _multiply_partition,
                (
                    x_ring, word_ring, scale_ring, x_ready, x_empty, w_ready, w_empty, input_level,
                    weight_level, bias, out, units, row_tiles, output_tiles, steps, rows, outputs,
                    bias_stride, out_row_stride, factor, GROUP, SPLITS,
                    HIGH_FIRST, LEVEL_X, LEVEL_W, BIAS,
                ),
            ),
            (
                _copy_partition,
                (
                    x_desc, word_desc, scale_desc, x_ring, word_ring, scale_ring, x_ready, x_empty,
                    w_ready, w_empty, units, row_tiles, output_tiles, steps, features // 64, GROUP,
                    SPLITS,
                ),
            ),
        ],
        [1],
        [COPY_REGISTERS],
    )  # fmt: skip
