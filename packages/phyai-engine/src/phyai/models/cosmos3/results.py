"""What Cosmos3 answers."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

SAMPLE_RATE = 48_000
"""Of the published sound decoder, samples per second."""


@dataclass(frozen=True, eq=False)
class _Result:
    """What all answers share.

    Attributes:
        timing_ms: milliseconds by stage: preprocess, encode, prefill, noise, denoise,
            decode, postprocess, and their total.
        prompt: the text that the model read, without its chat template.
        seed: of the noise.
        latents: fp32 [C, T, H, W] video latents if asked for.
    """

    timing_ms: Mapping[str, float]
    prompt: str
    seed: int
    latents: Tensor | None


@dataclass(frozen=True, eq=False)
class PolicyResult(_Result):
    """Actions of a robot.

    Attributes:
        actions: fp32 [chunk, columns] in units of the robot.
        normalized: fp32 [chunk, raw_dim] as the model made them.
        frames: uint8 [T, H, W, 3] predicted video if asked for, its first frame the observed one.
        fps: of actions and frames.
    """

    actions: np.ndarray
    normalized: np.ndarray
    frames: np.ndarray | None
    fps: float


@dataclass(frozen=True, eq=False)
class VideoResult(_Result):
    """A clip.

    Attributes:
        frames: uint8 [T, H, W, 3].
        fps: frames per second.
        sound: fp32 [2, samples] in [-1, 1] if asked for.
        sample_rate: of the sound, samples per second.
    """

    frames: np.ndarray
    fps: float
    sound: np.ndarray | None = None
    sample_rate: int = SAMPLE_RATE


@dataclass(frozen=True, eq=False)
class ImageResult(_Result):
    """A picture.

    Attributes:
        image: uint8 [H, W, 3].
    """

    image: np.ndarray


Result = PolicyResult | VideoResult | ImageResult
