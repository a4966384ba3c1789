"""Choice among the backends of a dense attention operator."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from piper_kernels._triton.targets import AcceleratorTarget


@dataclass(frozen=True)
class AttentionRequest:
    """What decides which backends can execute a call; host metadata only.

    Attributes:
        target: Compiler target of the device; ``None`` for a CPU.
        head_dim: 64 or 128.
        is_causal: Whether later keys are masked.
    """

    target: AcceleratorTarget | None
    head_dim: int
    is_causal: bool


class AttentionBackend(Protocol):
    """What executes a dense attention operator."""

    name: str

    def support(self, request: AttentionRequest, /) -> tuple[bool, str]:
        """Return whether the backend executes such calls, or why not."""
        ...

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool
    ) -> Tensor:
        """Return the attention of checked operands, contiguous in the dtype of ``query``."""
        ...


def select_backend[B: AttentionBackend](backends: Sequence[B], request: AttentionRequest) -> B:
    """Return the first backend that supports a request.

    Raises:
        RuntimeError: None does; the message has the reason of each.
    """
    reasons = []
    for backend in backends:
        usable, reason = backend.support(request)
        if usable:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise RuntimeError(f"no attention backend supports {request}; " + "; ".join(reasons))
