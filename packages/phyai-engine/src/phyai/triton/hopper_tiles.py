"""What persistent warp-specialized bf16 products for Hopper share, in Gluon.

One warp copies operand tiles into a ring of shared memory with TMA, two warpgroups multiply them.
Importing needs a Triton with Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN201  # the types of device functions are their docstrings
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

_BYTES = gl.constexpr(2)


@gluon.jit
def tile_position(tile, row_tiles, column_tiles, group):
    """Return row tile and column tile of a number.

    Numbers that follow each other go through ``group`` row tiles of one column tile.
    """
    per_group = group * column_tiles
    first = (tile // per_group) * group
    size = gl.minimum(row_tiles - first, group)
    return first + (tile % per_group) % size, (tile % per_group) // size


@gluon.jit
def copy_steps(
    x_desc, w_desc, x_ring, w_ring, ready, empty, count, first_row, first_column, apart, first, last
):  # fmt: skip
    """Fill the ring with steps ``first`` to ``last`` of a tile and return the new ``count``.

    Where a slot holds several blocks of the weight, their rows are ``apart`` in it.
    """
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    PART: gl.constexpr = w_desc.block_type.shape[0]
    for step in range(first, last):
        slot = count % STAGES
        mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(slot), (BLOCK_M + BLOCK_N) * BLOCK_K * _BYTES)
        x_at = [first_row, step * BLOCK_K]
        tma.async_copy_global_to_shared(x_desc, x_at, ready.index(slot), x_ring.index(slot))
        for part in gl.static_range(BLOCK_N // PART):
            w_at = [part * apart + first_column, step * BLOCK_K]
            target = w_ring.index(slot).slice(part * PART, PART)
            tma.async_copy_global_to_shared(w_desc, w_at, ready.index(slot), target)
        count += 1
    return count


@gluon.jit
def multiply_steps(x_ring, w_ring, ready, empty, count, first, last):
    """Return the FP32 sums of steps ``first`` to ``last`` of a tile, and the new ``count``."""
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 16]
    )
    accumulator = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
    previous = count % STAGES
    for step in range(first, last):
        slot = count % STAGES
        mbarrier.wait(ready.index(slot), (count // STAGES) & 1)
        token = warpgroup_mma(
            x_ring.index(slot),
            w_ring.index(slot).permute((1, 0)),
            accumulator,
            use_acc=step > first,
            is_async=True,
        )
        accumulator = warpgroup_mma_wait(num_outstanding=1, deps=(token,))
        # The products of the step before have read their slot.
        mbarrier.arrive(empty.index(previous), count=1, pred=step > first)
        previous = slot
        count += 1
    accumulator = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator,))
    mbarrier.arrive(empty.index(previous), count=1)
    return accumulator, count


@gluon.jit
def store_tile(values, out, first_row, first_column, rows, columns, STORE: gl.constexpr) -> None:
    """Store a tile; the threads of a warp exchange values so that each stores 16 bytes a time."""
    BLOCK_M: gl.constexpr = values.shape[0]
    BLOCK_N: gl.constexpr = values.shape[1]
    row = first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, STORE))
    column = first_column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, STORE))
    target = gl.expand_dims(row.to(gl.int64) * columns, 1) + gl.expand_dims(column, 0)
    mask = gl.expand_dims(row < rows, 1) & gl.expand_dims(column < columns, 0)
    gl.store(out + target, gl.convert_layout(values, STORE), mask=mask)
