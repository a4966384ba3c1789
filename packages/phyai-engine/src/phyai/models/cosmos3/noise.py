"""Starting points of the sampler: drawn noise with the clean frames and rows written over it."""

from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from phyai.models.cosmos3.recent import Recent
from phyai.models.cosmos3.state import Layout, Modalities
from phyai.processing.errors import ProcessingError

Shape = tuple[int, ...] | None
NoiseKind = Literal["native", "torch"]
NOISE_KINDS: tuple[NoiseKind, ...] = ("native", "torch")


def native_noise(seed: int, channels: int, layout: Layout, widths: tuple[int, int]) -> Modalities:
    """Draws the noise of the model owner's server, on the CPU.

    NumPy's legacy generator starts anew from the same seed for every modality, so the noise of
    actions and sound begins with the values that the video's does.

    Args:
        seed: 0 to 2**32 - 1.
        channels: of the video latents.
        layout: shapes of the request.
        widths: columns of an action row, channels of a sound frame.

    Returns:
        fp32 standard normals.
    """
    shapes = _shapes(channels, layout, widths)
    sizes = [int(np.prod(shape)) for shape in shapes if shape is not None]
    stream = np.random.RandomState(seed).standard_normal(max(sizes))
    values = torch.from_numpy(stream.astype(np.float32))
    return _modalities(
        [None if shape is None else values[: int(np.prod(shape))].view(shape) for shape in shapes]
    )


def torch_noise(seed: int, channels: int, layout: Layout, widths: tuple[int, int]) -> Modalities:
    """Draws noise as diffusers does: one generator of the CPU; video, then sound, then actions.

    Arguments and result are those of `native_noise`.
    """
    generator = torch.Generator().manual_seed(seed)
    video, action, sound = _shapes(channels, layout, widths)
    drawn = [
        None if shape is None else torch.randn(shape, generator=generator)
        for shape in (video, sound, action)
    ]
    return _modalities([drawn[0], drawn[2], drawn[1]])


def draw_noise(
    kind: NoiseKind, seed: int, channels: int, layout: Layout, widths: tuple[int, int]
) -> Modalities:
    """Draws the noise of one kind.

    Raises:
        ProcessingError: for an unknown kind or a seed out of range.
    """
    _check_source(kind, seed)
    draw = native_noise if kind == "native" else torch_noise
    return draw(seed, channels, layout, widths)


class NoiseSource:
    """Draws noise and keeps the last of it, for a seed that comes again or is known beforehand.

    Args:
        channels: of the video latents.
        widths: columns of an action row, channels of a sound frame.
        device: where noise is needed; drawn noise waits in pinned memory for a GPU.
        kept: draws to keep.
    """

    def __init__(
        self, channels: int, widths: tuple[int, int], device: torch.device, *, kept: int = 2
    ) -> None:
        self._channels = channels
        self._widths = widths
        self._device = device
        self._kept: Recent[tuple[NoiseKind, int, Layout], Modalities] = Recent(kept)

    def get(self, kind: NoiseKind, seed: int, layout: Layout) -> Modalities:
        """Returns noise on the device.

        Raises:
            ProcessingError: as `draw_noise`.
        """
        drawn = self.prepare(kind, seed, layout)
        return drawn.map(lambda part: part.to(self._device, non_blocking=True))

    def prepare(self, kind: NoiseKind, seed: int, layout: Layout) -> Modalities:
        """Draws noise that will be asked for, and returns it on the host.

        Raises:
            ProcessingError: as `draw_noise`.
        """
        _check_source(kind, seed)

        def draw() -> Modalities:
            drawn = draw_noise(kind, seed, self._channels, layout, self._widths)
            pinned = self._device.type == "cuda"
            return drawn.map(torch.Tensor.pin_memory) if pinned else drawn

        return self._kept.get((kind, seed, layout), draw)

    def checked(self, noise: Modalities, layout: Layout) -> Modalities:
        """Returns noise of a caller on the device, in fp32.

        Raises:
            ProcessingError: for a modality that is missing, superfluous or of another shape.
        """
        check_noise(noise, self._channels, layout, self._widths)
        return noise.map(lambda part: part.to(self._device, torch.float32))


def check_noise(noise: Modalities, channels: int, layout: Layout, widths: tuple[int, int]) -> None:
    """Checks the shapes of noise that was not drawn here; arguments are those of `native_noise`.

    Raises:
        ProcessingError: for a modality that is missing, superfluous or of another shape.
    """
    shapes = _shapes(channels, layout, widths)
    for name, shape in zip(("video", "action", "sound"), shapes, strict=True):
        part = getattr(noise, name)
        found = None if part is None else tuple(part.shape)
        if found != shape:
            raise ProcessingError(f"noise has {name} of shape {found}; this request needs {shape}")


def start(
    noise: Modalities, layout: Layout, *, frames: Tensor | None, rows: Tensor | None
) -> Modalities:
    """Returns the sampler's starting point.

    Args:
        noise: fp32 of every modality of the layout.
        layout: which frames and rows are clean.
        frames: [C, clean frames, H, W] latents, in the order of ``layout.clean_frames``.
        rows: [clean rows, action_dim], in the order of ``layout.action.clean_rows``.
    """
    video = noise.video.clone()
    if frames is not None:
        video[:, list(layout.clean_frames)] = frames.to(video)
    action = noise.action
    if action is not None and layout.action is not None:
        action = action.clone()
        action[:, layout.action.raw_dim :] = 0
        if rows is not None:
            action[list(layout.action.clean_rows)] = rows.to(action)
    return Modalities(video, action, noise.sound)


@lru_cache(maxsize=64)
def runs(indices: tuple[int, ...]) -> tuple[slice, ...]:
    """Returns the slices of adjacent indices, in ascending order."""
    found: list[slice] = []
    for index in sorted(indices):
        if found and found[-1].stop == index:
            found[-1] = slice(found[-1].start, index + 1)
        else:
            found.append(slice(index, index + 1))
    return tuple(found)


def _check_source(kind: NoiseKind, seed: int) -> None:
    if kind not in NOISE_KINDS:
        raise ProcessingError(f"noise is {kind!r}; allowed: {', '.join(NOISE_KINDS)}")
    whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    if not (whole and 0 <= seed < 2**32):
        raise ProcessingError(f"seed is {seed!r}; allowed: integers from 0 to {2**32 - 1}")


def _shapes(channels: int, layout: Layout, widths: tuple[int, int]) -> list[Shape]:
    """Returns the shapes of video, action and sound."""
    action_dim, sound_dim = widths
    return [
        (channels, layout.frames, layout.height, layout.width),
        None if layout.action is None else (layout.action.rows, action_dim),
        (sound_dim, layout.sound_frames) if layout.sound_frames else None,
    ]


def _modalities(values: list[Tensor | None]) -> Modalities:
    video, action, sound = values
    assert video is not None
    return Modalities(video, action, sound)
