"""Execution of ConvRot INT8 convolutions with kernels. Importing needs Triton."""

import torch
from torch import Tensor

from piper_kernels._triton.targets import AcceleratorTarget, accelerator_target, sm_count
from piper_kernels.conv3d.convrot.int8 import _launch, _plan
from piper_kernels.conv3d.convrot.int8._geometry import Geometry
from piper_kernels.conv3d.convrot.int8._nvidia import hopper_plan
from piper_kernels.conv3d.convrot.int8._operands import Filter, Normalization
from piper_kernels.linear.convrot.int8._selection import hopper_is_installed

_HOPPER = (9, 0)


def conv3d(
    input: Tensor,  # noqa: A002  # the name in torch
    weight: Filter,
    geometry: Geometry,
    residual: Tensor | None = None,
    norm: Normalization | None = None,
) -> Tensor:
    """Prepare the voxels of the input, then multiply; see ``reference.conv3d``."""
    processors = sm_count(input.device)
    codes = prepare_voxels(input, weight, geometry, norm, processors)
    return convolve(codes, weight, geometry, residual, processors)


def prepare_voxels(
    input: Tensor,  # noqa: A002
    weight: Filter,
    geometry: Geometry,
    norm: Normalization | None,
    processors: int,
) -> Tensor:
    """Return padded codes with the schedule of the device; see ``_launch.prepare_voxels``."""
    if _has_hopper_kernels(input.device):
        from piper_kernels.conv3d.convrot.int8._nvidia import hopper_preparation

        plan = hopper_preparation.plan_voxels(weight.group_size, geometry.channels)
        return hopper_preparation.prepare_voxels(input, weight, geometry, plan, norm, processors)
    tile = _plan.plan_voxels(weight.group_size)
    return _launch.prepare_voxels(input, weight, geometry, tile, norm, processors)


def convolve(
    codes: Tensor, weight: Filter, geometry: Geometry, residual: Tensor | None, processors: int
) -> Tensor:
    """Multiply padded codes with the schedule of the device; see ``_launch.convolve``."""
    if residual is not None:
        residual = residual.contiguous()
    if _has_hopper_kernels(codes.device):
        from piper_kernels.conv3d.convrot.int8._nvidia import hopper

        if hopper.is_usable(weight.qdata):
            plan = hopper_plan.select_plan(
                geometry.outputs,
                geometry.channels,
                geometry.out_height,
                geometry.out_width,
                geometry.batch * geometry.out_frames,
                processors,
            )
            return hopper.convolve(codes, weight, geometry, residual, plan, processors)
    plan = _plan.select_plan(_target(codes.device), geometry.outputs, geometry.channels)
    return _launch.convolve(codes, weight, geometry, residual, plan)


def _target(device: torch.device) -> AcceleratorTarget:
    target = accelerator_target(device)
    assert target is not None  # for the type checker: this backend was selected
    return target


def _has_hopper_kernels(device: torch.device) -> bool:
    target = _target(device)
    return target.backend == "cuda" and target.capability == _HOPPER and hopper_is_installed()
