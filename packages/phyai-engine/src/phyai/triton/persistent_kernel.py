"""All layers of an adaptive decoder in one launch whose programs stay.

A layer has six phases with a barrier of all programs between each two: norm and projection,
attention in chunks of keys, their merge, the output product, norm and gate/up, the down product.
One warp of a program knows nothing of barriers and streams the weights of all its tiles. Before the
others wait they start to copy keys of the prefix, which nobody writes. Importing needs a Triton
with Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN202, C901, PLR0912, PLR0915  # device functions, phases in a row
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from phyai.triton import persistent_attention as attention
from phyai.triton.persistent_products import activate, add_product, project
from phyai.triton.persistent_stream import NARROW, PHASES, WIDE, stream
from phyai.triton.persistent_tiles import (
    BLOCK_K,
    BLOCK_M,
    SLOTS,
    STAGES,
    arrive,
    barrier,
    wait_for,
)


@gluon.jit
def _meet(counters, count, programs, phase, begin):
    """Wait for the phase before, if this launch ran one, and return how many have arrived."""
    barrier()
    if phase > begin:
        count += programs
        arrive(counters)
        wait_for(counters, count)
    return count


@gluon.jit
def _compute(
    constants, rotation, segments, residual, scaled, squares, query, keys, values, partial,
    heights, attended, hidden, parts, counters, weights, ready, empty, rows, layer_stride,
    first_slot, tiles, splits, items, begin, end, eps, scale,
    WIDTH: gl.constexpr, MLP: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr,
    OUT_SPLITS: gl.constexpr, DOWN_SPLITS: gl.constexpr,
) -> None:  # fmt: skip
    """Do this program's share of every phase."""
    QKV: gl.constexpr = (HEADS + 2) * DIM
    COLUMNS: gl.constexpr = WIDTH // NARROW
    block: gl.constexpr = weights.layout
    ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], block)
    page_columns = ring._reinterpret(gl.bfloat16, [STAGES * DIM // 64, BLOCK_M, 64], block)
    narrow = weights._reinterpret(gl.bfloat16, [2 * SLOTS, NARROW, BLOCK_K // 2], block)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    total_rows = rows * HEADS
    count = 0
    used = 0
    span = attention.key_span(gl.minimum(program, items - 1), segments, tiles, splits)
    for layer in range(begin // PHASES, (end + PHASES - 1) // PHASES):
        phase = layer * PHASES
        constant = constants + layer * (QKV + 2 * MLP + 4 * WIDTH)
        up_constant = constant + QKV
        gates = up_constant + 2 * MLP
        layer_keys = keys + gl.cast(layer, gl.int64) * layer_stride
        layer_values = values + gl.cast(layer, gl.int64) * layer_stride

        if (phase >= begin) & (phase < end):
            count = _meet(counters, count, programs, phase, begin)
            for tile in range(program, QKV // NARROW, programs):
                used = project(
                    tile, scaled, squares, constant, query, layer_keys + first_slot * DIM,
                    layer_values + first_slot * DIM, rotation, narrow, ready, empty, used, ring,
                    rows, eps, WIDTH, HEADS, DIM, COLUMNS,
                )  # fmt: skip

        phase += 1
        if (phase >= begin) & (phase < end):
            barrier()
            if phase > begin:
                arrive(counters)
            first_row, members, tile, split, low, high, start, second, length = span
            # Only what is waited for: an item without rows leaves no copy behind.
            copied = (
                (program < items)
                & (tile * BLOCK_M < members * HEADS)
                & attention.are_old(low, high, start, second, length, first_slot, rows)
            )
            if copied:
                attention.copy_keys(
                    layer_keys, layer_values, low, high, start, second, length, ring
                )
            if phase > begin:
                count += programs
                wait_for(counters, count)
            for item in range(program, items, programs):
                if item != program:
                    barrier()
                    copied = item < 0
                    first_row, members, tile, split, low, high, start, second, length = (
                        attention.key_span(item, segments, tiles, splits)
                    )
                if (tile * BLOCK_M < members * HEADS) & (low < high):
                    if copied == 0:
                        attention.copy_keys(
                            layer_keys, layer_values, low, high, start, second, length, ring
                        )
                    attention.attend(
                        query, partial, heights, first_row, members, tile, split, low, high,
                        total_rows, scale, ring, page_columns, HEADS,
                    )  # fmt: skip
                else:
                    attention.mark_empty(
                        heights, first_row, members, tile, split, total_rows, HEADS
                    )

        phase += 1
        if (phase >= begin) & (phase < end):
            count = _meet(counters, count, programs, phase, begin)
            last = (total_rows + attention.MERGED_ROWS - 1) // attention.MERGED_ROWS
            for item in range(program, last, programs):
                attention.merge(item, partial, heights, attended, total_rows, splits, DIM)

        phase += 1
        if (phase >= begin) & (phase < end):
            count = _meet(counters, count, programs, phase, begin)
            for item in range(program, COLUMNS * OUT_SPLITS, programs):
                used = add_product(
                    item, attended, narrow, ready, empty, used, ring, residual, gates,
                    gates + WIDTH, scaled, squares, parts, counters + 1, rows, WIDTH, HEADS * DIM,
                    OUT_SPLITS,
                )  # fmt: skip

        phase += 1
        if (phase >= begin) & (phase < end):
            count = _meet(counters, count, programs, phase, begin)
            for tile in range(program, 2 * MLP // WIDE, programs):
                used = activate(
                    tile, scaled, squares, up_constant, hidden, weights, ready, empty, used, ring,
                    rows, eps, WIDTH, MLP, COLUMNS,
                )  # fmt: skip

        phase += 1
        if (phase >= begin) & (phase < end):
            count = _meet(counters, count, programs, phase, begin)
            for item in range(program, COLUMNS * DOWN_SPLITS, programs):
                used = add_product(
                    item, hidden, narrow, ready, empty, used, ring, residual, gates + 2 * WIDTH,
                    gates + 3 * WIDTH, scaled, squares, parts, counters + 1, rows, WIDTH, MLP,
                    DOWN_SPLITS,
                )  # fmt: skip


@gluon.jit(do_not_specialize=["eps", "scale", "begin", "end", "splits", "tiles", "items"])
def decoder_kernel(
    weights, constants, rotation, segments, residual, scaled, squares, query, keys, values,
    partial, heights, attended, hidden, parts, counters,
    rows, layer_stride, first_slot, tiles, splits, items, begin, end, eps, scale,
    WIDTH: gl.constexpr, MLP: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr,
    OUT_SPLITS: gl.constexpr, DOWN_SPLITS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
) -> None:  # fmt: skip
    """Run the phases ``begin`` to ``end`` of all layers, numbered through.

    Args:
        weights: Pointer to addresses int64 ``[layers, 4]``: qkv, out, gate/up, down, all bf16.
        constants: Pointer to fp32 ``[layers, (HEADS + 2) * DIM + 2 * MLP + 4 * WIDTH]``: the shift
            of the norms times qkv and gate/up, the gate of the attention, the scale of the second
            norm, the gate of the MLP, the scale of the next layer's first norm.
        rotation: Pointer to fp32 ``[rows, DIM]``, cosines and sines.
        segments: Pointer to int32 ``[groups, 6]``, a plan's table.
        residual: Pointer to bf16 ``[rows, WIDTH]``, read and written.
        scaled: Pointer to bf16 ``[rows, WIDTH]``, residual times one plus scale; likewise.
        squares: Pointer to fp32 ``[rows, WIDTH / 32]``, sums of squares of 32 columns; likewise.
        query: Pointer to bf16 ``[rows, HEADS, DIM]``.
        keys: Pointer to bf16 ``[layers, slots, DIM]``; rows are stored from ``first_slot`` on.
        values: Likewise.
        partial: Pointer to bf16 ``[splits, rows, HEADS, DIM]``.
        heights: Pointer to fp32 ``[splits, rows, HEADS]``.
        attended: Pointer to bf16 ``[rows, HEADS, DIM]``.
        hidden: Pointer to bf16 ``[rows, MLP]``.
        parts: Pointer to fp32 ``[max(OUT_SPLITS, DOWN_SPLITS), rows, WIDTH]``.
        counters: Pointer to int32 zeros, one for each column tile and one more in front.
        rows: At most 64.
        layer_stride: Values between two layers of the cache.
        first_slot: Where the first row's key goes.
        tiles: Row tiles of a request's attention.
        splits: Chunks of keys.
        items: Tiles times chunks times requests.
        begin: First phase.
        end: Phase behind the last one.
        eps: Of the norms.
        scale: Of the scores.
        WIDTH: Of the residual.
        MLP: Of the hidden rows.
        HEADS: Query heads; there is one key head.
        DIM: Of a head.
        OUT_SPLITS: Parts of the output product.
        DOWN_SPLITS: Parts of the down product.
        PRODUCER_REGISTERS: Registers of a thread of the warp that copies weights.
    """
    block: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, WIDE, BLOCK_K // 2], block)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), count=32)
        mbarrier.init(empty.index(slot), count=1)
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    constants, rotation, segments, residual, scaled, squares, query, keys, values,
                    partial, heights, attended, hidden, parts, counters, ring, ready, empty, rows,
                    layer_stride, first_slot, tiles, splits, items, begin, end, eps, scale,
                    WIDTH, MLP, HEADS, DIM, OUT_SPLITS, DOWN_SPLITS,
                ),
            ),
            (
                stream,
                (
                    weights, ring, ready, empty, begin, end, WIDTH, MLP, HEADS, DIM, OUT_SPLITS,
                    DOWN_SPLITS,
                ),
            ),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
