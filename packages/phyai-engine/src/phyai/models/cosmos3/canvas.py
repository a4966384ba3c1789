"""From camera frames to the pixels that the VAE encodes."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from phyai.models.cosmos3.domains import find_canvas
from phyai.processing.errors import ProcessingError
from phyai.processing.images import as_rgb

SPATIAL = 16
"""Pixels per latent row and column."""


def to_frames(clip: np.ndarray | Sequence[np.ndarray], name: str) -> Tensor:
    """Returns a clip as uint8 [T, 3, H, W].

    Args:
        clip: T frames as `as_rgb` takes them, all of one size.
        name: argument, for messages.

    Raises:
        ProcessingError: for an empty clip, a bad frame, or frames of several sizes.
    """
    if len(np.shape(clip[0]) if len(clip) else ()) != 3:
        raise ProcessingError(
            f"{name!r} must be a clip of frames [H, W, 3], got {_describe(clip)}; "
            "stack the frames along a leading axis"
        )
    frames = [as_uint8(frame, f"{name}[{index}]") for index, frame in enumerate(clip)]
    sizes = {frame.shape[:2] for frame in frames}
    if len(sizes) > 1:
        raise ProcessingError(f"{name!r} has frames of several sizes: {sorted(sizes)}")
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)


def as_uint8(picture: np.ndarray, name: str) -> np.ndarray:
    """Returns a picture as uint8 [H, W, 3]; floats in [0, 1] are rounded.

    Raises:
        ProcessingError: for another layout, dtype or range.
    """
    frame = as_rgb(picture, name)
    return frame if frame.dtype == np.uint8 else np.rint(frame * 255).astype(np.uint8)


def scaled(frames: Tensor) -> Tensor:
    """Maps uint8 pixels to fp32 in [-1, 1], ``x / 127.5 - 1``."""
    return frames.to(torch.float32) / 127.5 - 1


def fit_canvas(frames: Tensor, tier: str) -> tuple[Tensor, tuple[int, int]]:
    """Fits the frames of an action mode into the nearest canvas of a tier.

    They are scaled down (bicubic, antialiased) if they are larger, never up, and padded at the
    right and the bottom by reflection, or by their edge where the padding is as large as they are.

    Args:
        frames: uint8 [T, 3, H, W].
        tier: resolution tier.

    Returns:
        fp32 [3, T, canvas height, canvas width], and (height, width) of the content. Values are in
        [-1, 1], or a little outside at the edges of what was scaled down, as diffusers has them.

    Raises:
        ProcessingError: for an unknown tier.
    """
    height, width = frames.shape[-2:]
    canvas = find_canvas(tier, height, width)
    scale = min(canvas[0] / height, canvas[1] / width, 1.0)
    content = (max(1, int(scale * height + 0.5)), max(1, int(scale * width + 0.5)))
    pixels = scaled(frames)
    if content != (height, width):
        pixels = functional.interpolate(
            pixels, size=content, mode="bicubic", align_corners=False, antialias=True
        )
    bottom, right = canvas[0] - content[0], canvas[1] - content[1]
    reflects = bottom < content[0] and right < content[1]
    mode = "reflect" if reflects else "replicate"
    return functional.pad(pixels, (0, right, 0, bottom), mode=mode).transpose(0, 1), content


def content_cells(content: tuple[int, int]) -> tuple[int, int]:
    """Returns the latent rows and columns that hold content; the padding's are cut off."""
    return max(content[0] // SPATIAL, 1), max(content[1] // SPATIAL, 1)


def cover_canvas(frames: Tensor, canvas: tuple[int, int]) -> Tensor:
    """Scales frames until they cover a canvas and crops around the centre.

    Args:
        frames: uint8 [T, 3, H, W].
        canvas: height and width.

    Returns:
        fp32 [3, T, height, width] in [-1, 1], on the grid of uint8 values.
    """
    height, width = frames.shape[-2:]
    scale = max(canvas[0] / height, canvas[1] / width)
    size = (max(canvas[0], round(height * scale)), max(canvas[1], round(width * scale)))
    pixels = frames.to(torch.float32)
    if size != (height, width):
        pixels = functional.interpolate(
            pixels, size=size, mode="bilinear", align_corners=False, antialias=True
        )
        pixels = pixels.round().clamp(0, 255)
    top, left = (size[0] - canvas[0]) // 2, (size[1] - canvas[1]) // 2
    cropped = pixels[..., top : top + canvas[0], left : left + canvas[1]]
    return (cropped / 127.5 - 1).transpose(0, 1)


def to_uint8(pixels: Tensor) -> np.ndarray:
    """Maps decoded pixels [3, T, H, W] in [-1, 1] to uint8 [T, H, W, 3] on the host."""
    values = (pixels.float().clamp(-1, 1) + 1) * 127.5
    return values.round().to(torch.uint8).permute(1, 2, 3, 0).cpu().numpy()


def _describe(clip: np.ndarray | Sequence[np.ndarray]) -> str:
    if isinstance(clip, np.ndarray):
        return f"shape {clip.shape}"
    return f"{len(clip)} items of {type(clip[0]).__name__}" if len(clip) else "nothing"
