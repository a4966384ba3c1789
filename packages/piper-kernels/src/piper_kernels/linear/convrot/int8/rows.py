"""Rows that the operation in front of a ConvRot INT8 product rotates and quantizes itself.

An operator that stores its result in 16 bits for the product to read, rotate and quantize writes
and reads it once too often. These functions do the operator's work and the product's preparation
at once; `multiply_rows` is the rest of the product. Where no kernel runs, and for rows of more than
8,192 columns, they are the two operations after each other.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from piper_kernels._triton.runtime import supports_device
from piper_kernels.linear.convrot.int8 import _ops
from piper_kernels.linear.convrot.int8._plan import plan_input_rows
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

Rows = tuple[Tensor, Tensor]
"""Codes int8 ``[M, K]`` and FP32 row scales ``[M]``."""


def gated_rows(x: Tensor, group_size: int) -> Rows:
    """Return prepared rows of ``silu(gate) * up``, which is FP32 until it is quantized.

    Args:
        x: Floating ``[M, 2 * K]`` as ``[gate | up]``, columns side by side.
        group_size: Rotation group along ``K``: 16, 64 or 256.
    """
    features = x.shape[1] // 2
    if not _runs(x) or plan_input_rows(features) is None:
        gate, up = x.chunk(2, dim=1)
        return _ops.prepare_input(torch.cat((up, gate), dim=1), group_size, "swiglu")
    from piper_kernels.linear.convrot.int8 import _launch

    codes, scale = _empty(x.shape[0], features, x.device)
    if codes.numel():
        _launch.prepare_rows(x, codes, scale, group_size, "silu_and_mul", None)
    return codes, scale


def normed_rows(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    group_size: int,
    *,
    gemma: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return prepared rows of the RMS norm of ``x + residual``, and the sum.

    The sum is rounded to the dtype of the residual, the norm to that of ``x``, as by operations of
    their own.

    Args:
        x: Floating ``[M, K]``, columns side by side.
        residual: Likewise, or ``None``; the sum is then ``x`` itself.
        weight: Floating ``[K]``.
        eps: Added to the mean square.
        group_size: Rotation group along ``K``: 16, 64 or 256.
        gemma: Whether one plus the weight multiplies.
    """
    plan = plan_input_rows(x.shape[1])
    if not _runs(x) or plan is None or plan.count > 1:
        total = x if residual is None else (x.float() + residual.float()).to(residual.dtype)
        factor = weight.float() + 1 if gemma else weight.float()
        wide = functional.rms_norm(total.to(x.dtype).float(), weight.shape, factor, eps)
        return *_ops.prepare_input(wide.to(x.dtype), group_size), total
    from piper_kernels.linear.convrot.int8 import _launch_rows

    codes, scale = _empty(x.shape[0], x.shape[1], x.device)
    total = x
    if residual is not None:
        total = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
    if codes.numel():
        _launch_rows.norm_rows(
            x, residual, weight, eps, total, codes, scale, group_size, plan, gemma=gemma
        )
    return codes, scale, total


def joined_rows(parts: Sequence[Tensor], group_size: int) -> Rows:
    """Return prepared rows of attention that lies in several tensors.

    Args:
        parts: Floating ``[T, heads, head_dim]`` of one dtype, any strides with features side by
            side.
        group_size: Rotation group along ``heads * head_dim``: 16, 64 or 256.
    """
    first = parts[0]
    heads, width = first.shape[1:]
    plan = plan_input_rows(heads * width)
    if not _runs(first) or plan is None or plan.count > 1:
        return _ops.prepare_input(torch.cat([*parts]).flatten(1), group_size)
    from piper_kernels.linear.convrot.int8 import _launch_rows

    codes, scale = _empty(sum(part.shape[0] for part in parts), heads * width, first.device)
    start = 0
    for part in parts:
        stop = start + part.shape[0]
        if stop > start:
            _launch_rows.head_rows(part, codes[start:stop], scale[start:stop], group_size, plan)
        start = stop
    return codes, scale


def multiply_rows(
    codes: Tensor, scale: Tensor, weight: ConvRotInt8Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the product ``[M, N]`` of prepared rows in ``dtype``; see the README of this folder.

    Args:
        codes: int8 ``[M, K]``.
        scale: FP32 ``[M]``.
        weight: Logical ``[N, K]``, of the rotation group of the rows.
        bias: Floating ``[N]`` or ``None``.
        dtype: Of the result.
    """
    return _ops.linear_prepared(codes, scale, weight.qdata, weight.scale, bias, dtype)


def _runs(x: Tensor) -> bool:
    return supports_device(x.device)


def _empty(rows: int, features: int, device: torch.device) -> Rows:
    codes = torch.empty((rows, features), dtype=torch.int8, device=device)
    return codes, torch.empty(rows, dtype=torch.float32, device=device)
