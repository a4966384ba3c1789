"""Attention of many query rows to runs of cache slots for Hopper, in Gluon.

All heads share one key head, so rows are (token, head) pairs. A program attends from 64 of them.
One warp copies the query tile and then keys and values into a ring of shared memory with TMA; two
warpgroups take the blocks of 64 keys in turns, each with a softmax of its own: while one is busy
with exponentials, the other multiplies. At the end they join their sums.

Importing needs a Triton with Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN201  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_BYTES = gl.constexpr(2)
_NONE = gl.constexpr(float("-inf"))


@gluon.jit
def block_of(index, first_blocks, start, length, second, more, BLOCK_N: gl.constexpr):
    """Return the first slot of a block of keys and how many of its keys are seen.

    ``first_blocks`` blocks cover the ``length`` slots from ``start`` on, the others the ``more``
    slots from ``second`` on.
    """
    later = index >= first_blocks
    inside = index - gl.where(later, first_blocks, 0)
    begin = gl.where(later, second, start) + inside * BLOCK_N
    left = gl.where(later, more, length) - inside * BLOCK_N
    return begin, left


@gluon.jit
def copy_partition(
    q_desc, k_desc, v_desc, q_tile, ring, q_ready, ready, empty, first_row, blocks, first_blocks,
    start, length, second, more,
) -> None:  # fmt: skip
    """Copy the query tile, then keys and values of every block, each into the next slot."""
    SLOTS: gl.constexpr = ring.shape[0]
    BLOCK_M: gl.constexpr = q_tile.shape[0]
    BLOCK_N: gl.constexpr = ring.shape[1]
    DIM: gl.constexpr = ring.shape[2]
    if blocks > 0:
        mbarrier.expect(q_ready.index(0), BLOCK_M * DIM * _BYTES)
        tma.async_copy_global_to_shared(q_desc, [first_row, 0], q_ready.index(0), q_tile)
    for index in range(blocks):
        begin, _left = block_of(index, first_blocks, start, length, second, more, BLOCK_N)
        for part in gl.static_range(2):
            item = 2 * index + part
            slot = item % SLOTS
            mbarrier.wait(empty.index(slot), ((item // SLOTS) & 1) ^ 1)
            mbarrier.expect(ready.index(slot), BLOCK_N * DIM * _BYTES)
            if part == 0:
                tma.async_copy_global_to_shared(
                    k_desc, [begin, 0], ready.index(slot), ring.index(slot)
                )
            else:
                tma.async_copy_global_to_shared(
                    v_desc, [begin, 0], ready.index(slot), ring.index(slot)
                )


@gluon.jit
def clear_unseen(values, left, CLEAR: gl.constexpr) -> None:
    """Zero the rows of a tile of values from ``left`` on: a weight of zero would keep their NaN."""
    BLOCK_N: gl.constexpr = values.shape[0]
    row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, CLEAR))
    held = values.load(CLEAR)
    values.store(gl.where(gl.expand_dims(row < left, 1), held, 0.0).to(values.dtype))
    fence_async_shared()


@gluon.jit
def attend_blocks(
    q_tile, ring, q_ready, ready, empty, blocks, first_blocks, start, length, second, more, factor,
    GROUP: gl.constexpr, CLEAR: gl.constexpr,
):  # fmt: skip
    """Attend to every other block and return sums [rows, DIM], heights and weights of the rows."""
    SLOTS: gl.constexpr = ring.shape[0]
    BLOCK_M: gl.constexpr = q_tile.shape[0]
    BLOCK_N: gl.constexpr = ring.shape[1]
    DIM: gl.constexpr = ring.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16]
    )
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    top = gl.full((BLOCK_M,), _NONE, gl.float32, ROWS)
    weight = gl.zeros((BLOCK_M,), gl.float32, ROWS)
    total = gl.zeros((BLOCK_M, DIM), gl.float32, SUMS)
    nothing = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, SCORES)
    if blocks > 0:
        mbarrier.wait(q_ready.index(0), 0)
    for index in range(GROUP, blocks, 2):
        _begin, left = block_of(index, first_blocks, start, length, second, more, BLOCK_N)
        item = 2 * index
        slot = item % SLOTS
        mbarrier.wait(ready.index(slot), (item // SLOTS) & 1)
        keys = ring.index(slot).permute((1, 0))
        token = warpgroup_mma(q_tile, keys, nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(token,))
        mbarrier.arrive(empty.index(slot), count=1)
        if left < BLOCK_N:
            scores = gl.where(gl.expand_dims(column < left, 0), scores, _NONE)
        higher = gl.maximum(top, gl.max(scores, axis=1) * factor)
        share = gl.exp2(scores * factor - gl.expand_dims(higher, 1))
        fade = gl.exp2(top - higher)
        weight = weight * fade + gl.sum(share, axis=1)
        top = higher
        fade = gl.convert_layout(fade, gl.SliceLayout(1, SUMS))
        total = total * gl.expand_dims(fade, 1)
        share = gl.convert_layout(share.to(q_tile.dtype), OPERAND)
        item += 1
        slot = item % SLOTS
        mbarrier.wait(ready.index(slot), (item // SLOTS) & 1)
        if left < BLOCK_N:
            clear_unseen(ring.index(slot), left, CLEAR)
        token = warpgroup_mma(share, ring.index(slot), total, is_async=True)
        total = warpgroup_mma_wait(num_outstanding=0, deps=(token,))
        mbarrier.arrive(empty.index(slot), count=1)
    top = gl.convert_layout(top, gl.SliceLayout(1, SUMS))
    weight = gl.convert_layout(weight, gl.SliceLayout(1, SUMS))
    return total, top, weight


@gluon.jit
def give_partition(
    q_tile, ring, q_ready, ready, empty, heights, joined, blocks, first_blocks, start, length,
    second, more, factor, CLEAR: gl.constexpr, JOIN: gl.constexpr,
) -> None:  # fmt: skip
    """Attend to the odd blocks and hand the sums over in the ring, when nobody reads it any more.

    ``heights`` takes the heights and weights of the rows.
    """
    BLOCK_M: gl.constexpr = q_tile.shape[0]
    DIM: gl.constexpr = ring.shape[2]
    total, top, weight = attend_blocks(
        q_tile, ring, q_ready, ready, empty, blocks, first_blocks, start, length, second, more,
        factor, 1, CLEAR,
    )  # fmt: skip
    heights.index(0).store(top)
    heights.index(1).store(weight)
    mbarrier.wait(joined.index(0), 0)
    sums = ring._reinterpret(gl.float32, [ring.shape[0] // 2, BLOCK_M, DIM], JOIN).index(0)
    sums.store(total)
    mbarrier.arrive(joined.index(1), count=1)


@gluon.jit
def take_partition(
    q_tile, ring, q_ready, ready, empty, heights, joined, out, first_row, rows, blocks,
    first_blocks, start, length, second, more, factor, CLEAR: gl.constexpr, JOIN: gl.constexpr,
    STORE: gl.constexpr,
) -> None:  # fmt: skip
    """Attend to the even blocks, add the sums of the odd ones and store the tile's rows."""
    BLOCK_M: gl.constexpr = q_tile.shape[0]
    DIM: gl.constexpr = ring.shape[2]
    total, top, weight = attend_blocks(
        q_tile, ring, q_ready, ready, empty, blocks, first_blocks, start, length, second, more,
        factor, 0, CLEAR,
    )  # fmt: skip
    mbarrier.arrive(joined.index(0), count=1)
    mbarrier.wait(joined.index(1), 0)
    ROWS: gl.constexpr = top.type.layout
    other_top, other_weight = heights.index(0).load(ROWS), heights.index(1).load(ROWS)
    # The even blocks are never fewer, so that their height is a number wherever a row sees keys.
    higher = gl.maximum(top, other_top)
    mine, theirs = gl.exp2(top - higher), gl.exp2(other_top - higher)
    whole = weight * mine + other_weight * theirs
    mine, theirs = mine / whole, theirs / whole
    sums = ring._reinterpret(gl.float32, [ring.shape[0] // 2, BLOCK_M, DIM], JOIN).index(0)
    total = total * gl.expand_dims(mine, 1)
    total += sums.load(total.type.layout) * gl.expand_dims(theirs, 1)
    values = gl.convert_layout(total.to(out.dtype.element_ty), STORE)
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, STORE))
    place = gl.arange(0, DIM, layout=gl.SliceLayout(0, STORE))
    target = gl.expand_dims((first_row + row).to(gl.int64) * DIM, 1) + gl.expand_dims(place, 0)
    gl.store(out + target, values, mask=gl.expand_dims(row < rows, 1))


