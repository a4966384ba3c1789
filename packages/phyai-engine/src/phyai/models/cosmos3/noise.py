"""Starting points of the sampler: drawn noise with the clean frames and rows written over it."""

from functools import lru_cache
from math import prod
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from phyai.models.cosmos3.recent import Recent
from phyai.models.cosmos3.state import Layout, Modalities
from phyai.processing.errors import ProcessingError

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
    shapes = {k: v for k, v in layout.shapes(channels, *widths).items() if v is not None}
    stream = np.random.RandomState(seed).standard_normal(max(map(prod, shapes.values())))
    values = torch.from_numpy(stream.astype(np.float32))
    return Modalities(**{k: values[: prod(shape)].view(shape) for k, shape in shapes.items()})


def torch_noise(seed: int, channels: int, layout: Layout, widths: tuple[int, int]) -> Modalities:
    """Draws noise as diffusers does: one generator of the CPU; video, then sound, then actions.

    Arguments and result are those of `native_noise`.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = layout.shapes(channels, *widths)
    drawn: dict[str, Tensor] = {}
    for name in ("video", "sound", "action"):
        shape = shapes[name]
        if shape is not None:
            drawn[name] = torch.randn(shape, generator=generator)
    return Modalities(**drawn)


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
    for name, shape in layout.shapes(channels, *widths).items():
        part = getattr(noise, name)
        found = None if part is None else tuple(part.shape)
        if found != shape:
            raise ProcessingError(f"noise has {name} of shape {found}; this request needs {shape}")


def start(
    noise: Modalities, layout: Layout, *, frames: Tensor | None, rows: Tensor | None
) -> Modalities:
    """Returns the sampler's starting point; nothing waits for the device.

    Args:
        noise: fp32 of every modality of the layout.
        layout: which frames and rows are clean.
        frames: [C, clean frames, H, W] latents, in the order of ``layout.clean_frames``.
        rows: [clean rows, action_dim], in the order of ``layout.action.clean_rows``.
    """
    video = noise.video.clone()
    if frames is not None:
        _write(video, 1, layout.clean_frames, frames)
    action = noise.action
    if action is not None and layout.action is not None:
        action = action.clone()
        action[:, layout.action.raw_dim :] = 0
        if rows is not None:
            _write(action, 0, layout.action.clean_rows, rows)
    return Modalities(video, action, noise.sound)


def _write(target: Tensor, axis: int, indices: tuple[int, ...], source: Tensor) -> None:
    """Copies ``source`` to ``indices`` of an axis; by slices, since the host waits for an index."""
    slices = runs(indices)
    sizes = [part.stop - part.start for part in slices]
    for part, size, values in zip(slices, sizes, source.split(sizes, axis), strict=True):
        target.narrow(axis, part.start, size).copy_(values, non_blocking=True)


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
