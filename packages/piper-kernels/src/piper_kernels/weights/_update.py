"""Checks shared by the in-place updates of quantized weights. They read metadata only."""

import math
from numbers import Real

import torch
from torch import Tensor


def validate_scalar(name: str, value: object) -> float:
    """Return a coefficient as a float.

    Raises:
        TypeError: It is not a real number.
        ValueError: It is not finite.
    """
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a real number, got {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def validate_operands(
    operation: str,
    operands: dict[str, tuple[object, tuple[int | None, int | None]]],
    *,
    logical_dtype: torch.dtype,
    scale: Tensor,
) -> tuple[Tensor, ...]:
    """Check the dense matrices of an update against the weight's storage.

    Args:
        operation: Name used in messages, for example ``"ConvRot INT8 addmm_"``.
        operands: Operand name to the tensor and its shape; ``None`` leaves a size open.
        logical_dtype: Logical dtype of the weight, required of every operand.
        scale: Scales of the weight; gives the device.

    Returns:
        The operands in order.

    Raises:
        TypeError: An operand is not a tensor.
        ValueError: A shape, dtype, device or layout does not fit, or the weight is on meta.
        RuntimeError: Gradients are enabled and a tensor requires them.
    """
    if scale.device.type == "meta":
        raise ValueError(f"{operation} cannot update a weight on the meta device")
    tensors = []
    for name, (operand, shape) in operands.items():
        if not isinstance(operand, Tensor):
            raise TypeError(f"{operation}: {name} must be a tensor, got {type(operand).__name__}")
        _validate_operand(f"{operation}: {name}", operand, shape, logical_dtype, scale.device)
        tensors.append(operand)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, scale)):
        raise RuntimeError(f"{operation} does not support autograd; use torch.no_grad()")
    return tuple(tensors)


def _validate_operand(
    label: str,
    operand: Tensor,
    shape: tuple[int | None, int | None],
    logical_dtype: torch.dtype,
    device: torch.device,
) -> None:
    if operand.ndim != 2:
        raise ValueError(f"{label}: matrices must be 2-D, got shape {tuple(operand.shape)}")
    if any(want not in (None, got) for want, got in zip(shape, operand.shape, strict=True)):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{label} shape mismatch: expected [{wanted}], got {tuple(operand.shape)}")
    if operand.dtype != logical_dtype:
        raise ValueError(
            f"{label} must have the weight's logical dtype {logical_dtype}, got {operand.dtype}"
        )
    if operand.device != device:
        raise ValueError(
            f"{label} must share a device with the weight ({device}), got {operand.device}"
        )
    if operand.layout != torch.strided:
        raise ValueError(f"{label} must use strided layout, got {operand.layout}")
