"""Real-time chunking: a new chunk is guided towards the unexecuted end of the one before.

The form is the one LeRobot ships: the correction of the velocity is elementwise, without a
derivative of the network ("Real-Time Execution of Action Chunking Flow Policies", arXiv 2506.07339,
with the vector-Jacobian product of its eq. 2 replaced by the identity).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Schedule = Literal["linear", "exp", "ones", "zeros"]
SCHEDULES: tuple[Schedule, ...] = ("linear", "exp", "ones", "zeros")


def guidance_weights(chunk: int, delay: int, horizon: int, schedule: Schedule) -> Tensor:
    """Returns how strongly each action of a chunk is guided, fp32 [chunk].

    Actions before ``delay`` are executed before the chunk arrives and have weight 1, those from
    ``horizon`` on are free. Between them the weight falls from 1 to 0: ``linear``, or ``exp`` for
    ``w * expm1(w) / (e - 1)`` of the same line; it stays 1 for ``ones`` and is 0 for ``zeros``.

    Raises:
        ValueError: for a negative number or an unknown schedule.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; allowed: {', '.join(SCHEDULES)}")
    if delay < 0 or horizon < 0:
        raise ValueError(f"delay is {delay} and horizon {horizon}; they must not be negative")
    horizon = min(horizon, chunk)
    delay = min(delay, horizon)
    weights = torch.zeros(chunk)
    weights[:delay] = 1.0
    if schedule == "ones":
        weights[:horizon] = 1.0
    elif schedule != "zeros":
        count = horizon - delay
        line = torch.linspace(1.0, 0.0, count + 2)[1:-1]
        weights[delay:horizon] = line
        if schedule == "exp":
            weights = weights * torch.expm1(weights) / (math.e - 1.0)
    return weights


def guidance_strength(time: float, most: float) -> float:
    """Returns ``min((τ² + (1 - τ)²) / (τ (1 - τ)), most)`` with τ = 1 - time; ``most`` at τ = 0."""
    done = 1.0 - time
    product = done * time
    if product <= 0.0:
        return most
    return min((done**2 + time**2) / product, most)


@dataclass(frozen=True)
class Guidance:
    """What guides a batch of chunks.

    Attributes:
        previous: fp32 [B, chunk, max_action_dim], the unexecuted actions as the model made them
            (normalised), from the first action of the new chunk on; zero where there is none.
        weights: fp32 [B, chunk, 1]; zero where a request or an action is not guided.
        most: upper bound of the strength, one for all or fp32 [B, 1, 1].
    """

    previous: Tensor
    weights: Tensor
    most: float | Tensor = 10.0

    @classmethod
    def build(
        cls,
        previous: Sequence[Tensor | None],
        shape: tuple[int, int],
        *,
        delay: int,
        horizon: int = 10,
        schedule: Schedule = "linear",
        most: float = 10.0,
    ) -> "Guidance":
        """Pads the left-over actions of each request, as LeRobot does.

        Args:
            previous: [left over, columns] of each request, or None for one that is free.
            shape: (chunk, max_action_dim) of the model.
            delay: actions that will be executed before the new chunk arrives.
            horizon: actions that are guided at all; no more than were left over.
            schedule: how weights fall between ``delay`` and ``horizon``.
            most: upper bound of the strength.

        Raises:
            ValueError: for left-over actions that are no matrix or too large.
        """
        chunk, columns = shape
        padded = torch.zeros(len(previous), chunk, columns)
        weights = torch.zeros(len(previous), chunk, 1)
        for index, left in enumerate(previous):
            if left is None:
                continue
            if left.ndim != 2 or left.shape[0] > chunk or left.shape[1] > columns:
                raise ValueError(
                    f"request {index} has left-over actions of shape {tuple(left.shape)}; "
                    f"expected at most [{chunk}, {columns}]"
                )
            padded[index, : left.shape[0], : left.shape[1]] = left.float()
            reach = min(horizon, left.shape[0])
            weights[index, :, 0] = guidance_weights(chunk, delay, reach, schedule)
        return cls(padded, weights, most)

    @classmethod
    def join(cls, parts: Sequence["Guidance"]) -> "Guidance":
        """Returns the guidance of one batch from those of its requests, each with its own bound."""
        bounds = [
            torch.as_tensor(part.most).float().expand(len(part.previous), 1, 1) for part in parts
        ]
        return cls(
            torch.cat([part.previous for part in parts]),
            torch.cat([part.weights for part in parts]),
            torch.cat(bounds),
        )

    def to(self, device: torch.device | str) -> "Guidance":
        """Returns the same on another device."""
        return replace(
            self,
            previous=self.previous.to(device),
            weights=self.weights.to(device),
            most=self.most.to(device) if isinstance(self.most, Tensor) else self.most,
        )

    def correct(self, velocity: Tensor, actions: Tensor, time: float) -> Tensor:
        """Returns the guided velocity at noisy ``actions`` [B, chunk, A] and ``time``."""
        clean = actions - time * velocity
        error = (self.previous - clean) * self.weights
        if isinstance(self.most, Tensor):
            return velocity - self.most.clamp(max=guidance_strength(time, math.inf)) * error
        return velocity - guidance_strength(time, self.most) * error
