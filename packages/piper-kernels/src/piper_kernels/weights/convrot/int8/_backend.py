"""Selection of the code that quantizes and updates ConvRot INT8 storage on a device."""

from typing import Protocol

import torch
from torch import Tensor

from piper_kernels._triton.runtime import supports_device
from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.convrot.int8 import _update_reference
from piper_kernels.weights.convrot.int8._quantization import dynamic_quantize_rows


class UpdateBackend(Protocol):
    """What updates storage in place; the maths is that of ``_update_reference``."""

    def add_(
        self,
        qdata: Tensor,
        scale: Tensor,
        update: Tensor,
        group_size: int,
        alpha: float,
        rounding_seed: int | None = None,
    ) -> None:
        """Store ``W + alpha * update``."""
        ...

    def addmm_(
        self,
        qdata: Tensor,
        scale: Tensor,
        mat1: Tensor,
        mat2: Tensor,
        group_size: int,
        beta: float,
        alpha: float,
        rounding_seed: int | None = None,
    ) -> None:
        """Store ``beta * W + alpha * mat1 @ mat2``."""
        ...


def select_update_backend(qdata: Tensor) -> UpdateBackend:
    """Return what updates a weight, by its device.

    The choice is made once per update: a kernel that fails may have written a part of the
    storage, so its error is raised and nothing else is tried.
    """
    if qdata.numel() and supports_device(qdata.device):
        from piper_kernels.weights.convrot.int8 import triton

        return triton
    return _update_reference


def quantize_weight(source: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Rotate and quantize rows ``[rows, features]`` on their device.

    Returns:
        int8 codes of the same shape and FP32 scales ``[rows, 1]``.
    """
    if source.numel() and supports_device(source.device):
        from piper_kernels.weights.convrot.int8 import triton

        return triton.quantize_weight(source, group_size)
    return dynamic_quantize_rows(rotate_groups(source.to(torch.float32), group_size))


def runs_in_operators(device: torch.device) -> bool:
    """Return whether work on a device goes through custom operators.

    On the CPU the reference is called as it is, so that tracers see its operations.
    """
    return device.type not in ("cpu", "meta")
