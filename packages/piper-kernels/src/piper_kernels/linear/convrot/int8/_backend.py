"""Selection of the code that executes ConvRot INT8 operators on a device."""

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from piper_kernels._triton.runtime import supports_device
from piper_kernels._triton.targets import accelerator_target
from piper_kernels.linear.convrot.int8._outputs import Projection
from piper_kernels.linear.convrot.int8._portable import PortableBackend
from piper_kernels.linear.convrot.int8._selection import supports_matmul


class LinearBackend(Protocol):
    """What an execution backend provides; shapes and maths are those of the reference."""

    def linear(
        self,
        input: Tensor,  # noqa: A002  # the name of F.linear
        weight_qdata: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        group_size: int,
        activation_fn: str | None = None,
        input_scale: Tensor | None = None,
    ) -> Tensor:
        """Return the linear of a floating input."""
        ...

    def prepare_input(
        self,
        input: Tensor,  # noqa: A002
        group_size: int,
        activation_fn: str | None = None,
        input_scale: Tensor | None = None,
        *,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the codes and row scales of a floating input.

        With ``out`` they are written into it and it is returned: int8 ``[..., K]`` and FP32
        ``[...]``, both contiguous.
        """
        ...

    def linear_prepared(
        self,
        input_qdata: Tensor,
        input_scale: Tensor,
        weight_qdata: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        logical_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
        second_projection: Projection | None = None,
    ) -> Tensor:
        """Return the linear of a prepared input.

        With ``second_projection = (qdata, scale, bias)``, a weight of equal shape, its columns
        follow those of the first in one output ``[..., 2 * N]``. With ``out`` the result is
        written into it and it is returned; its rows may be any fixed distance apart.
        """
        ...

    def dequantized_input_mean(
        self, input_qdata: Tensor, input_scale: Tensor, block_lengths: Tensor | None = None
    ) -> Tensor:
        """Return the mean over a sequence of what prepared inputs stand for."""
        ...


_PORTABLE = PortableBackend()


def select_linear_backend(device: torch.device) -> LinearBackend:
    """Return the backend that executes linear operators on a device.

    Operators ask at execution time, so a compiled graph follows a change of backend.
    """
    if not supports_device(device):
        return _PORTABLE
    return _triton_backend(device)


@cache
def _triton_backend(device: torch.device) -> LinearBackend:
    from piper_kernels.linear.convrot.int8._triton_backend import PreparationBackend, TritonBackend

    target = accelerator_target(device)
    if target is not None and supports_matmul(target)[0]:
        return TritonBackend()
    return PreparationBackend()
