"""Persistent bf16 product with a gated activation for Hopper, in Gluon; see `hopper_tiles`.

A tile of the weight is as many rows of the gate as of the projection that it multiplies, so that
a thread ends with both sums of an output. Importing needs a Triton with Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN201  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from phyai.triton.hopper_tiles import copy_steps, multiply_steps, store_tile, tile_position

GELU_TANH, SILU = gl.constexpr(0), gl.constexpr(1)


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
def halves(accumulator):
    """Return the left and the right half of a tile's columns; no value changes its thread."""
    BLOCK_M: gl.constexpr = accumulator.shape[0]
    BLOCK_H: gl.constexpr = accumulator.shape[1] // 2
    return gl.split(accumulator.reshape((BLOCK_M, 2, BLOCK_H)).permute((0, 2, 1)))


@gluon.jit
def copy_partition(
    x_desc, w_desc, x_ring, w_ring, ready, empty, units, row_tiles, column_tiles, group, hidden,
    steps,
) -> None:  # fmt: skip
    """Fill the ring with the operands of every unit of this program."""
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_H: gl.constexpr = w_desc.block_type.shape[0]
    count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row_tile, column_tile = tile_position(unit, row_tiles, column_tiles, group)
        count = copy_steps(
            x_desc, w_desc, x_ring, w_ring, ready, empty, count, row_tile * BLOCK_M,
            column_tile * BLOCK_H, hidden, 0, steps,
        )  # fmt: skip


@gluon.jit
def multiply_partition(
    x_ring, w_ring, ready, empty, out, units, row_tiles, column_tiles, group, rows, hidden, steps,
    KIND: gl.constexpr, STORE: gl.constexpr,
) -> None:  # fmt: skip
    """Multiply what the ring holds, activate and store every unit of this program."""
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_H: gl.constexpr = w_ring.shape[1] // 2
    count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row_tile, column_tile = tile_position(unit, row_tiles, column_tiles, group)
        total, count = multiply_steps(x_ring, w_ring, ready, empty, count, 0, steps)
        gate, up = halves(total)
        values = (activate(gate, KIND) * up).to(out.dtype.element_ty)
        store_tile(values, out, row_tile * BLOCK_M, column_tile * BLOCK_H, rows, hidden, STORE)


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
