"""Launches of the NVFP4 product kernels. Importing needs Triton."""

# pyright: reportArgumentType=false, reportCallIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from piper_kernels._autocast import product
from piper_kernels._triton.launching import Launcher, launch_key
from piper_kernels._triton.targets import accelerator_target, dot_precision, sm_count
from piper_kernels.linear.nvfp4._nvidia.hopper_plan import HopperPlan
from piper_kernels.linear.nvfp4._operand_kernels import packed_operand_kernel
from piper_kernels.linear.nvfp4._plan import ProductPlan
from piper_kernels.linear.nvfp4._product_kernels import finish_kernel, product_kernel
from piper_kernels.linear.nvfp4._weight import Plan, Weight, operand_dtype
from piper_kernels.weights.nvfp4._layout import ceil_div

FINISH_ROWS, FINISH_OUTPUTS = 4, 512
FEW_ROWS = 64
DECODE_ROWS, DECODE_COLUMNS = 8, 256
# Rows of the weight that are decoded at once stay in the cache until they are multiplied.
DECODED_BYTES = 32 * 2**20
DECODED_PART = 128
_finish_parts = Launcher(finish_kernel)
_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def multiply(
    operand: Tensor,
    input_level: Tensor | None,
    weight: Weight,
    out: Tensor,
    plan: Plan,
    input_factor: float = 1.0,
    *,
    follows: bool = False,
) -> None:
    """Store ``operand @ weight.T * levels + bias``, accumulated in FP32 and rounded once.

    Args:
        operand: ``[rows, width]`` with unit column stride, arranged as the plan says.
        input_level: FP32 scalar second level of the input, or ``None``.
        weight: The weight, with at least one row.
        out: Floating ``[rows, outputs]`` with unit column stride.
        plan: The schedule.
        input_factor: Power of two that the operand was divided by.
        follows: Whether the kernel that wrote the operand is the last one on the stream and lets
            this product start before it ends.
    """
    if isinstance(plan, HopperPlan):
        _multiply_on_hopper(operand, input_level, weight, out, plan, input_factor, follows)
    elif plan.decoded:
        _multiply_decoded(operand, input_level, weight, out, input_factor)
    else:
        _multiply_tiles(operand, input_level, weight, out, plan, input_factor)


def _multiply_on_hopper(
    operand: Tensor,
    input_level: Tensor | None,
    weight: Weight,
    out: Tensor,
    plan: HopperPlan,
    input_factor: float,
    follows: bool,
) -> None:
    from piper_kernels.linear.nvfp4._nvidia import hopper

    target = out
    if plan.splits > 1:
        shape = (plan.splits * operand.shape[0], weight.outputs)
        target = operand.new_empty(shape, dtype=torch.float32)
    processors = sm_count(operand.device)
    hopper.launch(
        operand, input_level, weight, target, plan, processors,
        input_factor=input_factor, follows=follows,
    )  # fmt: skip
    if plan.splits > 1:
        numerics = _numerics(weight, input_level, operand.dtype, native=True)
        levels = (input_level, weight.level, weight.bias)
        _finish(target, levels, out, plan.splits, input_factor, numerics, dependent=True)


def _multiply_tiles(
    operand: Tensor,
    input_level: Tensor | None,
    weight: Weight,
    out: Tensor,
    plan: ProductPlan,
    input_factor: float,
) -> None:
    rows, width = operand.shape
    device = operand.device
    target = accelerator_target(device)
    dtype = operand_dtype(operand.dtype, device)
    partial = plan.splits > 1
    split_depth = ceil_div(ceil_div(width, plan.depth), plan.splits) * plan.depth
    splits = ceil_div(width, split_depth)
    bias = weight.bias
    native = target is not None and target.backend == "cuda" and dtype.itemsize == 2
    numerics = _numerics(weight, input_level, dtype, native=native)
    result = out
    if partial:
        result = operand.new_empty((splits * rows, weight.outputs), dtype=torch.float32)
    tiles = ceil_div(rows, plan.rows) * ceil_div(weight.outputs, plan.outputs)
    levels = (input_level, weight.level, bias)
    bias_stride = 0 if bias is None else bias.stride(0)
    product_kernel[(tiles, splits)](
        operand,
        weight.words(),
        weight.scale.view(torch.uint8),
        *levels,
        result,
        rows,
        weight.outputs,
        weight.features,
        width,
        split_depth,
        weight.scale_columns,
        weight.features // 4,
        operand.stride(0),
        bias_stride,
        result.stride(0),
        input_factor,
        ROWS=plan.rows,
        OUTPUTS=plan.outputs,
        DEPTH=plan.depth,
        GROUP=plan.group,
        PRECISION=dot_precision(device) if dtype == torch.float32 else "ieee",
        ARRANGED=plan.arrangement > 0,
        EVEN=weight.features % plan.depth == 0,
        PARTIAL=partial,
        SWIZZLED=weight.swizzled,
        HIGH_FIRST=weight.high_first,
        FP8=target is not None and target.capability >= (8, 9),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **numerics,
    )
    if partial:
        _finish(result, levels, out, splits, input_factor, numerics)


