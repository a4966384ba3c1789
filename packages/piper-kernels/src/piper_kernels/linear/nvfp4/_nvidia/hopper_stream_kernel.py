"""Product of few input rows and NVFP4 weights for Hopper, in Gluon: a stream of the weight.

A program has some weight rows and a part of the depth. Four warps arrange that part of the input
in shared memory, where it stays; warpgroups decode codes into the left operands of products with
it, while one warp keeps TMA copies of the next codes and block scales in flight. Twice as many
warpgroups take turns with the steps, where registers allow it. Importing needs a Triton with
Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piper_kernels.linear.nvfp4._nvidia.hopper_decode import left_operand, load_step
from piper_kernels.linear.nvfp4._nvidia.hopper_epilogue import store_tile


@gluon.jit
def _copy_partition(
    word_desc, scale_desc, word_ring, scale_ring, ready, empty, output_tile, start, stop,
    scale_columns,
):  # fmt: skip
    """Fill the ring with the codes and block scales of the steps of this program."""
    STAGES: gl.constexpr = word_ring.shape[0]
    OUTPUTS: gl.constexpr = word_ring.shape[1]
    HALVES: gl.constexpr = OUTPUTS // 128
    for step in range(start, stop):
        slot = (step - start) % STAGES
        mbarrier.wait(empty.index(slot), (((step - start) // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(slot), OUTPUTS * 128 + HALVES * 2048)
        tma.async_copy_global_to_shared(
            word_desc, [output_tile * OUTPUTS, step * 64], ready.index(slot), word_ring.index(slot)
        )
        for half in gl.static_range(HALVES):
            tile = (output_tile * HALVES + half) * scale_columns + step * 4
            tma.async_copy_global_to_shared(
                scale_desc, [tile * 4, 0], ready.index(slot),
                scale_ring.index(slot).slice(16 * half, 16),
            )  # fmt: skip


@gluon.jit
def _arrange_partition(
    source, held, x_ready, start, stop, rows, source_row_stride, STEPS: gl.constexpr,
    FOLLOWS: gl.constexpr,
):  # fmt: skip
    """Arrange the input of this program in shared memory, some steps at a time."""
    CHUNKS: gl.constexpr = x_ready.shape[0]
    CHUNK: gl.constexpr = STEPS // CHUNKS
    ROWS: gl.constexpr = held.shape[0] // (4 * STEPS)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    parts = held._reinterpret(gl.bfloat16, [CHUNKS, CHUNK * 4 * ROWS, 64], held.type.layout)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    row_start = gl.expand_dims(row.to(gl.int64) * source_row_stride, 1)
    if FOLLOWS:
        gdc_wait()
    for chunk in range(gl.cdiv(stop - start, CHUNK)):
        column = gl.arange(0, CHUNK * 256, layout=gl.SliceLayout(0, layout))
        column += (start + chunk * CHUNK) * 256
        mask = gl.expand_dims(row < rows, 1) & gl.expand_dims(column < stop * 256, 0)
        x = gl.load(source + row_start + gl.expand_dims(column, 0), mask=mask, other=0.0)
        x = x.reshape([ROWS, CHUNK, 4, 8, 2, 4]).permute((1, 5, 0, 3, 2, 4))
        parts.index(chunk).store(x.reshape([CHUNK * 4 * ROWS, 64]))
        fence_async_shared()
        mbarrier.arrive(x_ready.index(chunk), count=1)


@gluon.jit
def _sum_of_steps(
    held, x_ready, word_ring, scale_ring, ready, empty, start, stop, STEPS: gl.constexpr,
    HIGH_FIRST: gl.constexpr, TURN: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Decode and multiply every ``TURNS``-th step that the ring holds, from ``TURN`` on."""
    STAGES: gl.constexpr = word_ring.shape[0]
    OUTPUTS: gl.constexpr = word_ring.shape[1]
    ROWS: gl.constexpr = held.shape[0] // (4 * STEPS)
    CHUNK: gl.constexpr = STEPS // x_ready.shape[0]
    operands = held._reinterpret(gl.bfloat16, [STEPS * 4, ROWS, 64], held.type.layout)

    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, ROWS, 16]
    )
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    FLIP: gl.constexpr = 1 if HIGH_FIRST else 0
    accumulator = gl.zeros((OUTPUTS, ROWS), gl.float32, layout)
    before = gl.zeros((OUTPUTS, 64), gl.bfloat16, left)
    for turn in range(TURN, stop - start, TURNS):
        slot = turn % STAGES
        mbarrier.wait(ready.index(slot), (turn // STAGES) & 1)
        words, pairs = load_step(word_ring.index(slot), scale_ring.index(slot))
        mbarrier.wait(x_ready.index(turn // CHUNK), 0)
        for p in gl.static_range(4):
            values = left_operand(words, pairs, p ^ FLIP, left)
            right = operands.index(turn * 4 + p).permute((1, 0))
            token = warpgroup_mma(values, right, accumulator, is_async=True)
            # The registers of the product before are free again.
            accumulator, _ = warpgroup_mma_wait(num_outstanding=1, deps=(token, before))
            if p == 0:
                # Every word was decoded once: the loads from the slot are over, not only issued.
                mbarrier.arrive(empty.index(slot), count=1)
            before = values
    accumulator, _ = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator, before))
    return accumulator


@gluon.jit
def _second_partition(
    held, x_ready, word_ring, scale_ring, ready, empty, other, other_ready, start, stop,
    STEPS: gl.constexpr, HIGH_FIRST: gl.constexpr,
):  # fmt: skip
    """Multiply the odd steps and leave their sums in shared memory."""
    sums = _sum_of_steps(
        held, x_ready, word_ring, scale_ring, ready, empty, start, stop, STEPS, HIGH_FIRST, 1, 2
    )
    other.store(sums)
    mbarrier.arrive(other_ready, count=1)


@gluon.jit
def _multiply_partition(
    held, x_ready, word_ring, scale_ring, ready, empty, other, other_ready, input_level,
    weight_level, bias, out, output_tile, part, start, stop, rows, outputs, bias_stride,
    out_row_stride, factor, STEPS: gl.constexpr, SPLITS: gl.constexpr,
    HIGH_FIRST: gl.constexpr, LEVEL_X: gl.constexpr, LEVEL_W: gl.constexpr,
    BIAS: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Decode and multiply what the ring holds, or the even steps of it, and store the tile."""
    accumulator = _sum_of_steps(
        held, x_ready, word_ring, scale_ring, ready, empty, start, stop, STEPS, HIGH_FIRST, 0,
        TURNS,
    )  # fmt: skip
    if TURNS == 2:
        mbarrier.wait(other_ready, 0)
        accumulator += other.load(accumulator.type.layout)
    store_tile(
        accumulator, input_level, weight_level, bias, out, 0, output_tile, part, rows, outputs,
        bias_stride, out_row_stride, factor, SPLITS, LEVEL_X, LEVEL_W, BIAS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["rows"])
def hopper_stream_kernel(
    source,
    word_desc,
    scale_desc,
    input_level,
    weight_level,
    bias,
    out,
    rows,
    outputs,
    features,
    source_row_stride,
    bias_stride,
    out_row_stride,
    factor,
    ROWS: gl.constexpr,
    STEPS: gl.constexpr,
    W_STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    HELD: gl.constexpr,
    HIGH_FIRST: gl.constexpr,
    LEVEL_X: gl.constexpr,
    LEVEL_W: gl.constexpr,
    BIAS: gl.constexpr,
    CHUNKS: gl.constexpr,
    ARRANGE_REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
    FOLLOWS: gl.constexpr,
    TURNS: gl.constexpr,
    SECOND_REGISTERS: gl.constexpr,
):
    """Multiply bf16 ``[rows, features]`` by the codes of ``[outputs, features]``.

    ``FOLLOWS`` and ``TURNS`` are what ``hopper.launch`` and ``HopperPlan`` call so.
    """
    OUTPUTS: gl.constexpr = word_desc.block_type.shape[0]
    if SPLITS > 1:
        gdc_launch_dependents()
    held = gl.allocate_shared_memory(gl.bfloat16, [STEPS * 4 * ROWS, 64], HELD)
    word_ring = gl.allocate_shared_memory(gl.int16, [W_STAGES, OUTPUTS, 64], word_desc.layout)
    scale_ring = gl.allocate_shared_memory(
        gl.int32, [W_STAGES, OUTPUTS // 8, 32], scale_desc.layout
    )
    ready = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    x_ready = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], mbarrier.MBarrierLayout())
    other = gl.allocate_shared_memory(
        gl.float32, [OUTPUTS if TURNS == 2 else 1, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    other_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(other_ready, count=1)
    for chunk in gl.static_range(CHUNKS):
        mbarrier.init(x_ready.index(chunk), count=1)
    for slot in gl.static_range(W_STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    output_tiles = gl.cdiv(outputs, OUTPUTS)
    output_tile = gl.program_id(0) % output_tiles
    part = gl.program_id(0) // output_tiles
    steps = features // 256
    part_steps = gl.cdiv(steps, SPLITS)
    start = part * part_steps
    stop = gl.minimum(start + part_steps, steps)
    # What follows reads what kernels before this one wrote. Behind the kernel that wrote the input,
    # which started when all others had ended, only reading the input has to wait.
    if not FOLLOWS:
        gdc_wait()
    if TURNS == 2:
        gl.warp_specialize(
            [
                (
                    _multiply_partition,
                    (
                        held, x_ready, word_ring, scale_ring, ready, empty, other, other_ready,
                        input_level, weight_level, bias, out, output_tile, part, start, stop, rows,
                        outputs, bias_stride, out_row_stride, factor, STEPS, SPLITS, HIGH_FIRST,
                        LEVEL_X, LEVEL_W, BIAS, TURNS,
                    ),
                ),
                (
                    _second_partition,
                    (
                        held, x_ready, word_ring, scale_ring, ready, empty, other, other_ready,
                        start, stop, STEPS, HIGH_FIRST,
                    ),
                ),
                (
                    _arrange_partition,
                    (source, held, x_ready, start, stop, rows, source_row_stride, STEPS, FOLLOWS),
                ),
                (
                    _copy_partition,
                    (
                        word_desc, scale_desc, word_ring, scale_ring, ready, empty, output_tile,
                        start, stop, features // 64,
                    ),
                ),
            ],
            [gl.num_warps(), 4, 1],
            [SECOND_REGISTERS, ARRANGE_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _multiply_partition,
                    (
                        held, x_ready, word_ring, scale_ring, ready, empty, other, other_ready,
                        input_level, weight_level, bias, out, output_tile, part, start, stop, rows,
                        outputs, bias_stride, out_row_stride, factor, STEPS, SPLITS, HIGH_FIRST,
                        LEVEL_X, LEVEL_W, BIAS, TURNS,
                    ),
                ),
                (
                    _arrange_partition,
                    (source, held, x_ready, start, stop, rows, source_row_stride, STEPS, FOLLOWS),
                ),
                (
                    _copy_partition,
                    (
                        word_desc, scale_desc, word_ring, scale_ring, ready, empty, output_tile,
                        start, stop, features // 64,
                    ),
                ),
            ],
            [4, 1],
            [ARRANGE_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
