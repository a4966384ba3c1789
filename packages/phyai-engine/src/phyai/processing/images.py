"""Camera frames to the vision tower's input: layout checks, resizing, letterboxing, scaling.

The geometry and both filters follow the public π0/π0.5 pipelines: openpi resizes uint8 frames with
Pillow's antialiased bilinear filter, LeRobot resizes floats with `F.interpolate` (no antialias).
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from phyai.processing.errors import ProcessingError

ABSENT_PIXEL = -1.0
_FLOAT_SLACK = 1e-3
_LAYOUTS = "expected [H, W, 3] or [3, H, W]"


class ResizeFilter(StrEnum):
    """How a frame of another size reaches the model's resolution."""

    PIL = "pil"
    """Keep the aspect ratio; Pillow bilinear, antialiased, rounded to uint8."""
    INTERPOLATE = "interpolate"
    """Keep the aspect ratio; torch bilinear on floats, `align_corners=False`, no antialias."""
    STRETCH = "stretch"
    """Ignore the aspect ratio; torch bilinear on floats."""
    NONE = "none"
    """Refuse frames that do not have the model's resolution."""


@dataclass(frozen=True)
class Letterbox:
    """Where a resized frame of `height` x `width` sits inside the target; counts of pixels."""

    height: int
    width: int
    top: int
    bottom: int
    left: int
    right: int


def letterbox_geometry(height: int, width: int, target_height: int, target_width: int) -> Letterbox:
    """Fits a frame into the target without distortion, centred, the odd pixel at the far side.

    Args:
        height: Rows of the frame.
        width: Columns of the frame.
        target_height: Rows of the target.
        target_width: Columns of the target.

    Returns:
        The resized extent (floor of the exact one, at least one pixel) and the four margins.
    """
    ratio = max(width / target_width, height / target_height)
    new_height = max(1, int(height / ratio))
    new_width = max(1, int(width / ratio))
    top, left = (target_height - new_height) // 2, (target_width - new_width) // 2
    return Letterbox(
        height=new_height,
        width=new_width,
        top=top,
        bottom=target_height - new_height - top,
        left=left,
        right=target_width - new_width - left,
    )


def prepare_image(
    image: np.ndarray,
    resolution: tuple[int, int],
    *,
    resize: ResizeFilter,
    pad_value: float = ABSENT_PIXEL,
    name: str = "image",
) -> Tensor:
    """Turns one camera frame into the vision tower's input.

    Args:
        image: RGB, uint8 or floats in [0, 1], `[H, W, 3]` or `[3, H, W]`; any strides.
        resolution: Target (height, width).
        resize: Filter for frames of another size; a frame of the target size stays untouched.
        pad_value: Value of the letterbox margins after scaling.
        name: Camera name for error messages.

    Returns:
        float32 `[3, height, width]`; pixels in [-1, 1].

    Raises:
        ProcessingError: The frame has another layout, dtype or range, or needs a resize that
            `ResizeFilter.NONE` forbids.
    """
    frame = as_rgb(image, name)
    height, width = frame.shape[:2]
    if (height, width) == tuple(resolution):
        return torch.from_numpy(_planes(frame))
    if resize is ResizeFilter.NONE:
        raise ProcessingError(
            f"camera {name!r}: the frame is {height}x{width} but the policy reads "
            f"{resolution[0]}x{resolution[1]} and this preset does not resize; resize on the robot "
            "or use a preset with resize 'pil' or 'interpolate'"
        )
    if resize is ResizeFilter.STRETCH:
        return torch.from_numpy(_planes(_interpolate(frame, resolution)))
    box = letterbox_geometry(height, width, *resolution)
    size = (box.height, box.width)
    resized = _pil(frame, size) if resize is ResizeFilter.PIL else _interpolate(frame, size)
    canvas = np.full((3, *resolution), pad_value, dtype=np.float32)
    place = canvas[:, box.top : box.top + box.height, box.left : box.left + box.width]
    place[...] = _planes(resized)
    return torch.from_numpy(canvas)


def as_rgb(image: np.ndarray, name: str) -> np.ndarray:
    """Checks layout, dtype and range of a frame and brings its colours last.

    Args:
        image: RGB, uint8 or floats in [0, 1], `[H, W, 3]` or `[3, H, W]`.
        name: Camera name for error messages.

    Returns:
        `[H, W, 3]`, uint8 or float32.

    Raises:
        ProcessingError: The frame has another layout, dtype or range.
    """
    array = np.asarray(image)
    if array.ndim != 3:
        kind = {2: "a grayscale or depth frame", 4: "a batch of frames"}.get(array.ndim, "no frame")
        raise ProcessingError(
            f"camera {name!r}: shape {array.shape} is {kind}; {_LAYOUTS}, one frame per camera"
        )
    if 0 in array.shape:
        raise ProcessingError(f"camera {name!r}: shape {array.shape} has no pixels; {_LAYOUTS}")
    if array.shape[-1] != 3:
        if array.shape[0] != 3:
            raise ProcessingError(f"camera {name!r}: {_channel_fault(array.shape)}; {_LAYOUTS}")
        array = array.transpose(1, 2, 0)
    if array.dtype == np.uint8:
        return array
    if not np.issubdtype(array.dtype, np.floating):
        raise ProcessingError(
            f"camera {name!r}: dtype {array.dtype} is not supported; send uint8 in [0, 255] or "
            "floats in [0, 1]"
        )
    low, high = float(array.min()), float(array.max())
    if not (low >= -_FLOAT_SLACK and high <= 1 + _FLOAT_SLACK):
        raise ProcessingError(
            f"camera {name!r}: float frame spans [{low:g}, {high:g}]; floats must lie in [0, 1], "
            "or send uint8 in [0, 255]"
        )
    floats = array.astype(np.float32, copy=False)
    return floats if low >= 0 and high <= 1 else floats.clip(0.0, 1.0)


def _channel_fault(shape: tuple[int, ...]) -> str:
    if 1 in (shape[0], shape[-1]):
        return f"shape {shape} has one channel (grayscale or depth)"
    if 4 in (shape[0], shape[-1]):
        return f"shape {shape} has four channels; drop the alpha or depth channel"
    return f"shape {shape} has no axis of 3 colour channels"


def _unit(frame: np.ndarray) -> np.ndarray:
    """Pixels to a new float32 array in [0, 1]: uint8 by `x / 255`."""
    if frame.dtype == np.uint8:
        return np.divide(frame, 255, dtype=np.float32)
    return frame.astype(np.float32)


def _planes(frame: np.ndarray) -> np.ndarray:
    """Pixels `[H, W, 3]` to float32 `[3, H, W]` in [-1, 1]."""
    pixels = _unit(frame)
    pixels *= 2
    pixels -= 1
    return pixels.transpose(2, 0, 1)


def _pil(frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    if frame.dtype != np.uint8:
        frame = np.rint(frame * np.float32(255)).astype(np.uint8)
    picture = Image.fromarray(np.ascontiguousarray(frame))
    return np.asarray(picture.resize((size[1], size[0]), resample=Image.Resampling.BILINEAR))


def _interpolate(frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    pixels = torch.from_numpy(_unit(frame)).permute(2, 0, 1)
    resized = interpolate(pixels[None], size=size, mode="bilinear", align_corners=False)[0]
    return resized.clamp_(0.0, 1.0).permute(1, 2, 0).numpy()
