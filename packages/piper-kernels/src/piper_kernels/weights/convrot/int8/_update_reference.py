"""Portable in-place updates of ConvRot INT8 storage, in FP32 and in the rotated basis."""

import torch
from torch import Tensor

from piper_kernels._autocast import full_precision
from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.convrot.int8._quantization import dynamic_quantize_rows


def add_(
    qdata: Tensor,
    scale: Tensor,
    update: Tensor,
    group_size: int,
    alpha: float,
    rounding_seed: int | None = None,
) -> None:
    """Store ``W + alpha * update``, quantized by rows.

    Args:
        qdata: int8 ``[out, in]``, overwritten.
        scale: FP32 ``[out, 1]``, overwritten.
        update: Floating ``[out, in]`` in the logical basis.
        group_size: Rotation group along ``in``.
        alpha: Coefficient of the update.
        rounding_seed: Seed of stochastic rounding; ``None`` rounds half to even.
    """
    rotated = rotate_groups(update.to(torch.float32), group_size)
    _store(qdata, scale, qdata.to(torch.float32) * scale + rotated * alpha, rounding_seed)


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
    """Store ``beta * W + alpha * mat1 @ mat2``, quantized by rows.

    With ``beta == 0`` the old weight is not read, so NaN in it does not spread.

    Args:
        qdata: int8 ``[out, in]``, overwritten.
        scale: FP32 ``[out, 1]``, overwritten.
        mat1: Floating ``[out, rank]``.
        mat2: Floating ``[rank, in]`` in the logical basis.
        group_size: Rotation group along ``in``.
        beta: Coefficient of the old weight.
        alpha: Coefficient of the product.
        rounding_seed: Seed of stochastic rounding; ``None`` rounds half to even.
    """
    if beta == 0:
        base = torch.zeros(qdata.shape, dtype=torch.float32, device=qdata.device)
    else:
        base = qdata.to(torch.float32) * scale
    # The rotation acts on columns, so rotating the small factor rotates the product.
    rotated = rotate_groups(mat2.to(torch.float32), group_size)
    with full_precision(qdata.device):
        merged = torch.addmm(base, mat1.to(torch.float32), rotated, beta=beta, alpha=alpha)
    _store(qdata, scale, merged, rounding_seed)


def _store(qdata: Tensor, scale: Tensor, merged: Tensor, rounding_seed: int | None) -> None:
    codes, row_scale = dynamic_quantize_rows(merged, rounding_seed=rounding_seed)
    qdata.copy_(codes)
    scale.copy_(row_scale)
