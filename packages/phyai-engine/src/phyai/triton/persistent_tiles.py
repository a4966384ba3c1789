"""What the persistent decoder kernel is made of: a barrier of all programs, copies, products.

All programs of a launch are resident at once, so they may wait for each other. Weights do not
depend on what other programs compute: a warp of its own copies them into a ring of shared memory,
in the order of their use and ahead of it, whatever the others wait for. Importing needs a Triton
with Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN201  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BLOCK_M = gl.constexpr(64)
"""Rows of every tile; operands have no more rows than that."""
BLOCK_K = gl.constexpr(256)
"""Columns of one step of a product."""
STAGES = gl.constexpr(3)
"""Steps whose rows shared memory holds; all but one are copied ahead."""
SLOTS = gl.constexpr(7)
"""Slots of the ring of weights: one step of 32 weight rows, or half of one of 64."""
ROWS_16 = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))
"""Layout of [64, 16]; a thread loads or stores 16 bytes."""
ROWS_32 = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
"""Likewise of [64, 32]."""
ROWS_64 = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Likewise of [64, 64]; copies of rows into shared memory use it too."""
_ONE_WARP = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))

barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
"""Barrier of the threads of a program; Triton 3.8 has another name for it."""


@gluon.jit
def arrive(counter) -> None:
    """Count this program; what its threads stored before a barrier is visible to who sees it."""
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first red.release.gpu.global.add.u32 [$1], 1;
            mov.u32 $0, thread;
        }
        """,
        "=r,l",
        [counter],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_for(counter, count) -> None:
    """Wait until ``count`` programs were counted; what they stored before is then visible."""
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred other, missing;
            .reg .b32 thread, seen;
            mov.u32 thread, %tid.x;
            setp.ne.u32 other, thread, 0;
            @other bra OVER;
            AGAIN:
            ld.acquire.gpu.global.b32 seen, [$1];
            setp.lt.s32 missing, seen, $2;
            @missing bra AGAIN;
            OVER:
            mov.u32 $0, thread;
        }
        """,
        "=r,l,r",
        [counter, count],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    barrier()


