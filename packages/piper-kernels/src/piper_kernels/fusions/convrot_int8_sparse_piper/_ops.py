"""Custom operators that project prepared inputs to queries and keys of sparse Piper attention.

They take the result of ``convrot_int8_prepare_input`` and write what
``sparse_piper_attention_from_quantized`` reads. ``S'`` is ``S`` rounded up to 64; rows that do
not exist are zero in all codes. Fakes check host metadata and compute shapes.
"""

import torch
from torch import Tensor

from piper_kernels.attention.sparse_piper_attention._blocks import BLOCK
from piper_kernels.attention.sparse_piper_attention._preparation import QUERY_GROUP
from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode
from piper_kernels.fusions.convrot_int8_sage_qk import projections
from piper_kernels.fusions.convrot_int8_sage_qk.operands import (
    HeadProjection,
    PreparedInput,
    check_softmax_scale,
)
from piper_kernels.fusions.convrot_int8_sparse_piper._ops_operands import (
    LABEL,
    check_operands,
    sizes,
)
from piper_kernels.fusions.projected_qk.transform import HeadTransform, resolve_head_dim


@torch.library.custom_op("piper_kernels::convrot_int8_sparse_piper_project_query", mutates_args=())
def project_query(
    input_qdata: Tensor,
    input_scale: Tensor,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    norm_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    softmax_scale: float,
    routing_mode: int,
    block_lengths: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    head_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Project, normalize, rotate, summarize and quantize queries.

    Args:
        input_qdata: int8 ``[B, S, F]`` with ``S >= 64``.
        input_scale: FP32 ``[B, S]``.
        weight_qdata: int8 ``[H * D, F]``.
        weight_scale: FP32 ``[H * D, 1]``.
        norm_weight: Floating ``[D]``; ``None``: no factor after the normalization.
        cos: FP32 ``[S, R]``, ``R`` even and at most ``D``.
        sin: Like ``cos``.
        eps: Added to mean squares.
        softmax_scale: Factor of the logits.
        routing_mode: How blocks are summarized.
        block_lengths: int32 ``[S / 64]``, valid rows at the front of each block; ``None``: all.
        bias: Floating ``[H * D]``, added in FP32.
        head_dim: ``D``, 64 or 128; needed without ``norm_weight``.

    Returns:
        int8 codes ``[B, H, S', D]``, FP32 scales ``[B, H, S' / 32]`` and FP32 summaries
        ``[B, H, S' / 64, D]``.
    """
    width = resolve_head_dim(LABEL, norm_weight, head_dim)
    inputs = PreparedInput(input_qdata, input_scale)
    projection = HeadProjection(weight_qdata, weight_scale, bias, width)
    transform = HeadTransform(norm_weight, cos, sin, eps)
    check_operands(inputs, projection, transform, block_lengths)
    check_softmax_scale(LABEL, softmax_scale)
    mode = RoutingMode(routing_mode)
    return projections.project_query(
        inputs, projection, transform, softmax_scale, mode, block_lengths
    )


@project_query.register_fake
def _(
    input_qdata: Tensor,
    input_scale: Tensor,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    norm_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    softmax_scale: float,
    routing_mode: int,
    block_lengths: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    head_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    width = resolve_head_dim(LABEL, norm_weight, head_dim)
    inputs = PreparedInput(input_qdata, input_scale)
    projection = HeadProjection(weight_qdata, weight_scale, bias, width)
    check_operands(inputs, projection, HeadTransform(norm_weight, cos, sin, eps), block_lengths)
    check_softmax_scale(LABEL, softmax_scale)
    RoutingMode(routing_mode)
    batch, heads, blocks, _ = sizes(inputs, projection)
    return (
        input_qdata.new_empty((batch, heads, blocks * BLOCK, width)),
        input_scale.new_empty((batch, heads, blocks * (BLOCK // QUERY_GROUP))),
        input_scale.new_empty((batch, heads, blocks, width)),
    )


@torch.library.custom_op("piper_kernels::convrot_int8_sparse_piper_project_key", mutates_args=())
def project_key(
    input_qdata: Tensor,
    input_scale: Tensor,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    norm_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    routing_mode: int,
    block_lengths: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    head_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Project, normalize, rotate, summarize, center and quantize keys.

    Arguments are those of the query operator. Summaries are those of the keys before they are
    centered; the mean is that of the keys rounded to bfloat16.

    Returns:
        int8 codes ``[B, H, S', D]``, FP32 scales ``[B, H, S' / 64]``, FP32 summaries
        ``[B, H, S' / 64, D]`` and auxiliary ones, which have no blocks in the mode of means.
    """
    width = resolve_head_dim(LABEL, norm_weight, head_dim)
    inputs = PreparedInput(input_qdata, input_scale)
    projection = HeadProjection(weight_qdata, weight_scale, bias, width)
    transform = HeadTransform(norm_weight, cos, sin, eps)
    check_operands(inputs, projection, transform, block_lengths)
    mode = RoutingMode(routing_mode)
    return projections.project_key(inputs, projection, transform, mode, block_lengths)


@project_key.register_fake
def _(
    input_qdata: Tensor,
    input_scale: Tensor,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    norm_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    routing_mode: int,
    block_lengths: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    head_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    width = resolve_head_dim(LABEL, norm_weight, head_dim)
    inputs = PreparedInput(input_qdata, input_scale)
    projection = HeadProjection(weight_qdata, weight_scale, bias, width)
    check_operands(inputs, projection, HeadTransform(norm_weight, cos, sin, eps), block_lengths)
    batch, heads, blocks, _ = sizes(inputs, projection)
    aux = 0 if RoutingMode(routing_mode) is RoutingMode.MEAN else blocks
    return (
        input_qdata.new_empty((batch, heads, blocks * BLOCK, width)),
        input_scale.new_empty((batch, heads, blocks)),
        input_scale.new_empty((batch, heads, blocks, width)),
        input_scale.new_empty((batch, heads, aux, width)),
    )
