"""Actions between a server that answers in chunks and a robot that moves in steps."""

import math
import threading
from collections import deque
from collections.abc import Iterator

import numpy as np


class ActionQueue:
    """The chunk that a robot executes; safe to use from two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = np.zeros((0, 0), np.float32)
        self._position = 0

    def __len__(self) -> int:
        with self._lock:
            return max(0, len(self._chunk) - self._position)

    @property
    def position(self) -> int:
        """Steps since the observation of the current chunk, executed or skipped."""
        with self._lock:
            return self._position

    def pop(self) -> np.ndarray | None:
        """Return the next action [action_dim], None when there is none."""
        with self._lock:
            if self._position >= len(self._chunk):
                return None
            action = self._chunk[self._position]
            self._position += 1
            return action

    def rest(self) -> tuple[int, np.ndarray]:
        """Return `position`, and the actions [T, action_dim] that are left."""
        with self._lock:
            return self._position, self._chunk[self._position :]

    def replace(self, chunk: np.ndarray, elapsed: int) -> None:
        """Go on with a new chunk.

        Args:
            chunk: [T, action_dim].
            elapsed: Steps since its observation: its first actions, whose moment has passed.

        Raises:
            ValueError: `elapsed` is negative.
        """
        if elapsed < 0:
            raise ValueError(f"elapsed is {elapsed}; steps since the observation are 0 or more")
        with self._lock:
            self._chunk, self._position = chunk, elapsed

    def clear(self) -> None:
        """Forget the chunk."""
        self.replace(np.zeros((0, 0), np.float32), 0)


class LatencyTracker:
    """Times of recent requests, as a delay in steps of the robot.

    Args:
        window: Requests that are remembered.

    Raises:
        ValueError: `window` is below 1.
    """

    def __init__(self, window: int = 20) -> None:
        if window < 1:
            raise ValueError(f"window is {window}; remember at least 1 request")
        self._seconds: deque[float] = deque(maxlen=window)

    def add(self, seconds: float) -> None:
        """Remember the time of one request."""
        self._seconds.append(seconds)

    @property
    def worst_s(self) -> float:
        """Longest time of the window; 0 before the first request."""
        return max(self._seconds, default=0.0)

    def delay(self, hz: float) -> int:
        """Return the steps that a request may take at `hz` steps per second, rounded up."""
        return math.ceil(self.worst_s * hz - 1e-9)


class ActionInterpolator:
    """Raises the rate of actions: lines between one action and the next.

    Args:
        factor: Steps of the robot for each action.

    Raises:
        ValueError: `factor` is below 1.
    """

    def __init__(self, factor: int) -> None:
        if factor < 1:
            raise ValueError(f"factor is {factor}; a robot makes at least 1 step for each action")
        self._factor = factor
        self._last: np.ndarray | None = None

    def steps(self, action: np.ndarray) -> Iterator[np.ndarray]:
        """Yield `factor` actions from the last one to `action`; the first action stands still."""
        start = action if self._last is None else self._last
        self._last = action
        for step in range(1, self._factor + 1):
            yield start + (action - start) * (step / self._factor)

    def reset(self) -> None:
        """Begin anew: the next action is not joined to the last one."""
        self._last = None
