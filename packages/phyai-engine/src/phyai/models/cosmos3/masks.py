"""Which positions of a layout are denoised, on the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.state import Layout, Modalities


@dataclass(frozen=True, eq=False)
class Masks:
    """What is denoised of one layout.

    Attributes:
        noisy_tokens: [tokens, 1], one or zero.
        video: bool [1, T, 1, 1].
        action: bool [rows, action_dim], false at channels that the robot has not; None without
            action rows.
    """

    noisy_tokens: Tensor
    video: Tensor
    action: Tensor | None

    @classmethod
    def build(
        cls, layout: Layout, config: Cosmos3Config, *, dtype: torch.dtype, device: torch.device
    ) -> Masks:
        """Makes the masks of ``layout``; those of tokens in ``dtype``.

        Raises:
            ValueError: if the robot has more channels than the model.
        """
        frames, rows, columns = layout.grid(config.latent_patch_size)
        video = _marked(frames, layout.noisy_frames)
        parts = [video.repeat_interleave(rows * columns)]
        action = None
        if layout.action is not None:
            if layout.action.raw_dim > config.action_dim:
                raise ValueError(
                    f"raw_dim is {layout.action.raw_dim}; this model has {config.action_dim} "
                    "action channels"
                )
            noisy = _marked(layout.action.rows, layout.noisy_rows)
            parts.append(noisy)
            channels = _marked(config.action_dim, range(layout.action.raw_dim))
            action = (noisy[:, None] & channels).to(device)
        parts.append(torch.ones(layout.sound_frames, dtype=torch.bool))
        return cls(
            torch.cat(parts)[:, None].to(device, dtype),
            video[None, :, None, None].to(device),
            action,
        )

    def apply(self, velocities: Modalities) -> Modalities:
        """Returns ``velocities`` with zeros where nothing is denoised."""
        video, action = velocities.video, velocities.action
        video = torch.where(self.video, video, 0.0)
        if action is not None and self.action is not None:
            action = torch.where(self.action, action, 0.0)
        return Modalities(video, action, velocities.sound)


def _marked(count: int, chosen: Iterable[int]) -> Tensor:
    mask = torch.zeros(count, dtype=torch.bool)
    mask[list(chosen)] = True
    return mask
