"""Dense 8-bit attention for Hopper, in Gluon: INT8 scores, then INT8 or FP8 values.

One warp copies pairs of key and value tiles into a ring of shared memory with TMA. Two
warpgroups, each with 64 queries of one head, turn them into attention: while one computes
probabilities, the matrix units work for the other. Importing needs a Triton with Gluon's Hopper
API.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
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

from piper_kernels.attention._sm90_kernels.tiles import (
    MAGIC,
    MAX_STEP,
    PAIR_KEYS,
    QUERY_ROWS,
    SIGNED_OFFSET,
    TILE_KEYS,
    exponents,
    fast_exp2,
    hide_scores,
    pack_fp8,
    pack_signed_codes,
    row_maximum,
    subtract_rows,
    visible_keys,
)

# How far the coordinate of a pair may lie below the largest one of its row, in powers of two.
_COORDINATE_DROP = gl.constexpr(60.0)
_LOG2_448 = gl.constexpr(8.807354922057604)


@gluon.jit
def program_tile(query_tiles, CAUSAL: gl.constexpr):
    """Return batch-head and query tile of this program; with a mask long tiles come first."""
    program = gl.program_id(0)
    tile = program % query_tiles
    if CAUSAL:
        tile = query_tiles - 1 - tile
    return program // query_tiles, tile


@gluon.jit
def pair_count(tile, keys, CAUSAL: gl.constexpr):
    """Return how many pairs of key tiles the 128 queries of a tile see."""
    seen = keys
    if CAUSAL:
        seen = gl.minimum(keys, (tile + 1) * 2 * QUERY_ROWS)
    return gl.cdiv(seen, PAIR_KEYS)


@gluon.jit
def copy_partition(
    q_desc, k_desc, v_desc, m_desc, s_desc, q_tiles, k_ring, v_ring, m_ring, s_ring,
    q_ready, k_ready, k_empty, v_ready, v_empty, query_tiles, keys, stored_queries, stored_keys,
    groups, CAUSAL: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Fill the ring with the pairs of key tiles that the queries of this program see."""
    STAGES: gl.constexpr = k_ring.shape[0] // 2
    HEAD_DIM: gl.constexpr = k_ring.shape[2]
    head, tile = program_tile(query_tiles, CAUSAL)
    key_head = head // groups
    pairs = pair_count(tile, keys, CAUSAL)
    row = head * stored_queries + tile * 2 * QUERY_ROWS
    mbarrier.expect(q_ready.index(0), 2 * QUERY_ROWS * HEAD_DIM)
    for group in gl.static_range(2):
        tma.async_copy_global_to_shared(
            q_desc, [row + group * QUERY_ROWS, 0], q_ready.index(0), q_tiles.index(group)
        )
    all_pairs = gl.cdiv(stored_keys, PAIR_KEYS)
    for pair in range(pairs):
        slot = pair % STAGES
        phase = ((pair // STAGES) & 1) ^ 1
        mbarrier.wait(k_empty.index(slot), phase)
        mbarrier.expect(k_ready.index(slot), PAIR_KEYS * HEAD_DIM)
        key_row = key_head * stored_keys + pair * PAIR_KEYS
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                k_desc, [key_row + half * TILE_KEYS, 0], k_ready.index(slot),
                k_ring.index(slot * 2 + half),
            )  # fmt: skip
        mbarrier.wait(v_empty.index(slot), phase)
        EXTRA: gl.constexpr = 0 if FP8 else 4 * (PAIR_KEYS + HEAD_DIM)
        mbarrier.expect(v_ready.index(slot), PAIR_KEYS * HEAD_DIM + EXTRA)
        if not FP8:
            tma.async_copy_global_to_shared(
                m_desc, [key_row], v_ready.index(slot), m_ring.index(slot)
            )
            at = (key_head * all_pairs + pair) * HEAD_DIM
            tma.async_copy_global_to_shared(s_desc, [at], v_ready.index(slot), s_ring.index(slot))
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                v_desc, [key_head * HEAD_DIM, pair * PAIR_KEYS + half * TILE_KEYS],
                v_ready.index(slot), v_ring.index(slot * 2 + half),
            )  # fmt: skip


