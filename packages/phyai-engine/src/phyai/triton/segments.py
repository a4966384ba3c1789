"""Attention of query rows to two runs of cache slots each, whose lengths lie on the device."""

# ruff: noqa: ANN001, PLR0915, SIM102  # kernel arguments are pointers and integers
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.triton.rows import wide_products

if TYPE_CHECKING:
    from phyai.runtime.segments import SegmentPlan

CHUNK = 64
"""Keys of one program where a few query rows leave most of the device idle."""
ENOUGH = 64
"""Programs from which on the keys stay whole."""
BLOCK_M, BLOCK_N, MERGED_ROWS = 64, 64, 1


@triton.jit(do_not_specialize=["scale"])
def _attend_kernel(
    query, keys, values, segments, out, partial, lse,
    total_rows, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    CHUNK: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of (token, head) rows against one chunk of keys.

    ``segments`` holds six numbers a request: its first query row and their number, the first slot
    and length of its first run of keys, and those of its second run.
    """
    request = tl.program_id(2) // KV_HEADS
    kv_head = tl.program_id(2) % KV_HEADS
    split = tl.program_id(1)
    entry = segments + request * 6
    first_row, count = tl.load(entry), tl.load(entry + 1)
    start, length = tl.load(entry + 2), tl.load(entry + 3)
    second = tl.load(entry + 4) - length
    available = length + tl.load(entry + 5)
    member = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = member < count * GROUP
    low = split * CHUNK
    high = available
    if SPLITS > 1:
        high = tl.minimum(available, low + CHUNK)
    token = (first_row + member // GROUP).to(tl.int64)
    place = (token * KV_HEADS + kv_head) * GROUP + member % GROUP
    if SPLITS > 1:
        if low >= high:  # the merge leaves chunks of no keys out by their height
            nothing = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            tl.store(lse + split.to(tl.int64) * total_rows + place, nothing, mask=rows)
    if (tl.program_id(0) * BLOCK_M < count * GROUP) & (low < high):
        dim = tl.arange(0, DIM)
        q = tl.load(query + place[:, None] * DIM + dim[None, :], mask=rows[:, None], other=0.0)
        # Powers of two are faster than powers of e.
        factor = scale * 1.4426950408889634
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        total = tl.zeros((BLOCK_M, DIM), tl.float32)
        for begin in tl.range(low, high, BLOCK_N):
            index = begin + tl.arange(0, BLOCK_N)
            seen = index < high
            slot = index + tl.where(index < length, start, second)
            offset = (slot.to(tl.int64) * KV_HEADS + kv_head) * DIM
            k = tl.load(keys + offset[None, :] + dim[:, None], mask=seen[None, :], other=0.0)
            v = tl.load(values + offset[:, None] + dim[None, :], mask=seen[:, None], other=0.0)
            if WIDE:
                scores = tl.dot(q.to(tl.float32), k.to(tl.float32), input_precision="ieee")
            else:
                scores = tl.dot(q, k)
            scores = tl.where(seen[None, :], scores * factor, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, axis=1))
            fade = tl.math.exp2(top - higher)
            share = tl.math.exp2(scores - higher[:, None])
            weight = weight * fade + tl.sum(share, axis=1)
            total = total * fade[:, None]
            if WIDE:
                total = tl.dot(share, v.to(tl.float32), total, input_precision="ieee")
            else:
                total = tl.dot(share.to(v.dtype), v, total)
            top = higher
        total = total / weight[:, None]
        if SPLITS > 1:
            place += split.to(tl.int64) * total_rows
            tl.store(lse + place, top + tl.math.log2(weight), mask=rows)
            target = partial + place[:, None] * DIM + dim[None, :]
        else:
            target = out + place[:, None] * DIM + dim[None, :]
        tl.store(target, total.to(target.dtype.element_ty), mask=rows[:, None])


@triton.jit
def _merge_kernel(
    partial, lse, out, total_rows,
    DIM: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Joins the chunks of rows [token, head], each weighted by its sum of exponentials."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = row < total_rows
    dim = tl.arange(0, DIM)
    offsets = row[:, None].to(tl.int64) * DIM + dim[None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        height = tl.load(lse + split * total_rows + row, mask=rows, other=float("-inf"))
        top = tl.maximum(top, height)
    whole = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, DIM), tl.float32)
    for split in tl.static_range(SPLITS):
        height = tl.load(lse + split * total_rows + row, mask=rows, other=float("-inf"))
        used = rows & (height > float("-inf"))
        share = tl.where(used, tl.math.exp2(height - top), 0.0)
        source = partial + split * total_rows * DIM + offsets
        part = tl.load(source, mask=used[:, None], other=0.0).to(tl.float32)
        result += part * share[:, None]
        whole += share
    result = result / whole[:, None]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=rows[:, None])


def key_splits(plan: "SegmentPlan", heads: int, kv_heads: int) -> int:
    """Returns how many chunks the keys are cut into; one where the query rows fill the device."""
    tiles = triton.cdiv(plan.most_rows * (heads // kv_heads), BLOCK_M)
    programs = tiles * plan.table.shape[0] * kv_heads
    return triton.cdiv(plan.most_keys, CHUNK) if programs < ENOUGH else 1


def attend(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, plan: "SegmentPlan", *, scale: float
) -> Tensor:
    """Returns the attention output [T, heads, dim] of the operation ``attention_segments``.

    Many query rows are computed in one pass. Few are split over the keys, in chunks of `CHUNK`
    that a second kernel joins.

    Args:
        query: [T, heads, dim] in half precision, dim a power of two of at least 16.
        key_pages: [slots, 1, kv_heads, dim] in the same dtype.
        value_pages: as the keys.
        plan: which rows see which slots.
        scale: factor of the scores.
    """
    rows, heads, dim = query.shape
    kv_heads = key_pages.shape[2]
    query = query.contiguous()
    out = torch.empty_like(query)
    if not out.numel():
        return out
    groups, group = plan.table.shape[0], heads // kv_heads
    tiles = triton.cdiv(plan.most_rows * group, BLOCK_M)
    splits = key_splits(plan, heads, kv_heads)
    partial, lse = out, out
    if splits > 1:
        partial = torch.empty((splits, *query.shape), dtype=query.dtype, device=query.device)
        lse = torch.empty((splits, rows, heads), dtype=torch.float32, device=query.device)
    _attend_kernel[(tiles, splits, groups * kv_heads)](
        query, key_pages, value_pages, plan.table, out, partial, lse, rows * heads, scale,
        GROUP=group, KV_HEADS=kv_heads, DIM=dim, CHUNK=CHUNK, SPLITS=splits,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, WIDE=wide_products(),
        num_warps=4, num_stages=1 if splits > 1 else 2,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(triton.cdiv(rows * heads, MERGED_ROWS),)](
            partial, lse, out, rows * heads, DIM=dim, SPLITS=splits, ROWS=MERGED_ROWS, num_warps=4
        )
    return out
