"""Launchers that quantize and update ConvRot INT8 storage. Importing needs Triton.

They have the contracts of ``_update_reference``, on one device and with non-empty storage.
Nothing is synchronized and nothing is read back, so all of them can be captured.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
from torch import Tensor

from piper_kernels._triton.products import depth_step, rotated_right_factor, rows_side_by_side
from piper_kernels._triton.row_chunks import plan_row_chunks
from piper_kernels._triton.runtime import as_words, launch_guard
from piper_kernels._triton.targets import dot_precision
from piper_kernels.stochastic_quantization.triton import seed_argument
from piper_kernels.weights.convrot.int8._product_kernels import product_kernel, store_scales_kernel
from piper_kernels.weights.convrot.int8._row_kernels import fused_rows_kernel, wide_rows_kernel

SWEEP_TILE = 4096
SWEEP_WARPS = 8
PRODUCT_ROWS = 64
PRODUCT_COLUMNS = 128
PRODUCT_WARPS = 8
SCALE_TILE = 1024


def quantize_weight(source: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Rotate and quantize dense rows.

    Args:
        source: float16, bfloat16 or float32 ``[rows, features]``, any strides.
        group_size: Rotation group along the features.

    Returns:
        int8 codes ``[rows, features]`` and FP32 scales ``[rows, 1]``, both contiguous.
    """
    rows, features = source.shape
    qdata = torch.empty((rows, features), dtype=torch.int8, device=source.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=source.device)
    _requantize_rows(source, qdata, scale, group_size, 1.0, None, read_base=False)
    return qdata, scale


def add_(
    qdata: Tensor,
    scale: Tensor,
    update: Tensor,
    group_size: int,
    alpha: float,
    rounding_seed: int | None = None,
) -> None:
    """Store ``W + alpha * update``; see ``_update_reference.add_``."""
    _requantize_rows(update, qdata, scale, group_size, alpha, rounding_seed, read_base=True)


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
    """Store ``beta * W + alpha * mat1 @ mat2``; see ``_update_reference.addmm_``.

    The product is computed in FP32 and never stored. Beside the storage this takes four bytes
    per row and, for the rotated ``mat2``, four bytes per element of it.
    """
    rows, features = qdata.shape
    rank = mat1.shape[1] if alpha != 0 else 0
    with launch_guard(qdata.device):
        right = rotated_right_factor(mat2[:rank], group_size)
        amax_bits = torch.zeros(rows, dtype=torch.int32, device=qdata.device)
        grid = (triton.cdiv(rows, PRODUCT_ROWS) * triton.cdiv(features, PRODUCT_COLUMNS),)
        for encode in (False, True):
            product_kernel[grid](
                mat1,
                right,
                qdata,
                scale,
                amax_bits,
                rows,
                features,
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
                STOCHASTIC=rounding_seed is not None,
                ENCODE=encode,
                num_warps=PRODUCT_WARPS,
            )
        store_scales_kernel[(triton.cdiv(rows, SCALE_TILE),)](
            amax_bits, scale, rows, SIZE=SCALE_TILE
        )


def _requantize_rows(
    source: Tensor,
    qdata: Tensor,
    scale: Tensor,
    group_size: int,
    alpha: float,
    rounding_seed: int | None,
    *,
    read_base: bool,
) -> None:
    rows, features = qdata.shape
    source = rows_side_by_side(source)
    options = {
        "GROUP": group_size,
        "READ_BASE": read_base,
        "STOCHASTIC": rounding_seed is not None,
    }
    seed = seed_argument(rounding_seed)
    plan = plan_row_chunks(features)
    with launch_guard(qdata.device), as_words(qdata) as words:
        if plan is None:
            wide_rows_kernel[(rows,)](
                source,
                words,
                scale,
                source.stride(0),
                features,
                alpha,
                seed,
                SIZE=SWEEP_TILE,
                num_warps=SWEEP_WARPS,
                **options,
            )
            return
        fused_rows_kernel[(triton.cdiv(rows, plan.rows),)](
            source,
            words,
            scale,
            source.stride(0),
            rows,
            features,
            alpha,
            seed,
            ROWS=plan.rows,
            SIZE=plan.size,
            COUNT=plan.count,
            num_warps=plan.num_warps,
            **options,
        )
