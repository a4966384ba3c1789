"""Choice of the implementation of NVFP4 updates."""

from typing import Any

import torch


def select(device: torch.device) -> Any | None:  # noqa: ARG001  # no kernel is built in yet
    """Return what updates weights on a device, or ``None`` for the portable reference."""
    return None
