"""Portable ConvRot INT8 convolution: the numeric contract that backends reproduce.

Shapes: input ``[N, C, T, H, W]``, codes ``[N, T, H, W, C]``, output ``[N, O, T', H', W']``.
"""

import torch
from torch import Tensor

from piper_kernels.conv3d.convrot.int8._geometry import PAST_FRAMES, TAPS, Geometry
from piper_kernels.conv3d.convrot.int8._operands import Filter, Normalization
from piper_kernels.linear.convrot.int8._integer_matmul import integer_matmul
from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.convrot.int8._quantization import round_to_codes


def normalize(
    input: Tensor,  # noqa: A002  # the name in torch
    norm: Normalization,
) -> Tensor:
    """Normalize the channel groups of every frame, then apply SiLU, in FP32.

    Mean and population variance are those of one frame: ``C / groups`` channels, all pixels.

    Args:
        input: Floating ``[N, C, T, H, W]``.
        norm: The normalization.

    Returns:
        FP32 of the same shape.
    """
    batch, channels, frames, height, width = input.shape
    grouped = input.to(torch.float32).reshape(
        batch, norm.groups, channels // norm.groups, frames, height, width
    )
    variance, mean = torch.var_mean(grouped, dim=(2, 4, 5), correction=0, keepdim=True)
    values = (grouped - mean) * torch.rsqrt(variance + norm.epsilon)
    shape = (1, channels, 1, 1, 1)
    values = values.view(input.shape) * norm.weight.view(shape) + norm.bias.view(shape)
    return values * torch.sigmoid(values)


def prepare_input(
    input: Tensor,  # noqa: A002
    group_size: int,
    input_scale: Tensor,
    norm: Normalization | None = None,
) -> Tensor:
    """Normalize if asked for, rotate the channels of every voxel and quantize them, in FP32.

    Args:
        input: Floating ``[N, C, T, H, W]``.
        group_size: Rotation group along ``C``.
        input_scale: FP32 scalar, finite and positive.
        norm: A normalization in front, or ``None``.

    Returns:
        int8 codes ``[N, T, H, W, C]``: ``clamp(round_half_even(rotated / scale), -128, 127)``.
    """
    dense = input.to(torch.float32) if norm is None else normalize(input, norm)
    rotated = rotate_groups(dense.permute(0, 2, 3, 4, 1), group_size)
    return round_to_codes(rotated.div_(input_scale))


def pad(codes: Tensor, geometry: Geometry) -> Tensor:
    """Put the zero frames in front of codes and reflected pixels around them."""
    for dim in (2, 3):
        size = codes.shape[dim]
        parts = [codes]
        if geometry.before:
            parts.insert(0, codes.narrow(dim, 1, 1))
        if geometry.after:
            parts.append(codes.narrow(dim, size - 2, 1))
        codes = torch.cat(parts, dim)
    past = codes.new_zeros((codes.shape[0], PAST_FRAMES, *codes.shape[2:]))
    return torch.cat([past, codes], 1)


def convolve(codes: Tensor, qdata: Tensor, geometry: Geometry) -> Tensor:
    """Return the exact integer convolution, int32 ``[N, T', H', W', O]``."""
    padded = pad(codes, geometry)
    total = None
    for tap in range(TAPS**3):
        offsets = tap // 9, tap // 3 % 3, tap % 3
        part = padded
        for dim, (offset, step, count) in enumerate(
            zip(offsets, geometry.stride, geometry.out_shape[2:], strict=True), start=1
        ):
            part = part.narrow(dim, offset, (count - 1) * step + 1)
            part = part[(slice(None),) * dim + (slice(None, None, step),)]
        product = integer_matmul(
            part.reshape(-1, geometry.channels), qdata[(slice(None), *offsets)].contiguous()
        )
        total = product if total is None else total.add_(product)
    assert total is not None  # for the type checker: there are 27 taps
    batch, outputs, *sizes = geometry.out_shape
    return total.view(batch, *sizes, outputs)


def conv3d(
    input: Tensor,  # noqa: A002
    weight: Filter,
    geometry: Geometry,
    residual: Tensor | None = None,
    norm: Normalization | None = None,
) -> Tensor:
    """Return ``acc * input_scale * scale + bias + residual`` in FP32, rounded once to float16.

    Args:
        input: float16 or float32 ``[N, C, T, H, W]``, any strides.
        weight: The filter.
        geometry: The sizes.
        residual: float16 of the output's shape, or ``None``.
        norm: A normalization in front, or ``None``.

    Returns:
        float16 ``[N, O, T', H', W']``, contiguous.
    """
    codes = prepare_input(input, weight.group_size, weight.input_scale, norm)
    values = convolve(codes, weight.qdata, geometry).to(torch.float32)
    values = values.mul_(weight.input_scale).mul_(weight.scale.view(-1))
    if weight.bias is not None:
        values.add_(weight.bias)
    values = values.permute(0, 4, 1, 2, 3)
    if residual is not None:
        values = values + residual
    return values.to(torch.float16, memory_format=torch.contiguous_format).contiguous()
