"""RMS norm and rotation of query and key heads, and storing of keys and values, in one launch."""

# ruff: noqa: ANN001, ANN202  # kernel arguments are pointers and integers
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportOptionalMemberAccess=false

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _weigh(values, weight, inverse, CAST_FIRST: tl.constexpr, kind: tl.constexpr):
    """Returns normalized values times their weight in FP32, rounded between both if asked."""
    result = values * inverse
    if CAST_FIRST:
        result = (result.to(kind).to(tl.float32) * weight).to(kind).to(tl.float32)
    else:
        result = result * weight
    return result


@triton.jit(do_not_specialize=["eps"])
def _qk_norm_kernel(
    qkv, weight_q, weight_k, rotation, slots, query_out, keys, values,
    token_stride, rotation_stride, keys_stride, values_stride, item_tokens, eps,
    HEADS_Q: tl.constexpr, HEADS_K: tl.constexpr, HALF: tl.constexpr, CAST_FIRST: tl.constexpr,
    HEADS_FIRST: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One token: all heads [BLOCK_H, 2 * BLOCK] as left and right halves."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    mask = (head < HEADS_Q + 2 * HEADS_K)[:, None] & inside[None, :]
    places = head[:, None] * (2 * HALF) + pair[None, :]
    source = qkv + token * token_stride + places
    first = tl.load(source, mask=mask, other=0.0)
    second = tl.load(source + HALF, mask=mask, other=0.0)
    left, right = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(left * left + right * right, axis=1)
    inverse = tl.math.rsqrt(squares / (2 * HALF) + eps)[:, None]
    is_query = (head < HEADS_Q)[:, None]
    of_query = tl.load(weight_q + pair, mask=inside, other=0.0).to(tl.float32)[None, :]
    of_key = tl.load(weight_k + pair, mask=inside, other=0.0).to(tl.float32)[None, :]
    kind = qkv.dtype.element_ty
    left = _weigh(left, tl.where(is_query, of_query, of_key), inverse, CAST_FIRST, kind)
    of_query = tl.load(weight_q + HALF + pair, mask=inside, other=0.0).to(tl.float32)[None, :]
    of_key = tl.load(weight_k + HALF + pair, mask=inside, other=0.0).to(tl.float32)[None, :]
    right = _weigh(right, tl.where(is_query, of_query, of_key), inverse, CAST_FIRST, kind)
    row = rotation + token * rotation_stride
    cos = tl.load(row + pair, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(row + HALF + pair, mask=inside, other=0.0).to(tl.float32)[None, :]
    turned_left = (left * cos - right * sin).to(kind)
    turned_right = (right * cos + left * sin).to(kind)
    target = query_out + token * (HEADS_Q * 2 * HALF) + places
    if HEADS_FIRST:  # [items, heads, tokens of an item, 2 * HALF]
        item = token // item_tokens
        lane = item * HEADS_Q + head[:, None].to(tl.int64)
        line = lane * item_tokens + (token - item * item_tokens)
        target = query_out + line * (2 * HALF) + pair[None, :]
    tl.store(target, turned_left, mask=mask & is_query)
    tl.store(target + HALF, turned_right, mask=mask & is_query)
    is_key = mask & (head >= HEADS_Q)[:, None] & (head < HEADS_Q + HEADS_K)[:, None]
    target = keys + slot * keys_stride + places - HEADS_Q * 2 * HALF
    tl.store(target, turned_left, mask=is_key)
    tl.store(target + HALF, turned_right, mask=is_key)
    is_value = mask & (head >= HEADS_Q + HEADS_K)[:, None]
    target = values + slot * values_stride + places - (HEADS_Q + HEADS_K) * 2 * HALF
    tl.store(target, first, mask=is_value)
    tl.store(target + HALF, second, mask=is_value)


def qk_norm_rope_append(
    qkv: Tensor,
    weight_q: Tensor,
    weight_k: Tensor,
    rotation: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    eps: float,
    items: int | None = None,
    *,
    cast_first: bool,
) -> Tensor:
    """Norms and rotates queries and keys, stores keys and values; returns the queries.

    Args:
        qkv: [T, (heads_q + 2 * heads_k) * head_dim]: queries, keys, values of each token.
        weight_q: [head_dim], of the norm of query heads.
        weight_k: [head_dim], of the norm of key heads.
        rotation: [T, head_dim], cosines then sines of each token's angles.
        slots: integer [T]: where each token's key and value go; no slot twice.
        keys: [slots, heads_k, head_dim], contiguous in the last two dims, in the dtype of qkv.
        values: likewise.
        eps: added to the mean square.
        items: items of a batch whose tokens these are, as many of each, if queries are wanted so.
        cast_first: whether normalized values are rounded to the dtype of qkv before and after
            their weight multiplies them, as models do whose norms multiply in that dtype.

    Returns:
        [T, heads_q, head_dim] in the dtype of qkv; with ``items`` a view [items, T / items,
        heads_q, head_dim] of memory in which the tokens of a head follow each other.
    """
    tokens, (heads_k, head_dim) = qkv.shape[0], keys.shape[1:]
    heads_q = qkv.shape[1] // head_dim - 2 * heads_k
    if qkv.stride(1) != 1:
        qkv = qkv.contiguous()
    each = tokens if items is None else tokens // items
    shape = (tokens, heads_q, head_dim) if items is None else (items, heads_q, each, head_dim)
    out = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
    if tokens:
        block_h = triton.next_power_of_2(heads_q + 2 * heads_k)
        _qk_norm_kernel[(tokens,)](
            qkv, weight_q, weight_k, rotation, slots, out, keys, values,
            qkv.stride(0), rotation.stride(0), keys.stride(0), values.stride(0),
            each, eps,
            HEADS_Q=heads_q, HEADS_K=heads_k, HALF=head_dim // 2, CAST_FIRST=cast_first,
            HEADS_FIRST=items is not None, BLOCK_H=block_h,
            BLOCK=triton.next_power_of_2(head_dim // 2),
            num_warps=8 if block_h * head_dim > 4096 else 4,
        )  # fmt: skip
    return out if items is None else out.transpose(1, 2)
