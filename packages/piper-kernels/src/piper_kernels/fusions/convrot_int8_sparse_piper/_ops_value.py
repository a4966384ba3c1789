"""Custom operators that project prepared inputs to values of sparse Piper attention.

They complete the operators of ``_ops``, whose sizes they share.
"""

import torch
from torch import Tensor

from piper_kernels.attention.sparse_piper_attention._blocks import BLOCK
from piper_kernels.fusions.convrot_int8_sage_qk import projections
from piper_kernels.fusions.convrot_int8_sage_qk.operands import (
    HeadProjection,
    PreparedInput,
    check_input_mean,
)
from piper_kernels.fusions.convrot_int8_sparse_piper._ops_operands import (
    LABEL,
    check_operands,
    sizes,
)
from piper_kernels.fusions.projected_qk.transform import resolve_head_dim


def _value_operands(
    input_qdata: Tensor,
    input_scale: Tensor,
    input_mean: Tensor,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    block_lengths: Tensor | None,
    head_dim: int,
    bias: Tensor | None,
) -> tuple[PreparedInput, HeadProjection]:
    """Return the checked operands of a value operator."""
    inputs = PreparedInput(input_qdata, input_scale)
    width = resolve_head_dim(LABEL, None, head_dim)
    projection = HeadProjection(weight_qdata, weight_scale, bias, width)
    check_operands(inputs, projection, None, block_lengths)
    check_input_mean(LABEL, input_mean, inputs)
    return inputs, projection


def _empty_values(
    inputs: PreparedInput, projection: HeadProjection
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, blocks, width = sizes(inputs, projection)
    return (
        inputs.qdata.new_empty((batch, heads, width, blocks * BLOCK)),
        inputs.scale.new_empty((batch, heads, blocks, 1)),
        inputs.scale.new_empty((batch, heads, width)),
    )


@torch.library.custom_op("piper_kernels::convrot_int8_sparse_piper_project_value", mutates_args=())
def project_value(
    input_qdata: Tensor,
    input_scale: Tensor,
    input_mean: Tensor,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    block_lengths: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    head_dim: int = 128,
) -> tuple[Tensor, Tensor, Tensor]:
    """Project, center, quantize and transpose values.

    Args:
        input_qdata: int8 ``[B, S, F]`` with ``S >= 64``.
        input_scale: FP32 ``[B, S]``.
        input_mean: FP32 ``[B, F]``, result of ``convrot_int8_dequantized_input_mean``.
        weight_qdata: int8 ``[H * D, F]``.
        weight_scale: FP32 ``[H * D, 1]``.
        block_lengths: int32 ``[S / 64]``, valid rows at the front of each block; ``None``: all.
        bias: Floating ``[H * D]``, added in FP32 to values and means.
        head_dim: ``D``, 64 or 128.

    Returns:
        int8 codes ``[B, H, D, S']``, FP32 255 times their scales ``[B, H, S' / 64, 1]`` and the
        FP32 mean ``[B, H, D]`` that was subtracted.
    """
    inputs, projection = _value_operands(
        input_qdata, input_scale, input_mean, weight_qdata, weight_scale, block_lengths, head_dim,
        bias,
    )  # fmt: skip
    codes, multiplier, mean, _ = projections.project_value(
        inputs, projection, input_mean, per_tile=True, block_lengths=block_lengths
    )
    return codes, multiplier, mean


@project_value.register_fake
def _(
    input_qdata: Tensor,
    input_scale: Tensor,
    input_mean: Tensor,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    block_lengths: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    head_dim: int = 128,
) -> tuple[Tensor, Tensor, Tensor]:
    operands = _value_operands(
        input_qdata, input_scale, input_mean, weight_qdata, weight_scale, block_lengths, head_dim,
        bias,
    )  # fmt: skip
    return _empty_values(*operands)


@torch.library.custom_op(
    "piper_kernels::convrot_int8_sparse_piper_project_value_with_block_means", mutates_args=()
)
def project_value_with_block_means(
    input_qdata: Tensor,
    input_scale: Tensor,
    input_mean: Tensor,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    block_lengths: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    head_dim: int = 128,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do what the value operator does and return the means of blocks of 64 values too.

    Returns:
        The results of the value operator and FP32 ``[B, H, S' / 64, D]``, means over the rows
        that exist.
    """
    inputs, projection = _value_operands(
        input_qdata, input_scale, input_mean, weight_qdata, weight_scale, block_lengths, head_dim,
        bias,
    )  # fmt: skip
    codes, multiplier, mean, block_means = projections.project_value(
        inputs, projection, input_mean, per_tile=True, with_block_means=True,
        block_lengths=block_lengths,
    )  # fmt: skip
    assert block_means is not None, "block means were asked for"
    return codes, multiplier, mean, block_means


@project_value_with_block_means.register_fake
def _(
    input_qdata: Tensor,
    input_scale: Tensor,
    input_mean: Tensor,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    block_lengths: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    head_dim: int = 128,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs, projection = _value_operands(
        input_qdata, input_scale, input_mean, weight_qdata, weight_scale, block_lengths, head_dim,
        bias,
    )  # fmt: skip
    batch, heads, blocks, width = sizes(inputs, projection)
    means = input_scale.new_empty((batch, heads, blocks, width))
    return *_empty_values(inputs, projection), means
