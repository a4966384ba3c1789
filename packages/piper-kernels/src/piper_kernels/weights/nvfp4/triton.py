"""Launchers that update NVFP4 storage in place. Importing needs Triton.

They have the contracts of ``_update_reference``, on one device and with non-empty storage.
Nothing is synchronized and nothing is read back, so all of them can be captured. With a global
scale every tile is computed twice, and 1 KiB of maxima is all that is stored in between.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from typing import Any

import torch
import triton
from torch import Tensor

from piper_kernels._triton.products import depth_step, rotated_right_factor, rows_side_by_side
from piper_kernels._triton.runtime import launch_guard
from piper_kernels._triton.targets import accelerator_target, dot_precision
from piper_kernels.stochastic_quantization.triton import seed_argument
from piper_kernels.weights.nvfp4._layout import BLOCK_SIZE, SCALE_COLUMN_TILE, ceil_div
from piper_kernels.weights.nvfp4._tiles import AMAX_SLOTS
from piper_kernels.weights.nvfp4._update_kernels import (
    dense_kernel,
    product_kernel,
    store_global_scale_kernel,
)

DENSE_ROWS = 8
DENSE_COLUMNS = 256
PRODUCT_ROWS = 64
PRODUCT_COLUMNS = 64


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
    """Store ``W + alpha * update``; see ``_update_reference.add_``."""
    rows, features = update.shape
    source = rows_side_by_side(update)
    with launch_guard(qdata.device):
        amax_bits = _new_maxima(per_tensor_scale)
        grid = (triton.cdiv(rows, DENSE_ROWS) * triton.cdiv(features, DENSE_COLUMNS),)
        for pack in _passes(per_tensor_scale):
            dense_kernel[grid](
                source,
                qdata,
                scale.view(torch.uint8),
                per_tensor_scale,
                amax_bits,
                rows,
                features,
                _scale_columns(features, swizzled),
                source.stride(0),
                alpha,
                seed_argument(rounding_seed),
                GROUP=group_size,
                ROWS=DENSE_ROWS,
                COLUMNS=DENSE_COLUMNS,
                PACK=pack,
                **_format(qdata, per_tensor_scale, swizzled, high_first, rounding_seed),
            )
        _store_global_scale(amax_bits, per_tensor_scale)


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
    """Store ``beta * W + alpha * mat1 @ mat2``; see ``_update_reference.addmm_``.

    The product is computed in FP32 and never stored. A rotated ``mat2`` takes four bytes per
    element of it.
    """
    rows, features = mat1.shape[0], mat2.shape[1]
    rank = mat1.shape[1] if alpha != 0 else 0
    with launch_guard(qdata.device):
        right = rotated_right_factor(mat2[:rank], group_size)
        amax_bits = _new_maxima(per_tensor_scale)
        grid = (triton.cdiv(rows, PRODUCT_ROWS) * triton.cdiv(features, PRODUCT_COLUMNS),)
        for pack in _passes(per_tensor_scale):
            product_kernel[grid](
                mat1,
                right,
                qdata,
                scale.view(torch.uint8),
                per_tensor_scale,
                amax_bits,
                rows,
                features,
                _scale_columns(features, swizzled),
                rank,
                mat1.stride(0),
                mat1.stride(1),
                right.stride(0),
                beta,
                alpha,
                seed_argument(rounding_seed),
                ROWS=PRODUCT_ROWS,
                COLUMNS=PRODUCT_COLUMNS,
                DEPTH=depth_step(rank),
                PRECISION=dot_precision(qdata.device),
                READ_BASE=beta != 0,
                PACK=pack,
                **_format(qdata, per_tensor_scale, swizzled, high_first, rounding_seed),
            )
        _store_global_scale(amax_bits, per_tensor_scale)


def _format(
    qdata: Tensor,
    per_tensor_scale: Tensor | None,
    swizzled: bool,
    high_first: bool,
    rounding_seed: int | None,
) -> dict[str, Any]:
    target = accelerator_target(qdata.device)
    return {
        "TWO_LEVEL": per_tensor_scale is not None,
        "SWIZZLED": swizzled,
        "HIGH_FIRST": high_first,
        "STOCHASTIC": rounding_seed is not None,
        "NATIVE": target is not None and target.has_fp4_conversion,
    }


def _scale_columns(features: int, swizzled: bool) -> int:
    """Return the size that ``scale_offsets`` takes: tiles or blocks per row."""
    return ceil_div(features, SCALE_COLUMN_TILE if swizzled else BLOCK_SIZE)


def _passes(per_tensor_scale: Tensor | None) -> tuple[bool, ...]:
    """Return the value of ``PACK`` in every pass over the tiles."""
    return (True,) if per_tensor_scale is None else (False, True)


def _new_maxima(per_tensor_scale: Tensor | None) -> Tensor | None:
    if per_tensor_scale is None:
        return None
    return torch.zeros(AMAX_SLOTS.value, dtype=torch.int32, device=per_tensor_scale.device)


def _store_global_scale(amax_bits: Tensor | None, per_tensor_scale: Tensor | None) -> None:
    if per_tensor_scale is not None:
        store_global_scale_kernel[(1,)](amax_bits, per_tensor_scale, num_warps=1)
