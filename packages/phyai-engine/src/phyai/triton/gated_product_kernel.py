"""Persistent warp-specialized bf16 product with a gated activation for Hopper, in Gluon.

One warp copies operand tiles into a ring of shared memory with TMA, two warpgroups multiply them,
activate and store. A tile of the weight is as many rows of the gate as of the projection that it
multiplies, so that a thread ends with both sums of an output. Importing needs a Triton with
Gluon's Hopper API.
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

GELU_TANH, SILU = gl.constexpr(0), gl.constexpr(1)
_BYTES = gl.constexpr(2)


@gluon.jit
def unit_position(unit, row_tiles, column_tiles, group):
    """Return row tile and column tile of a unit.

    Units that follow each other go through ``group`` row tiles of one column tile.
    """
    per_group = group * column_tiles
    first = (unit // per_group) * group
    size = gl.minimum(row_tiles - first, group)
    return first + (unit % per_group) % size, (unit % per_group) // size


@gluon.jit
def activate(values, KIND: gl.constexpr):
    """Return ``gelu_tanh`` or ``silu`` of FP32 values."""
    if KIND == GELU_TANH:
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u; 2 sqrt(2 / pi) log2(e) is the factor.
        inner = values * (1.0 + 0.044715 * values * values)
        result = values / (1.0 + gl.exp2(-2.302208198144325 * inner))
    else:
        result = values / (1.0 + gl.exp2(-1.4426950408889634 * values))
    return result


@gluon.jit
def copy_partition(
    x_desc, w_desc, x_ring, w_ring, ready, empty, units, row_tiles, column_tiles, group, hidden,
    steps,
) -> None:  # fmt: skip
    """Fill the ring with the operands of every unit of this program."""
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    BLOCK_H: gl.constexpr = w_desc.block_type.shape[0]
    count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row_tile, column_tile = unit_position(unit, row_tiles, column_tiles, group)
        for step in range(steps):
            slot = count % STAGES
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(slot), (BLOCK_M + 2 * BLOCK_H) * BLOCK_K * _BYTES)
            x_at = [row_tile * BLOCK_M, step * BLOCK_K]
            tma.async_copy_global_to_shared(x_desc, x_at, ready.index(slot), x_ring.index(slot))
            for part in gl.static_range(2):
                w_at = [part * hidden + column_tile * BLOCK_H, step * BLOCK_K]
                target = w_ring.index(slot).slice(part * BLOCK_H, BLOCK_H)
                tma.async_copy_global_to_shared(w_desc, w_at, ready.index(slot), target)
            count += 1


@gluon.jit
def multiply_partition(
    x_ring, w_ring, ready, empty, out, units, row_tiles, column_tiles, group, rows, hidden, steps,
    KIND: gl.constexpr, STORE: gl.constexpr,
) -> None:  # fmt: skip
    """Multiply what the ring holds, activate and store every unit of this program."""
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_H: gl.constexpr = BLOCK_N // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 16]
    )
    count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row_tile, column_tile = unit_position(unit, row_tiles, column_tiles, group)
        accumulator = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
        previous = count % STAGES
        for step in range(steps):
            slot = count % STAGES
            mbarrier.wait(ready.index(slot), (count // STAGES) & 1)
            token = warpgroup_mma(
                x_ring.index(slot),
                w_ring.index(slot).permute((1, 0)),
                accumulator,
                use_acc=step > 0,
                is_async=True,
            )
            accumulator = warpgroup_mma_wait(num_outstanding=1, deps=(token,))
            # The products of the step before have read their slot.
            mbarrier.arrive(empty.index(previous), count=1, pred=step > 0)
            previous = slot
            count += 1
        accumulator = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator,))
        mbarrier.arrive(empty.index(previous), count=1)
        gate, up = halves(accumulator)
        values = (activate(gate, KIND) * up).to(out.dtype.element_ty)
        store_rows(values, out, row_tile * BLOCK_M, column_tile * BLOCK_H, rows, hidden, STORE)


@gluon.jit
def halves(accumulator):
    """Return the left and the right half of a tile's columns; no value changes its thread."""
    BLOCK_M: gl.constexpr = accumulator.shape[0]
    BLOCK_H: gl.constexpr = accumulator.shape[1] // 2
    return gl.split(accumulator.reshape((BLOCK_M, 2, BLOCK_H)).permute((0, 2, 1)))


@gluon.jit
def store_rows(values, out, first_row, first_column, rows, hidden, STORE: gl.constexpr) -> None:
    """Store a tile; the threads of a warp exchange values so that each stores 16 bytes a time."""
    BLOCK_M: gl.constexpr = values.shape[0]
    BLOCK_H: gl.constexpr = values.shape[1]
    row = first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, STORE))
    column = first_column + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(0, STORE))
    target = gl.expand_dims(row.to(gl.int64) * hidden, 1) + gl.expand_dims(column, 0)
    stored = gl.convert_layout(values, STORE)
    gl.store(out + target, stored, mask=gl.expand_dims(row < rows, 1))


@gluon.jit(do_not_specialize=["rows", "group"])
def gated_product_kernel(
    x_desc,
    w_desc,
    out,
    rows,
    hidden,
    depth,
    group,
    STAGES: gl.constexpr,
    KIND: gl.constexpr,
    STORE: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
) -> None:
    """Compute ``act(x Wgᵀ) * (x Wuᵀ)`` of bf16 ``x`` [M, K] and ``[Wg; Wu]`` [2 H, K].

    Args:
        x_desc: Descriptor of the rows, block ``[BLOCK_M, BLOCK_K]``.
        w_desc: Descriptor of the weight, block ``[BLOCK_H, BLOCK_K]``.
        out: Pointer to contiguous bf16 ``[M, H]``.
        rows: ``M``; rows of the last tile beyond it are read as zeros and not stored.
        hidden: ``H``, a multiple of ``BLOCK_H``.
        depth: ``K``, a multiple of ``BLOCK_K``.
        group: Row tiles that share a column tile before the next column tile.
        STAGES: Slots of the ring.
        KIND: ``GELU_TANH`` or ``SILU``.
        STORE: Layout in which a tile is stored.
        COPY_REGISTERS: Registers of a thread of the copying warp.
    """
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    BLOCK_H: gl.constexpr = w_desc.block_type.shape[0]
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * BLOCK_H, BLOCK_K], w_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    row_tiles = gl.cdiv(rows, BLOCK_M)
    column_tiles = hidden // BLOCK_H
    steps = depth // BLOCK_K
    units = row_tiles * column_tiles
    gl.warp_specialize(
        [
            (
                multiply_partition,
                (
                    x_ring, w_ring, ready, empty, out, units, row_tiles, column_tiles, group, rows,
                    hidden, steps, KIND, STORE,
                ),
            ),
            (
                copy_partition,
                (
                    x_desc, w_desc, x_ring, w_ring, ready, empty, units, row_tiles, column_tiles,
                    group, hidden, steps,
                ),
            ),
        ],
        [1],
        [COPY_REGISTERS],
    )  # fmt: skip
