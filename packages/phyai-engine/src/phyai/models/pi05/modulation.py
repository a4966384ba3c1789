"""What one Euler step needs from its time."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from phyai.models.pi05.stream import LayerModulation


@dataclass(frozen=True)
class StepModulation:
    """Time-dependent values of one step; constants of the checkpoint for a given step count.

    Attributes:
        embedding: [1 or B, expert width], which π0 mixes into its action tokens.
        layers: modulation of each expert layer, None where norms are plain.
        final: modulation [1 or B, 3 * width] of the expert's last norm.
        constants: what kernels derive from these values and the weights, and keep.
    """

    embedding: Tensor
    layers: tuple[LayerModulation | None, ...]
    final: Tensor | None
    constants: dict[str, Any] = field(default_factory=dict, compare=False)
