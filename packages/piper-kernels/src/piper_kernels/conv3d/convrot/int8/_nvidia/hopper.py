"""Launcher of the Gluon convolution for Hopper. Importing needs Triton with Gluon."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from piper_kernels._triton.runtime import launch_guard
from piper_kernels.conv3d.convrot.int8._geometry import TAPS, Geometry
from piper_kernels.conv3d.convrot.int8._nvidia.hopper_kernel import hopper_conv3d_kernel
from piper_kernels.conv3d.convrot.int8._nvidia.hopper_plan import HopperPlan, box_tiles
from piper_kernels.conv3d.convrot.int8._operands import Filter
from piper_kernels.linear.convrot.int8._nvidia.hopper import store_layout

COPY_REGISTERS = 24
ALIGNMENT = 16
SENT_VOXELS = 64
SENT_WIDTHS = (16, 32, 64)
"""Box widths whose rows are 32 to 128 bytes, which TMA swizzles."""

_REGISTERS = 65_536


def is_usable(qdata: Tensor) -> bool:
    """Return whether TMA can read a filter: it starts at a multiple of 16 bytes."""
    return qdata.data_ptr() % ALIGNMENT == 0


def tile_layout(*block: int) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of an int8 tile."""
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.int8)


def code_block(plan: HopperPlan) -> list[int]:
    """Return the block of codes that one copy reads; see ``hopper_conv3d_kernel``."""
    return [1, plan.box_height, 1, plan.box_width, plan.depth]


def code_view(geometry: Geometry) -> tuple[list[int], list[int]]:
    """Return shape and strides of padded codes as the kernel sees them.

    The filter at row ``dy`` meets row ``dy % stride`` of the step ``y + dy // stride``, so rows
    become steps and their phases; likewise columns, whose phases join the channels.
    """
    _, step_h, step_w = geometry.stride
    height, width = geometry.stored_height, geometry.stored_width
    channels = geometry.channels
    shape = [
        geometry.batch * geometry.frames,
        height // step_h,
        step_h,
        width // step_w,
        step_w * channels,
    ]
    row = width * channels
    return shape, [height * row, step_h * row, row, step_w * channels, 1]


def out_block(plan: HopperPlan) -> list[int]:
    """Return the block of outputs that one copy stores; see ``hopper_conv3d_kernel``."""
    rows = SENT_VOXELS // plan.box_width
    return [1, plan.outputs, 1, rows, plan.box_width]


def out_layout(plan: HopperPlan) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of ``out_block``."""
    return gl.NVMMASharedLayout.get_default_for(out_block(plan), gl.float16)


def sends(plan: HopperPlan, out_width: int, residual: Tensor | None) -> bool:
    """Return whether TMA stores the outputs of a plan: rows start at multiples of 16 bytes."""
    return residual is None and out_width % 8 == 0 and plan.box_width in SENT_WIDTHS


def max_registers(plan: HopperPlan) -> int | None:
    """Return the registers of a thread with which several programs fit on a multiprocessor."""
    if plan.programs_per_sm == 1:
        return None
    # The copying warp counts as four.
    threads = 32 * (plan.num_warps + 4) * plan.programs_per_sm
    return _REGISTERS // threads // 8 * 8


def spans_wide(geometry: Geometry, plan: HopperPlan) -> bool:
    """Return whether offsets between the outputs of a tile need 64 bits."""
    plane = geometry.out_frames * geometry.out_height * geometry.out_width
    return plan.outputs * plane >= 1 << 31


def convolve(
    codes: Tensor,
    weight: Filter,
    geometry: Geometry,
    residual: Tensor | None,
    plan: HopperPlan,
    processors: int,
) -> Tensor:
    """Convolve padded codes with a filter that ``is_usable``; see ``_launch.convolve``."""
    out = torch.empty(geometry.out_shape, dtype=torch.float16, device=codes.device)
    bias = weight.scale if weight.bias is None else weight.bias
    block = code_block(plan)
    shape, strides = code_view(geometry)
    code_desc = TensorDescriptor(codes, shape, strides, block, tile_layout(*block))
    depth = TAPS**3 * geometry.channels
    tile = [plan.outputs, plan.depth]
    rows = weight.qdata.view(geometry.outputs, depth)
    weight_desc = TensorDescriptor(rows, [geometry.outputs, depth], [depth, 1], tile,
                                   tile_layout(*tile))  # fmt: skip
    out_desc, buffers = code_desc, 0
    if sends(plan, geometry.out_width, residual):
        out_desc = TensorDescriptor(out, list(out.shape), list(out.stride()), out_block(plan),
                                    out_layout(plan))  # fmt: skip
        buffers = plan.buffers
    units = box_tiles(plan, geometry.out_height, geometry.out_width)
    units *= geometry.batch * geometry.out_frames * -(-geometry.outputs // plan.outputs)
    with launch_guard(codes.device):
        hopper_conv3d_kernel[(min(units, processors * plan.programs_per_sm),)](
            code_desc, weight_desc, out_desc, weight.input_scale, weight.scale, bias,
            out if residual is None else residual, out, geometry.batch, geometry.outputs,
            geometry.frames, *geometry.out_shape[2:], bias.stride(0), *geometry.stride,
            CHANNELS=geometry.channels, STAGES=plan.stages,
            STORE=store_layout(plan.outputs, plan.voxels, plan.num_warps),
            HAS_BIAS=weight.bias is not None, HAS_RESIDUAL=residual is not None,
            WIDE=spans_wide(geometry, plan), BUFFERS=buffers,
            COPY_REGISTERS=COPY_REGISTERS, num_warps=plan.num_warps,
            maxnreg=max_registers(plan), enable_fp_fusion=False,
        )  # fmt: skip
    return out
