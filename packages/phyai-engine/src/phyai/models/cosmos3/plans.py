"""What a request means for the model: texts, layout, clean values and how its answer is read."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phyai.models.cosmos3.checks import check_count
from phyai.models.cosmos3.droid import PolicyContract
from phyai.models.cosmos3.prompts import SYSTEM_IMAGE, SYSTEM_VIDEO, ClipFormat, PromptStyle
from phyai.models.cosmos3.sampler import Sampling
from phyai.models.cosmos3.state import Layout

TEMPORAL = 4
"""Pixel frames per latent frame, after the first."""


@dataclass(frozen=True)
class Setup:
    """What planning needs to know of the model.

    Attributes:
        device: where pictures are processed.
        action_dim: width of an action row, 0 without action heads.
        domains: ids of the embodiments that are served.
        sound: latent sound frames of (pixel frames, fps); None: no sound is made.
        contract: of `PolicyRequest`.
        style: whose habits texts follow.
        system_prompt: whether a system message precedes the prompt; native has none.
    """

    device: torch.device
    action_dim: int
    domains: tuple[int, ...]
    sound: Callable[[int, float], int] | None
    contract: PolicyContract
    style: PromptStyle
    system_prompt: bool

    def system(self, clip: ClipFormat) -> str | None:
        """Returns the system message for a clip."""
        if not self.system_prompt:
            return None
        return SYSTEM_IMAGE if clip.frames == 1 else SYSTEM_VIDEO


@dataclass(frozen=True, eq=False)
class Plan:
    """One request, ready for the model.

    Attributes:
        prompt: text of the conditional branch.
        negative: text of the unconditional branch.
        system: system message of both.
        layout: shapes, and what is clean.
        sampling: how to integrate.
        fps: of frames and actions.
        pixels: fp32 [3, T, H, W] in [-1, 1] whose latents are the clean frames, or None.
        cells: latent rows and columns of those that are kept.
        rows: fp32 [n, action_dim], the clean action rows, or None.
        actions: from the model's rows [chunk, raw_dim] to the robot's actions; None: no actions
            are returned.
        video: whether to decode the frames.
    """

    prompt: str
    negative: str
    system: str | None
    layout: Layout
    sampling: Sampling
    fps: float
    pixels: Tensor | None = None
    cells: tuple[int, int] | None = None
    rows: Tensor | None = None
    actions: Callable[[np.ndarray], np.ndarray] | None = None
    video: bool = True


def latent_frames(frames: int) -> int:
    """Returns the latent frames of a clip of 1 + 4 k pixel frames.

    Raises:
        ProcessingError: for another number of frames.
    """
    return 1 + (check_count("frames", frames, step=TEMPORAL, more=1) - 1) // TEMPORAL


def padded_rows(rows: np.ndarray, width: int) -> Tensor | None:
    """Returns rows [n, raw_dim] with zeros up to ``width``, fp32; None if there are none."""
    if not len(rows):
        return None
    padded = torch.zeros(len(rows), width)
    padded[:, : rows.shape[1]] = torch.from_numpy(np.asarray(rows, dtype=np.float32))
    return padded
