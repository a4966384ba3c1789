"""Portable in-place updates of NVFP4 storage, in FP32 and in the basis of the codes."""

import torch
from torch import Tensor

from piper_kernels._autocast import full_precision
from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.nvfp4._encoding import decode, encode, per_tensor_scale_of
from piper_kernels.weights.nvfp4._layout import (
    BLOCK_SIZE,
    pack_codes,
    swizzle_scale,
    unswizzle_scale,
)


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
    """Store ``W + alpha * update``.

    Args:
        qdata: uint8 ``[out, in / 2]``, overwritten.
        scale: float8_e4m3fn in the canonical 2-D shape, overwritten.
        per_tensor_scale: FP32 with one element, overwritten with the new ``amax / 2688``, or
            ``None`` for one scale level.
        update: Floating ``[out, in]`` in the logical basis.
        group_size: Rotation group along ``in``, 0 for none.
        alpha: Coefficient of the update.
        swizzled: Whether ``scale`` is in the 128x4 layout.
        high_first: Whether even features are in the high nibbles.
        rounding_seed: Seed of stochastic rounding; ``None`` rounds to nearest.
    """
    base = _base(qdata, scale, per_tensor_scale, swizzled=swizzled, high_first=high_first)
    merged = base + _rotated(update, group_size) * alpha
    _store(qdata, scale, per_tensor_scale, merged, swizzled, high_first, rounding_seed)


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
    """Store ``beta * W + alpha * mat1 @ mat2``.

    With ``beta == 0`` the old weight is not read, so NaN in it does not spread.

    Args:
        qdata: uint8 ``[out, in / 2]``, overwritten.
        scale: float8_e4m3fn in the canonical 2-D shape, overwritten.
        per_tensor_scale: FP32 with one element, overwritten, or ``None``.
        mat1: Floating ``[out, rank]``.
        mat2: Floating ``[rank, in]`` in the logical basis.
        group_size: Rotation group along ``in``, 0 for none.
        beta: Coefficient of the old weight.
        alpha: Coefficient of the product.
        swizzled: Whether ``scale`` is in the 128x4 layout.
        high_first: Whether even features are in the high nibbles.
        rounding_seed: Seed of stochastic rounding; ``None`` rounds to nearest.
    """
    if beta == 0:
        shape = (qdata.shape[0], 2 * qdata.shape[1])
        base = torch.zeros(shape, dtype=torch.float32, device=qdata.device)
    else:
        base = _base(qdata, scale, per_tensor_scale, swizzled=swizzled, high_first=high_first)
    # The rotation acts on columns, so rotating the small factor rotates the product.
    with full_precision(qdata.device):
        merged = torch.addmm(
            base, mat1.to(torch.float32), _rotated(mat2, group_size), beta=beta, alpha=alpha
        )
    _store(qdata, scale, per_tensor_scale, merged, swizzled, high_first, rounding_seed)


def _rotated(matrix: Tensor, group_size: int) -> Tensor:
    dense = matrix.to(torch.float32)
    return rotate_groups(dense, group_size) if group_size else dense


def _base(
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor | None,
    *,
    swizzled: bool,
    high_first: bool,
) -> Tensor:
    if swizzled:
        scale = unswizzle_scale(scale, qdata.shape[0], 2 * qdata.shape[1] // BLOCK_SIZE)
    decoded = scale.to(torch.float32)
    if per_tensor_scale is not None:
        decoded = per_tensor_scale.view(()) * decoded
    return decode(qdata, decoded, high_first=high_first)


def _store(
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor | None,
    merged: Tensor,
    swizzled: bool,
    high_first: bool,
    rounding_seed: int | None,
) -> None:
    level = None if per_tensor_scale is None else per_tensor_scale_of(merged.abs().amax())
    codes, block_scale = encode(merged, level, rounding_seed=rounding_seed)
    qdata.copy_(pack_codes(codes, high_first=high_first))
    scale.copy_(swizzle_scale(block_scale) if swizzled else block_scale)
    if per_tensor_scale is not None and level is not None:
        per_tensor_scale.copy_(level.view(per_tensor_scale.shape))
