"""One step of dense 8-bit attention on Hopper, in Gluon: a pair of key tiles for 64 queries.

Importing needs a Triton with Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN202, C901, PLR0912, PLR0915  # the types of arguments are in docstrings
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

from piper_kernels.attention._sm90_kernels.tiles import (
    HIDDEN,
    MAGIC,
    MAGIC_BITS,
    PAIR_KEYS,
    QUERY_ROWS,
    TILE_KEYS,
    biased_differences,
    biased_exponentials,
    biased_maximum,
    fast_exp2,
    hide_scores,
    local_layout,
    local_maximum,
    local_sums,
    pack_fp8,
    pack_half_codes,
    pack_scaled_half_codes,
    pack_signed_codes,
    per_thread,
    sum_packed_codes,
    visible_keys,
)

# How far the coordinate of a pair may lie below the largest one of its row, in powers of two.
_COORDINATE_DROP = gl.constexpr(60.0)
_LOG2_254 = gl.constexpr(7.988684686772166)
_LOG2_255 = gl.constexpr(7.994353436858858)
_LOG2_448 = gl.constexpr(8.807354922057604)


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
def raise_steep_coordinate(
    score_0, score_1, log_0, log_1, coordinate, offset, top, top_offset,
):  # fmt: skip
    """Return the state of the softmax with the coordinate of the next pair, of huge scores.

    The coordinate is the larger one of its tiles, but not far below that of earlier pairs. A sum
    of a huge score and a logarithm would lose the logarithm: coordinates are pairs of both.

    Args:
        score_0: FP32 ``[64]``, the largest score of the first tile.
        score_1: The same of the second tile.
        log_0: What the scale of its values adds to it.
        log_1: The same of the second tile.
        coordinate: FP32 ``[64]``, what numerator and denominator refer to.
        offset: FP32 ``[64]``, what is added to it.
        top: The largest coordinate so far.
        top_offset: What is added to it.

    Returns:
        The factor of what was accumulated, coordinate, offset, top and its offset.
    """
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
    return weight, score, log, top, top_offset


@gluon.jit
def local_scores(scores, scale, log, MASKED: gl.constexpr):
    """Return the largest score and logarithm that each of the four threads of a row has.

    Args:
        scores: int32 ``[64, 64]``, biased; ``HIDDEN`` where masked.
        scale: FP32 ``[64]``.
        log: FP32 number or ``[64]``, added to scores.
        MASKED: Whether there may be rows without a visible key, whose result is -inf.

    Returns:
        FP32 ``[64, 4]``.
    """
    largest = local_maximum(scores)
    scaled = (largest.to(gl.float32, bitcast=True) - MAGIC) * per_thread(scale)
    scaled += per_thread(gl.zeros_like(scale) + log)
    if MASKED:
        scaled = gl.where(largest == HIDDEN, float("-inf"), scaled)
    return scaled


@gluon.jit
def encode(
    p, multipliers, log, sign, FIRST: gl.constexpr, OPERAND: gl.constexpr, FP8: gl.constexpr,
    PER_KEY: gl.constexpr, EXACT: gl.constexpr,
):  # fmt: skip
    """Return the codes of probabilities as left operand; those of INT8 are 127 less, signed."""
    if FP8:
        codes = pack_fp8(p, OPERAND)
    elif PER_KEY:
        LAYOUT: gl.constexpr = gl.SliceLayout(0, p.type.layout)
        multiplier = multipliers.slice(FIRST, TILE_KEYS).load(LAYOUT)
        if EXACT:
            p = p * gl.expand_dims(multiplier * (sign * (254.0 / 255.0)), 0)
            codes = pack_signed_codes(p + (MAGIC - 127.0 * sign), OPERAND)
        else:
            factor = multiplier * (sign * (254.0 / 255.0) * fast_exp2(-log))
            codes = pack_scaled_half_codes(p, factor, sign, OPERAND)
    else:
        codes = pack_half_codes(p, sign, OPERAND)
    return codes


@gluon.jit
def sum_rows_of_codes(codes, log, sign):
    """Return what each of the four threads of a row adds to its denominator, ``[64, 4]``."""
    LAYOUT: gl.constexpr = local_layout()
    total = gl.convert_layout(sum_packed_codes(codes), LAYOUT, assert_trivial=True)
    unit = fast_exp2(-_LOG2_254 - log)
    return (total.to(gl.float32) * sign + 127.0 * (TILE_KEYS / 4)) * unit


@gluon.jit
def attend_pair(
    scores, scales, query, q_scale, output, bias, denominator, coordinate, offset, top, top_offset,
    k_scale, v_log_max, rings, rows, pair, keys, tiles, SCORES: gl.constexpr, PAIR: gl.constexpr,
    STEEP: gl.constexpr, MASKED: gl.constexpr, MORE: gl.constexpr, CAUSAL: gl.constexpr,
    FP8: gl.constexpr, PER_KEY: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Add a pair of key tiles to the attention of 64 queries.

    ``output`` is FP32 ``[64, D]`` plus ``bias`` in units of ``2 ** (coordinate + offset)``, and so
    is ``denominator`` ``[64, 4]``, whose row sums count. With ``AHEAD``, ``scores`` are the pending
    int32 ``[64, 128]`` of this pair, and those of the next one are started; otherwise they are
    passed through.

    Returns:
        The next pending scores, the scales of their tiles and the new state.
    """
    k_ring, v_ring, m_ring, s_ring, ready, empty = rings
    STAGES: gl.constexpr = k_ring.shape[0]
    HEAD_DIM: gl.constexpr = k_ring.shape[2]
    PRODUCT: gl.constexpr = output.type.layout
    SCORE_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=PRODUCT, k_width=4)
    # Rows of a masked pair must not know the scales of values that they do not see.
    EXACT: gl.constexpr = PER_KEY and MASKED
    PER_TILE: gl.constexpr = not FP8 and not EXACT
    slot = pair % STAGES
    # Products of odd pairs are negative.
    sign = 1.0 - 2.0 * (pair & 1).to(gl.float32)
    # All waits come first: code between branches is scheduled as a whole.
    if not AHEAD:
        wait_pair(ready, pair)
        pending = issue_scores(query, k_ring, pair, PAIR)
    else:
        pending = scores
        if MORE:
            wait_pair(ready, pair + 1)
    steep_0, steep_1, log_0, log_1 = scales
    if MORE:
        scales = load_scales(k_scale, v_log_max, pair + 1, tiles, FP8)
    scale_0 = q_scale * steep_0
    scale_1 = q_scale * steep_1
    found = warpgroup_mma_wait(num_outstanding=0, deps=(pending,))
    first, second = split_pair(found + MAGIC_BITS, SCORES)
    visible_0 = scale_0
    visible_1 = scale_1
    if MASKED:
        visible_0 = visible_keys(rows, pair * PAIR_KEYS, keys, SCORES, CAUSAL)
        visible_1 = visible_keys(rows, pair * PAIR_KEYS + TILE_KEYS, keys, SCORES, CAUSAL)
        first = hide_scores(first, visible_0)
        second = hide_scores(second, visible_1)
        if PER_KEY:
            # Values that a query does not see have no influence on its coordinate either.
            log_0 = largest_log(m_ring.index(slot), visible_0, 0)
            log_1 = largest_log(m_ring.index(slot), visible_1, TILE_KEYS)
    if STEEP:
        largest_0, score_0 = biased_maximum(first, scale_0, MASKED)
        largest_1, score_1 = biased_maximum(second, scale_1, MASKED)
        weight, coordinate, offset, top, top_offset = raise_steep_coordinate(
            score_0, score_1, log_0, log_1, coordinate, offset, top, top_offset
        )
        start_0 = (score_0 - coordinate) + (log_0 - offset if PER_TILE else -offset)
        start_1 = (score_1 - coordinate) + (log_1 - offset if PER_TILE else -offset)
        first = biased_differences(first, largest_0)
        second = biased_differences(second, largest_1)
    else:
        largest = gl.maximum(
            local_scores(first, scale_0, log_0, MASKED),
            local_scores(second, scale_1, log_1, MASKED),
        )
        largest = gl.convert_layout(gl.max(largest, axis=1), SCORE_ROW, assert_trivial=True)
        top = gl.maximum(top, largest)
        largest = gl.maximum(largest, top - _COORDINATE_DROP)
        weight = fast_exp2(coordinate - largest)
        coordinate = largest
        # Of all scores of a row and tile the rounded start is equally far off. It must be rounded
        # once, as a fused multiply-add is: a probability above 1.0024 would have a code above 127.
        start_0 = (log_0 - coordinate if PER_TILE else -coordinate) - MAGIC * scale_0
        start_1 = (log_1 - coordinate if PER_TILE else -coordinate) - MAGIC * scale_1
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
    codes_0 = encode(p_0, m_ring.index(slot), log_0, sign, 0, OPERAND, FP8, PER_KEY, EXACT)
    product = warpgroup_mma(
        codes_0, v_ring.index(slot * 2).permute((1, 0)), start, use_acc=not FP8, is_async=True
    )
    if FP8 or PER_KEY:
        total = local_sums(p_0)
        if not FP8 and not EXACT:
            total = total * fast_exp2(-log_0)
    p_1 = biased_exponentials(second, scale_1, start_1)
    if MASKED:
        p_1 = gl.where(visible_1, p_1, 0.0)
    codes_1 = encode(p_1, m_ring.index(slot), log_1, sign, TILE_KEYS, OPERAND, FP8, PER_KEY, EXACT)
    product = warpgroup_mma(
        codes_1, v_ring.index(slot * 2 + 1).permute((1, 0)), product, use_acc=True, is_async=True
    )
    if FP8 or PER_KEY:
        part = local_sums(p_1)
        if not FP8 and not EXACT:
            part = part * fast_exp2(-log_1)
        total = gl.convert_layout(total + part, local_layout(), assert_trivial=True)
    else:
        total = sum_rows_of_codes(codes_0, log_0, sign)
        total += sum_rows_of_codes(codes_1, log_1, sign)
    denominator = denominator * per_thread(weight) + total
    if AHEAD and MORE:
        scores = issue_scores(query, k_ring, pair + 1, PAIR)
    weight = gl.convert_layout(weight, gl.SliceLayout(1, PRODUCT), assert_trivial=True)
    product = warpgroup_mma_wait(num_outstanding=1 if AHEAD and MORE else 0, deps=(product,))
    mbarrier.arrive(empty.index(slot), count=1)
    if not FP8:
        product = product.to(gl.float32, bitcast=True)
        bias = bias * weight + sign * MAGIC
    output = output * gl.expand_dims(weight, 1) + product
    return scores, scales, output, bias, denominator, coordinate, offset, top, top_offset
