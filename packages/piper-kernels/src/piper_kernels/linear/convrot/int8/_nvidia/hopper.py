"""Launcher of the Gluon matrix product for Hopper. Importing needs Triton with Gluon."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from piper_kernels._triton.launching import Launcher
from piper_kernels._triton.runtime import launch_guard
from piper_kernels.linear.convrot.int8._launch import epilogue_arguments, product_key, sum_parts
from piper_kernels.linear.convrot.int8._nvidia.hopper_kernel import hopper_matmul_kernel
from piper_kernels.linear.convrot.int8._nvidia.hopper_plan import HopperPlan
from piper_kernels.linear.convrot.int8._outputs import Projection
from piper_kernels.linear.convrot.int8._plan import ceil_div

COPY_REGISTERS = 24
ALIGNMENT = 16
_REGISTERS = 65_536

_matmul = Launcher(hopper_matmul_kernel)


@cache
def operand_layout(rows: int, depth: int) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of an int8 tile."""
    return gl.NVMMASharedLayout.get_default_for([rows, depth], gl.int8)


@cache
def store_layout(block_m: int, block_n: int, num_warps: int) -> gl.DistributedLinearLayout:
    """Return a layout of a tile whose threads hold 8 columns side by side.

    A warp has the rows that it has in the layout of the accumulators, so a conversion between
    the two exchanges values within groups of four threads only.
    """
    columns, rows = [], []
    size = 32
    while size < block_n:
        columns.append([0, size])
        size *= 2
    size = 16 * num_warps
    while size < block_m:
        rows.append([size, 0])
        size *= 2
    warps = [[16 << bit, 0] for bit in range(num_warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *columns, *rows],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=warps,
        block_bases=[],
        shape=[block_m, block_n],
    )


def is_usable(input_qdata: Tensor, first: Projection, second: Projection | None) -> bool:
    """Return whether TMA can read the operands: rows side by side, each 16-byte aligned."""
    codes = [input_qdata, first[0]] + ([] if second is None else [second[0]])
    return all(
        tensor.data_ptr() % ALIGNMENT == 0
        and tensor.stride(0) % ALIGNMENT == 0
        and tensor.stride(0) >= tensor.shape[1]
        for tensor in codes
    )


def matmul(
    input_qdata: Tensor,
    input_scale: Tensor,
    first: Projection,
    second: Projection | None,
    out: Tensor,
    plan: HopperPlan,
    sm_count: int,
) -> None:
    """Multiply prepared rows by one or two weights that ``is_usable``; see ``_launch.matmul``."""
    rows, depth = input_qdata.shape
    columns = first[0].shape[0]
    tensors, strides, flags = epilogue_arguments(input_scale, first, second)
    all_columns = columns * (1 if second is None else 2)
    split = plan.split_k
    target = out
    if split > 1:
        target = torch.empty((split, rows, all_columns), dtype=torch.int32, device=out.device)
    x_desc = _descriptor(input_qdata, plan.block_m, plan.block_k)
    w_desc = _descriptor(first[0], plan.block_n, plan.block_k)
    second_desc = None if second is None else _descriptor(second[0], plan.block_n, plan.block_k)
    units = ceil_div(rows, plan.block_m) * ceil_div(columns, plan.block_n) * split
    units *= 1 if second is None else 2
    numbers = (columns, depth, out.stride(0), *strides)
    key = product_key(target, tensors, (rows >> 31, *numbers, plan, *flags.values()))
    constants = (
        plan.stages,
        plan.group_m,
        split,
        store_layout(plan.block_m, plan.block_n, plan.num_warps),
        *flags.values(),
        COPY_REGISTERS,
    )
    with launch_guard(out.device):
        _matmul(
            min(units, sm_count * plan.programs_per_sm),
            (x_desc, w_desc, second_desc, *tensors, target, rows, *numbers, *constants),
            {
                "num_warps": plan.num_warps,
                "maxnreg": max_registers(plan),
                "enable_fp_fusion": False,
            },
            key,
        )
        if split > 1:
            sum_parts(target, input_scale, first, second, out)


def _descriptor(codes: Tensor, rows: int, depth: int) -> TensorDescriptor:
    """Return the TMA description of a matrix that is read in tiles."""
    return TensorDescriptor.from_tensor(codes, [rows, depth], operand_layout(rows, depth))


def max_registers(plan: HopperPlan) -> int | None:
    """Return the registers of a thread with which several programs fit on a multiprocessor."""
    if plan.programs_per_sm == 1:
        return None
    # The copying warp counts as four.
    threads = 32 * (plan.num_warps + 4) * plan.programs_per_sm
    return _REGISTERS // threads // 8 * 8
