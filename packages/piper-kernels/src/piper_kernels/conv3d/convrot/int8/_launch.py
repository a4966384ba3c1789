"""Launchers of the Triton kernels of convolutions. Importing needs Triton.

Nothing is synchronized and nothing is read back, so all of them can be captured.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

import torch
from torch import Tensor

from piper_kernels._triton.runtime import launch_guard
from piper_kernels.conv3d.convrot.int8._geometry import Geometry
from piper_kernels.conv3d.convrot.int8._kernels.convolution import conv3d_kernel
from piper_kernels.conv3d.convrot.int8._kernels.preparation import prepare_voxels_kernel
from piper_kernels.conv3d.convrot.int8._kernels.statistics import (
    finish_statistics_kernel,
    statistics_kernel,
)
from piper_kernels.conv3d.convrot.int8._operands import Filter, Normalization
from piper_kernels.conv3d.convrot.int8._plan import VoxelTile, plan_statistics
from piper_kernels.conv3d.convrot.int8._tiles import ConvolutionPlan
from piper_kernels.linear.convrot.int8._plan import ceil_div

WIDE = 1 << 31
"""Elements from which offsets into an output have 64 bits."""

_FINISH_WARPS = 1


def frame_statistics(
    input: Tensor,  # noqa: A002  # the name in torch
    norm: Normalization,
    processors: int,
) -> tuple[Tensor, Tensor]:
    """Return mean and reciprocal deviation of every frame and channel group.

    Args:
        input: Floating ``[N, C, T, H, W]``, any strides.
        norm: The normalization.
        processors: Multiprocessors of the device.

    Returns:
        Two FP32 tensors ``[N * T, groups]``.
    """
    batch, channels, frames, height, width = input.shape
    units = batch * frames * norm.groups
    size = channels // norm.groups
    pixels, tiles = plan_statistics(height * width, size, units, processors)
    chunks = ceil_div(height * width, pixels * tiles)
    numbers = {"dtype": torch.float32, "device": input.device}
    partials = torch.empty((units, 2, chunks), **numbers)
    mean, deviation = (torch.empty((batch * frames, norm.groups), **numbers) for _ in range(2))
    n, c, t, h, w = input.stride()
    with launch_guard(input.device):
        statistics_kernel[(units * chunks,)](
            input, partials, frames, width, height * width, norm.groups, chunks, n, t, c, h, w,
            CHANNELS=size, PIXELS=pixels, TILES=tiles, FLAT=h == w * width,
        )  # fmt: skip
        finish_statistics_kernel[(units,)](
            input, partials, mean, deviation, frames, height * width, norm.groups, chunks,
            norm.epsilon, n, t, c, CHANNELS=size, CHUNK_PIXELS=pixels * tiles,
            CHUNKS=1 << (chunks - 1).bit_length(), num_warps=_FINISH_WARPS,
        )  # fmt: skip
    return mean, deviation


def prepare_voxels(
    input: Tensor,  # noqa: A002
    weight: Filter,
    geometry: Geometry,
    tile: VoxelTile,
    norm: Normalization | None,
    processors: int,
) -> Tensor:
    """Return the codes of the padded frames, int8 ``[N * T, stored H, stored W, C]``.

    Args:
        input: Floating ``[N, C, T, H, W]``, any strides.
        weight: The filter, of which the input scale and the rotation group are used.
        geometry: The sizes.
        tile: What a program prepares.
        norm: A normalization in front, or ``None``.
        processors: Multiprocessors of the device.
    """
    stored = (geometry.stored_height, geometry.stored_width)
    frames = geometry.batch * geometry.frames
    codes = torch.empty((frames, *stored, geometry.channels), dtype=torch.int8, device=input.device)
    scale = weight.input_scale
    numbers = [scale, scale, scale, scale]
    if norm is not None:
        parameters = (norm.weight.contiguous(), norm.bias.contiguous())
        numbers = [*frame_statistics(input, norm, processors), *parameters]
    groups = 0 if norm is None else norm.groups
    tiles = ceil_div(stored[0] * stored[1], tile.voxels)
    n, c, t, h, w = input.stride()
    flat = stored == (geometry.height, geometry.width) and h == w * geometry.width
    with launch_guard(input.device):
        prepare_voxels_kernel[(frames * tiles * (geometry.channels // tile.columns),)](
            input, codes.view(torch.int32), scale, *numbers, geometry.frames, geometry.height,
            geometry.width, stored[1], stored[0] * stored[1], tiles, groups, n, t, c, h, w,
            CHANNELS=geometry.channels, VOXELS=tile.voxels, SIZE=tile.columns,
            GROUP=weight.group_size,
            NORM_CHANNELS=geometry.channels // groups if groups else 0,
            BEFORE=geometry.before, FLAT=flat, CHANNELS_LAST=c == 1, num_warps=tile.num_warps,
        )  # fmt: skip
    return codes


def convolve(
    codes: Tensor,
    weight: Filter,
    geometry: Geometry,
    residual: Tensor | None,
    plan: ConvolutionPlan,
) -> Tensor:
    """Return the scaled convolution of padded codes, float16 ``[N, O, T', H', W']``.

    Args:
        codes: Result of :func:`prepare_voxels`.
        weight: The filter.
        geometry: The sizes.
        residual: float16 of the output's shape, contiguous, or ``None``.
        plan: The schedule.
    """
    out = torch.empty(geometry.out_shape, dtype=torch.float16, device=codes.device)
    bias = weight.scale if weight.bias is None else weight.bias
    tiles = ceil_div(geometry.voxels, plan.voxels) * ceil_div(geometry.outputs, plan.outputs)
    with launch_guard(codes.device):
        conv3d_kernel[(tiles,)](
            codes, weight.qdata, weight.input_scale, weight.scale, bias,
            out if residual is None else residual, out, geometry.voxels, geometry.outputs,
            geometry.frames, *geometry.out_shape[2:], geometry.stored_height,
            geometry.stored_width, bias.stride(0), *geometry.stride, CHANNELS=geometry.channels,
            OUTPUTS=plan.outputs, VOXELS=plan.voxels, DEPTH=plan.depth,
            HAS_BIAS=weight.bias is not None, HAS_RESIDUAL=residual is not None,
            WIDE=out.numel() >= WIDE, num_warps=plan.num_warps, num_stages=plan.num_stages,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out
