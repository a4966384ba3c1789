"""Attention within items of a padded batch, for heads whose width is no power of two."""

# ruff: noqa: ANN001  # kernel arguments are pointers and integers
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.triton.rows import wide_products

BLOCK_M, BLOCK_N = 64, 64
_NARROWEST_PART = 16


@triton.jit
def _product(left, right, WIDE: tl.constexpr):  # noqa: ANN202
    if WIDE:  # the interpreter's products of bf16 are wrong
        found = tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    else:
        found = tl.dot(left, right)
    return found


@triton.jit(do_not_specialize=["scale"])
def _narrow_attention_kernel(
    query, key, value, out, rows, keys, heads,
    q_batch_stride, q_row_stride, q_head_stride, k_batch_stride, k_row_stride, k_head_stride,
    v_batch_stride, v_row_stride, v_head_stride, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Attends from one tile of rows of a head to all keys.

    A head's features are read as ``LOW`` of them and up to ``HIGH`` more, which wastes less than
    the next power of two does.
    """
    head = tl.program_id(1) % heads
    batch = (tl.program_id(1) // heads).to(tl.int64)
    query += batch * q_batch_stride + head * q_head_stride
    key += batch * k_batch_stride + (head // GROUP) * k_head_stride
    value += batch * v_batch_stride + (head // GROUP) * v_head_stride
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (row < rows)[:, None]
    low, high = tl.arange(0, LOW), LOW + tl.arange(0, HIGH)
    exists = (high < DIM)[None, :]
    place = query + row.to(tl.int64)[:, None] * q_row_stride
    q_low = tl.load(place + low[None, :], mask=inside, other=0.0)
    q_high = tl.load(place + high[None, :], mask=inside & exists, other=0.0)
    factor = scale * 1.4426950408889634  # powers of two are faster than powers of e
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    total_low = tl.zeros((BLOCK_M, LOW), tl.float32)
    total_high = tl.zeros((BLOCK_M, HIGH), tl.float32)
    for first in tl.range(0, keys, BLOCK_N):
        column = first + tl.arange(0, BLOCK_N)
        seen = column < keys
        source = key + column.to(tl.int64)[None, :] * k_row_stride
        k_low = tl.load(source + low[:, None], mask=seen[None, :], other=0.0)
        exists_down = (high < DIM)[:, None] & seen[None, :]
        k_high = tl.load(source + high[:, None], mask=exists_down, other=0.0)
        source = value + column.to(tl.int64)[:, None] * v_row_stride
        v_low = tl.load(source + low[None, :], mask=seen[:, None], other=0.0)
        v_high = tl.load(source + high[None, :], mask=seen[:, None] & exists, other=0.0)
        scores = _product(q_low, k_low, WIDE) + _product(q_high, k_high, WIDE)
        scores = tl.where(seen[None, :], scores * factor, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        fade = tl.math.exp2(top - higher)
        share = tl.math.exp2(scores - higher[:, None])
        weight = weight * fade + tl.sum(share, axis=1)
        share = share.to(value.dtype.element_ty)
        total_low = total_low * fade[:, None] + _product(share, v_low, WIDE)
        total_high = total_high * fade[:, None] + _product(share, v_high, WIDE)
        top = higher
    inverse = 1.0 / weight[:, None]
    place = out + ((batch * rows + row) * heads + head)[:, None] * DIM
    kind = out.dtype.element_ty
    tl.store(place + low[None, :], (total_low * inverse).to(kind), mask=inside)
    tl.store(place + high[None, :], (total_high * inverse).to(kind), mask=inside & exists)


def parts_of(head_dim: int) -> tuple[int, int]:
    """Returns the widths in which a head's features are read: powers of two of at least 16."""
    low = 1 << (head_dim.bit_length() - 1)
    if low == head_dim:
        low //= 2
    return low, max(_NARROWEST_PART, triton.next_power_of_2(head_dim - low))


def narrow_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Returns ``softmax(q kᵀ scale) v`` [B, S, heads, dim], contiguous.

    Args:
        q: [B, S, heads, dim] in half precision, dim a multiple of 8 from 32 to 128; features are
            contiguous, other strides free.
        k: [B, S2, kv_heads, dim], kv_heads a divisor of heads.
        v: likewise.
        scale: factor of the scores.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    batch, rows, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    if not keys:
        return out.zero_()
    low, high = parts_of(dim)
    _narrow_attention_kernel[(triton.cdiv(rows, BLOCK_M), batch * heads)](
        q, k, v, out, rows, keys, heads, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], scale,
        GROUP=heads // kv_heads, DIM=dim, LOW=low, HIGH=high, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
        WIDE=wide_products(), num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
