"""Inputs of weight-only NVFP4 products in the form that a schedule reads. Needs Triton."""

import torch
from torch import Tensor

from piper_kernels._triton.launching import Launcher, launch_key
from piper_kernels.linear.nvfp4._nvidia.hopper_plan import HELD_ROWS, STEP, HopperPlan
from piper_kernels.linear.nvfp4._operand_kernels import (
    dense_operand_kernel,
    rotated_operand_kernel,
)
from piper_kernels.linear.nvfp4._weight import Plan, operand_width
from piper_kernels.weights.nvfp4._layout import ceil_div

# A row of a bf16 tile is one 16-byte load of every thread of a warp, and holds whole groups.
COLUMNS = 256
ROWS = 8
# The product waits for few rows, so that more programs rotate them.
FEW_ROWS = 2
# A warp rotates so many values of a row.
ROTATED = 2048

_dense = Launcher(dense_operand_kernel)
_rotated = Launcher(rotated_operand_kernel)


def operand_grid(rows: int, features: int) -> tuple[int]:
    """Return the programs of a kernel with tiles of ``ROWS`` x ``COLUMNS``."""
    return (ceil_div(rows, ROWS) * ceil_div(features, COLUMNS),)


def dense_operand(
    matrix: Tensor, dtype: torch.dtype, group_size: int, plan: Plan
) -> tuple[Tensor, float, bool]:
    """Return the operand of an input that is not quantized.

    Args:
        matrix: Floating ``[rows, features]`` with unit column stride.
        dtype: Dtype of the operand.
        group_size: Rotation group, 0 for none.
        plan: The schedule of the product.

    Returns:
        ``[rows, width]``, the power of two that it was divided by, and whether a kernel was
        launched for it that lets the product start before it ends.
    """
    if not (plan.arrangement or group_size):
        return matrix, 1.0, False
    rows, features = matrix.shape
    # A rotated float16 input may leave its range; this keeps it inside.
    factor = group_size**0.5 if group_size and dtype == torch.float16 else 1.0
    width = operand_width(features, plan)
    operand = matrix.new_empty((rows, width), dtype=dtype)
    leads = isinstance(plan, HopperPlan)
    tensors = (matrix, operand)
    stride = matrix.stride(0)
    few = rows <= HELD_ROWS
    numbers = (features, stride, group_size, plan.arrangement)
    key = launch_key(tensors, rows >> 31, few, leads, numbers)
    if leads and group_size == STEP == plan.arrangement:
        _rotated(
            rows * ceil_div(features, ROTATED),
            (*tensors, rows, features, stride, 1, ROTATED, leads),
            {"num_warps": 1},
            key,
        )
    else:
        tile_rows = FEW_ROWS if few else ROWS
        constants = (group_size, plan.arrangement, tile_rows, COLUMNS, leads)
        _dense(
            ceil_div(rows, tile_rows) * ceil_div(width, COLUMNS),
            (*tensors, rows, features, width, stride, 1.0 / factor, *constants),
            {},
            key,
        )
    return operand, factor, leads
