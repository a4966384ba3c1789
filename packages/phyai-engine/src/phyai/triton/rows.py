"""What row-wise launchers share."""

import os

import triton
from torch import Tensor


def flat_rows(x: Tensor) -> Tensor:
    """Returns ``x`` [..., H] as [rows, H] with unit column stride; copies only if it must."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def row_block(hidden: int) -> dict[str, int]:
    """Returns the block that holds one row, and its warps: about eight values a thread."""
    block = triton.next_power_of_2(hidden)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 256))}


def wide_products() -> bool:
    """Whether products must be in fp32: Triton's interpreter is wrong in bf16."""
    return bool(os.environ.get("TRITON_INTERPRET"))
