"""Portable NVFP4 linear with quantized inputs: the numeric contract that backends reproduce."""

import torch
from torch import Tensor

from piper_kernels._autocast import full_precision
from piper_kernels._input_activations import apply_activation
from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.nvfp4._encoding import E2M1_MAX, E4M3_MAX, decode, encode
from piper_kernels.weights.nvfp4._layout import (
    BLOCK_SIZE,
    pack_codes,
    swizzle_scale,
    unswizzle_scale,
)


def prepare_input(
    input: Tensor,  # noqa: A002  # the name of F.linear
    activation_per_tensor_scale: Tensor | None,
    dynamic_activation_scale: bool,
    activation_fn: str | None = None,
    high_first: bool = False,
    *,
    group_size: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Activate, rotate and quantize an input, all in FP32.

    Args:
        input: Floating ``[..., factor * K]``; the factor is 2 for ``"swiglu"``, else 1.
        activation_per_tensor_scale: Static FP32 scalar second scale level, for the rotated
            input; ``None`` uses 1.
        dynamic_activation_scale: Take ``amax / 2688`` of the whole input instead.
        activation_fn: ``None``, ``"gelu_tanh"`` or ``"swiglu"``.
        high_first: Whether even features go to high nibbles, as in the weight.
        group_size: Rotation group along ``K``, 0 for none.

    Returns:
        uint8 codes ``[rows, K / 2]``, swizzled float8_e4m3fn block scales and the FP32 scalar
        second level. The second level of a zero input is 0, with codes that are all zero.
    """
    values = apply_activation(input, activation_fn)
    values = values.reshape(-1, values.shape[-1])
    if group_size:
        values = rotate_groups(values, group_size)
    if dynamic_activation_scale:
        amax = values.abs().amax() if values.numel() else values.new_zeros(())
        level = amax / (E4M3_MAX * E2M1_MAX)
    elif activation_per_tensor_scale is None:
        level = values.new_ones(())
    else:
        level = activation_per_tensor_scale
    codes, scale = encode(values, level)
    return pack_codes(codes, high_first=high_first), swizzle_scale(scale), level


def linear_prepared(
    input_qdata: Tensor,
    input_scale: Tensor,
    input_per_tensor_scale: Tensor,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    weight_per_tensor_scale: Tensor | None,
    bias: Tensor | None,
    logical_dtype: torch.dtype,
) -> Tensor:
    """Multiply a prepared input: ``acc * (g_x * g_w) + bias`` in FP32, rounded once.

    Both operands must have the same nibble order; the product does not depend on which.

    Args:
        input_qdata: uint8 ``[rows, K / 2]``.
        input_scale: Swizzled float8_e4m3fn block scales of the input.
        input_per_tensor_scale: FP32 scalar ``g_x``.
        weight_qdata: uint8 ``[N, K / 2]``.
        weight_scale: Swizzled float8_e4m3fn block scales of the weight.
        weight_per_tensor_scale: FP32 scalar ``g_w``; ``None`` stands for 1.
        bias: Floating ``[N]``, or ``None``.
        logical_dtype: Dtype of the result.

    Returns:
        ``[rows, N]``.
    """
    left = _block_scaled(input_qdata, input_scale)
    right = _block_scaled(weight_qdata, weight_scale)
    with full_precision(left.device):
        output = left @ right.t()
    level = input_per_tensor_scale.to(torch.float32)
    if weight_per_tensor_scale is not None:
        level = level * weight_per_tensor_scale
    output = output * level
    if bias is not None:
        output = output + bias.to(torch.float32)
    return output.to(logical_dtype)


def linear(
    input: Tensor,  # noqa: A002  # the name of F.linear
    weight_qdata: Tensor,
    weight_scale: Tensor,
    weight_per_tensor_scale: Tensor | None,
    activation_per_tensor_scale: Tensor | None,
    bias: Tensor | None,
    dynamic_activation_scale: bool,
    high_first: bool = False,
    *,
    group_size: int = 0,
) -> Tensor:
    """Return ``input @ W.T + bias`` with a quantized input, in the dtype of ``input``.

    See ``prepare_input`` and ``linear_prepared`` for the steps and shapes.
    """
    qdata, scale, level = prepare_input(
        input,
        activation_per_tensor_scale,
        dynamic_activation_scale,
        high_first=high_first,
        group_size=group_size,
    )
    output = linear_prepared(
        qdata,
        scale,
        level,
        weight_qdata,
        weight_scale,
        weight_per_tensor_scale,
        bias,
        input.dtype,
    )
    return output.view(*input.shape[:-1], weight_qdata.shape[0])


def _block_scaled(qdata: Tensor, swizzled_scale: Tensor) -> Tensor:
    rows, blocks = qdata.shape[0], 2 * qdata.shape[1] // BLOCK_SIZE
    return decode(qdata, unswizzle_scale(swizzled_scale, rows, blocks).to(torch.float32))
