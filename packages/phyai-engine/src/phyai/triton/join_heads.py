"""Attention of several requests, in whatever order in memory, as rows of one matrix."""

# ruff: noqa: ANN001  # kernel arguments are pointers and integers
# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _join_kernel(
    x, out, hidden, row_stride, head_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < hidden
    places = (columns // WIDTH).to(tl.int64) * head_stride + columns % WIDTH
    values = tl.load(x + row * row_stride + places, mask=mask, other=0.0)
    tl.store(out + row * hidden + columns, values, mask=mask)


def join_heads(parts: Sequence[Tensor]) -> Tensor:
    """Returns ``parts`` [T, heads, head_dim], features side by side, as [sum of T, heads * dim]."""
    heads, width = parts[0].shape[1:]
    hidden = heads * width
    rows = sum(part.shape[0] for part in parts)
    out = torch.empty((rows, hidden), dtype=parts[0].dtype, device=parts[0].device)
    block = min(BLOCK, triton.next_power_of_2(hidden))
    first = 0
    for part in parts:
        stop = first + part.shape[0]
        if part.numel():
            _join_kernel[(part.shape[0], triton.cdiv(hidden, block))](
                part, out[first:stop], hidden, *part.stride()[:2], WIDTH=width, BLOCK=block,
                num_warps=max(1, block // 512),
            )  # fmt: skip
        first = stop
    return out
