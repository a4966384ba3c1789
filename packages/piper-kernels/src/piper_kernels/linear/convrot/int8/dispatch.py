"""Checks of host metadata in front of the ConvRot INT8 operators."""

import torch
from torch import Tensor

from piper_kernels._input_activations import width_factor
from piper_kernels.linear._bias import validate_bias
from piper_kernels.linear.convrot.int8 import _ops
from piper_kernels.weights.convrot.int8._storage import (
    validate_activation_scale,
    validate_storage,
)


def linear(
    input: Tensor,  # noqa: A002  # the name of F.linear
    weight_qdata: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    *,
    logical_dtype: torch.dtype,
    activation_fn: str | None = None,
    input_scale: Tensor | None = None,
) -> Tensor:
    """Check the operands of a linear and run it.

    Args:
        input: ``[..., factor * K]`` in ``logical_dtype``.
        weight_qdata: int8 ``[N, K]``.
        weight_scale: FP32 ``[N, 1]``.
        bias: ``[N]`` in float16, bfloat16 or float32, or ``None``.
        group_size: Rotation group along ``K``.
        logical_dtype: Dtype that the weight presents.
        activation_fn: ``None``, ``"gelu_tanh"`` or ``"swiglu"`` (factor 2).
        input_scale: Static FP32 scalar scale, or ``None``.

    Returns:
        ``[..., N]`` in the dtype of ``input``.

    Raises:
        ValueError: A shape, dtype, device or layout does not fit.
        TypeError: The bias is not a tensor.
        RuntimeError: Gradients are enabled and an operand requires them.
    """
    validate_storage(weight_qdata, weight_scale, group_size)
    validate_activation_scale(input_scale, weight_qdata.device)
    out_features, in_features = weight_qdata.shape
    _validate_input(input, in_features * width_factor(activation_fn), weight_qdata.device)
    if input.dtype != logical_dtype:
        raise ValueError(
            f"ConvRot INT8 linear input must have the weight's logical dtype {logical_dtype}, "
            f"got {input.dtype}; convert the input or the weight with .to(dtype)"
        )
    validate_bias(bias, out_features, input.device)
    if torch.is_grad_enabled() and (
        input.requires_grad
        or weight_scale.requires_grad
        or (bias is not None and bias.requires_grad)
    ):
        raise RuntimeError(
            "ConvRot INT8 linear does not support autograd; "
            "use torch.no_grad() or torch.inference_mode()"
        )
    return _ops.linear(
        input, weight_qdata, weight_scale, bias, group_size, activation_fn, input_scale
    )


def _validate_input(value: Tensor, width: int, device: torch.device) -> None:
    features = value.shape[-1] if value.ndim else 0
    if value.ndim == 0 or features != width:
        raise ValueError(
            f"ConvRot INT8 linear expected {width} input features, got {features} "
            f"(input shape {tuple(value.shape)})"
        )
    if value.device != device:
        raise ValueError(
            f"linear input and weight must share a device, got {value.device} and {device}"
        )
    if value.layout != torch.strided:
        raise ValueError(f"linear input must use strided layout, got {value.layout}")