def _numerics(
    weight: Weight, input_level: Tensor | None, dtype: torch.dtype, *, native: bool
) -> dict[str, Any]:
    """Return the flags that products and their last step share."""
    return {
        "DTYPE": _DTYPES[dtype],
        "LEVEL_X": input_level is not None,
        "LEVEL_W": weight.level is not None,
        "BIAS": weight.bias is not None,
        "NATIVE": native,
    }


def _finish(
    sums: Tensor,
    levels: tuple[Tensor | None, Tensor | None, Tensor | None],
    out: Tensor,
    splits: int,
    input_factor: float,
    numerics: dict[str, Any],
    *,
    dependent: bool = False,
) -> None:
    """Store the sum of ``splits`` parts, scaled, with the bias, rounded once.

    ``dependent`` lets it start while the kernel that stores the parts still runs.
    """
    rows, outputs = out.shape
    bias = levels[2]
    tile_rows = 1 if rows <= FEW_ROWS else FINISH_ROWS
    strides = (0 if bias is None else bias.stride(0), out.stride(0))
    constants = (splits, tile_rows, FINISH_OUTPUTS, *numerics.values(), dependent)
    tensors = (sums, *levels, out)
    _finish_parts(
        ceil_div(rows, tile_rows) * ceil_div(outputs, FINISH_OUTPUTS),
        (*tensors, rows, outputs, *strides, input_factor, *constants),
        {"launch_pdl": True} if dependent else {},
        launch_key(tensors, rows >> 31, outputs, strides, constants),
    )


def _multiply_decoded(
    operand: Tensor,
    input_level: Tensor | None,
    weight: Weight,
    out: Tensor,
    input_factor: float,
) -> None:
    """Decode parts of the weight once, let the library sum in FP32, then scale and round."""
    features = operand.shape[1]
    numerics = _numerics(weight, input_level, operand.dtype, native=False)
    part = max(DECODED_PART, DECODED_BYTES // (2 * features) // DECODED_PART * DECODED_PART)
    for first in range(0, weight.outputs, part):
        count = min(part, weight.outputs - first)
        dense = operand.new_empty((count, features))
        grid = (triton.cdiv(count, DECODE_ROWS) * triton.cdiv(features, DECODE_COLUMNS),)
        packed_operand_kernel[grid](
            weight.qdata,
            weight.scale.view(torch.uint8),
            dense,
            first,
            count,
            features,
            features,
            weight.scale_columns,
            SWIZZLED=weight.swizzled,
            HIGH_FIRST=weight.high_first,
            ARRANGEMENT=0,
            ROWS=DECODE_ROWS,
            COLUMNS=DECODE_COLUMNS,
        )
        bias = None if weight.bias is None else weight.bias[first : first + count]
        levels = (input_level, weight.level, bias)
        result = out[:, first : first + count]
        _finish(_fp32_product(operand, dense), levels, result, 1, input_factor, numerics)


def _fp32_product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right.T`` in FP32, accumulated in FP32."""
    if left.is_cuda and left.dtype.itemsize == 2:
        return torch.mm(left, right.t(), out_dtype=torch.float32)
    return product(left.float(), right.float().t())
