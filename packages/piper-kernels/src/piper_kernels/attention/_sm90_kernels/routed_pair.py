"""One step of routed attention on Hopper, in Gluon: a pair of key tiles for 64 queries.

Importing needs a Triton with Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN202, D417, PLR0915  # the types of device functions are their docstrings
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

from piper_kernels.attention._sm90_kernels.routes import tile_at
from piper_kernels.attention._sm90_kernels.tiles import (
    MAGIC,
    QUERY_ROWS,
    SIGNED_OFFSET,
    TILE_KEYS,
    fast_exp2,
    hide_scores,
    pack_signed_codes,
    row_maximum,
)

# int32 bits of 2**24: adding a difference d in [-2**23, 0] gives the bits of 2**24 + d, exactly.
_LARGE_BITS = gl.constexpr(0x4B800000)
_LARGE = gl.constexpr(16777216.0)
_LOG2_255 = gl.constexpr(7.994353436858858)
# A coordinate that rises by more forgets what was accumulated before.
_FORGET = gl.constexpr(40.0)
# The sum of codes of a row stays below 2**23, so 127 times it fits into int32.
_SUM_BITS = gl.constexpr(23)


@gluon.jit
def key_tile(k_ring, index):
    """Return a tile of keys ``[D, 64]`` in shared memory."""
    HEAD_DIM: gl.constexpr = k_ring.shape[len(k_ring.shape) - 1]
    tile = k_ring.index(index)
    if len(k_ring.shape) == 6:
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_KEYS, HEAD_DIM], gl.int8)
        tile = tile._reinterpret(gl.int8, [TILE_KEYS, HEAD_DIM], LAYOUT)
    return tile.permute((1, 0))


@gluon.jit
def column_keys(k_ring, SCORES: gl.constexpr):
    """Return the key of its tile that each of the 64 columns of scores belongs to."""
    column = gl.arange(0, TILE_KEYS, layout=gl.SliceLayout(0, SCORES))
    if len(k_ring.shape) == 6:
        # Key 16 h + 4 t + 2 a + b lies in column 16 h + 8 a + 2 t + b.
        return (column & 49) | ((column & 6) << 1) | ((column & 8) >> 2)
    return column


@gluon.jit
def fast_log2(x):
    """Return the base-2 logarithm of an FP32 number in one instruction."""
    return gl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def raised_coordinate(top, offset, coordinate, exponent, code_sum):
    """Return the coordinate of the next pair and how much lower the last one is.

    Args:
        top: FP32 ``[64]``, the largest score of the pair.
        offset: FP32 ``[64]``, what value scales add to it, less the logarithm of 255.
        coordinate: FP32 ``[64]``, the reference of scores.
        exponent: FP32 ``[64]``, whole numbers that are added to it.
        code_sum: FP32 ``[64]``, at least the sum of the codes.

    Returns:
        Coordinate, exponent, whether the rows before are forgotten, and the whole-numbered rise.
    """
    rise = (top - coordinate) + (offset - exponent)
    forget = rise > _FORGET
    # Low pairs get a low coordinate, or their codes were small, as far as int32 allows.
    lowest = (code_sum.to(gl.int32, bitcast=True) >> 23) - (126 + _SUM_BITS)
    rise = gl.maximum(gl.ceil(rise), lowest.to(gl.float32))
    exponent = gl.where(forget, gl.ceil(offset), exponent + rise)
    coordinate = gl.where(forget, top, coordinate)
    return coordinate, exponent, forget, rise


@gluon.jit
def exponentials(scores, largest, scale):
    """Return ``2 ** ((scores - largest) * scale)`` of int32 scores ``[64, keys]``."""
    biased = scores + gl.expand_dims(_LARGE_BITS - largest, 1)
    biased = biased.to(gl.float32, bitcast=True)
    scale = gl.expand_dims(scale, 1)
    return fast_exp2(gl.fma(biased, scale, scale * -_LARGE))


@gluon.jit
def issue_scores(query, k_ring, slot, HALF: gl.constexpr, SCORES: gl.constexpr):
    """Start the products of the queries with one tile of a pair."""
    zeros = gl.zeros((QUERY_ROWS, TILE_KEYS), gl.int32, SCORES)
    return warpgroup_mma(
        query, key_tile(k_ring, slot * 2 + HALF), zeros, use_acc=False, is_async=True
    )


@gluon.jit
def attend_pair(
    scores_0, scores_1, output, denominator, code_sum, coordinate, exponent, query, q_scale,
    first, second, scale_0, scale_1, multiplier_0, multiplier_1, length_0, length_1,
    k_scale, v_multiplier, v_sum, route, kept, suffix, count,
    k_ring, v_ring, k_ready, k_empty, v_ready, v_empty, pair,
    MASKED: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    """Add a pair of key tiles to the attention of 64 queries and start the next scores.

    The numerator is an int32 sum of codes times values in units of
    ``2 ** (coordinate + exponent)``, so a new coordinate is a shift.

    Args:
        scores_0: Pending scores of the first tile, int32 ``[64, 64]``.
        scores_1: The same of the second tile.
        output: Pending numerator, int32 ``[64, D]``.
        denominator: FP32 ``[64]``, the same units.
        code_sum: FP32 ``[64]``, an upper bound of the sum of codes, the same units.
        coordinate: FP32 ``[64]``, the score to which they refer.
        exponent: FP32 ``[64]``, whole numbers added to it; apart, because scores may be huge.
        query: int8 ``[64, D]`` in shared memory.
        q_scale: FP32 ``[64]``.
        first: First tile of the pair.
        second: Its second tile.
        scale_0: Key scale of the first tile.
        scale_1: Key scale of the second tile.
        multiplier_0: Value multiplier of the first tile.
        multiplier_1: Value multiplier of the second tile.
        length_0: Keys of the first tile that exist, read only when ``MASKED``.
        length_1: The same of the second tile.

    Returns:
        The seven first arguments and then tiles, scales and multipliers, of the next pair.
    """
    STAGES: gl.constexpr = k_ring.shape[0] // 2
    PRODUCT: gl.constexpr = output.type.tensor_type.layout
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=PRODUCT, k_width=4)
    SCORES: gl.constexpr = q_scale.type.layout.parent
    HEAD_DIM: gl.constexpr = output.type.tensor_type.shape[1]
    slot = pair % STAGES
    next_slot = (pair + 1) % STAGES
    next_first = tile_at(route, pair * 2 + 2, kept, suffix, count)
    next_second = tile_at(route, pair * 2 + 3, kept, suffix, count)
    features = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, PRODUCT))
    sums = gl.load(v_sum + first * HEAD_DIM + features)
    sums += gl.load(v_sum + second * HEAD_DIM + features)
    scores_0, scores_1, output = warpgroup_mma_wait(
        num_outstanding=0, deps=(scores_0, scores_1, output)
    )
    mbarrier.arrive(k_empty.index(slot), count=1)
    mbarrier.arrive(v_empty.index((pair + STAGES - 1) % STAGES), count=1, pred=pair > 0)
    scale_0 = q_scale * scale_0
    scale_1 = q_scale * scale_1
    if MASKED:
        key = column_keys(k_ring, SCORES)
        everywhere = gl.zeros((QUERY_ROWS, TILE_KEYS), gl.int32, SCORES)
        visible_0 = gl.expand_dims(key < length_0, 0) & (everywhere == 0)
        visible_1 = gl.expand_dims(key < length_1, 0) & (everywhere == 0)
        scores_0 = hide_scores(scores_0, visible_0)
        scores_1 = hide_scores(scores_1, visible_1)
    largest_0, score_0 = row_maximum(scores_0, scale_0, MASKED)
    largest_1, score_1 = row_maximum(scores_1, scale_1, MASKED)
    top = gl.maximum(score_0, score_1)
    offset = gl.maximum(
        (score_0 - top) + fast_log2(multiplier_0), (score_1 - top) + fast_log2(multiplier_1)
    )
    coordinate, exponent, forget, rise = raised_coordinate(
        top, offset - _LOG2_255, coordinate, exponent, code_sum
    )
    fade = gl.where(forget, 0.0, fast_exp2(-rise))
    shift = gl.where(forget, 31.0, gl.minimum(gl.maximum(rise, 0.0), 31.0)).to(gl.int32)
    factor = gl.where(forget, 1.0, fast_exp2(gl.maximum(-rise, 0.0))).to(gl.int32)
    shift = gl.convert_layout(shift, gl.SliceLayout(1, PRODUCT), assert_trivial=True)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, PRODUCT), assert_trivial=True)
    output = (output >> gl.expand_dims(shift, 1)) * gl.expand_dims(factor, 1)
    output += gl.expand_dims(sums, 0)  # codes are stored less 128
    weight_0 = fast_exp2((score_0 - coordinate) - exponent)
    weight_1 = fast_exp2((score_1 - coordinate) - exponent)
    code_0 = weight_0 * multiplier_0
    code_1 = weight_1 * multiplier_1
    p_0 = exponentials(scores_0, largest_0, scale_0)
    if MASKED:
        p_0 = gl.where(visible_0, p_0, 0.0)
    bias: gl.constexpr = MAGIC + SIGNED_OFFSET
    codes_0 = pack_signed_codes(p_0 * gl.expand_dims(code_0, 1) + bias, OPERAND)
    sum_0 = gl.sum(p_0, axis=1)
    mbarrier.wait(v_ready.index(slot), (pair // STAGES) & 1)
    if MORE:
        mbarrier.wait(k_ready.index(next_slot), ((pair + 1) // STAGES) & 1)
    output = warpgroup_mma(
        codes_0, v_ring.index(slot * 2).permute((1, 0)), output, use_acc=True, is_async=True
    )
    next_scores_0 = scores_0
    if MORE:
        next_scores_0 = issue_scores(query, k_ring, next_slot, 0, SCORES)
    p_1 = exponentials(scores_1, largest_1, scale_1)
    if MASKED:
        p_1 = gl.where(visible_1, p_1, 0.0)
    codes_1 = pack_signed_codes(p_1 * gl.expand_dims(code_1, 1) + bias, OPERAND)
    output = warpgroup_mma(
        codes_1, v_ring.index(slot * 2 + 1).permute((1, 0)), output, use_acc=True, is_async=True
    )
    next_scores_1 = scores_1
    if MORE:
        next_scores_1 = issue_scores(query, k_ring, next_slot, 1, SCORES)
    sum_1 = gl.sum(p_1, axis=1)
    denominator = denominator * fade + (sum_0 * weight_0 + sum_1 * weight_1)
    # Rounding adds less than one half to each of 128 codes.
    code_sum = code_sum * fade + (sum_0 * code_0 + sum_1 * code_1 + 64.0)
    next_scale_0 = gl.load(k_scale + next_first)
    next_scale_1 = gl.load(k_scale + next_second)
    next_multiplier_0 = gl.load(v_multiplier + next_first)
    next_multiplier_1 = gl.load(v_multiplier + next_second)
    if not MORE:
        output = warpgroup_mma_wait(num_outstanding=0, deps=(output,))
    return (
        next_scores_0, next_scores_1, output, denominator, code_sum, coordinate, exponent,
        next_first, next_second, next_scale_0, next_scale_1, next_multiplier_0, next_multiplier_1,
    )  # fmt: skip
