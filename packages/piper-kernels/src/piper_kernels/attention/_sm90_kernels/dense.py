"""Dense 8-bit attention for Hopper, in Gluon: INT8 scores, then INT8 or FP8 values.

One warp copies pairs of key and value tiles into a ring of shared memory with TMA. Two or three
warpgroups, each with 64 queries of one head, turn them into attention: while one waits for its
products, the others compute probabilities. Importing needs a Triton with Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN202, PLR0915  # the types of arguments are in docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from piper_kernels.attention._sm90_kernels.dense_pair import (
    attend_pair,
    issue_scores,
    load_scales,
    wait_pair,
)
from piper_kernels.attention._sm90_kernels.tiles import (
    MAX_STEP,
    PAIR_KEYS,
    QUERY_ROWS,
    TILE_KEYS,
    local_layout,
)


@gluon.jit
def program_tile(query_tiles, CAUSAL: gl.constexpr):
    """Return batch-head and query tile of this program; with a mask long tiles come first."""
    program = gl.program_id(0)
    tile = program % query_tiles
    if CAUSAL:
        tile = query_tiles - 1 - tile
    return program // query_tiles, tile


@gluon.jit
def pair_count(tile, origin, keys, CAUSAL: gl.constexpr, GROUPS: gl.constexpr):
    """Return how many pairs of key tiles the queries of a tile see."""
    seen = keys
    if CAUSAL:
        seen = gl.minimum(keys, origin + (tile + 1) * GROUPS * QUERY_ROWS)
    return gl.cdiv(seen, PAIR_KEYS)


@gluon.jit
def copy_partition(
    operands, CAUSAL: gl.constexpr, FP8: gl.constexpr, PER_KEY: gl.constexpr, WINDOW: gl.constexpr
):
    """Fill the ring with the pairs of key tiles that the queries of this program see."""
    (
        q_desc, k_desc, v_desc, m_desc, s_desc, q_tiles, k_ring, v_ring, m_ring, s_ring, q_ready,
        ready, empty, query_tiles, keys, stored_queries, stored_keys, groups, origin,
    ) = operands  # fmt: skip
    STAGES: gl.constexpr = k_ring.shape[0]
    HEAD_DIM: gl.constexpr = k_ring.shape[2]
    GROUPS: gl.constexpr = q_tiles.shape[0]
    head, tile = program_tile(query_tiles, CAUSAL)
    key_head = head // groups
    pairs = pair_count(tile, origin if WINDOW else 0, keys, CAUSAL, GROUPS)
    row = head * stored_queries + tile * GROUPS * QUERY_ROWS
    mbarrier.expect(q_ready.index(0), GROUPS * QUERY_ROWS * HEAD_DIM)
    for group in gl.static_range(GROUPS):
        tma.async_copy_global_to_shared(
            q_desc, [row + group * QUERY_ROWS, 0], q_ready.index(0), q_tiles.index(group)
        )
    all_pairs = gl.cdiv(stored_keys, PAIR_KEYS)
    for pair in range(pairs):
        slot = pair % STAGES
        phase = ((pair // STAGES) & 1) ^ 1
        mbarrier.wait(empty.index(slot), phase)
        EXTRA: gl.constexpr = (0 if FP8 else 4 * HEAD_DIM) + (4 * PAIR_KEYS if PER_KEY else 0)
        mbarrier.expect(ready.index(slot), 2 * PAIR_KEYS * HEAD_DIM + EXTRA)
        key_row = key_head * stored_keys + pair * PAIR_KEYS
        tma.async_copy_global_to_shared(k_desc, [key_row, 0], ready.index(slot), k_ring.index(slot))
        if PER_KEY:
            tma.async_copy_global_to_shared(
                m_desc, [key_row], ready.index(slot), m_ring.index(slot)
            )
        if not FP8:
            at = (key_head * all_pairs + pair) * HEAD_DIM
            tma.async_copy_global_to_shared(s_desc, [at], ready.index(slot), s_ring.index(slot))
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                v_desc, [key_head * HEAD_DIM, pair * PAIR_KEYS + half * TILE_KEYS],
                ready.index(slot), v_ring.index(slot * 2 + half),
            )  # fmt: skip


@gluon.jit
def largest_scale(k_scale, tiles):
    """Return the largest key scale of a head."""
    BLOCK: gl.constexpr = 512
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    at = gl.arange(0, BLOCK, layout=LAYOUT)
    largest = gl.zeros((BLOCK,), gl.float32, LAYOUT)
    for first in range(0, tiles, BLOCK):
        scales = gl.load(k_scale + first + at, mask=first + at < tiles, other=0.0)
        largest = gl.maximum(largest, scales)
    return gl.max(largest, axis=0)


@gluon.jit
def attend_pairs(
    query, row_scales, k_scale, v_log_max, rings, rows, pairs, keys, tiles,
    SCORES: gl.constexpr, PAIR: gl.constexpr,
    PRODUCT: gl.constexpr, STEEP: gl.constexpr, CAUSAL: gl.constexpr, FP8: gl.constexpr,
    PER_KEY: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Attend to all pairs; see ``attend_partition``."""
    k_ring, _, _, _, ready, _ = rings
    HEAD_DIM: gl.constexpr = k_ring.shape[2]
    output = gl.zeros((QUERY_ROWS, HEAD_DIM), gl.float32, PRODUCT)
    offset = gl.zeros((QUERY_ROWS,), gl.float32, gl.SliceLayout(1, SCORES))
    denominator = gl.zeros((QUERY_ROWS, 4), gl.float32, local_layout())
    coordinate = gl.full((QUERY_ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    bias = gl.zeros((QUERY_ROWS,), gl.float32, gl.SliceLayout(1, PRODUCT))
    top = coordinate
    top_offset = offset
    scales = load_scales(k_scale, v_log_max, 0, tiles, FP8)
    scores = tiles
    if AHEAD:
        wait_pair(ready, 0)
        scores = issue_scores(query, k_ring, 0, PAIR)
    for pair in range(pairs - 1):
        scores, scales, output, bias, denominator, coordinate, offset, top, top_offset = (
            attend_pair(
                scores, scales, query, row_scales, output, bias, denominator, coordinate, offset,
                top, top_offset, k_scale, v_log_max, rings, rows, pair, keys, tiles, SCORES,
                PAIR, STEEP, False, True, CAUSAL, FP8, PER_KEY, AHEAD,
            )
        )  # fmt: skip
    scores, scales, output, bias, denominator, coordinate, offset, top, top_offset = attend_pair(
        scores, scales, query, row_scales, output, bias, denominator, coordinate, offset, top,
        top_offset, k_scale, v_log_max, rings, rows, pairs - 1, keys, tiles, SCORES, PAIR, STEEP,
        True, False, CAUSAL, FP8, PER_KEY, AHEAD,
    )  # fmt: skip
    denominator = gl.sum(denominator, axis=1)
    denominator = gl.convert_layout(denominator, gl.SliceLayout(1, PRODUCT), assert_trivial=True)
    return output - gl.expand_dims(bias, 1), denominator


@gluon.jit
def attend_partition(
    operands, GROUP: gl.constexpr,
    CAUSAL: gl.constexpr, FP8: gl.constexpr, PER_KEY: gl.constexpr, HAS_MEAN: gl.constexpr,
    WINDOW: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Compute the attention of the 64 queries of warpgroup ``GROUP`` of this program."""
    (
        q_tiles, k_ring, v_ring, m_ring, s_ring, q_ready, ready, empty, q_scale,
        k_scale, v_log_max, v_vector, out, query_tiles, queries, keys, stored_queries, stored_keys,
        groups, origin, head_stride, row_stride,
    ) = operands  # fmt: skip
    HEAD_DIM: gl.constexpr = k_ring.shape[2]
    GROUPS: gl.constexpr = q_tiles.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 32]
    )
    PAIR: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]
    )
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 32]
    )
    head, tile = program_tile(query_tiles, CAUSAL)
    key_head = head // groups
    all_pairs = pair_count(tile, origin if WINDOW else 0, keys, CAUSAL, GROUPS)
    first_row = (tile * GROUPS + GROUP) * QUERY_ROWS
    pairs = all_pairs
    if CAUSAL:
        last_row = first_row + QUERY_ROWS
        if WINDOW:
            last_row += origin
        pairs = gl.cdiv(gl.minimum(keys, last_row), PAIR_KEYS)
    tiles = stored_keys // TILE_KEYS
    k_scale += key_head.to(gl.int64) * tiles
    v_log_max += key_head.to(gl.int64) * tiles
    rows = first_row + gl.arange(0, QUERY_ROWS, layout=gl.SliceLayout(1, SCORES))
    scale_row = head.to(gl.int64) * (stored_queries // 32)
    row_scales = gl.load(q_scale + scale_row + rows // 32, mask=rows < stored_queries, other=0.0)
    steepest = gl.max(row_scales, axis=0) * largest_scale(k_scale, tiles)
    if WINDOW:
        rows += origin
    mbarrier.wait(q_ready.index(0), 0)
    query = q_tiles.index(GROUP)
    rings = (k_ring, v_ring, m_ring, s_ring, ready, empty)
    if steepest > MAX_STEP:
        output, denominator = attend_pairs(
            query, row_scales, k_scale, v_log_max, rings, rows, pairs, keys, tiles, SCORES, PAIR,
            PRODUCT, True, CAUSAL, FP8, PER_KEY, AHEAD,
        )  # fmt: skip
    else:
        output, denominator = attend_pairs(
            query, row_scales, k_scale, v_log_max, rings, rows, pairs, keys, tiles, SCORES, PAIR,
            PRODUCT, False, CAUSAL, FP8, PER_KEY, AHEAD,
        )  # fmt: skip
    if CAUSAL:
        # Pairs that only later warpgroups see are given back unread.
        for pair in range(pairs, all_pairs):
            wait_pair(ready, pair)
            mbarrier.arrive(empty.index(pair % k_ring.shape[0]), count=1)
    features = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, PRODUCT))
    inverse = 1.0 / gl.maximum(denominator, 1e-30)
    if FP8:
        vector = gl.load(v_vector + key_head * HEAD_DIM + features)
        output = output * gl.expand_dims(inverse, 1) * gl.expand_dims(vector, 0)
    else:
        output = output * gl.expand_dims(inverse * (1.0 / 254.0), 1)
        if HAS_MEAN:
            vector = gl.load(v_vector + key_head * HEAD_DIM + features)
            output += gl.expand_dims(vector, 0)
    row = first_row + gl.arange(0, QUERY_ROWS, layout=gl.SliceLayout(1, PRODUCT))
    if WINDOW:
        out += head.to(gl.int64) * head_stride
        at = gl.expand_dims(row.to(gl.int64) * row_stride, 1) + gl.expand_dims(features, 0)
    else:
        # Known distances keep registers free where rows lie side by side.
        out += head.to(gl.int64) * queries * HEAD_DIM
        at = gl.expand_dims(row * HEAD_DIM, 1) + gl.expand_dims(features, 0)
    gl.store(out + at, output.to(out.dtype.element_ty), mask=gl.expand_dims(row < queries, 1))


@gluon.jit(do_not_specialize=["query_tiles", "queries", "keys", "groups", "origin"])
def dense_attention_kernel(
    q_desc, k_desc, v_desc, m_desc, s_desc, q_scale, k_scale, v_log_max, v_vector, out,
    query_tiles, queries, keys, stored_queries, stored_keys, groups, origin, head_stride,
    row_stride, CAUSAL: gl.constexpr, FP8: gl.constexpr, PER_KEY: gl.constexpr,
    HAS_MEAN: gl.constexpr, GROUPS: gl.constexpr, AHEAD: gl.constexpr, STAGES: gl.constexpr,
    COPY_REGISTERS: gl.constexpr, ATTEND_REGISTERS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Attend from ``GROUPS * 64`` queries of one head to the keys of its key head.

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
        out: Pointer to ``[B * Hq, queries, D]`` with contiguous features.
        query_tiles: ``ceil(queries / (64 * GROUPS))``.
        queries: Queries without padding.
        keys: Keys without padding.
        stored_queries: ``Sq'``, a multiple of 64.
        stored_keys: ``Sk'``, a multiple of 64.
        groups: ``Hq / Hkv``.
        origin: Position of the first query among the keys, a multiple of 128; for the mask.
        head_stride: Elements between the heads of ``out``.
        row_stride: Elements between its queries.
        CAUSAL: Whether later keys are hidden.
        FP8: Whether values are E4M3; then ``m_desc`` and ``s_desc`` are not read.
        PER_KEY: Whether every INT8 value has a scale; otherwise 64 keys share one, ``m_desc`` is
            not read and the denominator is the sum of codes.
        HAS_MEAN: Whether a mean is added.
        GROUPS: Warpgroups that attend, two or three.
        AHEAD: Whether the scores of the next pair are started before a pair is finished.
        STAGES: Slots of the ring.
        COPY_REGISTERS: Registers of a thread of the copying warp.
        ATTEND_REGISTERS: Registers of a thread of a warpgroup.
        WINDOW: Whether ``origin`` and the strides of ``out`` are read; otherwise the queries are
            all there are and ``out`` is contiguous.
    """
    HEAD_DIM: gl.constexpr = k_desc.block_type.shape[1]
    q_tiles = gl.allocate_shared_memory(gl.int8, [GROUPS, QUERY_ROWS, HEAD_DIM], q_desc.layout)
    k_ring = gl.allocate_shared_memory(gl.int8, [STAGES, PAIR_KEYS, HEAD_DIM], k_desc.layout)
    v_ring = gl.allocate_shared_memory(
        v_desc.dtype, [2 * STAGES, HEAD_DIM, TILE_KEYS], v_desc.layout
    )
    m_ring = gl.allocate_shared_memory(gl.float32, [STAGES, PAIR_KEYS], m_desc.layout)
    s_ring = gl.allocate_shared_memory(gl.int32, [STAGES, HEAD_DIM], s_desc.layout)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    q_ready = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIERS)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    mbarrier.init(q_ready.index(0), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=GROUPS)
    attend = (
        q_tiles, k_ring, v_ring, m_ring, s_ring, q_ready, ready, empty, q_scale,
        k_scale, v_log_max, v_vector, out, query_tiles, queries, keys, stored_queries, stored_keys,
        groups, origin, head_stride, row_stride,
    )  # fmt: skip
    copy = (
        q_desc, k_desc, v_desc, m_desc, s_desc, q_tiles, k_ring, v_ring, m_ring, s_ring, q_ready,
        ready, empty, query_tiles, keys, stored_queries, stored_keys, groups, origin,
    )  # fmt: skip
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (attend_partition, (attend, 0, CAUSAL, FP8, PER_KEY, HAS_MEAN, WINDOW, AHEAD)),
                (attend_partition, (attend, 1, CAUSAL, FP8, PER_KEY, HAS_MEAN, WINDOW, AHEAD)),
                (copy_partition, (copy, CAUSAL, FP8, PER_KEY, WINDOW)),
            ],
            [4, 1],
            [ATTEND_REGISTERS, COPY_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (attend_partition, (attend, 0, CAUSAL, FP8, PER_KEY, HAS_MEAN, WINDOW, AHEAD)),
                (attend_partition, (attend, 1, CAUSAL, FP8, PER_KEY, HAS_MEAN, WINDOW, AHEAD)),
                (attend_partition, (attend, 2, CAUSAL, FP8, PER_KEY, HAS_MEAN, WINDOW, AHEAD)),
                (copy_partition, (copy, CAUSAL, FP8, PER_KEY, WINDOW)),
            ],
            [4, 4, 1],
            [ATTEND_REGISTERS, ATTEND_REGISTERS, COPY_REGISTERS],
        )
