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
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from piper_kernels.fusions.convrot_int8_sage_qk._hopper_epilogue import (
    ROWS,
    store_block_mean,
    store_keys,
    store_queries,
    store_values,
)
from piper_kernels.fusions.projected_qk._hopper_heads import (
    column_halves,
    normalized_and_turned,
    row_halves,
    store_summary,
)
from piper_kernels.linear.convrot.int8._nvidia.hopper_kernel import copy_partition, unit_position

# What heads are.
QUERIES, KEYS, VALUES = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@gluon.jit
def _projected(x, row_scale, w_scale, bias, column, bias_stride, HAS_BIAS: gl.constexpr):
    """Return the FP32 projection of int32 sums ``[64, D]`` from a column on."""
    layout: gl.constexpr = gl.SliceLayout(0, x.type.layout)
    column = column + gl.arange(0, x.shape[1], layout=layout)
    values = x.to(gl.float32) * gl.expand_dims(row_scale, 1)
    values = values * gl.expand_dims(gl.load(w_scale + column), 0)
    if HAS_BIAS:
        values += gl.expand_dims(gl.load(bias + column * bias_stride).to(gl.float32), 0)
    return values


@gluon.jit
def _encode_head(
    sums,
    head,
    batch,
    tile,
    x_scale,
    w_scale,
    bias,
    weight,
    cos,
    sin,
    mean,
    lengths,
    codes,
    scales,
    keys,
    partials,
    first_summary,
    second_summary,
    rows,
    heads,
    tiles,
    bias_stride,
    eps,
    factor,
    KIND: gl.constexpr,
    ROTARY: gl.constexpr,
    SUMMARY: gl.constexpr,
    STORE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_WEIGHT: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Encode 64 rows of one head from their int32 sums ``[64, D]``."""
    D: gl.constexpr = sums.shape[1]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums.type.layout))
    count = gl.minimum(rows - tile * ROWS, ROWS)
    inside = count
    if MASKED:
        count = gl.minimum(count, gl.load(lengths + tile))
    exists = row < count
    position = tile * ROWS + row
    # Rows that do not exist are zero before the bias, so nothing of them is infinite.
    row_scale = gl.load(x_scale + batch.to(gl.int64) * rows + position, mask=exists, other=0.0)
    x = _projected(sums, row_scale, w_scale, bias, head * D, bias_stride, HAS_BIAS)
    lead = batch.to(gl.int64) * heads + head
    block = lead * tiles + tile
    existing = gl.expand_dims(exists, 1)
    if KIND == VALUES:
        if SUMMARY:
            store_block_mean(x, existing, count, first_summary + block * D)
        at = codes + lead * (tiles * ROWS) * D + tile * ROWS
        store_values(x, existing, mean + lead * D, at, scales + block, tiles * ROWS, STORE)
    else:
        # Rows past the end repeat the last one's angles.
        angles = gl.minimum(position, rows - 1).to(gl.int64) * ROTARY
        x = normalized_and_turned(x, weight, cos + angles, sin + angles, eps, ROTARY, HAS_WEIGHT)
        store_summary(
            x, existing, count, first_summary + block * D,
            second_summary + block * D, KIND == QUERIES, SUMMARY,
        )  # fmt: skip
        if KIND == QUERIES:
            at = codes + block * (ROWS * D // 2)
            store_queries(x, exists, at, scales + block * 2, factor, STORE)
        else:
            at = keys + (lead * rows + tile * ROWS) * D
            store_keys(x, existing, at, partials + block * D, inside, STORE)


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
    cos,
    sin,
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
    rows,
    heads,
    bias_stride,
    eps,
    factor,
    KIND: gl.constexpr,
    D: gl.constexpr,
    ROTARY: gl.constexpr,
    SUMMARY: gl.constexpr,
    GROUP_M: gl.constexpr,
    STORE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_WEIGHT: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Multiply what the ring holds and encode every tile of this program."""
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    TILE_HEADS: gl.constexpr = BLOCK_N // D
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 32]
    )
    tiles = gl.cdiv(rows, ROWS)
    sequence_tiles = gl.cdiv(rows, BLOCK_M)
    count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row_tile, column_tile, _second, _part, _start, _stop = unit_position(
            unit, row_tiles, column_tiles, steps, GROUP_M, 1, False
        )
        accumulator = gl.zeros((BLOCK_M, BLOCK_N), gl.int32, layout)
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
        batch = row_tile // sequence_tiles
        first_tile = (row_tile % sequence_tiles) * (BLOCK_M // ROWS)
        blocks = row_halves(accumulator)
        for half in gl.static_range(BLOCK_M // ROWS):
            tile = first_tile + half
            sums = (blocks[half],)
            if TILE_HEADS == 2:
                sums = column_halves(blocks[half])
            for part in gl.static_range(TILE_HEADS):
                head = column_tile * TILE_HEADS + part
                if (tile < tiles) & (head < heads):
                    _encode_head(
                        sums[part], head, batch, tile, x_scale, w_scale, bias, weight, cos, sin,
                        mean, lengths, codes, scales, keys, partials, first_summary,
                        second_summary, rows, heads, tiles, bias_stride, eps, factor, KIND, ROTARY,
                        SUMMARY, STORE, HAS_BIAS, HAS_WEIGHT, MASKED,
                    )  # fmt: skip


@gluon.jit(do_not_specialize=["batches", "rows", "heads"])
def hopper_encode_kernel(
    x_desc,
    w_desc,
    x_scale,
    w_scale,
    bias,
    weight,
    cos,
    sin,
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
        x_scale: FP32 ``[batches, rows]``.
        w_scale: FP32 ``[heads * D]``.
        bias: Floating ``[heads * D]``; read with ``HAS_BIAS``.
        weight: Floating ``[D]``, of queries and keys; read with ``HAS_WEIGHT``.
        cos: FP32 ``[rows, ROTARY]``, of queries and keys.
        sin: Like ``cos``.
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
    row_tiles = batches * gl.cdiv(rows, BLOCK_M)
    column_tiles = gl.cdiv(heads * D, BLOCK_N)
    steps = gl.cdiv(depth, BLOCK_K)
    units = row_tiles * column_tiles
    gl.warp_specialize(
        [
            (
                _encode_partition,
                (
                    x_ring, w_ring, ready, empty, x_scale, w_scale, bias, weight, cos, sin, mean,
                    lengths, codes, scales, keys, partials, first_summary, second_summary, units,
                    row_tiles, column_tiles, steps, rows, heads, bias_stride, eps, factor, KIND, D,
                    ROTARY, SUMMARY, GROUP_M, STORE, HAS_BIAS, HAS_WEIGHT, MASKED,
                ),
            ),
            (
                copy_partition,
                (
                    x_desc, w_desc, w_desc, x_ring, w_ring, ready, empty, units, row_tiles,
                    column_tiles, steps, GROUP_M, 1, False,
                ),
            ),
        ],
        [1],
        [COPY_REGISTERS],
    )  # fmt: skip
