"""Choice of the implementation of NVFP4 quantization and updates."""

from typing import Any

import torch
from torch import Tensor

from piper_kernels._triton.runtime import supports_device
from piper_kernels._triton.targets import accelerator_target
from piper_kernels.weights.nvfp4 import _quantize_reference, _update_reference

MIN_CAPABILITY = (8, 0)


def runs_in_operators(device: torch.device) -> bool:
    """Return whether work on a device goes through custom operators.

    On the CPU the references are called as they are, so that tracers see their operations.
    """
    return device.type not in ("cpu", "meta")


def select(device: torch.device) -> Any | None:
    """Return what updates weights on a device, or ``None`` for the portable reference.

    On accelerators that is a custom operator, opaque to tracers.
    """
    if not runs_in_operators(device):
        return None
    from piper_kernels.weights.nvfp4 import _ops

    return _ops


def select_executor(device: torch.device) -> Any:
    """Return what an operator runs on a device: kernels or the portable reference.

    The choice is made once per update: a kernel that fails may have written a part of the
    storage, so its error is raised and nothing else is tried.
    """
    if not _has_kernels(device):
        return _update_reference
    from piper_kernels.weights.nvfp4 import triton

    return triton


def select_quantizer(source: Tensor) -> Any:
    """Return what quantizes a dense source: kernels or the portable reference."""
    if source.numel() == 0 or not _has_kernels(source.device):
        return _quantize_reference
    from piper_kernels.weights.nvfp4 import quantize_triton

    return quantize_triton


def _has_kernels(device: torch.device) -> bool:
    target = accelerator_target(device)
    if target is None or not supports_device(device):
        return False
    return target.backend != "cuda" or target.capability >= MIN_CAPABILITY
