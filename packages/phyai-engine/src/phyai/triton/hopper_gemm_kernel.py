"""Persistent bf16 product with a bias for Hopper, in Gluon; see `hopper_tiles`.

Where there are fewer tiles than multiprocessors, several programs each sum a part of the columns of
the operands. Importing needs a Triton with Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN201  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from phyai.triton.hopper_tiles import copy_steps, multiply_steps, store_tile, tile_position


@gluon.jit
def unit_position(unit, row_tiles, column_tiles, group, steps, splits):
    """Return row tile, column tile, part of ``K`` and its first and last step of a unit."""
    tiles = row_tiles * column_tiles
    part = unit // tiles
    row_tile, column_tile = tile_position(unit % tiles, row_tiles, column_tiles, group)
    return row_tile, column_tile, part, part * steps // splits, (part + 1) * steps // splits


@gluon.jit
def copy_partition(
    x_desc, w_desc, x_ring, w_ring, ready, empty, units, row_tiles, column_tiles, group, steps,
    splits,
) -> None:  # fmt: skip
    """Fill the ring with the operands of every unit of this program."""
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row_tile, column_tile, _part, first, last = unit_position(
            unit, row_tiles, column_tiles, group, steps, splits
        )
        count = copy_steps(
            x_desc, w_desc, x_ring, w_ring, ready, empty, count, row_tile * BLOCK_M,
            column_tile * BLOCK_N, 0, first, last,
        )  # fmt: skip


@gluon.jit
def multiply_partition(
    x_ring, w_ring, ready, empty, bias, out, units, row_tiles, column_tiles, group, rows, columns,
    steps, splits, WHOLE: gl.constexpr, HAS_BIAS: gl.constexpr, STORE: gl.constexpr,
) -> None:  # fmt: skip
    """Multiply what the ring holds and store every unit of this program."""
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row_tile, column_tile, part, first, last = unit_position(
            unit, row_tiles, column_tiles, group, steps, splits
        )
        total, count = multiply_steps(x_ring, w_ring, ready, empty, count, first, last)
        first_row, first_column = row_tile * BLOCK_M, column_tile * BLOCK_N
        layout: gl.constexpr = total.type.layout
        if WHOLE:
            if HAS_BIAS:
                column = first_column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
                added = gl.load(bias + column, mask=column < columns, other=0.0)
                total += gl.expand_dims(added.to(gl.float32), 0)
            values = total.to(out.dtype.element_ty)
            store_tile(values, out, first_row, first_column, rows, columns, STORE)
        else:
            target = out + part.to(gl.int64) * rows * columns
            store_tile(total, target, first_row, first_column, rows, columns, layout)


@gluon.jit(do_not_specialize=["rows", "group", "splits"])
def hopper_gemm_kernel(
    x_desc,
    w_desc,
    bias,
    out,
    rows,
    columns,
    depth,
    group,
    splits,
    STAGES: gl.constexpr,
    WHOLE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    STORE: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
) -> None:
    """Compute ``x Wᵀ + bias`` of bf16 ``x`` [M, K] and ``W`` [N, K], or its parts.

    Args:
        x_desc: Descriptor of the rows, block ``[BLOCK_M, BLOCK_K]``.
        w_desc: Descriptor of the weight, block ``[BLOCK_N, BLOCK_K]``.
        bias: Pointer to floating ``[N]``.
        out: Pointer to contiguous bf16 ``[M, N]``, or to FP32 ``[splits, M, N]``.
        rows: ``M``; tiles are read as zeros outside of the operands and not stored there.
        columns: ``N``.
        depth: ``K``.
        group: Row tiles that share a column tile before the next column tile.
        splits: Parts of ``K``, none of them empty.
        STAGES: Slots of the ring.
        WHOLE: Whether there is one part.
        HAS_BIAS: Whether a bias is added; parts have none.
        STORE: Layout in which a whole tile is stored.
        COPY_REGISTERS: Registers of a thread of the copying warp.
    """
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    row_tiles = gl.cdiv(rows, BLOCK_M)
    column_tiles = gl.cdiv(columns, BLOCK_N)
    steps = gl.cdiv(depth, BLOCK_K)
    units = row_tiles * column_tiles * splits
    gl.warp_specialize(
        [
            (
                multiply_partition,
                (
                    x_ring, w_ring, ready, empty, bias, out, units, row_tiles, column_tiles, group,
                    rows, columns, steps, splits, WHOLE, HAS_BIAS, STORE,
                ),
            ),
            (
                copy_partition,
                (
                    x_desc, w_desc, x_ring, w_ring, ready, empty, units, row_tiles, column_tiles,
                    group, steps, splits,
                ),
            ),
        ],
        [1],
        [COPY_REGISTERS],
    )  # fmt: skip
