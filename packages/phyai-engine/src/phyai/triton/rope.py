"""Rotary embedding of queries and keys in one launch, with half-split or interleaved pairs."""

# ruff: noqa: ANN001  # kernel arguments are pointers and integers
# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rope_kernel(
    positions,
    query,
    key,
    query_out,
    key_out,
    cache,
    heads_q,
    heads_k,
    head_dim,
    query_token,
    query_head,
    key_token,
    key_head,
    cache_stride,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    REST: tl.constexpr,
    BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
) -> None:
    heads = heads_q + heads_k
    token = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    if head < heads_q:
        source = query + token * query_token + head * query_head
        target = query_out + (token * heads_q + head) * head_dim
    else:
        source = key + token * key_token + (head - heads_q) * key_head
        target = key_out + (token * heads_k + head - heads_q) * head_dim
    pair = tl.arange(0, BLOCK)
    mask = pair < HALF
    row = cache + tl.load(positions + token).to(tl.int64) * cache_stride
    cos = tl.load(row + pair, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(row + HALF + pair, mask=mask, other=0.0).to(tl.float32)
    left = 2 * pair if INTERLEAVED else pair
    right = left + 1 if INTERLEAVED else pair + HALF
    first = tl.load(source + left, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + right, mask=mask, other=0.0).to(tl.float32)
    kind = target.dtype.element_ty
    tl.store(target + left, (first * cos - second * sin).to(kind), mask=mask)
    tl.store(target + right, (second * cos + first * sin).to(kind), mask=mask)
    if REST > 0:
        rest = tl.arange(0, REST_BLOCK)
        beyond = 2 * HALF + rest
        tl.store(
            target + beyond, tl.load(source + beyond, mask=rest < REST, other=0.0), mask=rest < REST
        )


def rope(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys; dims past the rotary ones are copied.

    Args:
        positions: integer [T].
        q: [T, heads_q, head_dim] with unit stride along head_dim.
        k: [T, heads_k, head_dim], likewise.
        cos_sin_cache: [max_pos, rotary_dim], cosines then sines.
        interleaved: whether pairs are neighbours instead of half the rotary dims apart.

    Returns:
        The rotated queries and keys, contiguous.
    """
    q, k = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k))
    tokens, heads_q, head_dim = q.shape
    heads_k, rotary = k.shape[1], cos_sin_cache.shape[-1]
    query_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    key_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if tokens:
        _rope_kernel[(tokens * (heads_q + heads_k),)](
            positions.contiguous(),
            q,
            k,
            query_out,
            key_out,
            cos_sin_cache.contiguous(),
            heads_q,
            heads_k,
            head_dim,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            rotary,
            HALF=rotary // 2,
            INTERLEAVED=interleaved,
            REST=head_dim - rotary,
            BLOCK=triton.next_power_of_2(rotary // 2),
            REST_BLOCK=triton.next_power_of_2(max(1, head_dim - rotary)),
            num_warps=1,
        )
    return query_out, key_out


@triton.jit
def _append_kernel(
    positions,
    qkv,
    query_out,
    keys,
    values,
    cache,
    first_slot,
    token_stride,
    cache_stride,
    HEADS_Q: tl.constexpr,
    HEADS_K: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    row = cache + tl.load(positions + token).to(tl.int64) * cache_stride
    cos = tl.load(row + pair, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(row + HALF + pair, mask=inside, other=0.0).to(tl.float32)[None, :]
    mask = (head < HEADS_Q + 2 * HEADS_K)[:, None] & inside[None, :]
    places = head[:, None] * (2 * HALF) + pair[None, :]
    source = qkv + token * token_stride + places
    first = tl.load(source, mask=mask, other=0.0)
    second = tl.load(source + HALF, mask=mask, other=0.0)
    kind = query_out.dtype.element_ty
    left, right = first.to(tl.float32), second.to(tl.float32)
    turned = (left * cos - right * sin).to(kind), (right * cos + left * sin).to(kind)
    is_query = mask & (head < HEADS_Q)[:, None]
    target = query_out + token * (HEADS_Q * 2 * HALF) + places
    tl.store(target, turned[0], mask=is_query)
    tl.store(target + HALF, turned[1], mask=is_query)
    slot = (token + first_slot) * (HEADS_K * 2 * HALF) + places
    is_key = mask & (head >= HEADS_Q)[:, None] & (head < HEADS_Q + HEADS_K)[:, None]
    target = keys + slot - HEADS_Q * 2 * HALF
    tl.store(target, turned[0], mask=is_key)
    tl.store(target + HALF, turned[1], mask=is_key)
    is_value = mask & (head >= HEADS_Q + HEADS_K)[:, None]
    target = values + slot - (HEADS_Q + HEADS_K) * 2 * HALF
    tl.store(target, first, mask=is_value)
    tl.store(target + HALF, second, mask=is_value)


def rope_append(
    positions: Tensor,
    qkv: Tensor,
    cos_sin_cache: Tensor,
    keys: Tensor,
    values: Tensor,
    first_slot: int,
) -> Tensor:
    """Rotates queries and keys by halves, and stores keys and values.

    Args:
        positions: integer [T].
        qkv: [T, heads_q + 2 * heads_k, head_dim]: queries, keys, values; heads are adjacent.
        cos_sin_cache: [max_pos, head_dim], cosines then sines.
        keys: [slots, 1, heads_k, head_dim], contiguous; slots from ``first_slot`` on are written.
        values: likewise.
        first_slot: slot of the first row.

    Returns:
        The rotated queries [T, heads_q, head_dim].
    """
    tokens, heads, head_dim = qkv.shape
    heads_k = keys.shape[2]
    if qkv.stride(2) != 1 or qkv.stride(1) != head_dim:
        qkv = qkv.contiguous()
    out = torch.empty((tokens, heads - 2 * heads_k, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens:
        _append_kernel[(tokens,)](
            positions.contiguous(),
            qkv,
            out,
            keys,
            values,
            cos_sin_cache.contiguous(),
            first_slot,
            qkv.stride(0),
            head_dim,
            HEADS_Q=heads - 2 * heads_k,
            HEADS_K=heads_k,
            HALF=head_dim // 2,
            BLOCK_H=triton.next_power_of_2(heads),
            BLOCK=triton.next_power_of_2(head_dim // 2),
            num_warps=4,
        )
    return out
