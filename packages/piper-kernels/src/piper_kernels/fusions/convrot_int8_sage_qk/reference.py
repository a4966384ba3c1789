"""Portable projections of prepared inputs to FP32 heads and their means."""

import torch
from torch import Tensor

from piper_kernels._autocast import full_precision
from piper_kernels.fusions.convrot_int8_sage_qk.operands import HeadProjection, PreparedInput
from piper_kernels.linear.convrot.int8 import reference as linear


def project(inputs: PreparedInput, projection: HeadProjection) -> Tensor:
    """Return ``((acc * input_scale) * weight_scale) + bias``, FP32 ``[B, S, H, D]``."""
    output = linear.linear_prepared(
        inputs.qdata, inputs.scale, projection.qdata, projection.scale, torch.float32,
        projection.bias,
    )  # fmt: skip
    return output.unflatten(-1, (projection.heads, projection.head_dim))


def project_mean(input_mean: Tensor, projection: HeadProjection) -> Tensor:
    """Return the mean of the projected rows, FP32 ``[B, H, D]``, from that of their inputs.

    The projection is linear, so no second pass over the rows is needed.

    Args:
        input_mean: FP32 ``[B, F]``, rotated, of ``convrot_int8_dequantized_input_mean``.
        projection: The projection.
    """
    with full_precision(input_mean.device):
        output = (input_mean @ projection.qdata.float().t()) * projection.scale.view(1, -1)
    if projection.bias is not None:
        output = output + projection.bias.float()
    return output.unflatten(-1, (projection.heads, projection.head_dim))
