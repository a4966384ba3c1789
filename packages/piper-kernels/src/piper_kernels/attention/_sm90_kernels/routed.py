"""Routed 8-bit attention for Hopper, in Gluon: INT8 scores, then INT8 values.

One program owns 64 queries of one head. One warp copies pairs of the key and value tiles on their
route into a ring of shared memory with TMA, a warpgroup turns them into attention. Two programs
share a multiprocessor: while one computes probabilities, the matrix units work for the other.
Importing needs a Triton with Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN202, PLR0915  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_init

from piper_kernels.attention._sm90_kernels.routed_pair import attend_pair, issue_scores
from piper_kernels.attention._sm90_kernels.routes import copy_partition, program_route, tile_at
from piper_kernels.attention._sm90_kernels.tiles import QUERY_ROWS, TILE_KEYS


@gluon.jit
def attend_partition(
    q_tile, k_ring, v_ring, q_ready, k_ready, k_empty, v_ready, v_empty,
    q_scale, k_scale, v_multiplier, v_sum, v_mean, lengths, coarse, gate, out,
    routes, table, first_block, blocks, tiles, heads, groups, routed_blocks, routed_tiles,
    routes_per_query, rows, query_tiles, query_rows, gate_batch_stride, gate_row_stride,
    gate_head_stride, HAS_LENGTHS: gl.constexpr, HAS_COARSE: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """Compute the attention of the 64 queries of this program."""
    HEAD_DIM: gl.constexpr = q_tile.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 32]
    )
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 32]
    )
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    batch, head, block, route, kept, suffix = program_route(
        routes, table, first_block, blocks, heads, routed_blocks, routed_tiles, routes_per_query
    )
    count = kept + tiles - suffix
    sequence = (batch * heads + head).to(gl.int64)
    key_head = (batch * (heads // groups) + head // groups).to(gl.int64)
    k_scale += key_head * tiles
    v_multiplier += key_head * tiles
    v_sum += key_head * tiles * HEAD_DIM
    row = gl.arange(0, QUERY_ROWS, layout=ROWS)
    scales = gl.load(q_scale + (sequence * query_tiles + block) * 2 + row // 32)
    output = warpgroup_mma_init(gl.zeros((QUERY_ROWS, HEAD_DIM), gl.int32, PRODUCT))
    denominator = gl.zeros((QUERY_ROWS,), gl.float32, ROWS)
    code_sum = denominator
    coordinate = gl.full((QUERY_ROWS,), float("-inf"), gl.float32, ROWS)
    exponent = denominator
    first = tile_at(route, 0, kept, suffix, count)
    second = tile_at(route, 1, kept, suffix, count)
    scale_0 = gl.load(k_scale + first)
    scale_1 = gl.load(k_scale + second)
    multiplier_0 = gl.load(v_multiplier + first)
    multiplier_1 = gl.load(v_multiplier + second)
    length_0 = TILE_KEYS
    length_1 = TILE_KEYS
    pairs = gl.cdiv(count, 2)
    mbarrier.wait(q_ready.index(0), 0)
    mbarrier.wait(k_ready.index(0), 0)
    scores_0 = issue_scores(q_tile, k_ring, 0, 0, SCORES)
    scores_1 = issue_scores(q_tile, k_ring, 0, 1, SCORES)
    for pair in range(pairs - 1):
        if HAS_LENGTHS:
            length_0 = gl.load(lengths + first)
            length_1 = gl.load(lengths + second)
        (
            scores_0, scores_1, output, denominator, code_sum, coordinate, exponent,
            first, second, scale_0, scale_1, multiplier_0, multiplier_1,
        ) = attend_pair(
            scores_0, scores_1, output, denominator, code_sum, coordinate, exponent, q_tile, scales,
            first, second, scale_0, scale_1, multiplier_0, multiplier_1, length_0, length_1,
            k_scale, v_multiplier, v_sum, route, kept, suffix, count,
            k_ring, v_ring, k_ready, k_empty, v_ready, v_empty, pair, HAS_LENGTHS, True,
        )  # fmt: skip
    if HAS_LENGTHS:
        length_0 = gl.load(lengths + first)
        length_1 = gl.load(lengths + second)
    else:
        # Only the last tile of a sequence may be short.
        last_length = rows - (tiles - 1) * TILE_KEYS
        length_0 = gl.where(first == tiles - 1, last_length, TILE_KEYS)
        length_1 = gl.where(second == tiles - 1, last_length, TILE_KEYS)
    length_1 = gl.where(count % 2 == 1, 0, length_1)
    (
        scores_0, scores_1, output, denominator, code_sum, coordinate, exponent,
        first, second, scale_0, scale_1, multiplier_0, multiplier_1,
    ) = attend_pair(
        scores_0, scores_1, output, denominator, code_sum, coordinate, exponent, q_tile, scales,
        first, second, scale_0, scale_1, multiplier_0, multiplier_1, length_0, length_1,
        k_scale, v_multiplier, v_sum, route, kept, suffix, count,
        k_ring, v_ring, k_ready, k_empty, v_ready, v_empty, pairs - 1, True, False,
    )  # fmt: skip
    denominator = gl.convert_layout(denominator, gl.SliceLayout(1, PRODUCT), assert_trivial=True)
    inverse = 1.0 / (gl.maximum(denominator, 1e-30) * 255.0)
    features = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, PRODUCT))
    mean = gl.load(v_mean + key_head * HEAD_DIM + features)
    values = output.to(gl.float32) * gl.expand_dims(inverse, 1) + gl.expand_dims(mean, 0)
    row = block * QUERY_ROWS + gl.arange(0, QUERY_ROWS, layout=gl.SliceLayout(1, STORE))
    features = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, STORE))
    inside = gl.expand_dims(row < query_rows, 1)
    if HAS_COARSE:
        values = gl.convert_layout(values, STORE)
        added = gl.load(coarse + (sequence * query_tiles + block) * HEAD_DIM + features)
        at = batch.to(gl.int64) * gate_batch_stride + head.to(gl.int64) * gate_head_stride
        at = gl.expand_dims(at + row.to(gl.int64) * gate_row_stride, 1)
        gates = gl.load(gate + at + gl.expand_dims(features, 0), mask=inside, other=0.0)
        values += gates.to(gl.float32) * gl.expand_dims(added, 0)
        rounded = values.to(out.dtype.element_ty)
    else:
        rounded = gl.convert_layout(values.to(out.dtype.element_ty), STORE)
    first_row = first_block * QUERY_ROWS
    stored = gl.minimum(query_rows, (first_block + blocks) * QUERY_ROWS) - first_row
    at = (batch.to(gl.int64) * stored + (row - first_row)) * heads + head
    gl.store(
        out + gl.expand_dims(at * HEAD_DIM, 1) + gl.expand_dims(features, 0), rounded, mask=inside
    )


@gluon.jit(
    do_not_specialize=[
        "first_block", "blocks", "tiles", "heads", "groups", "routed_blocks", "routed_tiles",
        "routes_per_query", "rows", "query_tiles", "query_rows", "gate_batch_stride",
        "gate_row_stride", "gate_head_stride",
    ]
)  # fmt: skip
def routed_attention_kernel(
    q_desc, k_desc, v_desc, q_scale, k_scale, v_multiplier, v_sum, v_mean, lengths, coarse, gate,
    out, routes, table, first_block, blocks, tiles, heads, groups, routed_blocks, routed_tiles,
    routes_per_query, rows, query_tiles, query_rows, gate_batch_stride, gate_row_stride,
    gate_head_stride, HAS_LENGTHS: gl.constexpr, HAS_COARSE: gl.constexpr, STAGES: gl.constexpr,
    STORE: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attend from query blocks to the key tiles on their routes.

    Args:
        q_desc: Descriptor of int8 ``[B * Hq * Q', D]``, block ``[64, D]``.
        k_desc: Descriptor of int8 ``[B * Hkv * S', D]``, block ``[64, D]``, for permuted values;
            for others of the view ``[B * Hkv * S' / 16, 2, 4, 2, D]`` that permutes keys, block
            ``[4, 2, 4, 2, D]``.
        v_desc: Descriptor of int8 ``[B * Hkv * D, S']``, block ``[D, 64]``.
        q_scale: FP32 ``[B, Hq, Q' / 32]``, with softmax scale and log2 e.
        k_scale: FP32 ``[B, Hkv, tiles]``.
        v_multiplier: FP32 ``[B, Hkv, tiles]``.
        v_sum: int32 ``[B, Hkv, tiles, D]``, 128 times the sum of the value codes of tiles.
        v_mean: FP32 ``[B, Hkv, D]``.
        lengths: int32 ``[tiles]``, read only when ``HAS_LENGTHS``.
        coarse: FP32 ``[B, Hq, query_tiles, D]``, read only when ``HAS_COARSE``.
        gate: Floating ``[B, query_rows, Hq, D]`` with contiguous features, read together with it.
        out: ``[B, rows of the range, Hq, D]``, contiguous.
        routes: uint16 ``[B, routed_blocks, routes_per_query]``.
        table: int32 ``[2 * Hq + 1]``: kept tiles of heads, then the offsets of their routes.
        first_block: First query block of the range.
        blocks: Query blocks of the range.
        tiles: Tiles of 64 keys, ``S' / 64``.
        heads: ``Hq``.
        groups: ``Hq / Hkv``.
        routed_blocks: Leading query blocks that have a route.
        routed_tiles: Leading tiles that routes select from.
        routes_per_query: Routes of a query block of all heads.
        rows: Keys that exist, or all of them with lengths.
        query_tiles: Tiles of 64 queries, ``Q' / 64``.
        query_rows: Queries that exist.
        gate_batch_stride: Elements between the batches of the gate.
        gate_row_stride: Elements between its rows.
        gate_head_stride: Elements between its heads.
        HAS_LENGTHS: Whether tiles have lengths.
        HAS_COARSE: Whether a gated coarse output is added.
        STAGES: Pairs of tiles in the ring.
        STORE: Layout in which the output is stored.
        COPY_REGISTERS: Registers of a thread of the copying warp.
    """
    HEAD_DIM: gl.constexpr = q_desc.block_type.shape[1]
    q_tile = gl.allocate_shared_memory(gl.int8, [QUERY_ROWS, HEAD_DIM], q_desc.layout)
    k_shape: gl.constexpr = [2 * STAGES] + k_desc.block_type.shape  # noqa: RUF005
    k_ring = gl.allocate_shared_memory(gl.int8, k_shape, k_desc.layout)
    v_ring = gl.allocate_shared_memory(gl.int8, [2 * STAGES, HEAD_DIM, TILE_KEYS], v_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready.index(0), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=1)
        mbarrier.init(v_ready.index(slot), count=1)
        mbarrier.init(v_empty.index(slot), count=1)
    gl.warp_specialize(
        [
            (
                attend_partition,
                (
                    q_tile, k_ring, v_ring, q_ready, k_ready, k_empty, v_ready, v_empty, q_scale,
                    k_scale, v_multiplier, v_sum, v_mean, lengths, coarse, gate, out, routes, table,
                    first_block, blocks, tiles, heads, groups, routed_blocks, routed_tiles,
                    routes_per_query, rows, query_tiles, query_rows, gate_batch_stride,
                    gate_row_stride, gate_head_stride, HAS_LENGTHS, HAS_COARSE, STORE,
                ),
            ),
            (
                copy_partition,
                (
                    q_desc, k_desc, v_desc, q_tile, k_ring, v_ring, q_ready, k_ready, k_empty,
                    v_ready, v_empty, routes, table, first_block, blocks, tiles, heads, groups,
                    routed_blocks, routed_tiles, routes_per_query, query_tiles,
                ),
            ),
        ],
        [1],
        [COPY_REGISTERS],
    )  # fmt: skip
