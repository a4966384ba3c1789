"""Custom operators that project prepared inputs to the operands of dense Piper attention.

They take the result of ``convrot_int8_prepare_input`` and write what
``piper_attention_from_quantized`` reads: ``S'`` is ``S`` rounded up to 64, rows past the end are
zero in all codes. Fakes check host metadata and compute shapes.
"""

import torch
from torch import Tensor

from piper_kernels._triton.targets import accelerator_target
from piper_kernels.attention._backends import AttentionRequest, select_backend
from piper_kernels.attention._online_softmax import PROBABILITY_LEVELS
from piper_kernels.attention._quantization import Granularity
from piper_kernels.attention.piper_attention._backend import BACKENDS
from piper_kernels.attention.sparse_piper_attention._blocks import BLOCK, block_count
from piper_kernels.fusions.convrot_int8_sage_qk import projections
from piper_kernels.fusions.convrot_int8_sage_qk.operands import (
    HeadProjection,
    PreparedInput,
    check_input_mean,
    check_projection,
    check_softmax_scale,
)
from piper_kernels.fusions.projected_qk.transform import (
    HeadTransform,
    check_transform,
    resolve_head_dim,
)

LABEL = "dense Piper projection"


def _granularity(qk_quantization: str) -> Granularity:
    names = {granularity.name.lower(): granularity for granularity in Granularity}
    if qk_quantization not in names:
        allowed = ", ".join(repr(name) for name in names)
        raise ValueError(
            f"{LABEL}: qk_quantization must be one of {allowed}, got {qk_quantization!r}"
        )
    return names[qk_quantization]


def _operands(
    input_qdata: Tensor,
    input_scale: Tensor,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    transform: HeadTransform | None,
    head_dim: int | None,
    bias: Tensor | None,
) -> tuple[PreparedInput, HeadProjection]:
    """Return the checked operands."""
    weight = None if transform is None else transform.weight
    width = resolve_head_dim(LABEL, weight, head_dim)
    inputs = PreparedInput(input_qdata, input_scale)
    projection = HeadProjection(weight_qdata, weight_scale, bias, width)
    check_projection(LABEL, inputs, projection)
    if transform is not None:
        rows, device = input_qdata.shape[1], input_qdata.device
        check_transform(LABEL, transform, width, rows, device)
    return inputs, projection


def _empty_rows(
    inputs: PreparedInput, projection: HeadProjection, scales_per_block: int
) -> tuple[Tensor, Tensor]:
    """Return uninitialized codes and scales of queries or keys."""
    batch, rows, _ = inputs.qdata.shape
    heads, blocks, width = projection.heads, block_count(rows), projection.head_dim
    return (
        inputs.qdata.new_empty((batch, heads, blocks * BLOCK, width)),
        inputs.scale.new_empty((batch, heads, blocks * scales_per_block)),
    )


def _values_per_tile(
    input_qdata: Tensor, projection: HeadProjection, input_mean: Tensor | None
) -> bool:
    """Return whether 64 values share a scale on the device; never without a mean."""
    device = input_qdata.device
    if input_mean is None or (device.type == "cuda" and not torch.cuda.is_available()):
        return False
    target = accelerator_target(device)
    request = AttentionRequest(target, projection.head_dim, is_causal=False)
    return select_backend(BACKENDS, request).values_per_tile


@torch.library.custom_op("piper_kernels::convrot_int8_piper_project_query", mutates_args=())
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
    bias: Tensor | None = None,
    *,
    head_dim: int | None = None,
    qk_quantization: str = "per_warp",
) -> tuple[Tensor, Tensor]:
    """Project, normalize, rotate and quantize queries.

    Args:
        input_qdata: int8 ``[B, S, F]``.
        input_scale: FP32 ``[B, S]``.
        weight_qdata: int8 ``[H * D, F]``.
        weight_scale: FP32 ``[H * D, 1]``.
        norm_weight: Floating ``[D]``; ``None``: no factor after the normalization.
        cos: FP32 ``[S, R]``, ``R`` even and at most ``D``.
        sin: Like ``cos``.
        eps: Added to mean squares.
        softmax_scale: Factor of the logits.
        bias: Floating ``[H * D]``, added in FP32.
        head_dim: ``D``, 64 or 128; needed without ``norm_weight``.
        qk_quantization: ``"per_warp"``: 32 rows share a scale; ``"per_thread"``: 4 rows do.

    Returns:
        int8 codes ``[B, H, S', D]`` and FP32 scales with the factor of the logits and
        ``log2(e)``: ``[B, H, S' / 32]`` per warp, ``[B, H, S']`` per thread.
    """
    granularity = _granularity(qk_quantization)
    transform = HeadTransform(norm_weight, cos, sin, eps)
    inputs, projection = _operands(
        input_qdata, input_scale, weight_qdata, weight_scale, transform, head_dim, bias
    )
    check_softmax_scale(LABEL, softmax_scale)
    codes, scale, _ = projections.project_query(
        inputs, projection, transform, softmax_scale, None, granularity=granularity
    )
    return codes, scale


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
    bias: Tensor | None = None,
    *,
    head_dim: int | None = None,
    qk_quantization: str = "per_warp",
) -> tuple[Tensor, Tensor]:
    granularity = _granularity(qk_quantization)
    transform = HeadTransform(norm_weight, cos, sin, eps)
    operands = _operands(
        input_qdata, input_scale, weight_qdata, weight_scale, transform, head_dim, bias
    )
    check_softmax_scale(LABEL, softmax_scale)
    return _empty_rows(*operands, 2 if granularity is Granularity.PER_WARP else BLOCK)


