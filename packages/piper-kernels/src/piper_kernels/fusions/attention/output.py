"""Attention of windows of queries, projected window by window."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from piper_kernels.fusions.attention.pipeline import SLOTS, run_stages
from piper_kernels.fusions.attention.windows import GATE_STREAM_WINDOWS

Attend = Callable[[slice, Tensor, Tensor | None], None]
"""Write the attention of a window of queries ``[B, rows, H, D]``, given the gates of it."""


class OutputLinear(Protocol):
    """The linear behind an attention."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """What it reads besides its input."""
        ...

    def project(self, attention: Tensor, out: Tensor) -> None:
        """Write the linear ``[B, rows, N]`` of merged heads ``[B, rows, H * D]``."""
        ...


class Gates(Protocol):
    """The gates of a coarse residual."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """What they are made of."""
        ...

    @property
    def projected(self) -> bool:
        """Whether a window costs a projection."""
        ...

    def window(self, rows: slice, out: Tensor | None) -> Tensor:
        """Return the gates of a window, ``[B, rows, H, D]``, in ``out`` where they need room."""
        ...


@dataclass
class WindowedOutput:
    """Room for windows of attention and gates, and the order of their work.

    Attributes:
        shape: ``(B, rows, H, D)`` of the attention.
        dtype: Its dtype.
        windows: Windows of the rows, the first of which is the longest.
        linear: The linear of the merged heads.
        gates: The gates, or ``None``.
    """

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    windows: list[slice]
    linear: OutputLinear
    gates: Gates | None = None
    _attention: list[Tensor] = field(default_factory=list)
    _gates: list[Tensor] = field(default_factory=list)

    def run(self, attend: Attend, output: Tensor, touched: Iterable[Tensor]) -> Tensor:
        """Attend and project every window.

        Args:
            attend: Writes the attention of a window.
            output: ``[B, rows, N]`` for the result.
            touched: What ``attend`` reads.

        Returns:
            ``output``.
        """
        windows = [window for window in self.windows if window.stop > window.start]
        device = output.device
        slots = min(len(windows), SLOTS if device.type == "cuda" else 1)
        self._attention = [self._room(windows, device) for _ in range(slots)]
        ahead = self._projects_ahead(windows)
        if self.gates is not None and self.gates.projected:
            self._gates = [self._room(windows, device) for _ in range(slots if ahead else 1)]
        ready: list[Tensor | None] = [None] * SLOTS

        def gate(window: slice, slot: int) -> None:
            if self.gates is not None:
                ready[slot] = self.gates.window(window, self._gate_room(window, slot))

        def attention(window: slice, slot: int) -> None:
            if not ahead:
                gate(window, slot)
            attend(window, self._view(self._attention, window, slot), ready[slot])

        def project(window: slice, slot: int) -> None:
            merged = self._view(self._attention, window, slot).flatten(2)
            self.linear.project(merged, output[:, window])

        stages = (gate, attention, project) if ahead else (attention, project)
        shared = [*touched, *self.linear.tensors, *self._attention, *self._gates, output]
        shared += () if self.gates is None else self.gates.tensors
        run_stages(windows, stages, len(stages) - 2, device, shared)
        return output

    def _projects_ahead(self, windows: Sequence[slice]) -> bool:
        """Return whether projected gates get a stream of their own."""
        gates = self.gates
        return gates is not None and gates.projected and len(windows) >= GATE_STREAM_WINDOWS

    def _room(self, windows: Sequence[slice], device: torch.device) -> Tensor:
        batch, _, heads, head_dim = self.shape
        rows = windows[0].stop - windows[0].start
        return torch.empty(batch * rows * heads * head_dim, dtype=self.dtype, device=device)

    def _view(self, rooms: Sequence[Tensor], window: slice, slot: int) -> Tensor:
        batch, _, heads, head_dim = self.shape
        rows = window.stop - window.start
        count = batch * rows * heads * head_dim
        return rooms[slot % len(rooms)][:count].view(batch, rows, heads, head_dim)

    def _gate_room(self, window: slice, slot: int) -> Tensor | None:
        return self._view(self._gates, window, slot) if self._gates else None
