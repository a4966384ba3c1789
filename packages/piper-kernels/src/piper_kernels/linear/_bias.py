"""The bias contract of quantized linear operators."""

import torch
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def validate_bias(bias: object, out_features: int, device: torch.device) -> None:
    """Check a linear bias; its dtype need not be the input's and it may be strided.

    Raises:
        TypeError: It is neither ``None`` nor a tensor.
        ValueError: Its shape, device, dtype or layout does not fit.
    """
    if bias is None:
        return
    if not isinstance(bias, Tensor):
        raise TypeError(f"linear bias must be a tensor or None, got {type(bias).__name__}")
    if tuple(bias.shape) != (out_features,):
        raise ValueError(f"linear bias must have shape {(out_features,)}, got {tuple(bias.shape)}")
    if bias.device != device:
        raise ValueError(
            f"linear input and bias must share a device, got {device} and {bias.device}"
        )
    if bias.dtype not in _DTYPES:
        raise ValueError(f"linear bias must be FP16, BF16, or FP32, got {bias.dtype}")
    if bias.layout != torch.strided:
        raise ValueError(f"linear bias must use strided layout, got {bias.layout}")
