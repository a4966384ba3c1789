"""Launchers of the Triton kernels. Importing needs Triton.

They have the contracts of ``reference`` for non-empty operands on one device. Nothing is
synchronized and nothing is read back, so all of them can be captured.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from piper_kernels._triton.launching import Launcher, are_aligned
from piper_kernels._triton.products import rows_side_by_side
from piper_kernels._triton.runtime import as_words, launch_guard
from piper_kernels.linear.convrot.int8._kernels.matmul import matmul_kernel, sum_parts_kernel
from piper_kernels.linear.convrot.int8._kernels.mean import sum_rows_kernel
from piper_kernels.linear.convrot.int8._kernels.preparation import (
    prepare_rows_kernel,
    prepare_wide_rows_kernel,
)
from piper_kernels.linear.convrot.int8._outputs import Projection
from piper_kernels.linear.convrot.int8._plan import MatmulPlan, ceil_div, plan_input_rows

SWEEP_TILE = 4096
SWEEP_WARPS = 8
SUM_ROWS = 4
SUM_COLUMNS = 256
MEAN_ROWS = 32
MEAN_COLUMNS = 128
MEAN_PART = 512

_matmul = Launcher(matmul_kernel)
_sum_parts = Launcher(sum_parts_kernel)
_prepare = Launcher(prepare_rows_kernel)
_prepare_wide = Launcher(prepare_wide_rows_kernel)


def prepare_rows(
    source: Tensor,
    qdata: Tensor,
    scale: Tensor,
    group_size: int,
    activation_fn: str | None,
    input_scale: Tensor | None,
    max_fused_width: int | None = None,
) -> None:
    """Activate, rotate and quantize rows.

    Args:
        source: Floating ``[rows, factor * features]``, any strides.
        qdata: int8 ``[rows, features]``, contiguous, written.
        scale: FP32 ``[rows]``, contiguous, written.
        group_size: Rotation group along the features.
        activation_fn: ``None``, ``"gelu_tanh"``, ``"swiglu"`` or ``"silu_and_mul"``.
        input_scale: FP32 scalar for every row, or ``None``.
        max_fused_width: Features above which a row is read twice; ``None`` for the limit of
            the registers.
    """
    rows, features = qdata.shape
    source = rows_side_by_side(source)
    static = scale if input_scale is None else input_scale
    fused = max_fused_width is None or features <= max_fused_width
    plan = plan_input_rows(features) if fused else None
    with launch_guard(qdata.device), as_words(qdata) as words:
        tensors = (source, words, scale, static)
        key = None
        if are_aligned(*tensors):
            key = (qdata.device.index, source.dtype, source.stride(0), features, rows >> 31)
            key += (group_size, activation_fn, input_scale is None, plan)
        if plan is None:
            constants = (group_size, SWEEP_TILE, activation_fn, input_scale is not None)
            _prepare_wide(
                rows,
                (*tensors, source.stride(0), features, *constants),
                {"num_warps": SWEEP_WARPS},
                key,
            )
            return
        constants = (group_size, plan.rows, plan.size, plan.count, activation_fn)
        _prepare(
            ceil_div(rows, plan.rows),
            (*tensors, source.stride(0), rows, features, *constants, input_scale is not None),
            {"num_warps": plan.num_warps},
            key,
        )


def epilogue_arguments(
    input_scale: Tensor, first: Projection, second: Projection | None
) -> tuple[list[Tensor], list[int], tuple[bool, bool, bool]]:
    """Return what every product kernel takes for its epilogue.

    Args:
        input_scale: FP32 ``[M]``, contiguous.
        first: The projection.
        second: The paired one, or ``None``.

    Returns:
        Tensors ``x_scale, w_scale, second_w_scale, bias, second_bias``, the strides of the two
        biases, and the flags ``PAIRED``, ``HAS_BIAS`` and ``HAS_SECOND_BIAS``.
    """
    _, scale, bias = first
    second_scale, second_bias = (scale, None) if second is None else second[1:]
    biases = [scale if value is None else value for value in (bias, second_bias)]
    flags = (second is not None, bias is not None, second_bias is not None)
    strides = [value.stride(0) for value in biases]
    return [input_scale, scale, second_scale, *biases], strides, flags


def product_key(
    out: Tensor, operands: Sequence[Tensor], numbers: tuple[Hashable, ...]
) -> tuple[Hashable, ...] | None:
    """Return the key of a launch whose last two operands are the biases; see ``Launcher``."""
    if not are_aligned(out, *operands):
        return None
    return (out.device.index, out.dtype, operands[-2].dtype, operands[-1].dtype, *numbers)


def sum_parts(
    parts: Tensor,
    input_scale: Tensor,
    first: Projection,
    second: Projection | None,
    out: Tensor,
) -> None:
    """Sum int32 ``parts [split, M, columns]``, scale and bias them into ``out [M, columns]``."""
    split, rows, _ = parts.shape
    columns = first[0].shape[0]
    tensors, strides, flags = epilogue_arguments(input_scale, first, second)
    tiles = ceil_div(columns, SUM_COLUMNS) * (1 if second is None else 2)
    numbers = (columns, out.stride(0), *strides)
    _sum_parts(
        ceil_div(rows, SUM_ROWS) * tiles,
        (parts, *tensors, out, rows, *numbers, SUM_ROWS, SUM_COLUMNS, split, *flags),
        {"enable_fp_fusion": False},
        product_key(out, [parts, *tensors], (rows >> 31, *numbers, split, *flags)),
    )


def matmul(
    input_qdata: Tensor,
    input_scale: Tensor,
    first: Projection,
    second: Projection | None,
    out: Tensor,
    plan: MatmulPlan,
) -> None:
    """Multiply prepared rows by one weight or by two of equal shape.

    Args:
        input_qdata: int8 ``[M, K]``, columns side by side.
        input_scale: FP32 ``[M]``, contiguous.
        first: The projection; codes and scales contiguous.
        second: The paired projection, whose columns follow, or ``None``.
        out: ``[M, N]`` or ``[M, 2 * N]``, columns side by side, written.
        plan: The schedule.
    """
    rows, depth = input_qdata.shape
    columns = first[0].shape[0]
    tensors, strides, flags = epilogue_arguments(input_scale, first, second)
    all_columns = columns * (1 if second is None else 2)
    split = plan.split_k
    target = out
    if split > 1:
        target = torch.empty((split, rows, all_columns), dtype=torch.int32, device=out.device)
    tiles = ceil_div(rows, plan.block_m) * ceil_div(columns, plan.block_n)
    tiles *= 1 if second is None else 2
    codes = [input_qdata, first[0], (first if second is None else second)[0]]
    numbers = (columns, depth, input_qdata.stride(0), out.stride(0), *strides)
    even = depth % plan.block_k == 0
    constants = (plan.block_m, plan.block_n, plan.block_k, plan.group_m, split, even)
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    with launch_guard(out.device):
        _matmul(
            tiles * split,
            (*codes, *tensors, target, rows, *numbers, *constants, *flags),
            options | {"enable_fp_fusion": False},
            product_key(target, [*codes, *tensors], (rows >> 31, *numbers, plan, *flags)),
        )
        if split > 1:
            sum_parts(target, input_scale, first, second, out)


def dequantized_mean(
    input_qdata: Tensor, input_scale: Tensor, block_lengths: Tensor | None
) -> Tensor:
    """Return the mean of contiguous prepared inputs; see ``reference``."""
    batch, sequence, features = input_qdata.shape
    parts = ceil_div(sequence, MEAN_PART)
    sums = torch.empty((batch, parts, features), dtype=torch.float32, device=input_qdata.device)
    with launch_guard(input_qdata.device):
        sum_rows_kernel[(ceil_div(features, MEAN_COLUMNS), parts, batch)](
            input_qdata, input_scale, input_scale if block_lengths is None else block_lengths,
            sums, sequence, features, MEAN_PART, parts,
            ROWS=MEAN_ROWS, COLUMNS=MEAN_COLUMNS, MASKED=block_lengths is not None,
        )  # fmt: skip
    count = sequence if block_lengths is None else block_lengths.sum()
    return sums.sum(dim=1) / count
