"""Launcher of the Gluon product of NVFP4 weights for Hopper. Importing needs Triton with Gluon."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from piper_kernels.linear.nvfp4._nvidia.hopper_plan import HopperPlan
from piper_kernels.linear.nvfp4._nvidia.hopper_product_kernel import hopper_product_kernel
from piper_kernels.linear.nvfp4._nvidia.hopper_stream_kernel import hopper_stream_kernel

COPY_REGISTERS = 24
ARRANGE_REGISTERS = 112  # beside eight warps that multiply
# Decoded weights are divided by it.
OPERAND_FACTOR = 2.0**8


@cache
def operand_layout(rows: int, columns: int, bits: int) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a tile with rows of 128 bytes.

    Args:
        rows: Rows of the tile.
        columns: Columns of the tile.
        bits: Bits of an element, 16 or 32.
    """
    return gl.NVMMASharedLayout.get_default_for([rows, columns], {16: gl.int16, 32: gl.int32}[bits])


@cache
def options_of(
    plan: HopperPlan, *, high_first: bool, levels: tuple[bool, bool], bias: bool
) -> dict[str, Any]:
    """Return the constants and launch options of a plan's kernel.

    Args:
        plan: The schedule.
        high_first: Whether the even feature is the high nibble of a byte.
        levels: Whether the input and the weight have a second scale level.
        bias: Whether there is a bias.
    """
    options: dict[str, Any] = {
        "W_STAGES": plan.w_stages,
        "SPLITS": plan.splits,
        "HIGH_FIRST": high_first,
        "LEVEL_X": levels[0],
        "LEVEL_W": levels[1],
        "BIAS": bias,
        "COPY_REGISTERS": COPY_REGISTERS,
        "num_warps": plan.num_warps,
    }
    if plan.held_steps:
        return options | {
            "ROWS": plan.rows,
            "STEPS": plan.held_steps,
            "CHUNKS": max(1, plan.held_steps // plan.chunk),
            "HELD": operand_layout(4 * plan.held_steps * plan.rows, 64, 16),
            "ARRANGE_REGISTERS": ARRANGE_REGISTERS,
        }
    return options | {"X_STAGES": plan.x_stages, "GROUP": plan.group}


def launch(
    operand: Tensor,
    input_level: Tensor | None,
    qdata: Tensor,
    scale: Tensor,
    level: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    plan: HopperPlan,
    sm_count: int,
    *,
    high_first: bool,
    input_factor: float = 1.0,
) -> None:
    """Store ``operand @ weight.T * levels + bias``, or FP32 sums of the parts of a split plan.

    Args:
        operand: bf16 ``[rows, features]`` with unit column stride, arranged as the plan says.
        input_level: FP32 scalar second level of the input, or ``None``.
        qdata: uint8 ``[outputs, features / 2]``, contiguous, 16-byte aligned.
        scale: Swizzled float8_e4m3fn block scales, contiguous, 16-byte aligned.
        level: FP32 scalar second level of the weight, or ``None``.
        bias: Floating ``[outputs]`` of any stride, or ``None``.
        out: ``[rows, outputs]`` with unit column stride, or FP32 ``[splits * rows, outputs]``.
        plan: The schedule.
        sm_count: Multiprocessors of the device.
        high_first: Whether the even feature is the high nibble of a byte.
        input_factor: Power of two that the operand was divided by.
    """
    rows, features = operand.shape
    outputs = qdata.shape[0]
    words = qdata.view(torch.int16)
    scale_words = scale.view(-1).view(torch.int32).view(-1, 32)
    w_block = [plan.outputs, 64]
    w_descriptors = (
        TensorDescriptor.from_tensor(words, w_block, operand_layout(*w_block, 16)),
        TensorDescriptor.from_tensor(scale_words, [16, 32], operand_layout(16, 32, 32)),
    )
    epilogue = (input_level, level, bias, out, rows, outputs, features)
    strides = (0 if bias is None else bias.stride(0), out.stride(0))
    factor = input_factor * OPERAND_FACTOR
    levels = input_level is not None, level is not None
    options = options_of(plan, high_first=high_first, levels=levels, bias=bias is not None)
    output_tiles = triton.cdiv(outputs, plan.outputs)
    if plan.held_steps:
        hopper_stream_kernel[(output_tiles, plan.splits)](
            operand, *w_descriptors, *epilogue, operand.stride(0), *strides, factor,
            launch_pdl=True, **options,
        )  # fmt: skip
        return
    x_block = [plan.rows, 64]
    x_descriptor = TensorDescriptor.from_tensor(operand, x_block, operand_layout(*x_block, 16))
    units = triton.cdiv(rows, plan.rows) * output_tiles * plan.splits
    hopper_product_kernel[(min(units, sm_count),)](
        x_descriptor, *w_descriptors, *epilogue, *strides, factor, **options
    )