@gluon.jit
def tile_rows(first, apart, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the weight's rows of a tile: its halves stand ``apart`` rows from each other."""
    row = gl.arange(0, N, layout=LAYOUT)
    return first + row % (N // 2) + (row // (N // 2)) * apart


@gluon.jit
def stream_tile(
    weight, stride, first, apart, column, ring, ready, empty, used, COUNT: gl.constexpr
):
    """Copy a tile of a weight, ``COUNT`` slots from ``column`` on, and return the new ``used``.

    Args:
        weight: Pointer to bf16 rows.
        stride: Between rows.
        first: First row; the second half of the tile stands ``apart`` rows behind it.
        apart: Rows between the halves.
        column: First column.
        ring: Shared memory [SLOTS, N, columns of a slot].
        ready: A barrier for each slot, on which every thread of the warp arrives by its copies.
        empty: A barrier for each slot, on which those arrive who read it.
        used: Slots filled so far.
        COUNT: Slots of this tile.
    """
    N: gl.constexpr = ring.shape[1]
    K: gl.constexpr = ring.shape[2]
    row = tile_rows(first, apart, N, gl.SliceLayout(1, _ONE_WARP))
    place = gl.arange(0, K, layout=gl.SliceLayout(0, _ONE_WARP))
    source = weight + gl.expand_dims(row * stride + column, 1) + gl.expand_dims(place, 0)
    for step in range(COUNT):
        slot = used % SLOTS
        mbarrier.wait(empty.index(slot), ((used // SLOTS) & 1) ^ 1)
        async_copy.async_copy_global_to_shared(ring.index(slot), source + step * K)
        async_copy.mbarrier_arrive(ready.index(slot), increment_count=False)
        used += 1
    return used


@gluon.jit
def no_sums(N: gl.constexpr):
    """Return zeros [BLOCK_M, N] in the layout of a product's sums."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16]
    )
    return gl.zeros((BLOCK_M, N), gl.float32, layout)


@gluon.jit
def _release(empty, first, COUNT: gl.constexpr, pred) -> None:
    """Let slots be filled again that every warp has read."""
    for slot in gl.static_range(COUNT):
        mbarrier.arrive(empty.index((first + slot + SLOTS) % SLOTS), count=1, pred=pred)


@gluon.jit
def multiply(x, stride, rows, column, weights, ready, empty, used, ring, STEPS: gl.constexpr):
    """Return the FP32 sums [BLOCK_M, N] of a tile that is being streamed, and the new ``used``.

    Args:
        x: Pointer to bf16 rows, which other programs may have written before the last wait.
        stride: Between rows.
        rows: Number of rows; more of the tile are zeros.
        column: First column.
        weights: Shared memory [SLOTS or 2 * SLOTS, N, BLOCK_K / 2].
        ready: A barrier for each slot, see `stream_tile`.
        empty: Likewise.
        used: Slots read so far.
        ring: Shared memory [STAGES, BLOCK_M, BLOCK_K] for the rows, all of it free.
        STEPS: Blocks of columns.
    """
    HALF: gl.constexpr = BLOCK_K // 2
    N: gl.constexpr = weights.shape[1]
    # A step's weights are two halves of one slot, or two slots.
    IN_SLOT: gl.constexpr = weights.shape[0] // SLOTS
    PER_STEP: gl.constexpr = 2 // IN_SLOT
    AHEAD: gl.constexpr = STAGES - 1
    x_halves = ring._reinterpret(gl.bfloat16, [2 * STAGES, BLOCK_M, HALF], ring.layout)
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ROWS_64))
    place = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, ROWS_64))
    source = x + gl.expand_dims(row * stride + column, 1) + gl.expand_dims(place, 0)
    inside = gl.expand_dims(row < rows, 1)
    for step in gl.static_range(AHEAD):
        if step < STEPS:
            async_copy.async_copy_global_to_shared(
                ring.index(step), source + step * BLOCK_K, mask=inside
            )
        async_copy.commit_group()
    total = no_sums(N)
    for step in range(STEPS):
        first = used + step * PER_STEP
        for slot in gl.static_range(PER_STEP):
            number = first + slot
            mbarrier.wait(ready.index(number % SLOTS), (number // SLOTS) & 1)
        async_copy.wait_group(AHEAD - 1)
        fence_async_shared()
        barrier()
        # Every warp is done with the step before: its rows and weights may be overwritten.
        for half in gl.static_range(2):
            total = warpgroup_mma(
                x_halves.index(step % STAGES * 2 + half),
                weights.index((first + half // IN_SLOT) % SLOTS * IN_SLOT + half % IN_SLOT).permute(
                    (1, 0)
                ),
                total,
                is_async=True,
            )
        _release(empty, first - PER_STEP, PER_STEP, step > 0)
        ahead = step + AHEAD
        if ahead < STEPS:
            async_copy.async_copy_global_to_shared(
                ring.index(ahead % STAGES), source + ahead * BLOCK_K, mask=inside
            )
        async_copy.commit_group()
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
    barrier()
    used += STEPS * PER_STEP
    _release(empty, used - PER_STEP, PER_STEP, True)
    return total, used


@gluon.jit
def halves(total):
    """Return the left and the right half of a tile's columns; no value changes its thread."""
    M: gl.constexpr = total.shape[0]
    H: gl.constexpr = total.shape[1] // 2
    return gl.split(total.reshape((M, 2, H)).permute((0, 2, 1)))


@gluon.jit
def store_rows(values, out, stride, rows, LAYOUT: gl.constexpr) -> None:
    """Store the rows of a tile that exist, 16 bytes a thread; ``out`` is its first element."""
    M: gl.constexpr = values.shape[0]
    N: gl.constexpr = values.shape[1]
    row = gl.arange(0, M, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT))
    target = out + gl.expand_dims(row * stride, 1) + gl.expand_dims(column, 0)
    found = gl.convert_layout(values.to(out.dtype.element_ty), LAYOUT)
    gl.store(target, found, mask=gl.expand_dims(row < rows, 1))
