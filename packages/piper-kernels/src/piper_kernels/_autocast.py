"""Autocast regions around arithmetic that must stay in FP32."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of the autocast region that is active on a device, if any."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast leaves matrix products on a device alone."""
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` in the dtype of the operands, inside autocast regions too."""
    with full_precision(left.device):
        return left @ right
