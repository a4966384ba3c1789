"""Positions of text and media tokens, and the rotations that they stand for, in fp32.

Positions have three axes: time, row and column. bf16 positions change velocities by a fifth, so
everything here is fp32 and computed on the host once for each layout.
"""

import torch
from torch import Tensor

from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.recent import Recent
from phyai.models.cosmos3.state import Layout

VIDEO_COMPRESSION = 4
"""Pixel frames that one latent frame stands for."""

_CACHED = 8


def text_positions(length: int) -> Tensor:
    """Returns fp32 [length, 3]: token ``s`` stands at ``(s, s, s)``."""
    return torch.arange(length, dtype=torch.float32)[:, None].expand(-1, 3)


def media_positions(layout: Layout, length: int, config: Cosmos3Config) -> Tensor:
    """Returns the positions of all media tokens behind a text of ``length`` tokens.

    The order is video (frame, row, column), action rows, sound frames. With an fps, a temporal
    position is a time, in units of 1 / 6 s for a ``base_fps`` of 24; without, a frame number.
    Sound latents have a rate of their own and are not compressed in time.

    Returns:
        fp32 [tokens, 3].
    """
    offset = float(length + config.unified_3d_mrope_temporal_modality_margin)
    fps, unit = layout.fps, config.base_fps / VIDEO_COMPRESSION
    frames, rows, columns = layout.grid(config.latent_patch_size)

    def times(count: int, start: int, rate: float | None, scale: float) -> Tensor:
        index = torch.arange(start, start + count, dtype=torch.float32)
        if rate is not None and config.enable_fps_modulation:
            index = index / rate * scale
        return index + offset

    video = torch.stack(
        torch.meshgrid(
            times(frames, 0, fps and fps / VIDEO_COMPRESSION, unit),
            torch.arange(rows, dtype=torch.float32),
            torch.arange(columns, dtype=torch.float32),
            indexing="ij",
        ),
        dim=-1,
    )
    parts = [video.reshape(-1, 3)]
    if layout.action is not None:
        parts.append(_line(times(layout.action.rows, layout.action.start, fps, unit)))
    if layout.sound_frames:
        sound = times(layout.sound_frames, 0, config.sound_latent_fps, config.base_fps)
        parts.append(_line(sound))
    return torch.cat(parts)


def _line(times: Tensor) -> Tensor:
    return torch.stack([times, torch.zeros_like(times), torch.zeros_like(times)], dim=1)


def rotation(positions: Tensor, config: Cosmos3Config) -> Tensor:
    """Returns the cosines, then the sines, of each position's angles.

    Slot ``j`` turns by ``position * rope_theta^(-2 j / head_dim)``. Its axis is the row where
    ``j mod 3`` is 1 and the column where it is 2, as long as their sections reach; else time.

    Args:
        positions: fp32 [tokens, 3].
        config: sections, base and head width.

    Returns:
        fp32 [tokens, head_dim].
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = positions[:, rotary_axes(config)] * (1.0 / config.rope_theta**exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def rotary_axes(config: Cosmos3Config) -> Tensor:
    """Returns the axis of each of the ``head_dim / 2`` slots: 0 time, 1 row, 2 column."""
    axes = torch.zeros(config.head_dim // 2, dtype=torch.long)
    for axis in (1, 2):
        axes[axis : 3 * config.mrope_section[axis] : 3] = axis
    return axes


class Rotations:
    """Rotations on a device, kept for the layouts and text lengths used last.

    Args:
        config: sections, base and head width.
        device: where they are needed.
    """

    def __init__(self, config: Cosmos3Config, device: torch.device) -> None:
        self.config = config
        self.device = device
        self._media: Recent[tuple[Layout, int], Tensor] = Recent(_CACHED)

    def text(self, length: int) -> Tensor:
        """Returns fp32 [length, head_dim] of a text."""
        return rotation(text_positions(length), self.config).to(self.device)

    def media(self, layout: Layout, length: int) -> Tensor:
        """Returns fp32 [tokens, head_dim] of all media tokens behind ``length`` text tokens."""

        def make() -> Tensor:
            positions = media_positions(layout, length, self.config)
            return rotation(positions, self.config).to(self.device)

        return self._media.get((layout, length), make)
