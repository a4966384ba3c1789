"""Launcher of the Gluon preparation for Hopper. Importing needs Triton with Gluon."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from piper_kernels._triton.runtime import launch_guard
from piper_kernels.conv3d.convrot.int8._geometry import Geometry
from piper_kernels.conv3d.convrot.int8._launch import frame_statistics
from piper_kernels.conv3d.convrot.int8._nvidia.hopper_preparation_kernel import (
    hopper_prepare_kernel,
)
from piper_kernels.conv3d.convrot.int8._operands import Filter, Normalization

BLOCK_CHANNELS = 64
_WARP_VOXELS = 16


@dataclass(frozen=True)
class VoxelPlan:
    """What a program prepares.

    Attributes:
        voxels: Voxels of a frame, 16 for each warp.
        blocks: Blocks of 64 channels: 1, 2 or 4.
    """

    voxels: int
    blocks: int

    @property
    def num_warps(self) -> int:
        """Warps of a program."""
        return self.voxels // _WARP_VOXELS


def plan_voxels(group_size: int, channels: int) -> VoxelPlan:
    """Return what a program prepares: whole rotation groups, 128 channels where there are."""
    if group_size == 4 * BLOCK_CHANNELS:
        return VoxelPlan(64, 4)
    return VoxelPlan(64, min(2, channels // BLOCK_CHANNELS))


def load_layout(plan: VoxelPlan, last: bool) -> gl.DistributedLinearLayout | gl.BlockedLayout:
    """Return the layout in which a block is loaded.

    Args:
        plan: What a program prepares.
        last: Whether channels are side by side: then a thread has the channels that fragments of
            the product give it, 16 of two voxels. Otherwise it has eight voxels of channels.
    """
    if last:
        return _rows_of_threads(plan, 16)
    lanes = plan.voxels // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [plan.num_warps, 1], [1, 0])


def store_layout(plan: VoxelPlan) -> gl.DistributedLinearLayout:
    """Return the layout of the words of a block: 16 bytes of two voxels for each thread."""
    return _rows_of_threads(plan, 4)


def shared_layout() -> gl.SwizzledSharedLayout:
    """Return the layout of a transposed block in shared memory."""
    return gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0])


def _rows_of_threads(plan: VoxelPlan, vector: int) -> gl.DistributedLinearLayout:
    """Return a layout of ``[voxels, 4 * vector]`` with the rows of the accumulators."""
    columns = [[0, 1 << bit] for bit in range(vector.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[*columns, [8, 0]],
        lane_bases=[[0, vector], [0, 2 * vector], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[_WARP_VOXELS << bit, 0] for bit in range(plan.num_warps.bit_length() - 1)],
        block_bases=[],
        shape=[plan.voxels, 4 * vector],
    )


def prepare_voxels(
    input: Tensor,  # noqa: A002  # the name in torch
    weight: Filter,
    geometry: Geometry,
    plan: VoxelPlan,
    norm: Normalization | None,
    processors: int,
) -> Tensor:
    """Return the codes of the padded frames; see ``_launch.prepare_voxels``.

    Rows and columns that only complete a step of the stride are not written.
    """
    frames = geometry.batch * geometry.frames
    stored = (geometry.stored_height, geometry.stored_width)
    codes = torch.empty((frames, *stored, geometry.channels), dtype=torch.int8, device=input.device)
    numbers = [weight.input_scale] * 4
    if norm is not None:
        parameters = (norm.weight.contiguous(), norm.bias.contiguous())
        numbers = [*frame_statistics(input, norm, processors), *parameters]
    groups = 0 if norm is None else norm.groups
    tiles = -(-geometry.height * geometry.width // plan.voxels)
    programs = frames * tiles * (geometry.channels // (BLOCK_CHANNELS * plan.blocks))
    n, c, t, h, w = input.stride()
    with launch_guard(input.device):
        hopper_prepare_kernel[(programs,)](
            input, codes.view(torch.int32), weight.input_scale, *numbers, geometry.frames,
            geometry.height, geometry.width, stored[1], stored[0] * stored[1], tiles, groups,
            n, t, c, h, w, CHANNELS=geometry.channels, VOXELS=plan.voxels, BLOCKS=plan.blocks,
            GROUP=weight.group_size, NORM_CHANNELS=geometry.channels // groups if groups else 0,
            BEFORE=geometry.before, AFTER=geometry.after, FLAT=h == w * geometry.width,
            LAST=c == 1, LOAD=load_layout(plan, c == 1), SHARED=shared_layout(),
            STORE=store_layout(plan), num_warps=plan.num_warps,
        )  # fmt: skip
    return codes
