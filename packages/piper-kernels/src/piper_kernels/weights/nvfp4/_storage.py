"""Host-metadata checks of NVFP4 storage. They never read tensor contents."""

from typing import Any

import torch
from torch import Tensor

from piper_kernels.weights.nvfp4._layout import BLOCK_SIZE, scale_shape

LOGICAL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def require_logical_dtype(dtype: torch.dtype) -> None:
    """Raise ``ValueError`` unless a weight can present itself with ``dtype``."""
    if dtype not in LOGICAL_DTYPES:
        raise ValueError(f"logical dtype must be float16, bfloat16 or float32, got {dtype}")


def logical_layout(qdata: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of the weight that packed codes represent.

    Codes with a row stride below the column stride are those of a transposed weight.

    Raises:
        ValueError: The codes are neither a matrix nor a stack of matrices.
    """
    if qdata.ndim not in (2, 3):
        raise ValueError(
            "NVFP4 qdata must have shape [out, in / 2] or [experts, out, in / 2], "
            f"got {tuple(qdata.shape)}"
        )
    lead, (rows, columns) = tuple(qdata.shape[:-2]), qdata.shape[-2:]
    transposed = is_transposed(qdata)
    if transposed:
        rows, columns = columns, rows
    features = 2 * columns
    stride = max(1, features)
    outer = (max(1, rows) * stride,) * len(lead)
    if transposed:
        return (*lead, features, rows), (*outer, 1, stride)
    return (*lead, rows, features), (*outer, stride, 1)


def is_transposed(qdata: Tensor) -> bool:
    """Return whether packed codes are stored for the transpose of the tensor they show."""
    return qdata.stride(-2) < qdata.stride(-1)


def validate_metadata(
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor | None,
    act_per_tensor_scale: Tensor | None,
    high_first: object,
) -> None:
    """Check what every wrapper needs, whatever its block size and rank.

    Raises:
        TypeError: ``high_first`` is no bool.
        ValueError: Devices differ or the rank of the global scale does not fit.
    """
    if not isinstance(high_first, bool):
        raise TypeError(f"high_first must be bool, got {type(high_first).__name__}")
    if per_tensor_scale is not None and per_tensor_scale.ndim not in (0, 3):
        raise ValueError(
            "per_tensor_scale must be a scalar [] or one per expert [experts, 1, 1], "
            f"got shape {tuple(per_tensor_scale.shape)}"
        )
    for name, tensor in (
        ("scale", scale),
        ("per_tensor_scale", per_tensor_scale),
        ("act_per_tensor_scale", act_per_tensor_scale),
    ):
        if tensor is not None and tensor.device != qdata.device:
            raise ValueError(
                f"qdata and {name} must share a device, got {qdata.device} and {tensor.device}"
            )


def require_source(hp_tensor: Tensor, block_size: int, *, swizzled: bool) -> None:
    """Check a dense tensor before it is quantized.

    Raises:
        ValueError: Its rank, dtype, layout, device or width, or the block size, is not
            supported.
    """
    if block_size != BLOCK_SIZE:
        raise ValueError(f"NVFP4 block_size must be {BLOCK_SIZE}, got {block_size}")
    shape = tuple(hp_tensor.shape)
    if hp_tensor.ndim not in (2, 3):
        raise ValueError(
            f"NVFP4 weights must be 2-D [out, in] or 3-D [experts, out, in], got shape {shape}"
        )
    if hp_tensor.dtype not in LOGICAL_DTYPES:
        raise ValueError(
            f"NVFP4 weights must use float16, bfloat16, or float32, got {hp_tensor.dtype}"
        )
    if hp_tensor.layout != torch.strided:
        raise ValueError(f"hp_tensor must use strided layout, got {hp_tensor.layout}")
    if hp_tensor.device.type == "meta":
        raise ValueError("cannot quantize a meta tensor; construct the weight on meta storage")
    if shape[-1] == 0 or shape[-1] % BLOCK_SIZE:
        raise ValueError(
            f"NVFP4 feature dimension must be a positive multiple of {BLOCK_SIZE}, got {shape[-1]}"
        )
    if swizzled and hp_tensor.ndim == 3 and shape[1] % 128:
        raise ValueError(
            "swizzled scales of 3-D weights need rows in multiples of 128 per expert, "
            f"got {shape[1]}; use is_swizzled_scales=False"
        )


def require_second_level(hp_tensor: Tensor, given: Tensor | None, *, compute: bool) -> None:
    """Check the global scale to quantize a source with.

    Raises:
        ValueError: It is asked for and given, or the given one is not FP32, neither a scalar
            nor one per expert of a stack, or on another device.
    """
    if given is None:
        return
    if compute:
        raise ValueError(
            "cannot both compute and receive per_tensor_scale; pass one of "
            "compute_per_tensor_scale=True and per_tensor_scale"
        )
    if given.dtype != torch.float32:
        raise ValueError(f"per_tensor_scale must be float32, got {given.dtype}")
    per_expert = hp_tensor.ndim == 3 and tuple(given.shape) in (
        (1, 1, 1),
        (hp_tensor.shape[0], 1, 1),
    )
    if given.ndim != 0 and not per_expert:
        raise ValueError(
            "per_tensor_scale must be a scalar [] or one per expert [experts, 1, 1], "
            f"got shape {tuple(given.shape)} for a weight of shape {tuple(hp_tensor.shape)}"
        )
    if given.device != hp_tensor.device:
        raise ValueError(
            f"hp and per_tensor_scale must share a device, got {hp_tensor.device} "
            f"and {given.device}"
        )


def require_decodable(weight: Any) -> None:
    """Check that codes and block scales of a weight are ones that can be decoded.

    Raises:
        ValueError: Block size, dtype or the number of block scales does not fit.
    """
    if weight.block_size != BLOCK_SIZE:
        raise ValueError(f"NVFP4 block_size must be {BLOCK_SIZE}, got {weight.block_size}")
    if weight.qdata.dtype != torch.uint8 or weight.scale.dtype != torch.float8_e4m3fn:
        raise ValueError(
            "NVFP4 qdata must be uint8 and scale float8_e4m3fn, "
            f"got {weight.qdata.dtype} and {weight.scale.dtype}"
        )
    level = weight.per_tensor_scale
    if level is not None and weight.ndim == 2 and level.numel() != 1:
        raise ValueError(
            "per_tensor_scale of a 2-D NVFP4 weight must have one element, "
            f"got shape {tuple(level.shape)}"
        )
    *lead, rows, features = matrix_shape(weight)
    rows *= lead[0] if lead else 1
    expected = scale_shape(rows, features, swizzled=weight.is_swizzled_scales)
    if weight.scale.numel() != expected[0] * expected[1]:
        raise ValueError(
            f"NVFP4 scale must have shape {expected} or its flat form for a weight of shape "
            f"{tuple(weight.shape)} with is_swizzled_scales={weight.is_swizzled_scales}, "
            f"got {tuple(weight.scale.shape)}"
        )


def matrix_shape(weight: Any) -> tuple[int, ...]:
    """Return the logical shape of a weight with any transpose undone: ``[..., out, in]``."""
    shape = tuple(weight.shape)
    return (*shape[:-2], shape[-1], shape[-2]) if weight.transposed else shape


def validate_update_storage(
    operation: str,
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor | None,
    block_size: int,
    *,
    swizzled: bool,
) -> tuple[int, int]:
    """Check storage before it is overwritten and return ``(out, in)``.

    Raises:
        ValueError: It is no canonical 2-D storage; the message names what differs.
    """
    if qdata.ndim != 2 or qdata.numel() == 0:
        raise ValueError(
            f"{operation} requires non-empty 2-D qdata, got shape {tuple(qdata.shape)}"
        )
    rows, features = qdata.shape[0], 2 * qdata.shape[1]
    if block_size != BLOCK_SIZE or features % BLOCK_SIZE:
        raise ValueError(
            f"{operation} requires blocks of {BLOCK_SIZE} that divide the {features} features, "
            f"got block_size {block_size}"
        )
    if qdata.dtype != torch.uint8 or scale.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"{operation} requires uint8 qdata and float8_e4m3fn scale, "
            f"got {qdata.dtype} and {scale.dtype}"
        )
    expected = scale_shape(rows, features, swizzled=swizzled)
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"{operation} requires scale of shape {expected}, got {tuple(scale.shape)}; "
            "view flat scales in two dimensions"
        )
    if per_tensor_scale is not None and (
        per_tensor_scale.numel() != 1 or per_tensor_scale.dtype != torch.float32
    ):
        raise ValueError(
            f"{operation} requires an FP32 per_tensor_scale with one element, got "
            f"{per_tensor_scale.dtype} with shape {tuple(per_tensor_scale.shape)}"
        )
    if not (qdata.is_contiguous() and scale.is_contiguous()):
        raise ValueError(
            f"{operation}: qdata and scale must be contiguous, got strides "
            f"{tuple(qdata.stride())} and {tuple(scale.stride())}"
        )
    return rows, features
