"""The contract of the floating input of quantized linears."""

import torch
from torch import Tensor


def validate_input(
    label: str, value: Tensor, features: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Check the input of a linear.

    Args:
        label: Name of the linear, for messages.
        value: ``[..., features]``, any strides.
        features: What the weight takes.
        device: Of the weight.
        dtype: The logical one of the weight.

    Raises:
        ValueError: Its shape, device, layout or dtype does not fit.
    """
    found = value.shape[-1] if value.ndim else 0
    if value.ndim == 0 or found != features:
        raise ValueError(
            f"{label} expected {features} input features, got {found} "
            f"(input shape {tuple(value.shape)})"
        )
    if value.device != device:
        raise ValueError(
            f"linear input and weight must share a device, got {value.device} and {device}"
        )
    if value.layout != torch.strided:
        raise ValueError(f"linear input must use strided layout, got {value.layout}")
    if value.dtype != dtype:
        raise ValueError(
            f"{label} input must have the weight's logical dtype {dtype}, "
            f"got {value.dtype}; convert the input or the weight with .to(dtype)"
        )