@gluon.jit
def issue_scores(query, k_ring, k_ready, pair, SCORES: gl.constexpr):
    """Start the products of the queries with both tiles of a pair."""
    STAGES: gl.constexpr = k_ring.shape[0] // 2
    slot = pair % STAGES
    mbarrier.wait(k_ready.index(slot), (pair // STAGES) & 1)
    zeros = gl.zeros((QUERY_ROWS, TILE_KEYS), gl.int32, SCORES)
    first = warpgroup_mma(
        query, k_ring.index(slot * 2).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    second = warpgroup_mma(
        query, k_ring.index(slot * 2 + 1).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    return first, second


@gluon.jit
def attend_pair(
    first, second, query, q_scale, steepest, output, bias, denominator, coordinate, offset, top, top_offset,
    k_scale, v_log_max, k_ring, v_ring, m_ring, s_ring, k_ready, k_empty, v_ready, v_empty,
    rows, pair, keys, tiles, SCORES: gl.constexpr, MASKED: gl.constexpr, MORE: gl.constexpr, CAUSAL: gl.constexpr,
    FP8: gl.constexpr,
):  # fmt: skip
    """Add a pair of key tiles to the attention of 64 queries and start the next scores.

    Args:
        first: Pending scores of the first tile, int32 ``[64, 64]``.
        second: The same of the second tile.
        query: int8 ``[64, D]`` in shared memory.
        q_scale: FP32 ``[64]``.
        output: FP32 ``[64, D]``, in units of ``2 ** (coordinate + offset)``.
        denominator: FP32 ``[64]``, the same.
        coordinate: FP32 ``[64]``, the score to which ``output`` refers.
        offset: FP32 ``[64]``, added to it; apart, because scores may be huge.
        top: FP32 ``[64]``, the largest coordinate so far.
        top_offset: FP32 ``[64]``, added to it.

    Returns:
        The new pending scores, output, denominator, coordinate, offset, top and its offset.
    """
    STAGES: gl.constexpr = k_ring.shape[0] // 2
    HEAD_DIM: gl.constexpr = k_ring.shape[2]
    PRODUCT: gl.constexpr = output.type.layout
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=PRODUCT, k_width=4)
    slot = pair % STAGES
    has_second = pair * 2 + 1 < tiles
    steep_0 = gl.load(k_scale + pair * 2)
    steep_1 = gl.load(k_scale + pair * 2 + 1, mask=has_second, other=0.0)
    scale_0 = q_scale * steep_0
    scale_1 = q_scale * steep_1
    if FP8:
        log_0 = -_LOG2_448
        log_1 = -_LOG2_448
    else:
        log_0 = gl.load(v_log_max + pair * 2)
        log_1 = gl.load(v_log_max + pair * 2 + 1, mask=has_second, other=0.0)
    first, second = warpgroup_mma_wait(num_outstanding=0, deps=(first, second))
    mbarrier.arrive(k_empty.index(slot), count=1)
    if MASKED:
        visible_0 = visible_keys(rows, pair * PAIR_KEYS, keys, SCORES, CAUSAL)
        visible_1 = visible_keys(rows, pair * PAIR_KEYS + TILE_KEYS, keys, SCORES, CAUSAL)
        first = hide_scores(first, visible_0)
        second = hide_scores(second, visible_1)
    largest_0, score_0 = row_maximum(first, scale_0, MASKED)
    largest_1, score_1 = row_maximum(second, scale_1, MASKED)
    # The coordinate of the pair: the larger one, but not far below that of earlier pairs.
    second_wins = (score_1 - score_0) + (log_1 - log_0) > 0
    score = gl.where(second_wins, score_1, score_0)
    log = gl.where(second_wins, log_1, log_0)
    rise = (score - top) + (log - top_offset)
    top = gl.where(rise > 0, score, top)
    top_offset = gl.where(rise > 0, log, top_offset)
    far = rise < -_COORDINATE_DROP
    score = gl.where(far, top, score)
    log = gl.where(far, top_offset - _COORDINATE_DROP, log)
    weight = fast_exp2((coordinate - score) + (offset - log))
    x_0, start_0, x_1, start_1 = exponents(
        first, second, largest_0, largest_1, scale_0, scale_1, (score_0 - score) - log,
        (score_1 - score) - log, steepest * gl.maximum(steep_0, steep_1) > MAX_STEP,
    )  # fmt: skip
    p_0 = fast_exp2(x_0 * gl.expand_dims(scale_0, 1) + gl.expand_dims(start_0, 1))
    if MASKED:
        p_0 = gl.where(visible_0, p_0, 0.0)
    mbarrier.wait(v_ready.index(slot), (pair // STAGES) & 1)
    zeros = gl.zeros((QUERY_ROWS, HEAD_DIM), gl.float32 if FP8 else gl.int32, PRODUCT)
    if FP8:
        codes = pack_fp8(p_0, OPERAND)
    else:
        multiplier = m_ring.index(slot).slice(0, TILE_KEYS).load(gl.SliceLayout(0, SCORES))
        biased = p_0 * gl.expand_dims(multiplier, 0) + (MAGIC + SIGNED_OFFSET)
        codes = pack_signed_codes(biased, OPERAND)
    product = warpgroup_mma(
        codes, v_ring.index(slot * 2).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    p_1 = fast_exp2(x_1 * gl.expand_dims(scale_1, 1) + gl.expand_dims(start_1, 1))
    if MASKED:
        p_1 = gl.where(visible_1, p_1, 0.0)
    if FP8:
        codes_1 = pack_fp8(p_1, OPERAND)
    else:
        multiplier = m_ring.index(slot).slice(TILE_KEYS, TILE_KEYS).load(gl.SliceLayout(0, SCORES))
        biased = p_1 * gl.expand_dims(multiplier, 0) + (MAGIC + SIGNED_OFFSET)
        codes_1 = pack_signed_codes(biased, OPERAND)
    product = warpgroup_mma(
        codes_1, v_ring.index(slot * 2 + 1).permute((1, 0)), product, use_acc=True, is_async=True
    )
    if MORE:
        first, second = issue_scores(query, k_ring, k_ready, pair + 1, SCORES)
    denominator = denominator * weight + gl.sum(p_0 + p_1, axis=1)
    weight = gl.convert_layout(weight, gl.SliceLayout(1, PRODUCT), assert_trivial=True)
    product = warpgroup_mma_wait(num_outstanding=2 if MORE else 0, deps=(product,))
    if not FP8:
        sums = s_ring.index(slot).load(gl.SliceLayout(0, PRODUCT))
        biased = product + gl.expand_dims(sums, 0)
        product = biased.to(gl.float32, bitcast=True)
        bias = bias * weight + MAGIC
    output = output * gl.expand_dims(weight, 1) + product
    if not FP8:
        if pair % 4 == 3:
            output = subtract_rows(output, bias)
            bias *= 0.0
    mbarrier.arrive(v_empty.index(slot), count=1)
    return first, second, output, bias, denominator, score, log, top, top_offset


@gluon.jit
def attend_partition(
    q_tiles, k_ring, v_ring, m_ring, s_ring, q_ready, k_ready, k_empty, v_ready, v_empty,
    q_scale, k_scale, v_log_max, v_vector, out, query_tiles, queries, keys, stored_queries,
    stored_keys, groups, GROUP: gl.constexpr, CAUSAL: gl.constexpr, FP8: gl.constexpr,
    HAS_MEAN: gl.constexpr,
):  # fmt: skip
    """Compute the attention of the 64 queries of warpgroup ``GROUP`` of this program."""
    HEAD_DIM: gl.constexpr = k_ring.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 32]
    )
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 32]
    )
    head, tile = program_tile(query_tiles, CAUSAL)
    key_head = head // groups
    pairs = pair_count(tile, keys, CAUSAL)
    tiles = stored_keys // TILE_KEYS
    k_scale += key_head.to(gl.int64) * tiles
    v_log_max += key_head.to(gl.int64) * tiles
    first_row = (tile * 2 + GROUP) * QUERY_ROWS
    rows = first_row + gl.arange(0, QUERY_ROWS, layout=gl.SliceLayout(1, SCORES))
    scale_row = head.to(gl.int64) * (stored_queries // 32)
    scales = gl.load(q_scale + scale_row + rows // 32, mask=rows < stored_queries, other=1.0)
    output = gl.zeros((QUERY_ROWS, HEAD_DIM), gl.float32, PRODUCT)
    denominator = gl.zeros((QUERY_ROWS,), gl.float32, gl.SliceLayout(1, SCORES))
    coordinate = gl.full((QUERY_ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    bias = gl.zeros((QUERY_ROWS,), gl.float32, gl.SliceLayout(1, PRODUCT))
    steepest = gl.max(scales, axis=0)
    top = coordinate
    offset = denominator
    top_offset = denominator
    mbarrier.wait(q_ready.index(0), 0)
    query = q_tiles.index(GROUP)
    first, second = issue_scores(query, k_ring, k_ready, 0, SCORES)
    for pair in range(pairs - 1):
        first, second, output, bias, denominator, coordinate, offset, top, top_offset = attend_pair(
            first, second, query, scales, steepest, output, bias, denominator, coordinate, offset, top,
            top_offset, k_scale, v_log_max, k_ring, v_ring, m_ring, s_ring, k_ready, k_empty, v_ready,
            v_empty, rows, pair, keys, tiles, SCORES, False, True, CAUSAL, FP8,
        )  # fmt: skip
    first, second, output, bias, denominator, coordinate, offset, top, top_offset = attend_pair(
        first, second, query, scales, steepest, output, bias, denominator, coordinate, offset, top,
        top_offset, k_scale, v_log_max, k_ring, v_ring, m_ring, s_ring, k_ready, k_empty, v_ready, v_empty,
        rows, pairs - 1, keys, tiles, SCORES, True, False, CAUSAL, FP8,
    )  # fmt: skip
    output -= gl.expand_dims(bias, 1)
    denominator = gl.convert_layout(denominator, gl.SliceLayout(1, PRODUCT), assert_trivial=True)
    features = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, PRODUCT))
    inverse = 1.0 / gl.maximum(denominator, 1e-30)
    if FP8:
        vector = gl.load(v_vector + key_head * HEAD_DIM + features)
        output = output * gl.expand_dims(inverse, 1) * gl.expand_dims(vector, 0)
    else:
        output = output * gl.expand_dims(inverse * (1.0 / 255.0), 1)
        if HAS_MEAN:
            vector = gl.load(v_vector + key_head * HEAD_DIM + features)
            output += gl.expand_dims(vector, 0)
    row = first_row + gl.arange(0, QUERY_ROWS, layout=gl.SliceLayout(1, PRODUCT))
    out += head.to(gl.int64) * queries * HEAD_DIM
    at = gl.expand_dims(row * HEAD_DIM, 1) + gl.expand_dims(features, 0)
    gl.store(out + at, output.to(out.dtype.element_ty), mask=gl.expand_dims(row < queries, 1))


@gluon.jit(do_not_specialize=["query_tiles", "queries", "keys", "groups"])
def dense_attention_kernel(
    q_desc, k_desc, v_desc, m_desc, s_desc, q_scale, k_scale, v_log_max, v_vector, out,
    query_tiles, queries, keys, stored_queries, stored_keys, groups,
    CAUSAL: gl.constexpr, FP8: gl.constexpr, HAS_MEAN: gl.constexpr,
    STAGES: gl.constexpr, COPY_REGISTERS: gl.constexpr, ATTEND_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attend from 128 queries of one head to the keys of its key head.

    Args:
        q_desc: Descriptor of int8 ``[B * Hq * Sq', D]``, block ``[64, D]``.
        k_desc: Descriptor of int8 ``[B * Hkv * Sk', D]``, block ``[64, D]``.
        v_desc: Descriptor of int8 or E4M3 ``[B * Hkv * D, Sk']``, block ``[D, 64]``, with
            permuted keys.
        m_desc: Descriptor of the FP32 multipliers ``[B * Hkv * Sk']``, block ``[128]``.
        s_desc: Descriptor of the int32 sums ``[B * Hkv * ceil(Sk' / 128) * D]``, block ``[D]``.
        q_scale: Pointer to FP32 ``[B * Hq, Sq' / 32]`` with the logit factor and ``log2(e)``.
        k_scale: Pointer to FP32 ``[B * Hkv, Sk' / 64]``.
        v_log_max: Pointer to FP32 ``[B * Hkv, Sk' / 64]``.
        v_vector: Pointer to FP32 ``[B * Hkv, D]``: the mean, or the scales of E4M3 values.
        out: Pointer to ``[B * Hq, queries, D]``.
        query_tiles: ``ceil(queries / 128)``.
        queries: Queries without padding.
        keys: Keys without padding.
        stored_queries: ``Sq'``, a multiple of 64.
        stored_keys: ``Sk'``, a multiple of 64.
        groups: ``Hq / Hkv``.
        CAUSAL: Whether later keys are hidden.
        FP8: Whether values are E4M3; then ``m_desc`` and ``s_desc`` are not read.
        HAS_MEAN: Whether a mean is added.
        STAGES: Slots of the ring.
        COPY_REGISTERS: Registers of a thread of the copying warp.
        ATTEND_REGISTERS: Registers of a thread of a warpgroup.
    """
    HEAD_DIM: gl.constexpr = k_desc.block_type.shape[1]
    q_tiles = gl.allocate_shared_memory(gl.int8, [2, QUERY_ROWS, HEAD_DIM], q_desc.layout)
    k_ring = gl.allocate_shared_memory(gl.int8, [2 * STAGES, TILE_KEYS, HEAD_DIM], k_desc.layout)
    v_ring = gl.allocate_shared_memory(
        v_desc.dtype, [2 * STAGES, HEAD_DIM, TILE_KEYS], v_desc.layout
    )
    m_ring = gl.allocate_shared_memory(gl.float32, [STAGES, PAIR_KEYS], m_desc.layout)
    s_ring = gl.allocate_shared_memory(gl.int32, [STAGES, HEAD_DIM], s_desc.layout)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    q_ready = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIERS)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    mbarrier.init(q_ready.index(0), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(slot), count=1)
        mbarrier.init(v_ready.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=2)
        mbarrier.init(v_empty.index(slot), count=2)
    gl.warp_specialize(
        [
            (
                attend_partition,
                (
                    q_tiles, k_ring, v_ring, m_ring, s_ring, q_ready, k_ready, k_empty, v_ready,
                    v_empty, q_scale, k_scale, v_log_max, v_vector, out, query_tiles, queries,
                    keys, stored_queries, stored_keys, groups, 0, CAUSAL, FP8, HAS_MEAN,
                ),
            ),
            (
                attend_partition,
                (
                    q_tiles, k_ring, v_ring, m_ring, s_ring, q_ready, k_ready, k_empty, v_ready,
                    v_empty, q_scale, k_scale, v_log_max, v_vector, out, query_tiles, queries,
                    keys, stored_queries, stored_keys, groups, 1, CAUSAL, FP8, HAS_MEAN,
                ),
            ),
            (
                copy_partition,
                (
                    q_desc, k_desc, v_desc, m_desc, s_desc, q_tiles, k_ring, v_ring, m_ring,
                    s_ring, q_ready, k_ready, k_empty, v_ready, v_empty, query_tiles, keys,
                    stored_queries, stored_keys, groups, CAUSAL, FP8,
                ),
            ),
        ],
        [4, 1],
        [ATTEND_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
