"""Custom operators that quantize and update ConvRot INT8 storage.

They keep kernels opaque to tracers. The backend is selected when an operator executes; fakes
compute shapes only.
"""

import torch
from torch import Tensor

from piper_kernels.weights.convrot.int8 import _backend


@torch.library.custom_op("piper_kernels::convrot_int8_add_", mutates_args=("qdata", "scale"))
def add_(
    qdata: Tensor,
    scale: Tensor,
    update: Tensor,
    group_size: int,
    alpha: float,
    rounding_seed: int | None = None,
) -> None:
    """Store ``W + alpha * update``; the seed is signed."""
    backend = _backend.select_update_backend(qdata)
    backend.add_(qdata, scale, update, group_size, alpha, rounding_seed)


@add_.register_fake
def _(*_operands: object) -> None:
    return None


@torch.library.custom_op("piper_kernels::convrot_int8_addmm_", mutates_args=("qdata", "scale"))
def addmm_(
    qdata: Tensor,
    scale: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    group_size: int,
    beta: float,
    alpha: float,
    rounding_seed: int | None = None,
) -> None:
    """Store ``beta * W + alpha * mat1 @ mat2``; the seed is signed."""
    backend = _backend.select_update_backend(qdata)
    backend.addmm_(qdata, scale, mat1, mat2, group_size, beta, alpha, rounding_seed)


@addmm_.register_fake
def _(*_operands: object) -> None:
    return None


@torch.library.custom_op("piper_kernels::convrot_int8_quantize_weight", mutates_args=())
def quantize_weight(source: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return int8 codes ``[rows, features]`` and FP32 scales ``[rows, 1]`` of dense rows."""
    return _backend.quantize_weight(source, group_size)


@quantize_weight.register_fake
def _(source: Tensor, _group_size: int) -> tuple[Tensor, Tensor]:
    rows, features = source.shape
    return (
        source.new_empty((rows, features), dtype=torch.int8),
        source.new_empty((rows, 1), dtype=torch.float32),
    )