@gluon.jit(do_not_specialize=["factor"])
def attend_hopper_kernel(
    q_desc,
    k_desc,
    v_desc,
    segments,
    out,
    factor,
    HEADS: gl.constexpr,
    SLOTS: gl.constexpr,
    CLEAR: gl.constexpr,
    JOIN: gl.constexpr,
    STORE: gl.constexpr,
    ATTEND_REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
) -> None:
    """Attend from one tile of (token, head) rows to the keys that its request sees.

    Args:
        q_desc: Descriptor of bf16 queries [tokens * HEADS, DIM], block ``[BLOCK_M, DIM]``.
        k_desc: Descriptor of bf16 keys [slots, DIM], block ``[BLOCK_N, DIM]``.
        v_desc: Likewise of values.
        segments: Pointer to six numbers a request: its first query token and their number, the
            first slot and length of its first run of keys, and those of its second run.
        out: Pointer to contiguous bf16 like the queries.
        factor: Scale of the scores times log2(e), positive.
        HEADS: Query heads.
        SLOTS: Blocks that the ring holds.
        CLEAR: Layout in which values that nobody sees are cleared.
        JOIN: Layout of the sums that a warpgroup hands over, in the memory of the ring.
        STORE: Layout in which the tile is stored.
        ATTEND_REGISTERS: Registers of a thread of the second attending warpgroup.
        COPY_REGISTERS: Registers of a thread of the copying warp.
    """
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    DIM: gl.constexpr = q_desc.block_type.shape[1]
    entry = segments + gl.program_id(1) * 6
    first_token, tokens = gl.load(entry), gl.load(entry + 1)
    start, length = gl.load(entry + 2), gl.load(entry + 3)
    second, more = gl.load(entry + 4), gl.load(entry + 5)
    first_row = first_token * HEADS + gl.program_id(0) * BLOCK_M
    rows = tokens * HEADS - gl.program_id(0) * BLOCK_M
    first_blocks = gl.cdiv(length, BLOCK_N)
    blocks = gl.where(rows > 0, first_blocks + gl.cdiv(more, BLOCK_N), 0)
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, DIM], q_desc.layout)
    ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BLOCK_N, DIM], k_desc.layout)
    heights = gl.allocate_shared_memory(
        gl.float32, [2, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    q_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    joined = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready.index(0), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    for number in gl.static_range(2):
        mbarrier.init(joined.index(number), count=1)
    gl.warp_specialize(
        [
            (
                take_partition,
                (
                    q_tile, ring, q_ready, ready, empty, heights, joined, out, first_row, rows,
                    blocks, first_blocks, start, length, second, more, factor, CLEAR, JOIN, STORE,
                ),
            ),
            (
                give_partition,
                (
                    q_tile, ring, q_ready, ready, empty, heights, joined, blocks, first_blocks,
                    start, length, second, more, factor, CLEAR, JOIN,
                ),
            ),
            (
                copy_partition,
                (
                    q_desc, k_desc, v_desc, q_tile, ring, q_ready, ready, empty, first_row, blocks,
                    first_blocks, start, length, second, more,
                ),
            ),
        ],
        [4, 1],
        [ATTEND_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
