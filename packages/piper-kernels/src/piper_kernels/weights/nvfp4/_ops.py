"""Custom operators that update NVFP4 storage in place.

They keep kernels opaque to tracers. The backend is selected when an operator executes; fakes
do nothing. A ``group_size`` of 0 stands for no rotation; seeds are signed.
"""

import torch
from torch import Tensor

from piper_kernels.weights.nvfp4 import _backend

_STORAGE = ("qdata", "scale", "per_tensor_scale")


@torch.library.custom_op("piper_kernels::nvfp4_add_", mutates_args=_STORAGE)
def add_(
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor | None,
    update: Tensor,
    group_size: int,
    alpha: float,
    swizzled: bool,
    high_first: bool,
    rounding_seed: int | None = None,
) -> None:
    """Store ``W + alpha * update``."""
    _backend.select_executor(qdata.device).add_(
        qdata,
        scale,
        per_tensor_scale,
        update,
        group_size,
        alpha,
        swizzled,
        high_first,
        rounding_seed,
    )


@add_.register_fake
def _(*_operands: object) -> None:
    return None


@torch.library.custom_op("piper_kernels::nvfp4_addmm_", mutates_args=_STORAGE)
def addmm_(
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor | None,
    mat1: Tensor,
    mat2: Tensor,
    group_size: int,
    beta: float,
    alpha: float,
    swizzled: bool,
    high_first: bool,
    rounding_seed: int | None = None,
) -> None:
    """Store ``beta * W + alpha * mat1 @ mat2``."""
    _backend.select_executor(qdata.device).addmm_(
        qdata,
        scale,
        per_tensor_scale,
        mat1,
        mat2,
        group_size,
        beta,
        alpha,
        swizzled,
        high_first,
        rounding_seed,
    )


@addmm_.register_fake
def _(*_operands: object) -> None:
    return None
