"""Host-metadata checks of ConvRot INT8 storage. They never read tensor contents."""

import torch
from torch import Tensor

from piper_kernels.weights.convrot._rotation import require_divisible, require_group_size

LOGICAL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_CONV_KERNEL = (3, 3, 3)
_MIN_CONV_CHANNELS = 64
_MAX_CONV_CHANNELS = 4096


def validate_storage(qdata: Tensor, scale: Tensor, group_size: int) -> None:
    """Check codes, scales and group size of a weight.

    Args:
        qdata: int8 ``[out, in]`` (linear) or ``[out, 3, 3, 3, in]`` (conv3d), contiguous.
        scale: FP32 ``[out, 1]``, contiguous, on the device of ``qdata``.
        group_size: Rotation group along ``in``.

    Raises:
        ValueError: One of them breaks the format; the message names it.
    """
    require_group_size(group_size)
    if qdata.dtype != torch.int8 or qdata.ndim not in (2, 5):
        raise ValueError(
            "qdata must be int8 with shape [out, in] or [out, 3, 3, 3, in], "
            f"got {qdata.dtype} with shape {tuple(qdata.shape)}"
        )
    require_features(qdata.shape[-1], group_size, conv=qdata.ndim == 5)
    if qdata.ndim == 5 and tuple(qdata.shape[1:4]) != _CONV_KERNEL:
        raise ValueError(
            f"conv3d qdata must have shape [out, 3, 3, 3, in], got {tuple(qdata.shape)}"
        )
    rows = qdata.shape[0]
    if scale.dtype != torch.float32 or tuple(scale.shape) != (rows, 1):
        raise ValueError(
            f"scale must be float32 with shape {(rows, 1)}, "
            f"got {scale.dtype} with shape {tuple(scale.shape)}"
        )
    if qdata.device != scale.device:
        raise ValueError(
            f"qdata and scale must share a device, got {qdata.device} and {scale.device}"
        )
    if qdata.layout != torch.strided or scale.layout != torch.strided:
        raise ValueError(
            f"qdata and scale must use strided layout, got {qdata.layout} and {scale.layout}"
        )
    if not (qdata.is_contiguous() and scale.is_contiguous()):
        raise ValueError(
            "qdata and scale must be contiguous, got strides "
            f"{tuple(qdata.stride())} and {tuple(scale.stride())}"
        )


def require_features(features: int, group_size: int, *, conv: bool) -> None:
    """Check the input width of a weight against its group size and kind."""
    if conv and not (
        _MIN_CONV_CHANNELS <= features <= _MAX_CONV_CHANNELS and features & (features - 1) == 0
    ):
        raise ValueError(
            "conv3d input channels must be a power-of-two from "
            f"{_MIN_CONV_CHANNELS} to {_MAX_CONV_CHANNELS}, got {features}"
        )
    require_divisible(features, group_size)


def validate_activation_scale(scale: Tensor | None, device: torch.device) -> None:
    """Check the metadata of a static input scale; ``None`` means dynamic scaling.

    Raises:
        ValueError: It is no strided FP32 scalar without gradient on ``device``.
    """
    if scale is None:
        return
    if scale.ndim != 0 or scale.dtype != torch.float32 or scale.layout != torch.strided:
        raise ValueError(
            "act_per_tensor_scale must be a strided FP32 scalar (shape []), "
            f"got {scale.dtype} with shape {tuple(scale.shape)} and layout {scale.layout}"
        )
    if scale.device != device:
        raise ValueError(
            f"act_per_tensor_scale must share a device with the weight ({device}), "
            f"got {scale.device}"
        )
    if scale.requires_grad:
        raise ValueError("act_per_tensor_scale must not require gradients; detach it")


def require_logical_dtype(dtype: torch.dtype) -> None:
    """Raise ``ValueError`` unless a weight can present itself with ``dtype``."""
    if dtype not in LOGICAL_DTYPES:
        raise ValueError(f"logical dtype must be float16, bfloat16 or float32, got {dtype}")


def logical_layout(
    stored: torch.Size, *, transposed: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides that a weight shows for the shape of its codes."""
    out_features, in_features = stored[0], stored[-1]
    if len(stored) == 5:
        taps = stored[1:4].numel()
        shape = (out_features, in_features, *stored[1:4])
        return shape, (in_features * taps, taps, 9, 3, 1)
    row_stride = max(1, in_features)
    if transposed:
        return (in_features, out_features), (1, row_stride)
    return (out_features, in_features), (row_stride, 1)
