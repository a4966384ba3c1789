"""Geometry, motion and success of the task, vectorised over a batch of episodes.

The workspace is the square [-1, 1]^2, x to the right and y up. Lengths are workspace units; one
step is the unit of time, so a velocity is a displacement per step.
"""

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from torch import Tensor

from reach.instructions import COLOUR_NAMES, TEMPLATES, instruction

WORKSPACE = 1.0
DISCS = 3
DISC_RADIUS = 0.16
DISC_AREA = 0.8
"""Disc centres lie in [-DISC_AREA, DISC_AREA]^2."""
SEPARATION = 0.45
"""Smallest distance between two disc centres."""
START_DISTANCE = 0.5
"""Smallest distance between the pointer's start and its target."""
MAX_SPEED = 0.1
TOLERANCE = 0.5 * DISC_RADIUS
HOLD_STEPS = 3
STEP_LIMIT = 60
_CANDIDATES = 24


@dataclass(frozen=True)
class Layout:
    """What is fixed during an episode.

    Attributes:
        discs: centres, float32 [B, DISCS, 2], workspace units.
        colours: index of each disc's colour, int64 [B, DISCS], distinct in a row.
        target: index of the disc that is asked for, int64 [B].
        template: index of the instruction's template, int64 [B].
        start: first position of the pointer, float32 [B, 2].
    """

    discs: Tensor
    colours: Tensor
    target: Tensor
    template: Tensor
    start: Tensor

    @property
    def goal(self) -> Tensor:
        """Centre of the target disc, float32 [B, 2]."""
        return self.discs[torch.arange(len(self.target), device=self.target.device), self.target]

    @property
    def target_colour(self) -> Tensor:
        """Colour index of the target disc, int64 [B]."""
        return self.colours.gather(1, self.target[:, None])[:, 0]

    def tasks(self) -> list[str]:
        """Instruction of every episode."""
        pairs = zip(self.template.tolist(), self.target_colour.tolist(), strict=True)
        return [instruction(template, colour) for template, colour in pairs]

    def to(self, device: torch.device | str) -> Self:
        """The same layout on `device`."""
        return type(self)(*(getattr(self, field.name).to(device) for field in fields(self)))


@dataclass(frozen=True)
class Pointer:
    """Where the pointer is and how it moved in the last step.

    Attributes:
        position: float32 [B, 2], workspace units.
        velocity: float32 [B, 2], displacement of the last step.
    """

    position: Tensor
    velocity: Tensor

    @property
    def state(self) -> Tensor:
        """Proprioceptive state (x, y, vx, vy), float32 [B, 4]."""
        return torch.cat([self.position, self.velocity], dim=-1)


def limit_norm(vector: Tensor, limit: float) -> Tensor:
    """Shorten the vectors [..., 2] that are longer than `limit`, keeping their direction."""
    length = torch.hypot(vector[..., :1], vector[..., 1:])
    return vector * (limit / length.clamp_min(limit))


def at_rest(position: Tensor) -> Pointer:
    """A pointer that stands still at `position` [B, 2]."""
    return Pointer(position, torch.zeros_like(position))


def move(pointer: Pointer, action: Tensor) -> Pointer:
    """One step: the action [B, 2] is the velocity, limited in speed and by the workspace's edge."""
    moved = pointer.position + limit_norm(action, MAX_SPEED)
    position = moved.clamp(-WORKSPACE, WORKSPACE)
    return Pointer(position, position - pointer.position)


def count_hold(position: Tensor, goal: Tensor, held: Tensor) -> Tensor:
    """Consecutive steps inside the tolerance: int64 [B] from the `held` of the step before."""
    inside = (position - goal).norm(dim=-1) <= TOLERANCE
    return torch.where(inside, held + 1, torch.zeros_like(held))


def sample_layouts(count: int, generator: torch.Generator) -> Layout:
    """Draw `count` layouts on the generator's device.

    Discs and start are the first of a fixed number of uniform candidates that keeps its distances;
    where none does, the candidate with the largest distance is taken.
    """
    device = generator.device

    def uniform(limit: float, *shape: int) -> Tensor:
        return (torch.rand(shape, generator=generator, device=device) * 2 - 1) * limit

    def integers(high: int) -> Tensor:
        return torch.randint(high, (count,), generator=generator, device=device)

    row = torch.arange(count, device=device)
    discs = uniform(DISC_AREA, count, _CANDIDATES, DISCS, 2)
    first, second = torch.triu_indices(DISCS, DISCS, offset=1, device=device)
    gaps = (discs[:, :, first] - discs[:, :, second]).norm(dim=-1).amin(dim=-1)
    discs = discs[row, _first_with(gaps, SEPARATION)]
    target = integers(DISCS)
    starts = uniform(WORKSPACE, count, _CANDIDATES, 2)
    distance = (starts - discs[row, target][:, None]).norm(dim=-1)
    shuffled = torch.rand(count, len(COLOUR_NAMES), generator=generator, device=device).argsort(1)
    return Layout(
        discs=discs,
        colours=shuffled[:, :DISCS],
        target=target,
        template=integers(len(TEMPLATES)),
        start=starts[row, _first_with(distance, START_DISTANCE)],
    )


def _first_with(value: Tensor, least: float) -> Tensor:
    """Index of the first column of [B, N] that reaches `least`, else of the largest one."""
    order = torch.arange(value.shape[1], 0, -1, device=value.device, dtype=value.dtype)
    reached = value >= least
    return torch.where(reached, value.amax(dim=1, keepdim=True) + order, value).argmax(dim=1)


def layout_seed(random: np.random.Generator) -> int:
    """The seed of one episode's layout, drawn from an environment's random generator."""
    return int(random.integers(2**31))


def seeded_layout(seed: int) -> Layout:
    """The single layout [B = 1] on the CPU that belongs to a layout seed."""
    return sample_layouts(1, torch.Generator().manual_seed(seed))


def episode_layouts(seeds: list[int]) -> Layout:
    """The layouts that `ReachEnv.reset(seed=...)` makes of `seeds`, as one batch on the CPU."""
    single = [seeded_layout(layout_seed(np.random.default_rng(seed))) for seed in seeds]
    return Layout(
        *(torch.cat([getattr(layout, f.name) for layout in single]) for f in fields(Layout))
    )
