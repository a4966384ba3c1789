"""Selection of the code that executes NVFP4 linear operators on a device."""

from typing import Protocol

import torch
from torch import Tensor

from piper_kernels._triton.runtime import support
from piper_kernels._triton.targets import accelerator_target
from piper_kernels.linear.nvfp4._portable import PortableBackend, Prepared

MIN_CAPABILITY = (8, 0)  # bf16 on the matrix units


class LinearBackend(Protocol):
    """What an execution backend provides; shapes and maths are those of the reference."""

    def linear(
        self,
        input: Tensor,  # noqa: A002  # the name of F.linear
        weight_qdata: Tensor,
        weight_scale: Tensor,
        weight_per_tensor_scale: Tensor | None,
        activation_per_tensor_scale: Tensor | None,
        bias: Tensor | None,
        dynamic_activation_scale: bool,
        high_first: bool = False,
        *,
        group_size: int = 0,
    ) -> Tensor:
        """Return the linear ``[..., N]`` of a floating input that is quantized first."""
        ...

    def prepare_input(
        self,
        input: Tensor,  # noqa: A002
        activation_per_tensor_scale: Tensor | None,
        dynamic_activation_scale: bool,
        activation_fn: str | None = None,
        high_first: bool = False,
        *,
        group_size: int = 0,
        out: Prepared | None = None,
    ) -> Prepared:
        """Return codes, swizzled block scales and the second level of a floating input.

        With ``out`` they are written into it and it is returned: uint8 ``[rows, K / 2]``,
        swizzled float8_e4m3fn and an FP32 scalar, all contiguous.
        """
        ...

    def linear_prepared(
        self,
        input_qdata: Tensor,
        input_scale: Tensor,
        input_per_tensor_scale: Tensor,
        weight_qdata: Tensor,
        weight_scale: Tensor,
        weight_per_tensor_scale: Tensor | None,
        bias: Tensor | None,
        logical_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the linear ``[rows, N]`` of a prepared input.

        With ``out`` the result is written into it and it is returned; its columns are side by
        side and its rows may be any fixed distance apart.
        """
        ...

    def weight_only_linear(
        self,
        input: Tensor,  # noqa: A002
        weight_qdata: Tensor,
        weight_scale: Tensor,
        weight_per_tensor_scale: Tensor | None,
        bias: Tensor | None,
        group_size: int,
        swizzled: bool,
        high_first: bool,
    ) -> Tensor:
        """Return the linear ``[..., N]`` of a floating input that is not quantized."""
        ...


_PORTABLE = PortableBackend()


def support_of_kernels(device: torch.device) -> tuple[bool, str]:
    """Return whether the kernels run on a device, and the reason when they do not."""
    usable, reason = support(device)
    if not usable:
        return usable, reason
    target = accelerator_target(device)
    if target is not None and target.backend == "cuda" and target.capability < MIN_CAPABILITY:
        return False, f"NVFP4 linear kernels need sm_80 or newer, {device} is {target.architecture}"
    return True, ""


def select_linear_backend(device: torch.device) -> LinearBackend:
    """Return the backend that executes linear operators on a device.

    Operators ask at execution time, so a compiled graph follows a change of backend.
    """
    if not support_of_kernels(device)[0]:
        return _PORTABLE
    from piper_kernels.linear.nvfp4 import _native, triton

    usable, _ = _native.support(accelerator_target(device))
    return _native.NativeBackend() if usable else triton.TritonBackend()
