"""Dense Piper attention over prepared operands, in plain Triton."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl

from piper_kernels.attention._mixed_sign_kernels.products import (
    add_products,
    counted,
    mark,
    start_counting,
    to_codes,
)
from piper_kernels.attention._mixed_sign_kernels.recurrence import (
    finite_or_zero,
    load_rows,
    log_scale,
    rescale,
    tile_scores,
    value_tile,
)


@triton.jit
def add_tile(
    low,
    high,
    denominator,
    maximum,
    offset,
    query,
    query_scale,
    row,
    key_codes,
    key_scale,
    value_codes,
    value_multiplier,
    first,
    key_length,
    stored_keys,
    HEAD_DIM: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr,
    BOUND: tl.constexpr,
    PACKED: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Add 64 keys to the state ``low, high, denominator, maximum, offset`` and return it."""
    WIDTH: tl.constexpr = HEAD_DIM // 2 if SPLIT else HEAD_DIM
    scores = tile_scores(query, query_scale, key_codes, key_scale, first, HEAD_DIM, KEY_GROUP == 1)
    key = first + tl.arange(0, 64)
    if MASKED:
        visible = (key < key_length)[None, :]
        if CAUSAL:
            visible = visible & (key[None, :] <= row[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    tile_maximum = tl.max(scores, 1)
    scores = scores - (finite_or_zero(tile_maximum) if MASKED else tile_maximum)[:, None]
    multiplier = tl.load(value_multiplier + key)
    tile_offset = tl.max(scores + log_scale(multiplier, BOUND)[None, :], 1)
    relative = finite_or_zero(tile_offset) if MASKED else tile_offset
    p = tl.exp2(scores - relative[:, None])
    old_weight, weight, maximum, offset = rescale(maximum, offset, tile_maximum, tile_offset)
    denominator = denominator * old_weight + tl.sum(p, 1) * weight
    codes = to_codes(p * multiplier[None, :], PACKED)
    values = value_tile(value_codes, first, stored_keys, 0, WIDTH)
    sums = add_products(start_counting(low.shape[0], WIDTH), codes, values, PRODUCT)
    low = low * old_weight[:, None] + counted(mark(sums, PRODUCT)) * weight[:, None]
    if SPLIT:
        values = value_tile(value_codes, first, stored_keys, WIDTH, WIDTH)
        sums = add_products(start_counting(low.shape[0], WIDTH), codes, values, PRODUCT)
        high = high * old_weight[:, None] + counted(mark(sums, PRODUCT)) * weight[:, None]
    return low, high, denominator, maximum, offset


@triton.jit
def store_features(
    out, numerator, denominator, mean, row, query_length, row_stride, FEATURE: tl.constexpr,
    CENTERED: tl.constexpr,
):  # fmt: skip
    """Divide, add the mean of the values and store some features of the rows of a head."""
    feature = FEATURE + tl.arange(0, numerator.shape[1])
    result = numerator / (tl.maximum(denominator, 1e-30) * 255.0)[:, None]
    if CENTERED:
        result += tl.load(mean + feature)[None, :]
    at = row.to(tl.int64)[:, None] * row_stride + feature[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=(row < query_length)[:, None])


@triton.jit(
    do_not_specialize=[
        "query_length", "key_length", "query_blocks", "key_blocks", "heads", "origin",
    ]
)  # fmt: skip
def dense_kernel(
    query_codes,
    query_scale,
    key_codes,
    key_scale,
    value_codes,
    value_multiplier,
    value_mean,
    out,
    query_length,
    key_length,
    query_blocks,
    key_blocks,
    heads,
    origin,
    head_stride,
    row_stride,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    QUERY_GROUP: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr,
    BOUND: tl.constexpr,
    PACKED: tl.constexpr,
    PRODUCT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Attend from ``BLOCK_M`` queries of one head to all visible keys.

    Args:
        query_codes: Pointer to int8 ``[B, heads, 64 * query_blocks, HEAD_DIM]``.
        query_scale: Pointer to FP32 scales with the logit factor and ``log2(e)``, one per
            ``QUERY_GROUP`` rows.
        key_codes: Pointer to int8 ``[B, heads / GROUPS, 64 * key_blocks, HEAD_DIM]``.
        key_scale: Pointer to FP32 scales, one per ``KEY_GROUP`` rows.
        value_codes: Pointer to int8 ``[B, heads / GROUPS, HEAD_DIM, 64 * key_blocks]``.
        value_multiplier: Pointer to FP32 ``[B, heads / GROUPS, 64 * key_blocks]``, 255 times the
            value scale.
        value_mean: Pointer to FP32 ``[B, heads / GROUPS, HEAD_DIM]``; not read when causal.
        out: Pointer to floating ``[B * heads, query_length, HEAD_DIM]``, features contiguous.
        query_length: Queries.
        key_length: Keys.
        query_blocks: Stored blocks of 64 queries.
        key_blocks: Stored blocks of 64 keys.
        heads: Query heads.
        origin: Position of the first query among the keys, a multiple of 64; for the mask.
        head_stride: Elements between the heads of ``out``.
        row_stride: Elements between its queries.
        HEAD_DIM: 64 or 128.
        GROUPS: Query heads per key-value head.
        BLOCK_M: Queries of a program.
        QUERY_GROUP: 1 or 32.
        KEY_GROUP: 1 or 64.
        CAUSAL: Whether later keys are masked; the last queries come first then.
        SPLIT: Whether the product with the values is made in two halves of the features.
        BOUND: Whether logarithms of value scales are bounded by bits.
        PACKED: Whether codes are converted four at a time.
        PRODUCT: How codes are multiplied; see ``products``.
        WINDOW: Whether ``origin`` and the strides of ``out`` are read; otherwise the queries are
            all there are and ``out`` is contiguous.
    """
    tiles = tl.cdiv(query_length, BLOCK_M)
    lead = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    kv_heads = heads // GROUPS
    kv_lead = lead // heads * kv_heads + lead % heads // GROUPS
    stored_keys = key_blocks * 64
    key_codes += kv_lead * stored_keys * HEAD_DIM
    key_scale += kv_lead * (stored_keys // KEY_GROUP)
    value_codes += kv_lead * stored_keys * HEAD_DIM
    value_multiplier += kv_lead * stored_keys
    stored_queries = query_blocks * 64

    start = tile * BLOCK_M
    row = start + tl.arange(0, BLOCK_M)
    query = load_rows(
        query_codes + lead * stored_queries * HEAD_DIM, start, query_length, HEAD_DIM, BLOCK_M
    )
    scale_at = query_scale + lead * (stored_queries // QUERY_GROUP) + row // QUERY_GROUP
    scale = tl.load(scale_at, mask=row < query_length, other=0.0)

    WIDTH: tl.constexpr = HEAD_DIM // 2 if SPLIT else HEAD_DIM
    low = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    high = tl.zeros((BLOCK_M, WIDTH if SPLIT else 1), tl.float32)
    denominator = tl.zeros((BLOCK_M,), tl.float32)
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    offset = tl.zeros((BLOCK_M,), tl.float32)

    position = row
    first_position = start
    if WINDOW and CAUSAL:
        position += origin
        first_position += origin
    stop = tl.minimum(first_position + BLOCK_M, key_length) if CAUSAL else key_length
    unmasked = (first_position if CAUSAL else key_length) // 64 * 64
    for first in range(0, unmasked, 64):
        low, high, denominator, maximum, offset = add_tile(
            low, high, denominator, maximum, offset, query, scale, position, key_codes, key_scale,
            value_codes, value_multiplier, first, key_length, stored_keys, HEAD_DIM, KEY_GROUP,
            False, CAUSAL, SPLIT, BOUND, PACKED, PRODUCT,
        )  # fmt: skip
    for first in range(unmasked, stop, 64):
        low, high, denominator, maximum, offset = add_tile(
            low, high, denominator, maximum, offset, query, scale, position, key_codes, key_scale,
            value_codes, value_multiplier, first, key_length, stored_keys, HEAD_DIM, KEY_GROUP,
            True, CAUSAL, SPLIT, BOUND, PACKED, PRODUCT,
        )  # fmt: skip

    # Known distances keep registers free where rows lie side by side.
    out += lead * (head_stride if WINDOW else query_length * HEAD_DIM)
    distance = row_stride if WINDOW else HEAD_DIM
    mean = value_mean + kv_lead * HEAD_DIM
    store_features(out, low, denominator, mean, row, query_length, distance, 0, not CAUSAL)
    if SPLIT:
        store_features(out, high, denominator, mean, row, query_length, distance, WIDTH, not CAUSAL)
