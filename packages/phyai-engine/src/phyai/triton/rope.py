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
