"""Launcher of the Gluon matrix product for Hopper. Importing needs Triton with Gluon."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from piper_kernels._triton.addresses import Address
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
def store_layout(
    block_m: int, block_n: int, num_warps: int, element_size: int = 2
) -> gl.DistributedLinearLayout:
    """Return a layout of a tile whose threads hold 16 bytes of columns side by side.

    A warp has the rows that it has in the layout of the accumulators, so a conversion between
    the two exchanges values within groups of four threads only.
    """
    vector = 16 // element_size
    columns, rows = [], []
    size = 4 * vector
    while size < block_n:
        columns.append([0, size])
        size *= 2
    size = 16 * num_warps
    while size < block_m:
        rows.append([size, 0])
        size *= 2
    side_by_side = [[0, 1 << bit] for bit in range(vector.bit_length() - 1)]
    warps = [[16 << bit, 0] for bit in range(num_warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[*side_by_side, [8, 0], *columns, *rows],
        lane_bases=[[0, vector], [0, 2 * vector], [1, 0], [2, 0], [4, 0]],
        warp_bases=warps,
        block_bases=[],
        shape=[block_m, block_n],
    )


def is_usable(input_qdata: Tensor, first: Projection, second: Projection | None) -> bool:
    """Return whether TMA can read the operands: rows side by side, each 16-byte aligned."""
    if not _is_readable(input_qdata) or not _is_readable(first[0]):
        return False
    return second is None or _is_readable(second[0])


def _is_readable(codes: Tensor) -> bool:
    stride = codes.stride(0)
    return (codes.data_ptr() | stride) % ALIGNMENT == 0 and stride >= codes.shape[1]


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
    split = plan.split_k
    target = out
    if split > 1:
        parts = (split, rows, columns * (1 if second is None else 2))
        target = torch.empty(parts, dtype=torch.int32, device=out.device)
    tile = (plan.block_n, plan.block_k)
    x_desc = code_descriptor(input_qdata.data_ptr(), rows, depth, input_qdata.stride(0),
                             plan.block_m, plan.block_k)  # fmt: skip
    w_desc = code_descriptor(first[0].data_ptr(), columns, depth, depth, *tile)
    second_desc = None
    if second is not None:
        second_desc = code_descriptor(second[0].data_ptr(), columns, depth, depth, *tile)
    programs, constants, options = _schedule(
        plan, rows, columns, flags, sm_count, out.element_size()
    )
    numbers = (columns, depth, out.stride(0), *strides)
    with launch_guard(out.device):
        _matmul(
            programs,
            (x_desc, w_desc, second_desc, *tensors, target, rows, *numbers, *constants),
            options,
            product_key(target, tensors, (rows >> 31, *numbers, plan, flags)),
        )
        if split > 1:
            sum_parts(target, input_scale, first, second, out)


@lru_cache(maxsize=4096)
def code_descriptor(
    start: int, rows: int, depth: int, stride: int, block_rows: int, block_depth: int
) -> TensorDescriptor:
    """Return the TMA description of int8 ``[rows, depth]`` at an address, read in tiles."""
    block = [block_rows, block_depth]
    layout = operand_layout(block_rows, block_depth)
    return TensorDescriptor(Address(start), [rows, depth], [stride, 1], block, layout)


@lru_cache(maxsize=4096)
def _schedule(
    plan: HopperPlan,
    rows: int,
    columns: int,
    flags: tuple[bool, bool, bool],
    sm_count: int,
    element_size: int,
) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
    """Return the programs of a launch, its constants and its compiler options."""
    units = ceil_div(rows, plan.block_m) * ceil_div(columns, plan.block_n) * plan.split_k
    units *= 2 if flags[0] else 1
    store = store_layout(plan.block_m, plan.block_n, plan.num_warps, element_size)
    constants = (plan.stages, plan.group_m, plan.split_k, store, *flags, COPY_REGISTERS)
    options = {
        "num_warps": plan.num_warps,
        "maxnreg": max_registers(plan),
        "enable_fp_fusion": False,
    }
    return min(units, sm_count * plan.programs_per_sm), constants, options


def max_registers(plan: HopperPlan) -> int | None:
    """Return the registers of a thread with which several programs fit on a multiprocessor."""
    if plan.programs_per_sm == 1:
        return None
    # The copying warp counts as four.
    threads = 32 * (plan.num_warps + 4) * plan.programs_per_sm
    return _REGISTERS // threads // 8 * 8
