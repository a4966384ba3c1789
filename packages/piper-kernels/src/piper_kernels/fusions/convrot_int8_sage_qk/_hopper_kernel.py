"""INT8 product on Hopper whose tiles leave as operands of Piper attention, in Gluon.

Operands are copied as in the plain product; see ``linear.convrot.int8._nvidia.hopper_kernel``. Two
programs share a multiprocessor: one encodes while one multiplies. Importing needs a Triton with
Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from piper_kernels.fusions.convrot_int8_sage_qk._hopper_blocks import (
    VALUES,
    angle_tiles,
    encode_block,
)
from piper_kernels.fusions.convrot_int8_sage_qk._hopper_epilogue import ROWS
from piper_kernels.fusions.projected_qk._hopper_heads import ANGLES, row_halves
from piper_kernels.linear.convrot.int8._nvidia.hopper_kernel import multiply_steps, unit_position

_WAIT = gl.constexpr("""
{
    .reg .pred early;
    .reg .u64 start, now;
    mov.u64 start, %clock64;
again:
    mov.u64 now, %clock64;
    sub.u64 now, now, start;
    setp.lt.u64 early, now, $1;
    @early bra again;
    mov.u32 $0, 0;
}
""")


@gluon.jit
def _wait_cycles(cycles):
    """Let that many cycles of the multiprocessor pass."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    waited = gl.full([32 * gl.num_warps()], cycles, gl.int64, layout)
    gl.inline_asm_elementwise(_WAIT, "=r,l", [waited], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _copy_partition(
    x_desc,
    w_desc,
    cos_desc,
    sin_desc,
    x_ring,
    w_ring,
    ready,
    empty,
    units,
    row_tiles,
    column_tiles,
    steps,
    sequence_tiles,
    GROUP_M: gl.constexpr,
    ANGLE_TILES: gl.constexpr,
):
    """Fill the ring with the operands of every unit, and the angles of its rows behind them."""
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K
    ANGLE_LAYOUT: gl.constexpr = cos_desc.layout
    count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row_tile, column_tile, _second, _part, _start, _stop = unit_position(
            unit, row_tiles, column_tiles, steps, GROUP_M, 1, False
        )
        for step in range(steps):
            slot = count % STAGES
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(slot), BYTES)
            x_at = [row_tile * BLOCK_M, step * BLOCK_K]
            w_at = [column_tile * BLOCK_N, step * BLOCK_K]
            tma.async_copy_global_to_shared(x_desc, x_at, ready.index(slot), x_ring.index(slot))
            tma.async_copy_global_to_shared(w_desc, w_at, ready.index(slot), w_ring.index(slot))
            count += 1
        first_row = (row_tile % sequence_tiles) * BLOCK_M
        for index in gl.static_range(BLOCK_M // ROWS * ANGLE_TILES):
            slot = count % STAGES
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(slot), BYTES)
            at = [first_row + index // ANGLE_TILES * ROWS, index % ANGLE_TILES * ANGLES]
            cosines = angle_tiles(x_ring, count, ANGLE_LAYOUT, 1)
            sines = angle_tiles(w_ring, count, ANGLE_LAYOUT, 1)
            tma.async_copy_global_to_shared(cos_desc, at, ready.index(slot), cosines[0])
            tma.async_copy_global_to_shared(sin_desc, at, ready.index(slot), sines[0])
            count += 1


@gluon.jit
def _encode_partition(
    x_ring,
    w_ring,
    ready,
    empty,
    x_scale,
    w_scale,
    bias,
    weight,
    mean,
    lengths,
    codes,
    scales,
    keys,
    partials,
    first_summary,
    second_summary,
    units,
    row_tiles,
    column_tiles,
    steps,
    sequence_tiles,
    rows,
    heads,
    bias_stride,
    eps,
    factor,
    delay,
    ANGLE_LAYOUT: gl.constexpr,
    KIND: gl.constexpr,
    D: gl.constexpr,
    ROTARY: gl.constexpr,
    SUMMARY: gl.constexpr,
    GROUP_M: gl.constexpr,
    ANGLE_TILES: gl.constexpr,
    STORE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_WEIGHT: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Multiply what the ring holds and encode every tile of this program."""
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 32]
    )
    count = 0
    # Programs that start and multiply together would encode together for ever, and nothing would
    # be multiplied then. Those of the second half share multiprocessors with those of the first.
    if gl.program_id(0) >= (gl.num_programs(0) + 1) // 2:
        _wait_cycles(delay)
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row_tile, column_tile, _second, _part, _start, _stop = unit_position(
            unit, row_tiles, column_tiles, steps, GROUP_M, 1, False
        )
        accumulator = gl.zeros((BLOCK_M, BLOCK_N), gl.int32, layout)
        count, accumulator = multiply_steps(
            x_ring, w_ring, ready, empty, count, accumulator, 0, steps
        )
        halves = row_halves(accumulator)
        for half in gl.static_range(BLOCK_M // ROWS):
            encode_block(
                halves[half],
                column_tile * (BLOCK_N // D),
                row_tile // sequence_tiles,
                (row_tile % sequence_tiles) * (BLOCK_M // ROWS) + half,
                count,
                x_ring, w_ring, ready, empty, x_scale, w_scale, bias, weight, mean, lengths, codes,
                scales, keys, partials, first_summary, second_summary, rows, heads, bias_stride,
                eps, factor, ANGLE_LAYOUT, KIND, D, ROTARY, SUMMARY, ANGLE_TILES, STORE, HAS_BIAS,
                HAS_WEIGHT, MASKED,
            )  # fmt: skip
            count += ANGLE_TILES


@gluon.jit(do_not_specialize=["batches", "rows", "heads", "delay"])
def hopper_encode_kernel(
    x_desc,
    w_desc,
    cos_desc,
    sin_desc,
    x_scale,
    w_scale,
    bias,
    weight,
    mean,
    lengths,
    codes,
    scales,
    keys,
    partials,
    first_summary,
    second_summary,
    batches,
    rows,
    heads,
    depth,
    bias_stride,
    eps,
    factor,
    delay,
    KIND: gl.constexpr,
    D: gl.constexpr,
    ROTARY: gl.constexpr,
    SUMMARY: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    STORE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_WEIGHT: gl.constexpr,
    MASKED: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    """Project prepared rows and encode heads.

    Args:
        x_desc: Descriptor of int8 rows ``[batches * rows, depth]``, block ``[128, BLOCK_K]``.
        w_desc: Descriptor of the weight, int8 ``[heads * D, depth]``, block ``[128, BLOCK_K]``.
        cos_desc: Descriptor of FP32 ``[rows, ROTARY]``, block ``[64, 64]``; ``None`` for values.
        sin_desc: Like ``cos_desc``.
        x_scale: FP32 ``[batches, rows]``.
        w_scale: FP32 ``[heads * D]``.
        bias: Floating ``[heads * D]``; read with ``HAS_BIAS``.
        weight: Floating ``[D]``, of queries and keys; read with ``HAS_WEIGHT``.
        mean: FP32 ``[batches, heads, D]``, subtracted from values.
        lengths: int32 ``[tiles]``, rows that exist at the front of tiles; read when ``MASKED``.
        codes: Of queries: int16 ``[batches, heads, 64 * tiles, D / 2]``, two codes each. Of
            values: int8 ``[batches, heads, D, 64 * tiles]``.
        scales: FP32, of queries ``[batches, heads, 2 * tiles]`` with ``factor``; of values
            ``[batches, heads, tiles]``, 255 times their scales.
        keys: Floating ``[batches, heads, rows, D]``.
        partials: FP32 ``[batches, heads, tiles, D]``, sums of stored keys.
        first_summary: FP32 ``[batches, heads, tiles, D]``; see ``store_summary``. Of values: the
            means of blocks, unless ``SUMMARY`` is 0.
        second_summary: The same, minima of keys.
        batches: Sequences; their rows are a multiple of 128 unless there is one.
        rows: Rows of a sequence.
        heads: Heads.
        depth: Features of the input.
        bias_stride: Elements between biases.
        eps: Added to mean squares.
        factor: Factor of the stored scales of queries.
        delay: Cycles that the second half of the programs starts later.
        KIND: ``QUERIES``, ``KEYS`` or ``VALUES``.
        D: 64 or 128.
        ROTARY: Features with a rotary embedding, a multiple of 32 and at most ``D``.
        SUMMARY: ``NO_SUMMARY``, ``MINMAX`` or ``MEAN``.
        STAGES: Slots of the ring.
        GROUP_M: Row tiles that share their columns in a row.
        STORE: Layout in which a block is stored.
        HAS_BIAS: Whether there is a bias.
        HAS_WEIGHT: Whether normalized features have a factor.
        MASKED: Whether tiles have lengths.
        COPY_REGISTERS: Registers of a thread of the copying warp.
    """
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    x_ring = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    sequence_tiles = gl.cdiv(rows, BLOCK_M)
    row_tiles = batches * sequence_tiles
    column_tiles = gl.cdiv(heads * D, BLOCK_N)
    steps = gl.cdiv(depth, BLOCK_K)
    units = row_tiles * column_tiles
    ANGLE_TILES: gl.constexpr = 0 if KIND == VALUES else (ROTARY + ANGLES - 1) // ANGLES
    angles = x_desc if KIND == VALUES else cos_desc
    other_angles = x_desc if KIND == VALUES else sin_desc
    ANGLE_LAYOUT: gl.constexpr = angles.layout
    gl.warp_specialize(
        [
            (
                _encode_partition,
                (
                    x_ring, w_ring, ready, empty, x_scale, w_scale, bias, weight, mean, lengths,
                    codes, scales, keys, partials, first_summary, second_summary, units, row_tiles,
                    column_tiles, steps, sequence_tiles, rows, heads, bias_stride, eps, factor,
                    delay, ANGLE_LAYOUT, KIND, D, ROTARY, SUMMARY, GROUP_M, ANGLE_TILES, STORE,
                    HAS_BIAS, HAS_WEIGHT, MASKED,
                ),
            ),
            (
                _copy_partition,
                (
                    x_desc, w_desc, angles, other_angles, x_ring, w_ring, ready, empty, units,
                    row_tiles, column_tiles, steps, sequence_tiles, GROUP_M, ANGLE_TILES,
                ),
            ),
        ],
        [1],
        [COPY_REGISTERS],
    )  # fmt: skip
