"""What a robot sends, what the model reads, and the sizes that lie between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Observation:
    """One moment of a robot, in robot units.

    Attributes:
        images: Camera name to RGB image: uint8 `[H, W, 3]` or `[3, H, W]`, or floats in [0, 1] of
            either layout. Names may be short (`base_0_rgb`) or full
            (`observation.images.base_0_rgb`). Cameras left out are masked.
        state: `[state_dim]` joint readings in robot units; None for policies that do not read it.
        task: The instruction in plain words.
    """

    images: Mapping[str, np.ndarray]
    state: np.ndarray | None
    task: str


@dataclass(frozen=True)
class ModelInputs:
    """A batch of B observations as the model reads it, on the CPU.

    Attributes:
        images: float32 `[B, V, 3, H, W]` in [-1, 1]; V cameras in checkpoint order.
        image_mask: bool `[B, V]`, False where the camera is absent.
        tokens: int64 `[B, L]`, padded on the right with 0.
        token_mask: bool `[B, L]`, True for real tokens.
        state: float32 `[B, max_state_dim]` normalised and zero-padded, or None when the policy has
            no continuous state input.
        prompts: The B strings that were tokenised.
    """

    images: Tensor
    image_mask: Tensor
    tokens: Tensor
    token_mask: Tensor
    state: Tensor | None
    prompts: tuple[str, ...]


class PolicyShape(Protocol):
    """The sizes of a checkpoint that processing needs; `PI05Config` satisfies it."""

    @property
    def family(self) -> str:
        """Model family: `pi05` or `pi0`."""
        ...

    @property
    def cameras(self) -> tuple[str, ...]:
        """Short camera names in checkpoint order."""
        ...

    @property
    def state_dim(self) -> int:
        """Columns of the state in the checkpoint's features."""
        ...

    @property
    def action_dim(self) -> int:
        """Columns of the action in the checkpoint's features."""
        ...

    @property
    def max_state_dim(self) -> int:
        """Width that the state is padded to."""
        ...

    @property
    def max_action_dim(self) -> int:
        """Width of the model's action output."""
        ...

    @property
    def tokenizer_max_length(self) -> int:
        """Prompt slots of the model."""
        ...

    @property
    def image_resolution(self) -> tuple[int, int]:
        """Height and width of the vision tower's input."""
        ...

    @property
    def empty_cameras(self) -> int:
        """Synthetic cameras that are always absent."""
        ...
