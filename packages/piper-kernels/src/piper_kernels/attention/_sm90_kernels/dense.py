"""Dense 8-bit attention for Hopper, in Gluon: INT8 scores, then INT8 or FP8 values.

One warp copies pairs of key and value tiles into a ring of shared memory with TMA. Two
warpgroups, each with 64 queries of one head, turn them into attention: while one computes
probabilities, the matrix units work for the other. Importing needs a Triton with Gluon's Hopper
API.
"""

# ruff: noqa: ANN001, ANN202, PLR0912, PLR0915  # the types of arguments are in docstrings
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
    MAGIC_BITS,
    MAX_STEP,
    PAIR_KEYS,
    QUERY_ROWS,
    TILE_KEYS,
    biased_differences,
    biased_exponentials,
    biased_maximum,
    fast_exp2,
    hide_scores,
    pack_fp8,
    pack_signed_codes,
    visible_keys,
)

# How far the coordinate of a pair may lie below the largest one of its row, in powers of two.
_COORDINATE_DROP = gl.constexpr(60.0)
_LOG2_255 = gl.constexpr(7.994353436858858)
_LOG2_254 = gl.constexpr(7.988684686772166)
# 64 times the bits of MAGIC, modulo 2**32.
_SUM_OF_BIASES = gl.constexpr((64 * 0x4B400000 + 2**31) % 2**32 - 2**31)
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
def pair_count(tile, origin, keys, CAUSAL: gl.constexpr):
    """Return how many pairs of key tiles the 128 queries of a tile see."""
    seen = keys
    if CAUSAL:
        seen = gl.minimum(keys, origin + (tile + 1) * 2 * QUERY_ROWS)
    return gl.cdiv(seen, PAIR_KEYS)


@gluon.jit
def copy_partition(
    q_desc, k_desc, v_desc, m_desc, s_desc, q_tiles, k_ring, v_ring, m_ring, s_ring,
    q_ready, k_ready, v_ready, empty, query_tiles, keys, stored_queries, stored_keys,
    groups, origin, CAUSAL: gl.constexpr, FP8: gl.constexpr, PER_KEY: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """Fill the ring with the pairs of key tiles that the queries of this program see."""
    STAGES: gl.constexpr = k_ring.shape[0]
    HEAD_DIM: gl.constexpr = k_ring.shape[2]
    head, tile = program_tile(query_tiles, CAUSAL)
    key_head = head // groups
    pairs = pair_count(tile, origin if WINDOW else 0, keys, CAUSAL)
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
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(k_ready.index(slot), PAIR_KEYS * HEAD_DIM)
        key_row = key_head * stored_keys + pair * PAIR_KEYS
        tma.async_copy_global_to_shared(
            k_desc, [key_row, 0], k_ready.index(slot), k_ring.index(slot)
        )
        EXTRA: gl.constexpr = (0 if FP8 else 4 * HEAD_DIM) + (4 * PAIR_KEYS if PER_KEY else 0)
        mbarrier.expect(v_ready.index(slot), PAIR_KEYS * HEAD_DIM + EXTRA)
        if PER_KEY:
            tma.async_copy_global_to_shared(
                m_desc, [key_row], v_ready.index(slot), m_ring.index(slot)
            )
        if not FP8:
            at = (key_head * all_pairs + pair) * HEAD_DIM
            tma.async_copy_global_to_shared(s_desc, [at], v_ready.index(slot), s_ring.index(slot))
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                v_desc, [key_head * HEAD_DIM, pair * PAIR_KEYS + half * TILE_KEYS],
                v_ready.index(slot), v_ring.index(slot * 2 + half),
            )  # fmt: skip


