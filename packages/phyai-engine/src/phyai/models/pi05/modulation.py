"""What one Euler step needs from its time."""

from dataclasses import dataclass

from torch import Tensor

from phyai.models.pi05.decoder import LayerModulation


@dataclass(frozen=True)
class StepModulation:
    """Time-dependent values of one step; constants of the checkpoint for a given step count.

    Attributes:
        embedding: [1 or B, expert width], which π0 mixes into its action tokens.
        layers: modulation of each expert layer, None where norms are plain.
        final: modulation [1 or B, 3 * width] of the expert's last norm.
    """

    embedding: Tensor
    layers: tuple[LayerModulation | None, ...]
    final: Tensor | None
