"""The public ConvRot INT8 convolutions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from piper_kernels.conv3d.convrot.int8 import _ops  # noqa: F401  # registers the operators
from piper_kernels.conv3d.convrot.int8._geometry import Padding, padding_flags
from piper_kernels.conv3d.convrot.int8._operands import check_stride
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

_operators = torch.ops.piper_kernels


def conv3d(
    input: Tensor,  # noqa: A002  # the name in torch
    weight: ConvRotInt8Tensor,
    bias: Tensor | None = None,
    *,
    stride: Sequence[int] = (1, 1, 1),
    padding: Padding,
    residual: Tensor | None = None,
) -> Tensor:
    """Convolve a video with a ConvRot INT8 filter, causal in time.

    The channels of every voxel are rotated in FP32 and quantized with the fixed scale of the
    weight; products are summed exactly; ``acc * input_scale * scale + bias + residual`` is
    computed in FP32 and rounded once. Two zero frames come before the first frame.

    Args:
        input: float16 or float32 ``[N, C, T, H, W]``, any strides.
        weight: ``[O, C, 3, 3, 3]`` with an ``act_per_tensor_scale``.
        bias: float16 ``[O]``, any stride.
        stride: Steps along time, height and width.
        padding: ``"none"``, ``"reflect"`` (one pixel on every side) or ``"reflect_right"`` (one
            pixel at bottom and right), of the spatial axes.
        residual: float16 ``[N, O, T', H', W']``, any strides, added before rounding.

    Returns:
        float16 ``[N, O, T', H', W']``, contiguous, with ``T' = (T - 1) // st + 1`` and
        ``H' = (H + p - 3) // sh + 1`` with ``p`` padded pixels; ``W'`` likewise.

    Raises:
        TypeError: The weight is no 5-D ``ConvRotInt8Tensor``.
        ValueError: The weight has no input scale, or a shape, dtype, device, layout, stride or
            padding does not fit.
        RuntimeError: Gradients are enabled and an operand requires them.
    """
    storage = _unpack(weight)
    symmetric, right = padding_flags(padding)
    steps = list(check_stride(stride))
    _require_inference(input, weight.scale, bias, residual)
    qdata, scale, group_size, input_scale = storage
    return _operators.convrot_int8_conv3d.default(
        input, qdata, scale, bias, group_size, input_scale, steps, symmetric, right, residual
    )


def group_norm_silu_conv3d(
    input: Tensor,  # noqa: A002
    norm_weight: Tensor,
    norm_bias: Tensor,
    norm_groups: int,
    norm_epsilon: float,
    weight: ConvRotInt8Tensor,
    bias: Tensor | None = None,
    *,
    stride: Sequence[int] = (1, 1, 1),
    padding: Padding,
    residual: Tensor | None = None,
) -> Tensor:
    """Normalize every frame by channel groups, apply SiLU and convolve, as one operator.

    Nothing is rounded between the normalization and the codes. Statistics are those of a single
    frame, with the population variance; they stay exact where the mean is much larger than the
    deviation.

    Args:
        input: float16 or float32 ``[N, C, T, H, W]``, any strides.
        norm_weight: float16 or float32 ``[C]``.
        norm_bias: float16 or float32 ``[C]``.
        norm_groups: Groups of channels, dividing ``C``.
        norm_epsilon: Finite and positive, added to the variance.
        weight: See :func:`conv3d`.
        bias: See :func:`conv3d`.
        stride: See :func:`conv3d`.
        padding: See :func:`conv3d`; the normalized values are what is reflected.
        residual: See :func:`conv3d`.

    Returns:
        What :func:`conv3d` returns.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`conv3d` does.
    """
    storage = _unpack(weight)
    symmetric, right = padding_flags(padding)
    steps = list(check_stride(stride))
    _require_inference(input, weight.scale, bias, residual, norm_weight, norm_bias)
    qdata, scale, group_size, input_scale = storage
    return _operators.convrot_int8_group_norm_silu_conv3d.default(
        input, norm_weight, norm_bias, norm_groups, norm_epsilon, qdata, scale, bias, group_size,
        input_scale, steps, symmetric, right, residual,
    )  # fmt: skip


def require_filter(weight: Any) -> Tensor:
    """Return the input scale of a weight that convolutions take.

    Raises:
        TypeError: The weight is no 5-D ``ConvRotInt8Tensor``.
        ValueError: It has no input scale.
    """
    if not isinstance(weight, ConvRotInt8Tensor) or weight.qdata.ndim != 5:
        shape = tuple(weight.shape) if isinstance(weight, Tensor) else ""
        raise TypeError(
            "conv3d needs a ConvRotInt8Tensor of shape [O, C, 3, 3, 3], got "
            f"{type(weight).__name__} {shape}".rstrip()
        )
    if weight.act_per_tensor_scale is None:
        raise ValueError(
            "conv3d needs a weight with act_per_tensor_scale; pass the calibrated FP32 scalar to "
            "from_hp or from_quantized"
        )
    return weight.act_per_tensor_scale


def _unpack(weight: ConvRotInt8Tensor) -> tuple[Tensor, Tensor, int, Tensor]:
    input_scale = require_filter(weight)
    return weight.qdata, weight.scale, weight.group_size, input_scale


def _require_inference(*operands: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(o is not None and o.requires_grad for o in operands):
        raise RuntimeError(
            "ConvRot INT8 conv3d is inference-only; use torch.no_grad() or torch.inference_mode()"
        )
