"""Projections of prepared inputs to quantized queries, keys and values.

Operands are checked already; see ``operands``. The code that executes is chosen by the device at
execution: kernels where Triton runs, else the portable reference.
"""

import torch
from torch import Tensor

from piper_kernels._triton.runtime import supports_device
from piper_kernels.attention._quantization import Granularity
from piper_kernels.attention.sparse_piper_attention._blocks import valid_rows
from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode
from piper_kernels.fusions.convrot_int8_sage_qk import reference
from piper_kernels.fusions.convrot_int8_sage_qk.operands import HeadProjection, PreparedInput
from piper_kernels.fusions.projected_qk import reference as projected_qk
from piper_kernels.fusions.projected_qk.transform import HeadTransform
from piper_kernels.fusions.projected_value import reference as projected_value


def project_query(
    inputs: PreparedInput,
    projection: HeadProjection,
    transform: HeadTransform,
    softmax_scale: float,
    mode: RoutingMode | None,
    block_lengths: Tensor | None = None,
    granularity: Granularity = Granularity.PER_WARP,
) -> tuple[Tensor, Tensor, Tensor]:
    """Project, normalize, rotate, summarize and quantize queries.

    A range of rows that starts at a multiple of 64 gives the same rows of the results.

    Args:
        inputs: Prepared rows ``[B, S, F]``; a range of rows may be strided.
        projection: Of ``H`` heads.
        transform: Normalization and rotary embedding of the ``S`` rows.
        softmax_scale: Factor of the logits.
        mode: How blocks are summarized; ``None``: not at all.
        block_lengths: int32 ``[S / 64]``, valid rows at the front of each block; ``None``: all.
        granularity: Which rows share a scale.

    Returns:
        Codes, scales and summaries of ``projected_qk.reference.encode_query``.
    """
    if _has_kernels(inputs):
        from piper_kernels.fusions.convrot_int8_sage_qk import _launch

        return _launch.project_query(
            inputs, projection, transform, softmax_scale, mode, block_lengths, granularity
        )
    return projected_qk.encode_query(
        reference.project(inputs, projection),
        transform,
        _valid(inputs, block_lengths),
        softmax_scale,
        mode,
        granularity,
    )


def project_key(
    inputs: PreparedInput,
    projection: HeadProjection,
    transform: HeadTransform,
    mode: RoutingMode | None,
    block_lengths: Tensor | None = None,
    granularity: Granularity = Granularity.PER_WARP,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Project, normalize, rotate, summarize, center and quantize the keys of a sequence.

    Returns:
        Codes, scales and both summaries of ``projected_qk.reference.encode_key``.
    """
    if _has_kernels(inputs):
        from piper_kernels.fusions.convrot_int8_sage_qk import _launch

        return _launch.project_key(inputs, projection, transform, mode, block_lengths, granularity)
    return projected_qk.encode_key(
        reference.project(inputs, projection),
        transform,
        _valid(inputs, block_lengths),
        mode,
        granularity,
    )


def project_value(
    inputs: PreparedInput,
    projection: HeadProjection,
    input_mean: Tensor | None,
    *,
    per_tile: bool,
    with_block_means: bool = False,
    block_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Project, center, quantize and transpose values.

    Args:
        inputs: Prepared rows ``[B, S, F]``.
        projection: Of ``H`` heads.
        input_mean: FP32 ``[B, F]``, the mean of the inputs; ``None`` leaves values uncentered.
        per_tile: Whether 64 rows share a scale.
        with_block_means: Whether means of blocks of 64 rows are wanted.
        block_lengths: int32 ``[S / 64]``, valid rows at the front of each block; ``None``: all.

    Returns:
        Codes and multipliers of ``projected_value.reference.encode_value``, the mean, FP32
        ``[B, H, D]``, zero without ``input_mean``, and the means of blocks or ``None``.
    """
    if _has_kernels(inputs):
        from piper_kernels.fusions.convrot_int8_sage_qk import _launch

        return _launch.project_value(
            inputs, projection, input_mean, per_tile, with_block_means, block_lengths
        )
    heads = reference.project(inputs, projection)
    valid = _valid(inputs, block_lengths)
    mean = None if input_mean is None else reference.project_mean(input_mean, projection)
    codes, multiplier = projected_value.encode_value(heads, mean, valid, per_tile=per_tile)
    if mean is None:
        mean = torch.zeros_like(heads[:, 0])
    means = projected_value.value_block_means(heads, valid) if with_block_means else None
    return codes, multiplier, mean, means


def _has_kernels(inputs: PreparedInput) -> bool:
    return supports_device(inputs.qdata.device) and inputs.qdata.numel() > 0


def _valid(inputs: PreparedInput, block_lengths: Tensor | None) -> Tensor | None:
    return valid_rows(inputs.qdata.shape[1], block_lengths, inputs.qdata.device)
