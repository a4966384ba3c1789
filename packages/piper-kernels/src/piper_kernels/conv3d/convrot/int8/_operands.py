"""What the operators of ConvRot INT8 convolution work on, and the checks of its metadata."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from piper_kernels.conv3d.convrot.int8._geometry import Geometry
from piper_kernels.weights.convrot.int8._storage import validate_activation_scale, validate_storage

INPUT_DTYPES = (torch.float16, torch.float32)


@dataclass(frozen=True)
class Normalization:
    """A group normalization of single frames, followed by SiLU.

    Attributes:
        weight: float16 or float32 ``[C]``.
        bias: float16 or float32 ``[C]``.
        groups: Groups of channels.
        epsilon: Added to the variance.
    """

    weight: Tensor
    bias: Tensor
    groups: int
    epsilon: float


@dataclass(frozen=True)
class Filter:
    """A quantized filter and what scales its products.

    Attributes:
        qdata: int8 ``[O, 3, 3, 3, C]``, contiguous.
        scale: FP32 ``[O, 1]``, contiguous.
        bias: float16 ``[O]``, any stride, or ``None``.
        group_size: Rotation group along ``C``.
        input_scale: FP32 scalar that quantizes the input.
    """

    qdata: Tensor
    scale: Tensor
    bias: Tensor | None
    group_size: int
    input_scale: Tensor


def check(
    input: Tensor,  # noqa: A002  # the name in torch
    weight: Filter,
    stride: Sequence[int],
    padding: tuple[bool, bool],
    residual: Tensor | None,
    norm: Normalization | None = None,
) -> Geometry:
    """Check the metadata of a convolution and return its sizes.

    Args:
        input: ``[N, C, T, H, W]``.
        weight: The filter.
        stride: Steps along time, height and width.
        padding: The flags ``symmetric`` and ``right``.
        residual: Added to the result, or ``None``.
        norm: Normalization in front, or ``None``.

    Raises:
        ValueError: A shape, dtype, device, layout or number does not fit.
    """
    _check_filter(weight)
    _check_input(input, weight)
    steps = check_stride(stride)
    if all(padding):
        raise ValueError("padding cannot be symmetric and right-sided at once; set one flag")
    geometry = Geometry(
        *input.shape,
        outputs=weight.qdata.shape[0],
        stride=steps,
        before=int(padding[0]),
        after=int(any(padding)),
    )
    _check_sizes(geometry)
    if norm is not None:
        _check_norm(norm, geometry.channels, input.device)
    if residual is not None:
        _check_residual(residual, geometry, input.device)
    return geometry


def check_stride(stride: Sequence[int]) -> tuple[int, int, int]:
    """Return the steps along time, height and width.

    Raises:
        ValueError: They are not three positive integers.
    """
    steps = tuple(stride)
    if len(steps) != 3 or not all(isinstance(s, int) and s > 0 for s in steps):
        raise ValueError(f"stride must be three positive integers, got {stride!r}")
    return steps[0], steps[1], steps[2]


def check_bias(bias: Tensor, outputs: int, device: torch.device) -> None:
    """Check the bias of a filter on a device.

    Raises:
        ValueError: It is not float16 ``[outputs]`` on that device.
    """
    if bias.dtype != torch.float16 or tuple(bias.shape) != (outputs,):
        raise ValueError(
            f"conv3d bias must be float16 with shape {(outputs,)}, "
            f"got {bias.dtype} with shape {tuple(bias.shape)}"
        )
    _check_device("bias", bias, device)


def _check_filter(weight: Filter) -> None:
    validate_storage(weight.qdata, weight.scale, weight.group_size)
    if weight.qdata.ndim != 5:
        raise ValueError(
            f"conv3d weight must be int8 [O, 3, 3, 3, C], got shape {tuple(weight.qdata.shape)}"
        )
    validate_activation_scale(weight.input_scale, weight.qdata.device)
    outputs = weight.qdata.shape[0]
    if outputs == 0:
        raise ValueError("conv3d weight dimensions must be positive, got 0 output channels")
    if weight.bias is not None:
        check_bias(weight.bias, outputs, weight.qdata.device)


def _check_input(value: Tensor, weight: Filter) -> None:
    if value.dtype not in INPUT_DTYPES:
        raise ValueError(
            f"conv3d input must be float16 or float32, got {value.dtype}; convert it with .half()"
        )
    channels = weight.qdata.shape[-1]
    if value.ndim != 5 or value.shape[1] != channels:
        raise ValueError(
            f"conv3d input must have shape [N, {channels}, T, H, W], got {tuple(value.shape)}"
        )
    _check_device("input", value, weight.qdata.device)


def _check_sizes(geometry: Geometry) -> None:
    sizes = (geometry.batch, geometry.frames, geometry.height, geometry.width)
    if not all(size > 0 for size in sizes):
        raise ValueError(f"conv3d input dimensions must be positive, got N, T, H, W = {sizes}")
    if geometry.after and (geometry.height < 2 or geometry.width < 2):
        raise ValueError(
            "reflected padding needs an input with height and width > 1, "
            f"got {geometry.height} x {geometry.width}"
        )
    if geometry.out_height < 1 or geometry.out_width < 1:
        raise ValueError(
            f"a 3x3x3 filter does not fit into {geometry.height} x {geometry.width} pixels with "
            f"{geometry.before + geometry.after} of padding; pad the input or use reflect"
        )


def _check_norm(norm: Normalization, channels: int, device: torch.device) -> None:
    for name, value in (("norm_weight", norm.weight), ("norm_bias", norm.bias)):
        if value.dtype not in INPUT_DTYPES or tuple(value.shape) != (channels,):
            raise ValueError(
                f"{name} must be float16 or float32 with shape {(channels,)}, "
                f"got {value.dtype} with shape {tuple(value.shape)}"
            )
        _check_device(name, value, device)
    if norm.groups < 1 or channels % norm.groups:
        raise ValueError(f"norm_groups must divide the {channels} channels, got {norm.groups}")
    if not (math.isfinite(norm.epsilon) and norm.epsilon > 0):
        raise ValueError(f"norm_epsilon must be finite and positive, got {norm.epsilon}")


def _check_residual(residual: Tensor, geometry: Geometry, device: torch.device) -> None:
    if residual.dtype != torch.float16 or tuple(residual.shape) != geometry.out_shape:
        raise ValueError(
            f"conv3d residual must be float16 with the output's shape {geometry.out_shape}, "
            f"got {residual.dtype} with shape {tuple(residual.shape)}"
        )
    _check_device("residual", residual, device)


def _check_device(name: str, value: Tensor, device: torch.device) -> None:
    if value.device != device:
        raise ValueError(
            f"conv3d {name} must be on the device of the weight, {device}, got {value.device}"
        )
    if value.layout != torch.strided:
        raise ValueError(f"conv3d {name} must use strided layout, got {value.layout}")
