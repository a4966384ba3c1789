"""Execution of ConvRot INT8 convolutions with kernels. Importing needs Triton."""

from torch import Tensor

from piper_kernels._triton.targets import accelerator_target, sm_count
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
    tile = _plan.plan_voxels(weight.group_size)
    codes = _launch.prepare_voxels(input, weight, geometry, tile, norm, processors)
    return convolve(codes, weight, geometry, residual, processors)


def convolve(
    codes: Tensor, weight: Filter, geometry: Geometry, residual: Tensor | None, processors: int
) -> Tensor:
    """Multiply padded codes with the schedule of the device; see ``_launch.convolve``."""
    target = accelerator_target(codes.device)
    assert target is not None  # for the type checker: this backend was selected
    if residual is not None:
        residual = residual.contiguous()
    if target.backend == "cuda" and target.capability == _HOPPER and hopper_is_installed():
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
    plan = _plan.select_plan(target, geometry.outputs, geometry.channels)
    return _launch.convolve(codes, weight, geometry, residual, plan)
