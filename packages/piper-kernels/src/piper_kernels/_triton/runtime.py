"""Whether and how Triton kernels can be launched on a device."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor

from piper_kernels._triton.targets import accelerator_target

MIN_CAPABILITY = (7, 0)
NO_TRITON = 'Triton is not installed; install it: pip install "piper-kernels[triton]"'
_NOTHING = nullcontext()


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
        return False, NO_TRITON
    return True, ""


def supports_device(device: torch.device) -> bool:
    """Return whether Triton kernels run on a device."""
    return support(device)[0]


def launch_guard(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that makes ``device`` current, as kernel launches require."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


def as_words(codes: Tensor) -> AbstractContextManager[Tensor]:
    """Return a context with contiguous codes of one byte as int32 words that kernels write into.

    Storage that does not start on a word is copied and written back at the end.

    Args:
        codes: int8 or uint8 ``[rows, bytes]``, contiguous, with whole words in a row.
    """
    if codes.data_ptr() % 4 == 0:
        return nullcontext(codes.view(torch.int32))
    return _copied_words(codes)


@contextmanager
def _copied_words(codes: Tensor) -> Iterator[Tensor]:
    aligned = codes.clone()
    yield aligned.view(torch.int32)
    codes.copy_(aligned)
