"""Choice of the implementation of NVFP4 updates."""

from typing import Any

import torch

from piper_kernels._triton.runtime import supports_device
from piper_kernels._triton.targets import accelerator_target
from piper_kernels.weights.nvfp4 import _update_reference

MIN_CAPABILITY = (8, 0)


def select(device: torch.device) -> Any | None:
    """Return what updates weights on a device, or ``None`` for the portable reference.

    On accelerators that is a custom operator, opaque to tracers.
    """
    if device.type in ("cpu", "meta"):
        return None
    from piper_kernels.weights.nvfp4 import _ops

    return _ops


def select_executor(device: torch.device) -> Any:
    """Return what an operator runs on a device: kernels or the portable reference.

    The choice is made once per update: a kernel that fails may have written a part of the
    storage, so its error is raised and nothing else is tried.
    """
    target = accelerator_target(device)
    if target is None or not supports_device(device):
        return _update_reference
    if target.backend == "cuda" and target.capability < MIN_CAPABILITY:
        return _update_reference
    from piper_kernels.weights.nvfp4 import triton

    return triton
