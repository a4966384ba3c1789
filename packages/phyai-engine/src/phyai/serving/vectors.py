"""Columns of states and actions between a robot and the numbers of a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from phyai.serving.jobs import RequestError


@dataclass(frozen=True)
class StatePart:
    """One piece of the state: ``model = robot * scale + offset``.

    Attributes:
        key: Request key.
        size: Columns.
        scale: A number or one per column; -1 flips a joint.
        offset: Likewise.
    """

    key: str
    size: int
    scale: float | tuple[float, ...] = 1.0
    offset: float | tuple[float, ...] = 0.0


@dataclass(frozen=True)
class ActionPart:
    """One piece of an action: ``robot = model * scale + offset``, then threshold, then clip.

    Attributes:
        name: For people.
        size: Columns.
        relative: Whether the checkpoint's actions are offsets from the state; they are added to it
            before anything here.
        scale: A number or one per column.
        offset: Likewise.
        threshold: Values above it become 1, the others 0.
        clip: Lowest and highest value.
    """

    name: str
    size: int
    relative: bool = False
    scale: float | tuple[float, ...] = 1.0
    offset: float | tuple[float, ...] = 0.0
    threshold: float | None = None
    clip: tuple[float, float] | None = None


def map_state(parts: Sequence[StatePart], state: np.ndarray) -> np.ndarray:
    """Return the state [state_dim] as the checkpoint reads it, float64.

    Raises:
        RequestError: The state has another number of columns than the parts.
    """
    mapped = np.empty(state.shape, np.float64)
    for part, columns in _columns("the state", parts, state.shape[-1]):
        mapped[..., columns] = state[..., columns] * np.asarray(part.scale) + part.offset
    return mapped


def map_actions(parts: Sequence[ActionPart], actions: np.ndarray) -> np.ndarray:
    """Return the actions [chunk, action_dim] as the robot takes them, float32.

    Raises:
        RequestError: The actions have another number of columns than the parts.
    """
    mapped = np.empty(actions.shape, np.float32)
    for part, columns in _columns("an action", parts, actions.shape[-1]):
        values = actions[..., columns] * np.asarray(part.scale) + part.offset
        if part.threshold is not None:
            values = (values > part.threshold).astype(np.float32)
        if part.clip is not None:
            values = np.clip(values, *part.clip)
        mapped[..., columns] = values
    return mapped


def unmap_actions(parts: Sequence[ActionPart], actions: np.ndarray) -> np.ndarray:
    """Return what `map_actions` made into these actions [T, action_dim], float64.

    What a threshold or a clip took away stays away, and a column with a scale of 0 becomes 0.

    Raises:
        RequestError: The actions have another number of columns than the parts.
    """
    model = np.zeros(actions.shape, np.float64)
    for part, columns in _columns("an action", parts, actions.shape[-1]):
        scale = np.broadcast_to(np.asarray(part.scale, np.float64), (part.size,))
        values = (actions[..., columns] - np.asarray(part.offset)) / np.where(scale == 0, 1, scale)
        model[..., columns] = np.where(scale == 0, 0.0, values)
    return model


def relative_mask(parts: Sequence[ActionPart]) -> tuple[bool, ...]:
    """Return which columns are offsets from the state; empty when none are."""
    mask = tuple(part.relative for part in parts for _ in range(part.size))
    return mask if any(mask) else ()


def _columns[Part: (StatePart, ActionPart)](
    what: str, parts: Sequence[Part], seen: int
) -> list[tuple[Part, slice]]:
    """Return every part with its columns.

    Raises:
        RequestError: There are ``seen`` columns, and the parts have another number.
    """
    stops = list(accumulate(part.size for part in parts))
    expected = stops[-1] if stops else 0
    if expected != seen:
        raise RequestError(f"{what} has {seen} columns, the adapter describes {expected}")
    return [(part, slice(stop - part.size, stop)) for part, stop in zip(parts, stops, strict=True)]
