"""``F.linear`` on NVFP4 weights."""

from typing import Any

import torch
from torch import Tensor

from piper_kernels.linear._bias import validate_bias
from piper_kernels.linear._dispatch import autocast_operands
from piper_kernels.linear._input import validate_input
from piper_kernels.linear.nvfp4 import _ops
from piper_kernels.linear.nvfp4._portable import dense_linear
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor
from piper_kernels.weights.nvfp4._layout import BLOCK_SIZE, scale_shape, swizzle_scale
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
    input, bias, logical_dtype = autocast_operands(input, bias, weight.dtype)  # noqa: A001
    require_decodable(weight)
    validate_input("NVFP4 linear", input, weight.shape[1], weight.device, logical_dtype)
    validate_bias(bias, weight.shape[0], input.device)
    if weight.act_quant_kwargs is None:
        return _weight_only(input, weight, bias)
    return _quantized_input(input, weight, bias)


def _needs_grad(input: Tensor, bias: Tensor | None) -> bool:  # noqa: A002
    return torch.is_grad_enabled() and (
        input.requires_grad or (bias is not None and bias.requires_grad)
    )


def _weight_only(input: Tensor, weight: PiperNVFP4Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002
    # On the CPU tracers see plain operations, and gradients need them everywhere.
    if input.device.type in ("cpu", "meta") or _needs_grad(input, bias):
        # Reconstructed in FP32: float16 could overflow before the rotation is undone.
        return dense_linear(input, weight.dequantize(torch.float32), bias)
    rows, features = weight.shape
    swizzled = weight.is_swizzled_scales
    return _ops.weight_only_linear(
        input,
        weight.qdata,
        weight.scale.view(scale_shape(rows, features, swizzled=swizzled)),
        _scalar(weight.per_tensor_scale),
        bias,
        _group_size(weight),
        swizzled,
        weight.high_first,
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
    if _needs_grad(input, bias):
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
    operands = (
        input,
        weight.qdata,
        _swizzled_scale(weight),
        _scalar(weight.per_tensor_scale),
        _scalar(act_scale),
        bias,
        options.use_dynamic_per_tensor_scale,
    )
    group_size = _group_size(weight)
    if group_size:
        # Its package imports this module.
        from piper_kernels.linear.convrot.nvfp4 import _ops as convrot_ops

        return convrot_ops.linear(*operands, group_size, weight.high_first)
    return _ops.linear(*operands, weight.high_first)


def _group_size(weight: PiperNVFP4Tensor) -> int:
    return getattr(weight, "group_size", 0)


def _scalar(level: Tensor | None) -> Tensor | None:
    return None if level is None else level.view(())


def _swizzled_scale(weight: PiperNVFP4Tensor) -> Tensor:
    rows, features = weight.shape
    if weight.is_swizzled_scales:
        return weight.scale.view(scale_shape(rows, features, swizzled=True))
    return swizzle_scale(weight.scale.view(rows, features // BLOCK_SIZE))
