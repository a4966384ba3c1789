"""Portable ConvRot INT8 linear: the numeric contract that backends reproduce."""

import torch
from torch import Tensor

from piper_kernels._input_activations import apply_activation
from piper_kernels.linear.convrot.int8._integer_matmul import integer_matmul
from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.convrot.int8._quantization import round_to_codes, row_scale

MEAN_BLOCK = 64  # rows of a block of ``dequantized_input_mean``


def prepare_input(
    input: Tensor,  # noqa: A002  # the name of F.linear
    group_size: int,
    activation_fn: str | None = None,
    input_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Activate, rotate and quantize an input, all in FP32.

    Args:
        input: Floating ``[..., factor * K]``; the factor is 2 for ``"swiglu"``, else 1.
        group_size: Rotation group along ``K``.
        activation_fn: ``None``, ``"gelu_tanh"`` or ``"swiglu"``.
        input_scale: FP32 scalar, finite and positive, used for every row; ``None`` scales
            each row by its maximum.

    Returns:
        int8 codes ``[..., K]`` and fresh FP32 row scales ``[...]``.
    """
    rotated = rotate_groups(apply_activation(input, activation_fn), group_size)
    if input_scale is None:
        scale = row_scale(rotated)
        return round_to_codes(rotated.div_(scale)), scale.squeeze(-1)
    codes = round_to_codes(rotated.div_(input_scale))
    return codes, input_scale.expand(rotated.shape[:-1]).clone(
        memory_format=torch.contiguous_format
    )


def linear_prepared(
    input_qdata: Tensor,
    input_scale: Tensor,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    logical_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply a prepared input: ``((acc * x_scale) * w_scale) + bias`` in FP32.

    Args:
        input_qdata: int8 ``[..., K]``.
        input_scale: FP32 ``[...]``.
        weight_qdata: int8 ``[N, K]``.
        weight_scale: FP32 ``[N, 1]``.
        logical_dtype: Dtype of the result, rounded to once.
        bias: Floating ``[N]``, or ``None``.

    Returns:
        ``[..., N]`` in ``logical_dtype``. ``acc`` is the exact integer product.
    """
    out_features, in_features = weight_qdata.shape
    lead = input_qdata.shape[:-1]
    accumulator = integer_matmul(input_qdata.reshape(lead.numel(), in_features), weight_qdata)
    output = accumulator.to(torch.float32)
    output.mul_(input_scale.reshape(-1, 1)).mul_(weight_scale.view(1, -1))
    if bias is not None:
        output.add_(bias)
    return output.to(logical_dtype).view(*lead, out_features)


def linear(
    input: Tensor,  # noqa: A002  # the name of F.linear
    weight_qdata: Tensor,
    weight_scale: Tensor,
    group_size: int,
    bias: Tensor | None = None,
    *,
    activation_fn: str | None = None,
    input_scale: Tensor | None = None,
) -> Tensor:
    """Return ``activation(input) @ W.T + bias`` in the dtype of ``input``.

    See ``prepare_input`` and ``linear_prepared`` for the steps and shapes.
    """
    qdata, scale = prepare_input(input, group_size, activation_fn, input_scale)
    return linear_prepared(qdata, scale, weight_qdata, weight_scale, input.dtype, bias)


def dequantized_input_mean(
    input_qdata: Tensor, input_scale: Tensor, block_lengths: Tensor | None = None
) -> Tensor:
    """Return the mean over a sequence of what prepared inputs stand for, still rotated.

    Args:
        input_qdata: int8 ``[B, S, K]``.
        input_scale: FP32 ``[B, S]``.
        block_lengths: int32 ``[S / 64]``, valid rows at the front of each block of 64, in
            1..64; other rows are left out. ``None`` means that every row is valid.

    Returns:
        FP32 ``[B, K]``; NaN for ``S = 0``.
    """
    values = input_qdata.to(torch.float32) * input_scale[..., None]
    if block_lengths is None:
        return values.mean(dim=1)
    positions = torch.arange(MEAN_BLOCK, device=input_qdata.device)
    valid = (positions < block_lengths[:, None]).reshape(1, -1, 1)
    return torch.where(valid, values, 0.0).sum(dim=1) / block_lengths.sum()
