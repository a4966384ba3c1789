"""Launches attention of many query rows to segments for Hopper; see `segments_hopper_kernel`.

Importing needs a Triton with Gluon's Hopper API.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from phyai.triton.hopper_operands import Address
from phyai.triton.segments_hopper_kernel import attend_hopper_kernel

if TYPE_CHECKING:
    from phyai.runtime.segments import SegmentPlan

DIM, BLOCK_M, BLOCK_N = 256, 64, 64
SLOTS = 6
"""Blocks of keys or values beside the query tile in shared memory."""
ATTEND_REGISTERS, COPY_REGISTERS = 240, 24

TILE = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DIM], gl.bfloat16)
CLEAR = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
JOIN = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
"""Eight rows that a warp stores at once lie in different banks."""
STORE = gl.DistributedLinearLayout(
    reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]],
    lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
    warp_bases=[[16, 0], [32, 0]],
    block_bases=[],
    shape=[BLOCK_M, DIM],
)
"""Threads hold 8 columns side by side; a warp has the rows that it has in the sums."""


@lru_cache(maxsize=4096)
def _descriptor(start: int, rows: int) -> TensorDescriptor:
    return TensorDescriptor(Address(start), [rows, DIM], [DIM, 1], [BLOCK_N, DIM], TILE)


def attend_hopper(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, plan: "SegmentPlan", *, scale: float
) -> Tensor:
    """Returns the attention output [T, heads, 256] of the operation ``attention_segments``.

    The host waits for nothing, so that a CUDA graph may hold the launch; it keeps the addresses.

    Args:
        query: bf16 [T, heads, 256] on a Hopper GPU.
        key_pages: bf16 [slots, 1, 1, 256], contiguous.
        value_pages: as the keys.
        plan: which rows see which slots.
        scale: factor of the scores, positive.

    Raises:
        ValueError: for other dtypes or sizes, pages that TMA cannot read, or a scale of zero or
            less.
    """
    rows, heads, dim = query.shape
    for name, pages in (("key", key_pages), ("value", value_pages)):
        if pages.shape[1:] != (1, 1, DIM) or not pages.is_contiguous() or pages.data_ptr() % 16:
            raise ValueError(
                f"{name} pages have shape {tuple(pages.shape)} and strides {pages.stride()}; the "
                f"kernel takes contiguous (slots, 1, 1, {DIM})"
            )
    dtypes = {tensor.dtype for tensor in (query, key_pages, value_pages)}
    if dim != DIM or dtypes != {torch.bfloat16} or not 0 < scale < math.inf:
        raise ValueError(
            f"query has shape {tuple(query.shape)}, dtypes are {dtypes}, scale is {scale}; the "
            f"kernel takes torch.bfloat16 heads of {DIM} and a positive scale"
        )
    query = query.contiguous()
    if query.data_ptr() % 16:
        query = query.clone()
    out = torch.empty_like(query)
    if not out.numel() or not key_pages.shape[0]:
        return out
    tiles = triton.cdiv(plan.most_rows * heads, BLOCK_M)
    with torch.cuda.device(query.device):
        attend_hopper_kernel[(tiles, plan.table.shape[0])](
            _descriptor(query.data_ptr(), rows * heads),
            _descriptor(key_pages.data_ptr(), key_pages.shape[0]),
            _descriptor(value_pages.data_ptr(), value_pages.shape[0]),
            plan.table,
            out,
            scale * math.log2(math.e),
            HEADS=heads,
            SLOTS=SLOTS,
            CLEAR=CLEAR,
            JOIN=JOIN,
            STORE=STORE,
            ATTEND_REGISTERS=ATTEND_REGISTERS,
            COPY_REGISTERS=COPY_REGISTERS,
            num_warps=4,
        )
    return out
