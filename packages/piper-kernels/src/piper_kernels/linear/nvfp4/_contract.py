"""Checks of operator operands and the shapes of results. They look at host metadata only."""

import torch
from torch import Tensor

from piper_kernels._input_activations import width_factor
from piper_kernels.linear._bias import validate_bias
from piper_kernels.weights.convrot._rotation import require_divisible, require_group_size
from piper_kernels.weights.nvfp4._layout import BLOCK_SIZE, scale_shape
from piper_kernels.weights.nvfp4._storage import LOGICAL_DTYPES


def prepared_shapes(
    input: Tensor,  # noqa: A002  # the name of F.linear
    activation_fn: str | None,
    group_size: int,
) -> tuple[int, int]:
    """Check a floating input and return the rows and features of its prepared form.

    Args:
        input: ``[..., factor * K]``; the factor is 2 for ``"swiglu"``, else 1.
        activation_fn: ``None``, ``"gelu_tanh"`` or ``"swiglu"``.
        group_size: Rotation group along ``K``, 0 for none.

    Raises:
        ValueError: Rank, dtype, layout, width, activation or group does not fit.
    """
    if input.ndim == 0:
        raise ValueError("NVFP4 linear input must have a feature dimension, got a scalar")
    if input.dtype not in LOGICAL_DTYPES:
        raise ValueError(
            f"NVFP4 linear input must be float16, bfloat16 or float32, got {input.dtype}"
        )
    if input.layout != torch.strided:
        raise ValueError(f"linear input must use strided layout, got {input.layout}")
    factor = width_factor(activation_fn)
    features = input.shape[-1] // factor
    if features == 0 or input.shape[-1] % (factor * BLOCK_SIZE):
        raise ValueError(
            f"NVFP4 linear input features must be a positive multiple of {factor * BLOCK_SIZE} "
            f"with activation_fn={activation_fn!r}, got {input.shape[-1]}"
        )
    if group_size:
        require_group_size(group_size)
        require_divisible(features, group_size)
    rows = 1
    for size in input.shape[:-1]:
        rows = rows * size
    return rows, features


def validate_packed(
    name: str, qdata: Tensor, scale: Tensor, *, swizzled: bool = True
) -> tuple[int, int]:
    """Check codes and block scales and return ``(rows, features)``.

    Args:
        name: What the message calls them.
        qdata: uint8 ``[rows, K / 2]``.
        scale: float8_e4m3fn in the canonical 2-D shape.
        swizzled: Whether block scales are in the 128 x 4 layout.

    Raises:
        ValueError: A shape, dtype, device or layout does not fit.
    """
    if qdata.ndim != 2 or qdata.dtype != torch.uint8 or scale.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"NVFP4 {name} must be uint8 codes [rows, features / 2] with float8_e4m3fn scales, "
            f"got {qdata.dtype} {tuple(qdata.shape)} and {scale.dtype}"
        )
    rows, features = qdata.shape[0], 2 * qdata.shape[1]
    if features == 0 or features % BLOCK_SIZE:
        raise ValueError(
            f"NVFP4 {name} features must be a positive multiple of {BLOCK_SIZE}, got {features}"
        )
    expected = scale_shape(rows, features, swizzled=swizzled)
    if tuple(scale.shape) != expected:
        layout = "swizzled " if swizzled else ""
        raise ValueError(
            f"NVFP4 {name} needs {layout}scales of shape {expected}, got {tuple(scale.shape)}"
        )
    if not (qdata.is_contiguous() and scale.is_contiguous()):
        raise ValueError(
            f"NVFP4 {name}: qdata and scale must be contiguous, got strides "
            f"{tuple(qdata.stride())} and {tuple(scale.stride())}"
        )
    require_device(f"{name} scale", scale, qdata.device)
    return rows, features


def require_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise ``ValueError`` unless a tensor is on the device of the operator."""
    if tensor.device != device:
        raise ValueError(f"NVFP4 operands must share a device, got {device} and {name} on "
                         f"{tensor.device}")  # fmt: skip


def validate_level(name: str, level: Tensor | None, device: torch.device) -> None:
    """Check a global scale: an FP32 scalar on the device, or ``None``."""
    if level is None:
        return
    if level.dtype != torch.float32 or level.ndim != 0:
        raise ValueError(
            f"{name} must be an FP32 scalar, got {level.dtype} with shape {tuple(level.shape)}"
        )
    require_device(name, level, device)


def validate_product(
    features: int,
    device: torch.device,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    weight_per_tensor_scale: Tensor | None,
    bias: Tensor | None,
    *,
    swizzled: bool = True,
) -> int:
    """Check the weight side of a product with ``features`` inputs and return its outputs.

    Raises:
        TypeError: The bias is no tensor.
        ValueError: A shape, dtype, device or layout does not fit.
    """
    rows, width = validate_packed("weight", weight_qdata, weight_scale, swizzled=swizzled)
    if width != features:
        raise ValueError(f"NVFP4 linear expected {width} input features, got {features}")
    require_device("weight", weight_qdata, device)
    validate_level("weight_per_tensor_scale", weight_per_tensor_scale, device)
    validate_bias(bias, rows, device)
    return rows
