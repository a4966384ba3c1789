"""Persistent warp-specialized INT8 matrix product for Hopper, in Gluon.

One warp copies operand tiles into a ring of shared memory with TMA, warpgroups multiply them with
INT32 WGMMA. Importing needs a Triton with Gluon's Hopper API.
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

from piper_kernels.linear.convrot.int8._nvidia.hopper_epilogue import store_part, store_tile


@gluon.jit
def unit_position(
    unit,
    row_tiles,
    column_tiles,
    steps,
    GROUP_M: gl.constexpr,
    SPLIT_K: gl.constexpr,
    PAIRED: gl.constexpr,
):
    """Return row tile, column tile, projection, part and its first and last step of a unit."""
    all_column_tiles = column_tiles * 2 if PAIRED else column_tiles
    tiles = row_tiles * all_column_tiles
    part = unit // tiles
    tile = unit % tiles
    per_group = GROUP_M * all_column_tiles
    first = (tile // per_group) * GROUP_M
    size = gl.minimum(row_tiles - first, GROUP_M)
    row_tile = first + (tile % per_group) % size
    column_tile = (tile % per_group) // size
    second = 0
    if PAIRED:
        second = (column_tile >= column_tiles).to(gl.int32)
        column_tile -= second * column_tiles
    part_steps = gl.cdiv(steps, SPLIT_K)
    start = part * part_steps
    return row_tile, column_tile, second, part, start, gl.minimum(start + part_steps, steps)


@gluon.jit
def copy_partition(
    x_desc,
    w_desc,
    second_w_desc,
    x_ring,
    w_ring,
    ready,
    empty,
    units,
    row_tiles,
    column_tiles,
    steps,
    GROUP_M: gl.constexpr,
    SPLIT_K: gl.constexpr,
    PAIRED: gl.constexpr,
):
    """Fill the ring with the operands of every unit of this program."""
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row_tile, column_tile, second, _part, start, stop = unit_position(
            unit, row_tiles, column_tiles, steps, GROUP_M, SPLIT_K, PAIRED
        )
        for step in range(start, stop):
            slot = count % STAGES
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(slot), (BLOCK_M + BLOCK_N) * BLOCK_K)
            x_at = [row_tile * BLOCK_M, step * BLOCK_K]
            w_at = [column_tile * BLOCK_N, step * BLOCK_K]
            tma.async_copy_global_to_shared(x_desc, x_at, ready.index(slot), x_ring.index(slot))
            if PAIRED:
                if second != 0:
                    tma.async_copy_global_to_shared(
                        second_w_desc, w_at, ready.index(slot), w_ring.index(slot)
                    )
                else:
                    tma.async_copy_global_to_shared(
                        w_desc, w_at, ready.index(slot), w_ring.index(slot)
                    )
            else:
                tma.async_copy_global_to_shared(w_desc, w_at, ready.index(slot), w_ring.index(slot))
            count += 1


@gluon.jit
def multiply_steps(left_ring, right_ring, ready, empty, count, accumulator, start, stop):
    """Multiply the slots of steps, in order, and free them.

    Args:
        left_ring: int8 ``[STAGES, M, K]`` in shared memory.
        right_ring: int8 ``[STAGES, N, K]`` in shared memory.
        ready: Barriers of full slots.
        empty: Barriers of free slots.
        count: Steps of the ring before these.
        accumulator: int32 ``[M, N]``; what it holds is not read.
        start: First step.
        stop: End of the steps, beyond ``start``.

    Returns:
        ``count`` behind the steps, and the sum of their products.
    """
    STAGES: gl.constexpr = left_ring.shape[0]
    previous = count % STAGES
    for step in range(start, stop):
        slot = count % STAGES
        mbarrier.wait(ready.index(slot), (count // STAGES) & 1)
        token = warpgroup_mma(
            left_ring.index(slot),
            right_ring.index(slot).permute((1, 0)),
            accumulator,
            use_acc=step > start,
            is_async=True,
        )
        accumulator = warpgroup_mma_wait(num_outstanding=1, deps=(token,))
        # The products of the step before have read their slot.
        mbarrier.arrive(empty.index(previous), count=1, pred=step > start)
        previous = slot
        count += 1
    accumulator = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator,))
    mbarrier.arrive(empty.index(previous), count=1)
    return count, accumulator


@gluon.jit
def multiply_partition(
    x_ring,
    w_ring,
    ready,
    empty,
    x_scale,
    w_scale,
    second_w_scale,
    bias,
    second_bias,
    out,
    units,
    row_tiles,
    column_tiles,
    steps,
    rows,
    columns,
    out_row_stride,
    bias_stride,
    second_bias_stride,
    GROUP_M: gl.constexpr,
    SPLIT_K: gl.constexpr,
    STORE: gl.constexpr,
    PAIRED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_SECOND_BIAS: gl.constexpr,
):
    """Multiply what the ring holds and finish every unit of this program."""
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    # Triton accepts integer WGMMA up to 128 columns.
    INSTRUCTION_N: gl.constexpr = min(BLOCK_N, 128)
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, INSTRUCTION_N, 32]
    )
    count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row_tile, column_tile, second, part, start, stop = unit_position(
            unit, row_tiles, column_tiles, steps, GROUP_M, SPLIT_K, PAIRED
        )
        accumulator = gl.zeros((BLOCK_M, BLOCK_N), gl.int32, layout)
        count, accumulator = multiply_steps(
            x_ring, w_ring, ready, empty, count, accumulator, start, stop
        )
        if SPLIT_K > 1:
            all_columns = columns * 2 if PAIRED else columns
            offset = part.to(gl.int64) * rows * all_columns + second * columns
            store_part(
                accumulator, out, row_tile * BLOCK_M, column_tile * BLOCK_N, rows, columns,
                all_columns, offset,
            )  # fmt: skip
        else:
            store_tile(
                accumulator, x_scale, w_scale, second_w_scale, bias, second_bias, out,
                row_tile * BLOCK_M, column_tile * BLOCK_N, second, rows, columns, out_row_stride,
                bias_stride, second_bias_stride, STORE, PAIRED, HAS_BIAS, HAS_SECOND_BIAS,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["rows"])
def hopper_matmul_kernel(
    x_desc,
    w_desc,
    second_w_desc,
    x_scale,
    w_scale,
    second_w_scale,
    bias,
    second_bias,
    out,
    rows,
    columns,
    depth,
    out_row_stride,
    bias_stride,
    second_bias_stride,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    SPLIT_K: gl.constexpr,
    STORE: gl.constexpr,
    PAIRED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_SECOND_BIAS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    """Multiply int8 ``[M, K]`` by one or two int8 ``[N, K]`` and finish the tiles.

    Args:
        x_desc: Descriptor of the rows, block ``[BLOCK_M, BLOCK_K]``.
        w_desc: Descriptor of the weight, block ``[BLOCK_N, BLOCK_K]``.
        second_w_desc: Descriptor of the paired weight, ``None`` unless ``PAIRED``.
        x_scale: Pointer to FP32 ``[M]``.
        w_scale: Pointer to FP32 ``[N]``.
        second_w_scale: The same of the second projection.
        bias: Pointer to floating ``[N]``.
        second_bias: The same of the second projection.
        out: Pointer to ``[M, columns]``, or to int32 ``[SPLIT_K, M, columns]``.
        rows: ``M``.
        columns: ``N``.
        depth: ``K``.
        out_row_stride: int64 elements between rows of ``out``.
        bias_stride: Elements between biases.
        second_bias_stride: The same of the second projection.
        STAGES: Slots of the ring.
        GROUP_M: Row tiles that share their columns in a row.
        SPLIT_K: Parts of ``K``, none of them empty.
        STORE: Layout in which a tile is stored.
        PAIRED: Whether there are two projections.
        HAS_BIAS: Whether the first has a bias.
        HAS_SECOND_BIAS: Whether the second has one.
        COPY_REGISTERS: Registers of a thread of the copying warp.
    """
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    other_desc = second_w_desc if PAIRED else w_desc
    x_ring = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    row_tiles = gl.cdiv(rows, BLOCK_M)
    column_tiles = gl.cdiv(columns, BLOCK_N)
    steps = gl.cdiv(depth, BLOCK_K)
    units = row_tiles * column_tiles * SPLIT_K * (2 if PAIRED else 1)
    gl.warp_specialize(
        [
            (
                multiply_partition,
                (
                    x_ring, w_ring, ready, empty, x_scale, w_scale, second_w_scale, bias,
                    second_bias, out, units, row_tiles, column_tiles, steps, rows, columns,
                    out_row_stride, bias_stride, second_bias_stride, GROUP_M, SPLIT_K, STORE,
                    PAIRED, HAS_BIAS, HAS_SECOND_BIAS,
                ),
            ),
            (
                copy_partition,
                (
                    x_desc, w_desc, other_desc, x_ring, w_ring, ready, empty, units, row_tiles,
                    column_tiles, steps, GROUP_M, SPLIT_K, PAIRED,
                ),
            ),
        ],
        [1],
        [COPY_REGISTERS],
    )  # fmt: skip
