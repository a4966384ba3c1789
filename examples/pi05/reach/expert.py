"""The scripted expert: a proportional controller with limits on speed and acceleration."""

import torch
from torch import Tensor

from reach.chunks import CHUNK
from reach.world import DISC_RADIUS, DISCS, MAX_SPEED, WORKSPACE, Layout, Pointer, limit_norm, move

GAIN = 0.25
"""Speed asked for per unit of distance: the pointer slows down within MAX_SPEED / GAIN."""
MAX_ACCELERATION = 0.03
"""Largest change of velocity in a step; above GAIN * MAX_SPEED, so braking never overshoots."""
_WARM_STEPS = 40
_DETOUR_STEPS = 24


def expert_action(pointer: Pointer, goal: Tensor) -> Tensor:
    """Velocity command [B, 2] that leads the pointer to `goal` [B, 2] and holds it there."""
    wanted = limit_norm((goal - pointer.position) * GAIN, MAX_SPEED)
    return pointer.velocity + limit_norm(wanted - pointer.velocity, MAX_ACCELERATION)


def expert_chunk(pointer: Pointer, goal: Tensor, steps: int = CHUNK) -> Tensor:
    """The expert's next commands from a state, in closed loop: float32 [B, steps, 2]."""
    actions = []
    for _ in range(steps):
        action = expert_action(pointer, goal)
        actions.append(action)
        pointer = move(pointer, action)
    return torch.stack(actions, dim=1)


def sample_states(layout: Layout, generator: torch.Generator) -> Pointer:
    """Draw one state per layout from what a good and an imperfect policy meet.

    Half of the states lie on noisy expert trajectories, many of which first head for another
    point (the corrections that a policy which drifted has to make); a quarter are uniform in
    position and velocity; a quarter are slow ones near any of the discs.
    """
    count, device = len(layout.target), generator.device

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    def disc_noise(radius: float) -> Tensor:
        angle, reach = rand(count, 1) * (2 * torch.pi), rand(count, 1).sqrt() * radius
        return torch.cat([angle.cos(), angle.sin()], dim=1) * reach

    path = _noisy_trajectory(layout, generator)
    anywhere = (rand(count, 2) * 2 - 1) * WORKSPACE
    disc = torch.randint(DISCS, (count,), generator=generator, device=device)
    centre = layout.discs[torch.arange(count, device=device), disc]
    near = (centre + disc_noise(2.5 * DISC_RADIUS)).clamp(-WORKSPACE, WORKSPACE)
    kind = rand(count, 1)
    position = torch.where(kind < 0.5, path.position, torch.where(kind < 0.75, anywhere, near))
    slow = disc_noise(0.4 * MAX_SPEED)
    velocity = torch.where(kind < 0.75, disc_noise(MAX_SPEED), slow)
    return Pointer(position, torch.where(kind < 0.5, path.velocity, velocity))


def _noisy_trajectory(layout: Layout, generator: torch.Generator) -> Pointer:
    """The state after a random number of noisy expert steps, some of them towards a detour."""
    count, device = len(layout.target), generator.device

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    goal = layout.goal
    detour = (rand(count, 2) * 2 - 1) * WORKSPACE
    detour_until = (rand(count, 1) * 2 - 1) * _DETOUR_STEPS  # half of them take no detour
    stop_at = rand(count, 1) * _WARM_STEPS
    strength = rand(count, 1) * (0.3 * MAX_SPEED)
    pointer = Pointer(layout.start, torch.zeros_like(layout.start))
    noise = torch.zeros_like(layout.start)
    for step in range(_WARM_STEPS):
        fresh = torch.randn(count, 2, generator=generator, device=device)
        noise = 0.8 * noise + 0.6 * strength * fresh
        action = expert_action(pointer, torch.where(step < detour_until, detour, goal))
        moved = move(pointer, action + noise)
        running = step < stop_at
        pointer = Pointer(
            torch.where(running, moved.position, pointer.position),
            torch.where(running, moved.velocity, pointer.velocity),
        )
    return pointer