@gluon.jit
def wait_pair(ready, pair):
    """Wait until the tiles of a pair lie in the ring."""
    STAGES: gl.constexpr = ready.shape[0]
    mbarrier.wait(ready.index(pair % STAGES), (pair // STAGES) & 1)


@gluon.jit
def issue_scores(query, k_ring, pair, SCORES: gl.constexpr):
    """Start the products of the queries with both tiles of a pair."""
    STAGES: gl.constexpr = k_ring.shape[0]
    # Starting at the bits of a large number makes the sums bits of biased numbers.
    start = gl.zeros((QUERY_ROWS, PAIR_KEYS), gl.int32, SCORES)
    keys = k_ring.index(pair % STAGES).permute((1, 0))
    return warpgroup_mma(query, keys, start, use_acc=False, is_async=True)


@gluon.jit
def split_pair(scores, TILE: gl.constexpr):
    """Return the scores ``[64, 64]`` of both tiles; every thread keeps its elements."""
    halves = scores.reshape([QUERY_ROWS, 2, TILE_KEYS]).permute((0, 2, 1))
    first, second = halves.split()
    first = gl.convert_layout(first, TILE, assert_trivial=True)
    return first, gl.convert_layout(second, TILE, assert_trivial=True)


@gluon.jit
def pinned(x):
    """Return int32 ``x`` in registers of its own, written before the product that starts there."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_scales(k_scale, v_log_max, pair, tiles, FP8: gl.constexpr):
    """Return the key scales of the tiles of a pair and the logarithms of their values' scales."""
    has_second = pair * 2 + 1 < tiles
    steep_0 = gl.load(k_scale + pair * 2)
    steep_1 = gl.load(k_scale + pair * 2 + 1, mask=has_second, other=0.0)
    if FP8:
        log_0 = steep_0 * 0.0 - _LOG2_448
        log_1 = log_0
    else:
        log_0 = gl.load(v_log_max + pair * 2)
        log_1 = gl.load(v_log_max + pair * 2 + 1, mask=has_second, other=0.0)
    return steep_0, steep_1, log_0, log_1


@gluon.jit
def largest_log(multipliers, visible, FIRST: gl.constexpr):
    """Return the logarithm to base 2 of the largest value scale that a query sees."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, visible.type.layout)
    multiplier = multipliers.slice(FIRST, TILE_KEYS).load(LAYOUT)
    seen = gl.where(visible, gl.expand_dims(multiplier, 0), 0.0)
    return gl.log2(gl.max(seen, axis=1)) - _LOG2_255


@gluon.jit
def encode(
    p, multipliers, sign, FIRST: gl.constexpr, OPERAND: gl.constexpr, FP8: gl.constexpr,
    PER_KEY: gl.constexpr,
):  # fmt: skip
    """Return the codes of probabilities as left operand and what their row sums are made of."""
    if FP8:
        codes = pack_fp8(p, OPERAND)
        parts = p
    else:
        parts = p
        if PER_KEY:
            LAYOUT: gl.constexpr = gl.SliceLayout(0, p.type.layout)
            multiplier = multipliers.slice(FIRST, TILE_KEYS).load(LAYOUT)
            p = p * gl.expand_dims(multiplier * (sign * (254.0 / 255.0)), 0)
            biased = p + (MAGIC - 127.0 * sign)
        else:
            biased = p * sign + (MAGIC - 127.0 * sign)
            parts = biased
        codes = pack_signed_codes(biased, OPERAND)
    return codes, parts


@gluon.jit
def sum_codes(biased, sign):
    """Return the row sums of codes times their sign in biased numbers ``[64, 64]``, as FP32."""
    total = gl.sum(biased.to(gl.int32, bitcast=True), axis=1) - _SUM_OF_BIASES
    return total.to(gl.float32) + sign * (127.0 * TILE_KEYS)


@gluon.jit
def attend_pair(
    scores, scales, query, q_scale, output, bias, denominator, coordinate, offset, top, top_offset,
    k_scale, v_log_max, k_ring, v_ring, m_ring, s_ring, k_ready, v_ready, empty,
    rows, pair, keys, tiles, SCORES: gl.constexpr, PAIR: gl.constexpr,
    STEEP: gl.constexpr, MASKED: gl.constexpr, MORE: gl.constexpr, CAUSAL: gl.constexpr,
    FP8: gl.constexpr, PER_KEY: gl.constexpr,
):  # fmt: skip
    """Add a pair of key tiles to the attention of 64 queries and start the next scores.

    ``scores`` are pending int32 ``[64, 128]``. ``output`` is FP32 ``[64, D]`` plus ``bias`` in
    units of ``2 ** (coordinate + offset)``, and so is ``denominator``; coordinate and offset are
    apart, because scores may be huge. ``top`` and ``top_offset`` are the largest ones so far.

    Returns:
        The next pending scores, the scales of their tiles and the new state.
    """
    STAGES: gl.constexpr = k_ring.shape[0]
    HEAD_DIM: gl.constexpr = k_ring.shape[2]
    PRODUCT: gl.constexpr = output.type.layout
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=PRODUCT, k_width=4)
    slot = pair % STAGES
    # Products of odd pairs are negative.
    sign = 1.0 - 2.0 * (pair & 1).to(gl.float32)
    # All waits come first: code between branches is scheduled as a whole.
    wait_pair(v_ready, pair)
    steep_0, steep_1, log_0, log_1 = scales
    if MORE:
        wait_pair(k_ready, pair + 1)
        scales = load_scales(k_scale, v_log_max, pair + 1, tiles, FP8)
    scale_0 = q_scale * steep_0
    scale_1 = q_scale * steep_1
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
    first, second = split_pair(scores + MAGIC_BITS, SCORES)
    if MASKED:
        visible_0 = visible_keys(rows, pair * PAIR_KEYS, keys, SCORES, CAUSAL)
        visible_1 = visible_keys(rows, pair * PAIR_KEYS + TILE_KEYS, keys, SCORES, CAUSAL)
        first = hide_scores(first, visible_0)
        second = hide_scores(second, visible_1)
        if PER_KEY:
            # Values that a query does not see have no influence on its coordinate either.
            log_0 = largest_log(m_ring.index(slot), visible_0, 0)
            log_1 = largest_log(m_ring.index(slot), visible_1, TILE_KEYS)
    largest_0, score_0 = biased_maximum(first, scale_0, MASKED)
    largest_1, score_1 = biased_maximum(second, scale_1, MASKED)
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
    shift_0 = (score_0 - score) - log
    shift_1 = (score_1 - score) - log
    if not FP8 and not PER_KEY:
        # Probabilities times the value scale of their tile: numbers in [0, 255].
        shift_0 += log_0 + _LOG2_254
        shift_1 += log_1 + _LOG2_254
    start_0 = shift_0 - largest_0.to(gl.float32, bitcast=True) * scale_0
    start_1 = shift_1 - largest_1.to(gl.float32, bitcast=True) * scale_1
    if STEEP:
        first = biased_differences(first, largest_0)
        second = biased_differences(second, largest_1)
        start_0 = shift_0
        start_1 = shift_1
    p_0 = biased_exponentials(first, scale_0, start_0)
    if MASKED:
        p_0 = gl.where(visible_0, p_0, 0.0)
    if FP8:
        start = gl.zeros((QUERY_ROWS, HEAD_DIM), gl.float32, PRODUCT)
    else:
        # Starting at the biased sums makes the product the bits of a biased number.
        sums = s_ring.index(slot).load(gl.SliceLayout(0, PRODUCT))
        start = gl.zeros((QUERY_ROWS, HEAD_DIM), gl.int32, PRODUCT)
        start = pinned(start + gl.expand_dims(sums, 0))
    codes, sum_0 = encode(p_0, m_ring.index(slot), sign, 0, OPERAND, FP8, PER_KEY)
    product = warpgroup_mma(
        codes, v_ring.index(slot * 2).permute((1, 0)), start, use_acc=not FP8, is_async=True
    )
    p_1 = biased_exponentials(second, scale_1, start_1)
    if MASKED:
        p_1 = gl.where(visible_1, p_1, 0.0)
    codes_1, sum_1 = encode(p_1, m_ring.index(slot), sign, TILE_KEYS, OPERAND, FP8, PER_KEY)
    product = warpgroup_mma(
        codes_1, v_ring.index(slot * 2 + 1).permute((1, 0)), product, use_acc=True, is_async=True
    )
    if FP8 or PER_KEY:
        denominator = denominator * weight + gl.sum(sum_0 + sum_1, axis=1)
    else:
        total = sum_codes(sum_0, sign) * (sign * fast_exp2(-_LOG2_254 - log_0))
        total += sum_codes(sum_1, sign) * (sign * fast_exp2(-_LOG2_254 - log_1))
        denominator = denominator * weight + total
    if MORE:
        scores = issue_scores(query, k_ring, pair + 1, PAIR)
    weight = gl.convert_layout(weight, gl.SliceLayout(1, PRODUCT), assert_trivial=True)
    product = warpgroup_mma_wait(num_outstanding=1 if MORE else 0, deps=(product,))
    if not FP8:
        product = product.to(gl.float32, bitcast=True)
        bias = bias * weight + sign * MAGIC
    output = output * gl.expand_dims(weight, 1) + product
    mbarrier.arrive(empty.index(slot), count=1)
    return scores, scales, output, bias, denominator, score, log, top, top_offset


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
    query, row_scales, k_scale, v_log_max, k_ring, v_ring, m_ring, s_ring, k_ready, v_ready,
    empty, rows, pairs, keys, tiles, SCORES: gl.constexpr, PAIR: gl.constexpr,
    PRODUCT: gl.constexpr, STEEP: gl.constexpr, CAUSAL: gl.constexpr, FP8: gl.constexpr,
    PER_KEY: gl.constexpr,
):  # fmt: skip
    """Attend to all pairs; see ``attend_partition``."""
    HEAD_DIM: gl.constexpr = k_ring.shape[2]
    output = gl.zeros((QUERY_ROWS, HEAD_DIM), gl.float32, PRODUCT)
    offset = gl.zeros((QUERY_ROWS,), gl.float32, gl.SliceLayout(1, SCORES))
    denominator = offset
    coordinate = gl.full((QUERY_ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    bias = gl.zeros((QUERY_ROWS,), gl.float32, gl.SliceLayout(1, PRODUCT))
    top = coordinate
    top_offset = offset
    scales = load_scales(k_scale, v_log_max, 0, tiles, FP8)
    wait_pair(k_ready, 0)
    scores = issue_scores(query, k_ring, 0, PAIR)
    for pair in range(pairs - 1):
        scores, scales, output, bias, denominator, coordinate, offset, top, top_offset = (
            attend_pair(
                scores, scales, query, row_scales, output, bias, denominator, coordinate, offset,
                top, top_offset, k_scale, v_log_max, k_ring, v_ring, m_ring, s_ring, k_ready,
                v_ready, empty, rows, pair, keys, tiles, SCORES, PAIR, STEEP, False, True,
                CAUSAL, FP8, PER_KEY,
            )
        )  # fmt: skip
    scores, scales, output, bias, denominator, coordinate, offset, top, top_offset = attend_pair(
        scores, scales, query, row_scales, output, bias, denominator, coordinate, offset, top,
        top_offset, k_scale, v_log_max, k_ring, v_ring, m_ring, s_ring, k_ready, v_ready,
        empty,
        rows, pairs - 1, keys, tiles, SCORES, PAIR, STEEP, True, False, CAUSAL, FP8, PER_KEY,
    )  # fmt: skip
    denominator = gl.convert_layout(denominator, gl.SliceLayout(1, PRODUCT), assert_trivial=True)
    return output - gl.expand_dims(bias, 1), denominator


@gluon.jit
def attend_partition(
    q_tiles, k_ring, v_ring, m_ring, s_ring, q_ready, k_ready, v_ready, empty,
    q_scale, k_scale, v_log_max, v_vector, out, query_tiles, queries, keys, stored_queries,
    stored_keys, groups, origin, head_stride, row_stride, GROUP: gl.constexpr,
    CAUSAL: gl.constexpr, FP8: gl.constexpr, PER_KEY: gl.constexpr, HAS_MEAN: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """Compute the attention of the 64 queries of warpgroup ``GROUP`` of this program."""
    HEAD_DIM: gl.constexpr = k_ring.shape[2]
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
    pairs = pair_count(tile, origin if WINDOW else 0, keys, CAUSAL)
    tiles = stored_keys // TILE_KEYS
    k_scale += key_head.to(gl.int64) * tiles
    v_log_max += key_head.to(gl.int64) * tiles
    first_row = (tile * 2 + GROUP) * QUERY_ROWS
    rows = first_row + gl.arange(0, QUERY_ROWS, layout=gl.SliceLayout(1, SCORES))
    scale_row = head.to(gl.int64) * (stored_queries // 32)
    row_scales = gl.load(q_scale + scale_row + rows // 32, mask=rows < stored_queries, other=0.0)
    steepest = gl.max(row_scales, axis=0) * largest_scale(k_scale, tiles)
    if WINDOW:
        rows += origin
    mbarrier.wait(q_ready.index(0), 0)
    query = q_tiles.index(GROUP)
    if steepest > MAX_STEP:
        output, denominator = attend_pairs(
            query, row_scales, k_scale, v_log_max, k_ring, v_ring, m_ring, s_ring, k_ready,
            v_ready, empty, rows, pairs, keys, tiles, SCORES, PAIR, PRODUCT, True, CAUSAL,
            FP8, PER_KEY,
        )  # fmt: skip
    else:
        output, denominator = attend_pairs(
            query, row_scales, k_scale, v_log_max, k_ring, v_ring, m_ring, s_ring, k_ready,
            v_ready, empty, rows, pairs, keys, tiles, SCORES, PAIR, PRODUCT, False, CAUSAL,
            FP8, PER_KEY,
        )  # fmt: skip
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
    HAS_MEAN: gl.constexpr, STAGES: gl.constexpr, COPY_REGISTERS: gl.constexpr,
    ATTEND_REGISTERS: gl.constexpr, WINDOW: gl.constexpr,
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
        out: Pointer to ``[B * Hq, queries, D]`` with contiguous features.
        query_tiles: ``ceil(queries / 128)``.
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
        STAGES: Slots of the ring.
        COPY_REGISTERS: Registers of a thread of the copying warp.
        ATTEND_REGISTERS: Registers of a thread of a warpgroup.
        WINDOW: Whether ``origin`` and the strides of ``out`` are read; otherwise the queries are
            all there are and ``out`` is contiguous.
    """
    HEAD_DIM: gl.constexpr = k_desc.block_type.shape[1]
    q_tiles = gl.allocate_shared_memory(gl.int8, [2, QUERY_ROWS, HEAD_DIM], q_desc.layout)
    k_ring = gl.allocate_shared_memory(gl.int8, [STAGES, PAIR_KEYS, HEAD_DIM], k_desc.layout)
    v_ring = gl.allocate_shared_memory(
        v_desc.dtype, [2 * STAGES, HEAD_DIM, TILE_KEYS], v_desc.layout
    )
    m_ring = gl.allocate_shared_memory(gl.float32, [STAGES, PAIR_KEYS], m_desc.layout)
    s_ring = gl.allocate_shared_memory(gl.int32, [STAGES, HEAD_DIM], s_desc.layout)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    q_ready = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIERS)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    mbarrier.init(q_ready.index(0), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(slot), count=1)
        mbarrier.init(v_ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    gl.warp_specialize(
        [
            (
                attend_partition,
                (
                    q_tiles, k_ring, v_ring, m_ring, s_ring, q_ready, k_ready, v_ready, empty,
                    q_scale, k_scale, v_log_max, v_vector, out, query_tiles, queries,
                    keys, stored_queries, stored_keys, groups, origin, head_stride, row_stride, 0,
                    CAUSAL, FP8, PER_KEY, HAS_MEAN, WINDOW,
                ),
            ),
            (
                attend_partition,
                (
                    q_tiles, k_ring, v_ring, m_ring, s_ring, q_ready, k_ready, v_ready, empty,
                    q_scale, k_scale, v_log_max, v_vector, out, query_tiles, queries,
                    keys, stored_queries, stored_keys, groups, origin, head_stride, row_stride, 1,
                    CAUSAL, FP8, PER_KEY, HAS_MEAN, WINDOW,
                ),
            ),
            (
                copy_partition,
                (
                    q_desc, k_desc, v_desc, m_desc, s_desc, q_tiles, k_ring, v_ring, m_ring,
                    s_ring, q_ready, k_ready, v_ready, empty, query_tiles, keys,
                    stored_queries, stored_keys, groups, origin, CAUSAL, FP8, PER_KEY, WINDOW,
                ),
            ),
        ],
        [4, 1],
        [ATTEND_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
