"""Whether and how Triton kernels can be launched on a device."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor

from piper_kernels._triton.targets import accelerator_target

MIN_CAPABILITY = (7, 0)


@cache
def triton_is_installed() -> bool:
    """Return whether ``import triton`` works; other import errors are raised."""
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return False
    return True


def support(device: torch.device) -> tuple[bool, str]:
    """Return whether Triton kernels run on a device, and the reason when they do not."""
    target = accelerator_target(device)
    if target is None:
        return False, f"Triton kernels need a CUDA or ROCm device, got {device}"
    if target.backend == "cuda" and target.capability < MIN_CAPABILITY:
        return False, f"Triton kernels need sm_70 or newer, {device} is {target.architecture}"
    if not triton_is_installed():
        return False, "Triton is not installed; install piper-kernels[triton]"
    return True, ""


def supports_device(device: torch.device) -> bool:
    """Return whether Triton kernels run on a device."""
    return support(device)[0]


def launch_guard(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that makes ``device`` current, as kernel launches require."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def as_words(codes: Tensor) -> Iterator[Tensor]:
    """Yield contiguous codes of one byte as int32 words that kernels write into.

    Storage that does not start on a word is copied and written back at the end.

    Args:
        codes: int8 or uint8 ``[rows, bytes]``, contiguous, with whole words in a row.
    """
    aligned = codes if codes.data_ptr() % 4 == 0 else codes.clone()
    yield aligned.view(torch.int32)
    if aligned is not codes:
        codes.copy_(aligned)
