"""Packs images and prompts of a batch into one row of tokens without gaps."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from phyai.processing.inputs import ModelInputs


@dataclass(frozen=True)
class PrefixLayout:
    """Where the tokens of each request are and which of them may be seen.

    Attributes:
        lengths: rows of each request.
        positions: int64 [total rows], counting visible tokens only.
        visible: row numbers, in the packed batch, that later tokens may attend to.
        views: (request, camera) pairs whose images are computed, in packing order.
        prompt_rows: bool [B, L], the prompt slots that are computed.
    """

    lengths: tuple[int, ...]
    positions: Tensor
    visible: tuple[Tensor, ...]
    views: tuple[tuple[int, int], ...]
    prompt_rows: Tensor

    @property
    def total(self) -> int:
        """Rows of the packed batch."""
        return sum(self.lengths)

    @property
    def visible_counts(self) -> tuple[int, ...]:
        """Visible tokens of each request, which is the position of its first action token."""
        return tuple(rows.numel() for rows in self.visible)


def plan_prefix(
    inputs: ModelInputs, tokens_per_view: int, *, drop_absent: bool, pack_prompt: bool
) -> PrefixLayout:
    """Decides which tokens are computed and how they are numbered.

    The order within a request is: each camera's tokens, then the prompt. A token that is computed
    but masked (an absent camera, padding) takes no position.

    Args:
        inputs: the batch; its masks are read on the host.
        tokens_per_view: tokens of one image.
        drop_absent: leave absent cameras out instead of masking them.
        pack_prompt: leave padding out instead of masking it.
    """
    image_mask = inputs.image_mask.cpu()
    token_mask = inputs.token_mask.cpu()
    prompt_rows = token_mask if pack_prompt else torch.ones_like(token_mask)
    views: list[tuple[int, int]] = []
    masks: list[Tensor] = []
    for request, present in enumerate(image_mask.tolist()):
        used = [camera for camera, here in enumerate(present) if here or not drop_absent]
        views += [(request, camera) for camera in used]
        seen = torch.tensor([present[camera] for camera in used], dtype=torch.bool)
        masks.append(
            torch.cat(
                [
                    seen.repeat_interleave(tokens_per_view),
                    token_mask[request][prompt_rows[request]],
                ]
            )
        )
    lengths = tuple(mask.numel() for mask in masks)
    starts = [0, *accumulate(lengths)]
    positions = torch.cat([(mask.cumsum(0) - 1).clamp_min(0) for mask in masks])
    visible = tuple(
        mask.nonzero().flatten() + start for mask, start in zip(masks, starts, strict=False)
    )
    return PrefixLayout(lengths, positions, visible, tuple(views), prompt_rows)


def pack_rows(layout: PrefixLayout, image_features: Tensor, prompt: Sequence[Tensor]) -> Tensor:
    """Joins image features [views, tokens, width] and prompt rows into [total, width]."""
    parts: list[Tensor] = []
    for request in range(len(layout.lengths)):
        parts += [
            image_features[index]
            for index, (owner, _) in enumerate(layout.views)
            if owner == request
        ]
        parts.append(prompt[request])
    return torch.cat(parts)
