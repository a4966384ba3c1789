"""Training data, made on the device: states, the expert's chunks, pictures and prompts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from reach.expert import expert_chunk, sample_states
from reach.normalisation import Statistics, describe
from reach.prompts import PromptTable
from reach.scene import View, render, to_uint8
from reach.world import Layout, Pointer, sample_layouts

CAMERAS = ("base", "wrist")
STATISTICS_SAMPLES = 1 << 16
_STATISTICS_SEED = 20250


@dataclass(frozen=True)
class ObservationBatch:
    """What the policy sees in B states.

    Attributes:
        images: base and wrist camera, float32 [B, 2, 3, 84, 84] in [-1, 1], from 8-bit pictures.
        image_mask: all true, bool [B, 2].
        tokens: prompt, int64 [B, MAX_LENGTH], padded right with 0.
        token_mask: bool [B, MAX_LENGTH].
        state: float32 [B, 4], not normalised.
    """

    images: Tensor
    image_mask: Tensor
    tokens: Tensor
    token_mask: Tensor
    state: Tensor


@dataclass(frozen=True)
class TrainingBatch(ObservationBatch):
    """Observations with the expert's answers.

    Attributes:
        actions: next commands, float32 [B, 16, 2] in workspace units per step as sampled;
            normalised and padded to [B, 16, max_action_dim] by `reach.train` before the loss.
    """

    actions: Tensor


def observe(layout: Layout, pointer: Pointer, prompts: PromptTable) -> ObservationBatch:
    """Pictures, prompt and state of B running episodes, on the layout's device."""
    views = [render(layout, pointer.position, view) for view in (View.BASE, View.WRIST)]
    images = to_uint8(torch.stack(views, dim=1)).float() / 255 * 2 - 1
    state = pointer.state
    tokens, token_mask = prompts.tokens(layout.template, layout.target_colour, state)
    present = torch.ones(images.shape[:2], dtype=torch.bool, device=images.device)
    return ObservationBatch(images, present, tokens, token_mask, state)


def sample_batch(
    batch_size: int,
    generator: torch.Generator,
    device: torch.device | str,
    prompts: PromptTable,
) -> TrainingBatch:
    """Draw a batch: random layouts, states of `sample_states`, the expert's chunk from each.

    Args:
        batch_size: B.
        generator: its device draws and computes the states; use one of `device` for speed.
        device: where pictures and tokens are made; `prompts` must be there.
        prompts: table of `PromptTable.build`.
    """
    layout = sample_layouts(batch_size, generator)
    pointer = sample_states(layout, generator)
    actions = expert_chunk(pointer, layout.goal)
    there = Pointer(pointer.position.to(device), pointer.velocity.to(device))
    seen = observe(layout.to(device), there, prompts)
    return TrainingBatch(
        seen.images,
        seen.image_mask,
        seen.tokens,
        seen.token_mask,
        seen.state,
        actions.to(device),
    )


def dataset_statistics(samples: int = STATISTICS_SAMPLES) -> Statistics:
    """Statistics of the state and the action over `samples` states, always the same on the CPU."""
    generator = torch.Generator().manual_seed(_STATISTICS_SEED)
    layout = sample_layouts(samples, generator)
    pointer = sample_states(layout, generator)
    actions = expert_chunk(pointer, layout.goal)
    return Statistics(describe(pointer.state), describe(actions.flatten(0, 1)))
