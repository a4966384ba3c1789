"""Columns of states and actions between a robot and the numbers of a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    _check_width("the state", sum(part.size for part in parts), state.shape[-1])
    mapped = np.empty(state.shape, np.float64)
    start = 0
    for part in parts:
        columns = slice(start, start + part.size)
        mapped[..., columns] = state[..., columns] * np.asarray(part.scale) + part.offset
        start += part.size
    return mapped


def map_actions(parts: Sequence[ActionPart], actions: np.ndarray) -> np.ndarray:
    """Return the actions [chunk, action_dim] as the robot takes them, float32.

    Raises:
        RequestError: The actions have another number of columns than the parts.
    """
    _check_width("an action", sum(part.size for part in parts), actions.shape[-1])
    mapped = np.empty(actions.shape, np.float32)
    start = 0
    for part in parts:
        columns = slice(start, start + part.size)
        values = actions[..., columns] * np.asarray(part.scale) + part.offset
        if part.threshold is not None:
            values = (values > part.threshold).astype(np.float32)
        if part.clip is not None:
            values = np.clip(values, *part.clip)
        mapped[..., columns] = values
        start += part.size
    return mapped


def unmap_actions(parts: Sequence[ActionPart], actions: np.ndarray) -> np.ndarray:
    """Return what `map_actions` made into these actions [T, action_dim], float64.

    What a threshold or a clip took away stays away, and a column with a scale of 0 becomes 0.

    Raises:
        RequestError: The actions have another number of columns than the parts.
    """
    _check_width("an action", sum(part.size for part in parts), actions.shape[-1])
    model = np.zeros(actions.shape, np.float64)
    start = 0
    for part in parts:
        columns = slice(start, start + part.size)
        scale = np.broadcast_to(np.asarray(part.scale, np.float64), (part.size,))
        values = (actions[..., columns] - np.asarray(part.offset)) / np.where(scale == 0, 1, scale)
        model[..., columns] = np.where(scale == 0, 0.0, values)
        start += part.size
    return model


def relative_mask(parts: Sequence[ActionPart]) -> tuple[bool, ...]:
    """Return which columns are offsets from the state; empty when none are."""
    mask = tuple(part.relative for part in parts for _ in range(part.size))
    return mask if any(mask) else ()


def _check_width(what: str, expected: int, seen: int) -> None:
    if expected != seen:
        raise RequestError(f"{what} has {seen} columns, the adapter describes {expected}")
