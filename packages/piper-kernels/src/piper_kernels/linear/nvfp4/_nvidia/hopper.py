"""Launchers of the Gluon products of NVFP4 weights for Hopper. Needs Triton with Gluon."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from piper_kernels._triton.addresses import Address
from piper_kernels._triton.launching import Launcher, launch_key
from piper_kernels.linear.nvfp4._nvidia.hopper_plan import HopperPlan
from piper_kernels.linear.nvfp4._nvidia.hopper_product_kernel import hopper_product_kernel
from piper_kernels.linear.nvfp4._nvidia.hopper_stream_kernel import hopper_stream_kernel
from piper_kernels.linear.nvfp4._weight import Weight
from piper_kernels.weights.nvfp4._layout import ceil_div

COPY_REGISTERS = 24
ARRANGE_REGISTERS = 112  # beside eight warps that multiply
SECOND_REGISTERS = 88
# Decoded weights are divided by it.
OPERAND_FACTOR = 2.0**8

_product = Launcher(hopper_product_kernel)
_stream = Launcher(hopper_stream_kernel)


@cache
def operand_layout(rows: int, columns: int, bits: int) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a tile with rows of 128 bytes.

    Args:
        rows: Rows of the tile.
        columns: Columns of the tile.
        bits: Bits of an element, 16 or 32.
    """
    return gl.NVMMASharedLayout.get_default_for([rows, columns], {16: gl.int16, 32: gl.int32}[bits])


def constants_of(
    plan: HopperPlan,
    *,
    high_first: bool,
    levels: tuple[bool, bool],
    bias: bool,
    follows: bool = False,
) -> dict[str, Any]:
    """Return the constants of a plan's kernel, in its order.

    Args:
        plan: The schedule.
        high_first: Whether the even feature is the high nibble of a byte.
        levels: Whether the input and the weight have a second scale level.
        bias: Whether there is a bias.
        follows: See ``launch``.
    """
    flags = {"HIGH_FIRST": high_first, "LEVEL_X": levels[0], "LEVEL_W": levels[1], "BIAS": bias}
    if not plan.held_steps:
        cut: dict[str, Any] = {
            "X_STAGES": plan.x_stages,
            "W_STAGES": plan.w_stages,
            "GROUP": plan.group,
            "SPLITS": plan.splits,
        }
        return cut | flags | {"COPY_REGISTERS": COPY_REGISTERS}
    cut = {
        "ROWS": plan.rows,
        "STEPS": plan.held_steps,
        "W_STAGES": plan.w_stages,
        "SPLITS": plan.splits,
        "HELD": operand_layout(4 * plan.held_steps * plan.rows, 64, 16),
    }
    rest = {
        "CHUNKS": max(1, plan.held_steps // plan.chunk),
        "ARRANGE_REGISTERS": ARRANGE_REGISTERS,
        "COPY_REGISTERS": COPY_REGISTERS,
        "FOLLOWS": follows,
        "TURNS": plan.turns,
        "SECOND_REGISTERS": SECOND_REGISTERS,
    }
    return cut | flags | rest


def launch(
    operand: Tensor,
    input_level: Tensor | None,
    weight: Weight,
    out: Tensor,
    plan: HopperPlan,
    sm_count: int,
    *,
    input_factor: float = 1.0,
    follows: bool = False,
) -> None:
    """Store ``operand @ weight.T * levels + bias``, or FP32 sums of the parts of a split plan.

    Args:
        operand: bf16 ``[rows, features]`` with unit column stride, arranged as the plan says.
        input_level: FP32 scalar second level of the input, or ``None``.
        weight: The weight; codes and swizzled scales start at multiples of 16 bytes.
        out: ``[rows, outputs]`` with unit column stride, or FP32 ``[splits * rows, outputs]``.
        plan: The schedule.
        sm_count: Multiprocessors of the device.
        input_factor: Power of two that the operand was divided by.
        follows: Whether the last kernel on the stream is the one that wrote the operand, started
            when all before it had ended, and lets this one start before it ends. The weight of
            few rows is then read while that one runs.
    """
    rows, features = operand.shape
    outputs, bias = weight.outputs, weight.bias
    codes = (
        descriptor(weight.qdata.data_ptr(), torch.int16, outputs, features // 4, plan.outputs, 64),
        descriptor(weight.scale.data_ptr(), torch.int32, weight.scale.numel() // 128, 32, 16, 32),
    )
    epilogue = (input_level, weight.level, bias, out)
    levels = (input_level is not None, weight.level is not None)
    strides = (0 if bias is None else bias.stride(0), out.stride(0))
    factor = input_factor * OPERAND_FACTOR
    output_tiles = ceil_div(outputs, plan.outputs)
    follows = follows and plan.held_steps > 0
    constants = _constant_values(plan, weight.high_first, levels, bias is not None, follows)
    options = {"num_warps": plan.num_warps, "launch_pdl": True}
    if plan.held_steps:
        numbers = (outputs, features, operand.stride(0), *strides)
        key = launch_key((operand, *epilogue), numbers, plan, constants)
        arguments = (operand, *codes, *epilogue, rows, *numbers, factor, *constants)
        _stream(output_tiles * plan.splits, arguments, options, key)
        return
    x = descriptor(operand.data_ptr(), operand.dtype, rows, features, plan.rows, 64)
    units = ceil_div(rows, plan.rows) * output_tiles * plan.splits
    numbers = (outputs, features, *strides)
    key = launch_key(epilogue, rows >> 31, numbers, plan, constants)
    arguments = (x, *codes, *epilogue, rows, *numbers, factor, *constants)
    _product(min(units, sm_count), arguments, options, key)


@lru_cache(maxsize=1024)
def _constant_values(
    plan: HopperPlan, high_first: bool, levels: tuple[bool, bool], bias: bool, follows: bool
) -> tuple[Any, ...]:
    constants = constants_of(plan, high_first=high_first, levels=levels, bias=bias, follows=follows)
    return tuple(constants.values())


@lru_cache(maxsize=4096)
def descriptor(
    start: int, dtype: torch.dtype, rows: int, columns: int, block_rows: int, block_columns: int
) -> TensorDescriptor:
    """Return the TMA description of contiguous ``[rows, columns]``, read in tiles."""
    block = [block_rows, block_columns]
    layout = operand_layout(*block, 8 * dtype.itemsize)
    return TensorDescriptor(Address(start, dtype), [rows, columns], [columns, 1], block, layout)
