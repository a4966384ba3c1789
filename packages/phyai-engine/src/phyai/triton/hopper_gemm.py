"""Launches bf16 products for Hopper; see `hopper_gemm_kernel`.

Importing needs a Triton with Gluon's Hopper API.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from phyai.triton import hopper_operands as operands
from phyai.triton.hopper_gemm_kernel import hopper_gemm_kernel
from phyai.triton.part_sums import sum_parts
from phyai.triton.rows import flat_rows

BLOCKS_N = {64: 8, 128: 6, 256: 4}
"""Columns of a tile, and the steps whose operands then fit into shared memory."""
SPLITS = (1, 2, 3, 4)

# What a multiprocessor does in a microsecond, estimated for an H200.
_PRODUCTS = 3.1e6
_OPERAND_BYTES = 90e3
_MEMORY_BYTES = 4.0e6  # of all multiprocessors together
_EPILOGUE = 1.5  # microseconds of a tile
_SUM_LAUNCH = 2.0


@dataclass(frozen=True)
class Plan:
    """How a product is cut.

    Attributes:
        block_n: columns of a tile.
        splits: parts of K that different programs sum; none is empty.
    """

    block_n: int
    splits: int = 1


def estimate(plan: Plan, rows: int, columns: int, depth: int, count: int) -> float:
    """Returns a model of the microseconds on ``count`` multiprocessors, without the launch.

    A step takes as long as its products or as the copy of its operands into shared memory.
    """
    tiles = triton.cdiv(rows, operands.BLOCK_M) * triton.cdiv(columns, plan.block_n)
    steps = triton.cdiv(triton.cdiv(depth, operands.BLOCK_K), plan.splits)
    products = operands.BLOCK_M * plan.block_n * operands.BLOCK_K / _PRODUCTS
    copied = (operands.BLOCK_M + plan.block_n) * operands.BLOCK_K * 2 / _OPERAND_BYTES
    waves = triton.cdiv(tiles * plan.splits, count)
    time = waves * (steps * max(products, copied) + _EPILOGUE)
    if plan.splits > 1:
        time += _SUM_LAUNCH + 2 * plan.splits * rows * columns * 4 / _MEMORY_BYTES
    return time


@lru_cache(maxsize=1024)
def select_plan(rows: int, columns: int, depth: int, count: int) -> Plan:
    """Returns the plan of ``[rows, depth] @ [columns, depth].T`` with the least estimate."""
    steps = triton.cdiv(depth, operands.BLOCK_K)
    plans = [Plan(block_n, splits) for block_n in BLOCKS_N for splits in SPLITS if splits <= steps]
    return min(plans, key=lambda plan: estimate(plan, rows, columns, depth, count))


def hopper_gemm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns ``x Wᵀ + bias`` [..., N] in bf16, summed in fp32 in an order that sizes decide.

    The host waits for nothing, so that a CUDA graph may hold the launches; it keeps the addresses
    of ``x`` and ``weight``.

    Args:
        x: bf16 [..., K] on a Hopper GPU, K a multiple of 8.
        weight: bf16 [N, K], contiguous, N a multiple of 16.
        bias: floating [N] or None.

    Raises:
        ValueError: for other dtypes, sizes, or a weight that TMA cannot read.
    """
    operands.check_operands(x, weight)
    columns, depth = weight.shape
    if columns % 16:
        raise ValueError(f"weight has {columns} rows; the kernel takes multiples of 16")
    if bias is not None and bias.shape != (columns,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; the weight needs ({columns},)")
    rows = operands.readable(flat_rows(x))
    out = torch.empty((*x.shape[:-1], columns), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    count = operands.processors(x.device)
    plan = select_plan(rows.shape[0], columns, depth, count)
    _launch(rows, weight, None if bias is None else bias.contiguous(), out, plan, count)
    return out


def _launch(
    rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, plan: Plan, count: int
) -> None:
    columns, depth = weight.shape
    row_tiles = triton.cdiv(rows.shape[0], operands.BLOCK_M)
    units = row_tiles * triton.cdiv(columns, plan.block_n) * plan.splits
    whole = plan.splits == 1
    target = out
    if not whole:
        parts = (plan.splits, rows.shape[0], columns)
        target = torch.empty(parts, dtype=torch.float32, device=out.device)
    with torch.cuda.device(out.device):
        hopper_gemm_kernel[(min(units, count),)](
            operands.descriptor(rows, operands.BLOCK_M),
            operands.descriptor(weight, plan.block_n),
            bias,
            target,
            rows.shape[0],
            columns,
            depth,
            operands.group_size(row_tiles),
            plan.splits,
            STAGES=BLOCKS_N[plan.block_n],
            WHOLE=whole,
            HAS_BIAS=bias is not None,
            STORE=operands.store_layout(plan.block_n),
            COPY_REGISTERS=operands.COPY_REGISTERS,
            num_warps=operands.NUM_WARPS,
        )
        if not whole:
            sum_parts(target, bias, out)
