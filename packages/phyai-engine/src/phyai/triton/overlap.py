"""Programmatic dependent launch: a kernel starts while the one before it still runs.

Such a kernel may touch nothing but constants before it waits for its predecessor. Kernels launched
in this way wait first, or only bring weights into the cache before.
"""

import os
from functools import lru_cache

import torch


@lru_cache(maxsize=16)
def overlap(device: torch.device) -> tuple[dict[str, bool], int]:
    """Returns launch options for kernels that may start early, and whether they may.

    NVIDIA GPUs from SM90 on can. The environment variable ``PHYAI_NO_DEPENDENT_LAUNCH`` turns it
    off.
    """
    able = (
        device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device)[0] >= 9
    )
    mode = int(os.environ.get("PHYAI_DEPENDENT_LAUNCH", "0")) if able else 0
    return ({"launch_pdl": True} if mode else {}), mode


def wide_products() -> bool:
    """Whether products must be in fp32: Triton's interpreter is wrong in bf16."""
    return bool(os.environ.get("TRITON_INTERPRET"))
