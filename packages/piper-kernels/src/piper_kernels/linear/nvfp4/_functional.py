"""``F.linear`` on NVFP4 weights."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from piper_kernels._autocast import autocast_dtype, full_precision
from piper_kernels.linear._bias import validate_bias
from piper_kernels.linear._dispatch import autocast_operand
from piper_kernels.linear.nvfp4 import reference
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor
from piper_kernels.weights.nvfp4._layout import BLOCK_SIZE, swizzle_scale
from piper_kernels.weights.nvfp4._storage import require_decodable


def nvfp4_linear(
    input: Tensor,  # noqa: A002  # the name of F.linear
    weight: PiperNVFP4Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply an input by an NVFP4 weight, as ``torch.nn.functional.linear`` does.

    Without ``weight.act_quant_kwargs`` the weight is dequantized and multiplied in the
    logical dtype. With them the input is quantized to NVFP4 in the basis of the weight
    (rotated for ConvRot), and the product is scaled, biased and rounded once in FP32.
    Inside an autocast region input, bias and logical weight dtype become the autocast dtype.

    Args:
        input: ``[..., in_features]`` in the logical dtype of the weight, any strides.
        weight: ``[out_features, in_features]``, not transposed.
        bias: ``[out_features]`` in float16, bfloat16 or float32.

    Returns:
        ``[..., out_features]`` in the dtype of ``input``.

    Raises:
        TypeError: The bias is no tensor.
        NotImplementedError: The weight is transposed or not a matrix.
        ValueError: A shape, dtype, device or layout does not fit.
        RuntimeError: The input is to be quantized while gradients are enabled and an operand
            requires them.
    """
    if weight.transposed or weight.ndim != 2:
        raise NotImplementedError(
            "NVFP4 linear needs an untransposed 2-D weight, got shape "
            f"{tuple(weight.shape)} with transposed={weight.transposed}; "
            "for x @ weight.t() pass the weight itself"
        )
    logical_dtype = weight.dtype
    target = autocast_dtype(input.device)
    if target is not None:
        logical_dtype = target
        input = autocast_operand(input, input.device, target)  # noqa: A001
        if isinstance(bias, Tensor):
            bias = autocast_operand(bias, input.device, target)
    require_decodable(weight)
    _validate_input(input, weight, logical_dtype)
    validate_bias(bias, weight.shape[0], input.device)
    if weight.act_quant_kwargs is None:
        return _weight_only(input, weight, bias)
    return _quantized_input(input, weight, bias)


def _weight_only(input: Tensor, weight: PiperNVFP4Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002
    # Reconstructed in FP32: float16 could overflow before the rotation is undone.
    dense = weight.dequantize(torch.float32)
    if bias is None or bias.dtype == input.dtype:
        return functional.linear(input, dense.to(input.dtype), bias)
    with full_precision(input.device):
        return functional.linear(input.to(torch.float32), dense, bias.to(torch.float32)).to(
            input.dtype
        )


def _quantized_input(
    input: Tensor,  # noqa: A002
    weight: PiperNVFP4Tensor,
    bias: Tensor | None,
) -> Tensor:
    options: Any = weight.act_quant_kwargs
    if options.block_size != BLOCK_SIZE:
        raise ValueError(
            f"NVFP4 linear quantizes inputs in blocks of {BLOCK_SIZE}, "
            f"got act_quant_kwargs.block_size={options.block_size}"
        )
    if torch.is_grad_enabled() and (
        input.requires_grad or (bias is not None and bias.requires_grad)
    ):
        raise RuntimeError(
            "NVFP4 linear with quantized inputs does not support autograd; "
            "use torch.no_grad() or torch.inference_mode()"
        )
    act_scale = weight.act_per_tensor_scale
    if act_scale is not None and (act_scale.numel() != 1 or act_scale.dtype != torch.float32):
        raise ValueError(
            "act_per_tensor_scale must be an FP32 scalar, "
            f"got {act_scale.dtype} with shape {tuple(act_scale.shape)}"
        )
    level = weight.per_tensor_scale
    return reference.linear(
        input,
        weight.qdata,
        _swizzled_scale(weight),
        None if level is None else level.view(()),
        None if act_scale is None else act_scale.view(()),
        bias,
        options.use_dynamic_per_tensor_scale,
        weight.high_first,
        group_size=getattr(weight, "group_size", 0),
    )


def _swizzled_scale(weight: PiperNVFP4Tensor) -> Tensor:
    if weight.is_swizzled_scales:
        return weight.scale
    return swizzle_scale(weight.scale.view(weight.shape[0], weight.shape[1] // BLOCK_SIZE))


def _validate_input(value: Tensor, weight: PiperNVFP4Tensor, logical_dtype: torch.dtype) -> None:
    features = value.shape[-1] if value.ndim else 0
    if value.ndim == 0 or features != weight.shape[1]:
        raise ValueError(
            f"NVFP4 linear expected {weight.shape[1]} input features, got {features} "
            f"(input shape {tuple(value.shape)})"
        )
    if value.device != weight.device:
        raise ValueError(
            f"linear input and weight must share a device, got {value.device} and {weight.device}"
        )
    if value.layout != torch.strided:
        raise ValueError(f"linear input must use strided layout, got {value.layout}")
    if value.dtype != logical_dtype:
        raise ValueError(
            f"NVFP4 linear input must have the weight's logical dtype {logical_dtype}, "
            f"got {value.dtype}; convert the input or the weight with .to(dtype)"
        )
