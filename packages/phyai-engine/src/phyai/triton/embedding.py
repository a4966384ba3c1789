"""Rows of a vocabulary shard, with the contract of the reference row ``torch.embedding``."""

# ruff: noqa: ANN001  # kernel arguments are pointers and integers
# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _embedding_kernel(
    ids, weight, out, width, weight_stride, shard_start, shard_end, BLOCK: tl.constexpr
) -> None:
    blocks = tl.cdiv(width, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    index = tl.load(ids + token).to(tl.int64)
    inside = (index >= shard_start) & (index < shard_end)
    row = weight + tl.where(inside, index - shard_start, 0) * weight_stride
    values = tl.load(row + columns, mask=mask & inside, other=0.0)
    tl.store(out + token * width + columns, values, mask=mask)


def embedding(input_ids: Tensor, weight: Tensor, shard_start: int, shard_end: int) -> Tensor:
    """Returns the rows of ``weight`` for ids in ``shard_start:shard_end``, zeros for the others.

    Args:
        input_ids: integer [...].
        weight: [rows, width]; its first row belongs to ``shard_start``.
        shard_start: first id of the shard.
        shard_end: first id after the shard.

    Raises:
        ValueError: the shard has more rows than the table.
    """
    if shard_end - shard_start > weight.shape[0]:
        raise ValueError(
            f"shard {shard_start}:{shard_end} has more rows than the table's {weight.shape[0]}"
        )
    table = weight if weight.stride(-1) == 1 else weight.contiguous()
    ids = input_ids.contiguous()
    width = table.shape[1]
    out = torch.empty((*ids.shape, width), dtype=table.dtype, device=table.device)
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(width))
        _embedding_kernel[(ids.numel() * triton.cdiv(width, block),)](
            ids, table, out, width, table.stride(0), shard_start, shard_end, BLOCK=block
        )
    return out
