"""What a kernel launcher has to know about an accelerator. Needs neither Triton nor a device."""

from dataclasses import dataclass
from functools import cache, cached_property

import torch


@dataclass(frozen=True)
class AcceleratorTarget:
    """The compiler target of a device.

    Attributes:
        backend: ``"cuda"`` or ``"hip"``.
        architecture: ``"sm_90"`` style for CUDA, ``"gfx1201"`` style for HIP.
    """

    backend: str
    architecture: str

    @cached_property
    def capability(self) -> tuple[int, int]:
        """Compute capability of a CUDA target; ``(0, 0)`` for HIP."""
        if self.backend != "cuda":
            return (0, 0)
        number = int(self.architecture.removeprefix("sm_"))
        return divmod(number, 10)

    @property
    def has_fp4_conversion(self) -> bool:
        """Whether one instruction converts two FP32 values to packed E2M1."""
        return self.capability >= (10, 0)


@cache
def _cuda_target(index: int) -> AcceleratorTarget:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return AcceleratorTarget("hip", properties.gcnArchName.partition(":")[0])
    return AcceleratorTarget("cuda", f"sm_{properties.major}{properties.minor}")


def accelerator_target(device: torch.device) -> AcceleratorTarget | None:
    """Return the target of a CUDA or ROCm device, ``None`` for every other device."""
    if device.type != "cuda":
        return None
    return _cuda_target(torch.cuda.current_device() if device.index is None else device.index)


@cache
def sm_count(device: torch.device) -> int:
    """Return the multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def dot_precision(device: torch.device) -> str:
    """Return the ``input_precision`` of an FP32 ``tl.dot`` that keeps FP32 accuracy."""
    target = accelerator_target(device)
    return "tf32x3" if target is not None and target.capability >= (8, 0) else "ieee"
