"""Launchers of the kernels in ``_kernels.rows``. Importing needs Triton."""

# pyright: reportArgumentType=false, reportCallIssue=false

from torch import Tensor

from piper_kernels._triton.launching import Launcher, launch_key
from piper_kernels._triton.products import rows_side_by_side
from piper_kernels._triton.row_chunks import RowChunks
from piper_kernels._triton.runtime import as_words, launch_guard
from piper_kernels.linear.convrot.int8._kernels.rows import head_rows_kernel, norm_rows_kernel
from piper_kernels.linear.convrot.int8._plan import ceil_div

_norm = Launcher(norm_rows_kernel)
_heads = Launcher(head_rows_kernel)


def norm_rows(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    total: Tensor,
    qdata: Tensor,
    scale: Tensor,
    group_size: int,
    plan: RowChunks,
    *,
    gemma: bool,
) -> None:
    """Add, normalize, rotate and quantize rows; see ``rows.normed_rows``.

    Args:
        x: Floating ``[rows, features]``.
        residual: Likewise, or ``None``.
        weight: Floating ``[features]``.
        eps: Added to the mean square.
        total: ``[rows, features]``, contiguous, written where there is a residual.
        qdata: int8 ``[rows, features]``, contiguous, written.
        scale: FP32 ``[rows]``, contiguous, written.
        group_size: Rotation group.
        plan: One chunk that holds a row.
        gemma: Whether one plus the weight multiplies.
    """
    rows, features = qdata.shape
    x, weight = rows_side_by_side(x), weight.contiguous()
    added = x if residual is None else rows_side_by_side(residual)
    with launch_guard(qdata.device), as_words(qdata) as words:
        tensors = (x, added, weight, total, words, scale)
        constants = (group_size, plan.rows, plan.size, residual is not None, gemma)
        strides = (x.stride(0), added.stride(0))
        _norm(
            ceil_div(rows, plan.rows),
            (*tensors, *strides, rows, features, eps, *constants),
            {"num_warps": plan.num_warps},
            launch_key(tensors, strides, features, rows >> 31, constants),
        )


def head_rows(
    source: Tensor, qdata: Tensor, scale: Tensor, group_size: int, plan: RowChunks
) -> None:
    """Rotate and quantize rows of heads; see ``rows.joined_rows``.

    Args:
        source: Floating ``[rows, heads, head_dim]`` with features side by side.
        qdata: int8 ``[rows, heads * head_dim]``, contiguous, written.
        scale: FP32 ``[rows]``, contiguous, written.
        group_size: Rotation group.
        plan: One chunk that holds a row.
    """
    rows, features = qdata.shape
    source = source if source.stride(2) == 1 else source.contiguous()
    strides = source.stride()[:2]
    with launch_guard(qdata.device), as_words(qdata) as words:
        tensors = (source, words, scale)
        constants = (group_size, plan.rows, plan.size, source.shape[2])
        _heads(
            ceil_div(rows, plan.rows),
            (*tensors, *strides, rows, features, *constants),
            {"num_warps": plan.num_warps},
            launch_key(tensors, strides, features, rows >> 31, constants),
        )