@torch.library.custom_op("piper_kernels::convrot_int8_piper_project_key", mutates_args=())
def project_key(
    input_qdata: Tensor,
    input_scale: Tensor,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    norm_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    bias: Tensor | None = None,
    *,
    head_dim: int | None = None,
    qk_quantization: str = "per_warp",
) -> tuple[Tensor, Tensor]:
    """Project, normalize, rotate, center and quantize keys.

    Arguments are those of the query operator; per warp 64 rows share a scale, per thread 16 do.
    The mean that is subtracted is that of the keys rounded to bfloat16.

    Returns:
        int8 codes ``[B, Hkv, S', D]`` and FP32 scales: ``[B, Hkv, S' / 64]`` per warp,
        ``[B, Hkv, S']`` per thread.
    """
    granularity = _granularity(qk_quantization)
    transform = HeadTransform(norm_weight, cos, sin, eps)
    inputs, projection = _operands(
        input_qdata, input_scale, weight_qdata, weight_scale, transform, head_dim, bias
    )
    codes, scale, _, _ = projections.project_key(
        inputs, projection, transform, None, granularity=granularity
    )
    return codes, scale


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
    bias: Tensor | None = None,
    *,
    head_dim: int | None = None,
    qk_quantization: str = "per_warp",
) -> tuple[Tensor, Tensor]:
    granularity = _granularity(qk_quantization)
    transform = HeadTransform(norm_weight, cos, sin, eps)
    operands = _operands(
        input_qdata, input_scale, weight_qdata, weight_scale, transform, head_dim, bias
    )
    return _empty_rows(*operands, 1 if granularity is Granularity.PER_WARP else BLOCK)


@torch.library.custom_op("piper_kernels::convrot_int8_piper_project_value", mutates_args=())
def project_value(
    input_qdata: Tensor,
    input_scale: Tensor,
    input_mean: Tensor | None,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    head_dim: int = 128,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Project, center, quantize and transpose values.

    Rows have a scale each, or 64 share one: what the attention of the device is meant for. Values
    that are not centered always have a scale each.

    Args:
        input_qdata: int8 ``[B, S, F]``.
        input_scale: FP32 ``[B, S]``.
        input_mean: FP32 ``[B, F]``, result of ``convrot_int8_dequantized_input_mean``; ``None``
            leaves values uncentered, as causal attention needs them.
        weight_qdata: int8 ``[Hkv * D, F]``.
        weight_scale: FP32 ``[Hkv * D, 1]``.
        bias: Floating ``[Hkv * D]``, added in FP32 to values and means.
        head_dim: ``D``, 64 or 128.

    Returns:
        int8 codes ``[B, Hkv, D, S']``, FP32 255 times their scales, ``[B, Hkv, S']`` or
        ``[B, Hkv, S' / 64]``, the base-2 logarithms of the scales, and the FP32 mean
        ``[B, Hkv, D]``, zero without ``input_mean``.
    """
    inputs, projection = _operands(
        input_qdata, input_scale, weight_qdata, weight_scale, None, head_dim, bias
    )
    if input_mean is not None:
        check_input_mean(LABEL, input_mean, inputs)
    codes, multiplier, mean, _ = projections.project_value(
        inputs,
        projection,
        input_mean,
        per_tile=_values_per_tile(input_qdata, projection, input_mean),
    )
    multiplier = multiplier.flatten(2)
    return codes, multiplier, (multiplier / PROBABILITY_LEVELS).log2(), mean


@project_value.register_fake
def _(
    input_qdata: Tensor,
    input_scale: Tensor,
    input_mean: Tensor | None,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    head_dim: int = 128,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs, projection = _operands(
        input_qdata, input_scale, weight_qdata, weight_scale, None, head_dim, bias
    )
    if input_mean is not None:
        check_input_mean(LABEL, input_mean, inputs)
    per_tile = _values_per_tile(input_qdata, projection, input_mean)
    codes, multiplier = _empty_rows(inputs, projection, 1 if per_tile else BLOCK)
    mean = input_scale.new_empty((codes.shape[0], codes.shape[1], projection.head_dim))
    return codes.mT.contiguous(), multiplier, torch.empty_like(multiplier), mean
