"""Launchers that quantize dense weights to NVFP4. Importing needs Triton.

They have the contracts of ``_quantize_reference``, for sources with elements. Besides the
result they take 1 KiB, a contiguous copy of sources that are no matrix with unit column
stride, and nothing else.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

import math

import torch
import triton
from torch import Tensor

from piper_kernels._triton.products import rows_side_by_side
from piper_kernels._triton.runtime import launch_guard
from piper_kernels._triton.targets import accelerator_target
from piper_kernels.weights.nvfp4._encoding import non_finite_amax
from piper_kernels.weights.nvfp4._layout import (
    BLOCK_SIZE,
    SCALE_COLUMN_TILE,
    ceil_div,
    scale_shape,
    stacked_scale_shape,
)
from piper_kernels.weights.nvfp4._quantize_kernels import amax_kernel, pack_kernel
from piper_kernels.weights.nvfp4._tiles import AMAX_SLOTS
from piper_kernels.weights.nvfp4._update_kernels import store_global_scale_kernel

# A row of a bf16 tile is one 16-byte load of every thread of a warp, and holds whole groups.
COLUMNS = 256
AMAX_ROWS = 16
PACK_ROWS = 8


def quantize(
    source: Tensor, per_tensor_scale: Tensor | None, group_size: int, swizzled: bool
) -> tuple[Tensor, Tensor]:
    """Quantize with a given global scale or none; see ``_quantize_reference.quantize``.

    Nothing is synchronized and nothing is read back, so this can be captured.
    """
    with launch_guard(source.device):
        return _pack(source, _matrix(source), per_tensor_scale, group_size, swizzled)


def quantize_two_level(
    source: Tensor, group_size: int, swizzled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize with a computed global scale; see ``_quantize_reference.quantize_two_level``.

    The scale is read back once, after everything is launched, because it must be finite.
    """
    matrix = _matrix(source)
    rows, features = matrix.shape
    level = torch.empty((), dtype=torch.float32, device=source.device)
    with launch_guard(source.device):
        amax_bits = torch.zeros(AMAX_SLOTS.value, dtype=torch.int32, device=source.device)
        amax_kernel[_grid(rows, features, AMAX_ROWS)](
            matrix,
            amax_bits,
            rows,
            features,
            matrix.stride(0),
            GROUP=group_size,
            ROWS=AMAX_ROWS,
            COLUMNS=COLUMNS,
        )
        store_global_scale_kernel[(1,)](amax_bits, level, num_warps=1)
        qdata, scale = _pack(source, matrix, level, group_size, swizzled)
    if not math.isfinite(level.item()):  # neither is amax
        raise non_finite_amax(amax_bits.max().view(torch.float32).item())
    return qdata, scale, level


def _pack(
    source: Tensor,
    matrix: Tensor,
    level: Tensor | None,
    group_size: int,
    swizzled: bool,
) -> tuple[Tensor, Tensor]:
    rows, features = matrix.shape
    qdata = torch.empty((rows, features // 2), dtype=torch.uint8, device=source.device)
    shape = scale_shape(rows, features, swizzled=swizzled)
    padded = shape[0] * shape[1] != rows * features // BLOCK_SIZE
    scale = (torch.zeros if padded else torch.empty)(shape, dtype=torch.uint8, device=source.device)
    levels = 1 if level is None else level.numel()
    target = accelerator_target(source.device)
    pack_kernel[_grid(rows, features, PACK_ROWS)](
        matrix,
        qdata.view(torch.int32),
        scale,
        None if level is None else level.contiguous(),
        rows,
        features,
        ceil_div(features, SCALE_COLUMN_TILE if swizzled else BLOCK_SIZE),
        matrix.stride(0),
        rows // levels,
        GROUP=group_size,
        ROWS=PACK_ROWS,
        COLUMNS=COLUMNS,
        TWO_LEVEL=level is not None,
        EXPERTS=levels > 1,
        SWIZZLED=swizzled,
        NATIVE=target is not None and target.has_fp4_conversion,
    )
    return (
        qdata.view(*source.shape[:-1], features // 2),
        scale.view(torch.float8_e4m3fn).view(
            stacked_scale_shape(tuple(source.shape), swizzled=swizzled)
        ),
    )


def _matrix(source: Tensor) -> Tensor:
    """Return ``[..., in]`` as a matrix with unit column stride; copies only what is not."""
    return rows_side_by_side(source.reshape(-1, source.shape[-1]))


def _grid(rows: int, features: int, tile_rows: int) -> tuple[int]:
    return (triton.cdiv(rows, tile_rows) * triton.cdiv(features, COLUMNS),)
