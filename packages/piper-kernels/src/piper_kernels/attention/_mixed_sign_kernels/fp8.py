"""SageAttention2++ over prepared operands, in plain Triton: E4M3 probabilities and values."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportCallIssue=false

import math

import triton
import triton.language as tl

from piper_kernels.attention._mixed_sign_kernels.recurrence import (
    load_rows,
    tile_scores,
    value_tile,
)

_LOG2_448 = tl.constexpr(math.log2(448))


@triton.jit
def add_fp8_tile(
    numerator,
    denominator,
    maximum,
    query,
    query_scale,
    row,
    key_codes,
    key_scale,
    value_codes,
    value_scale,
    first,
    key_length,
    stored_keys,
    HEAD_DIM: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    SUM_DTYPE: tl.constexpr,
):
    """Add 64 keys to the state ``numerator, denominator, maximum`` and return it."""
    scores = tile_scores(query, query_scale, key_codes, key_scale, first, HEAD_DIM, KEY_GROUP == 1)
    if MASKED:
        key = first + tl.arange(0, 64)
        visible = (key < key_length)[None, :]
        if CAUSAL:
            visible = visible & (key[None, :] <= row[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(maximum, tl.max(scores, 1))
    old_weight = tl.exp2(maximum - higher)
    # Huge scores would swallow the logarithm before the difference.
    p = tl.exp2((scores - higher[:, None]) + _LOG2_448)
    denominator = denominator * old_weight + tl.sum(p, 1)
    values = value_tile(value_codes, first, stored_keys, 0, HEAD_DIM)
    product = tl.dot(p.to(tl.float8e4nv), values, out_dtype=SUM_DTYPE)
    # A tile is summed in FP16, and tiles in FP32.
    product = product.to(tl.float16).to(tl.float32) * value_scale[None, :]
    return numerator * old_weight[:, None] + product, denominator, higher


@triton.jit(do_not_specialize=["query_length", "key_length", "query_blocks", "key_blocks"])
def fp8_kernel(
    query_codes,
    query_scale,
    key_codes,
    key_scale,
    value_codes,
    value_scale,
    out,
    query_length,
    key_length,
    query_blocks,
    key_blocks,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    QUERY_GROUP: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    SUM_DTYPE: tl.constexpr,
):
    """Attend from ``BLOCK_M`` queries of one head to all visible keys.

    Args:
        query_codes: Pointer to int8 ``[B, heads, 64 * query_blocks, HEAD_DIM]``.
        query_scale: Pointer to FP32 scales with the logit factor and ``log2(e)``, one per
            ``QUERY_GROUP`` rows.
        key_codes: Pointer to int8 ``[B, heads, 64 * key_blocks, HEAD_DIM]``.
        key_scale: Pointer to FP32 scales, one per ``KEY_GROUP`` rows.
        value_codes: Pointer to E4M3 ``[B, heads, HEAD_DIM, 64 * key_blocks]``.
        value_scale: Pointer to FP32 ``[B, heads, HEAD_DIM]``.
        out: Pointer to floating ``[B, heads, query_length, HEAD_DIM]``.
        query_length: Queries.
        key_length: Keys.
        query_blocks: Stored blocks of 64 queries.
        key_blocks: Stored blocks of 64 keys.
        HEAD_DIM: 64 or 128.
        BLOCK_M: Queries of a program.
        QUERY_GROUP: 1 or 32.
        KEY_GROUP: 1 or 64.
        CAUSAL: Whether later keys are masked; the last queries come first then.
        SUM_DTYPE: FP16 where matrix instructions sum in it, else FP32.
    """
    tiles = tl.cdiv(query_length, BLOCK_M)
    lead = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    stored_keys, stored_queries = key_blocks * 64, query_blocks * 64
    key_codes += lead * stored_keys * HEAD_DIM
    key_scale += lead * (stored_keys // KEY_GROUP)
    value_codes += lead * stored_keys * HEAD_DIM
    start = tile * BLOCK_M
    row = start + tl.arange(0, BLOCK_M)
    query = load_rows(
        query_codes + lead * stored_queries * HEAD_DIM, start, query_length, HEAD_DIM, BLOCK_M
    )
    scale_at = query_scale + lead * (stored_queries // QUERY_GROUP) + row // QUERY_GROUP
    scale = tl.load(scale_at, mask=row < query_length, other=0.0)
    feature = tl.arange(0, HEAD_DIM)
    feature_scale = tl.load(value_scale + lead * HEAD_DIM + feature)

    numerator = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    denominator = tl.zeros((BLOCK_M,), tl.float32)
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    stop = tl.minimum(start + BLOCK_M, key_length) if CAUSAL else key_length
    unmasked = (start if CAUSAL else key_length) // 64 * 64
    for first in range(0, unmasked, 64):
        numerator, denominator, maximum = add_fp8_tile(
            numerator, denominator, maximum, query, scale, row, key_codes, key_scale, value_codes,
            feature_scale, first, key_length, stored_keys, HEAD_DIM, KEY_GROUP, False, CAUSAL,
            SUM_DTYPE,
        )  # fmt: skip
    for first in range(unmasked, stop, 64):
        numerator, denominator, maximum = add_fp8_tile(
            numerator, denominator, maximum, query, scale, row, key_codes, key_scale, value_codes,
            feature_scale, first, key_length, stored_keys, HEAD_DIM, KEY_GROUP, True, CAUSAL,
            SUM_DTYPE,
        )  # fmt: skip
    result = numerator / tl.maximum(denominator, 1e-30)[:, None]
    at = (lead * query_length + row.to(tl.int64))[:, None] * HEAD_DIM + feature[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=(row < query_length)[:, None])
