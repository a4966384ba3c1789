"""Selection of the code that executes ConvRot INT8 convolutions on a device."""

from typing import Protocol

import torch
from torch import Tensor

from piper_kernels._triton.runtime import support
from piper_kernels._triton.targets import accelerator_target
from piper_kernels.conv3d.convrot.int8 import _plan, reference
from piper_kernels.conv3d.convrot.int8._geometry import Geometry
from piper_kernels.conv3d.convrot.int8._operands import Filter, Normalization


class ConvolutionBackend(Protocol):
    """What an execution backend provides; shapes and maths are those of the reference."""

    def conv3d(
        self,
        input: Tensor,  # noqa: A002  # the name in torch
        weight: Filter,
        geometry: Geometry,
        residual: Tensor | None = None,
        norm: Normalization | None = None,
    ) -> Tensor:
        """Return the convolution of a floating input."""
        ...


def native_support(device: torch.device) -> tuple[bool, str]:
    """Return whether a device runs the kernels of convolutions, and the reason when it does not."""
    usable, reason = support(device)
    target = accelerator_target(device)
    if not usable or target is None:
        return False, reason
    return _plan.supports(target)


def select_backend(device: torch.device) -> ConvolutionBackend:
    """Return the backend of a device; operators ask at execution time."""
    if not native_support(device)[0]:
        return reference
    from piper_kernels.conv3d.convrot.int8 import _triton_backend

    return _triton_backend
