"""Checks of host metadata in front of the ConvRot INT8 operators."""

import torch
from torch import Tensor

from piper_kernels._input_activations import width_factor
from piper_kernels.linear._bias import validate_bias
from piper_kernels.linear._input import validate_input
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
    width = in_features * width_factor(activation_fn)
    validate_input("ConvRot INT8 linear", input, width, weight_qdata.device, logical_dtype)
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
