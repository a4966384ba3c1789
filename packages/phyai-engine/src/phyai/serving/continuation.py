"""What a request says about the chunk before, and what of it goes to the engine."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAX_GUIDANCE_WEIGHT = 10.0


class Schedule(enum.StrEnum):
    """How the weight of the last chunk falls between ``delay`` and ``horizon``."""

    LINEAR = "linear"
    EXP = "exp"
    ONES = "ones"
    ZEROS = "zeros"


@dataclass(frozen=True)
class RTCOptions:
    """What a request says about the chunk before.

    Attributes:
        executed: Actions of the last chunk that were executed when the observation was taken,
            counted from its start.
        delay: Actions that will have been executed before the new chunk arrives.
        horizon: Actions from where on the new chunk is free; None takes half of it.
        schedule: Shape of the weights in between.
        max_guidance_weight: Upper bound of the guidance's strength; blending knows none.
        prev: float32 [T, action_dim] rest of the last chunk in the robot's units, for clients that
            keep it themselves; None takes the session's.
    """

    executed: int = 0
    delay: int = 0
    horizon: int | None = None
    schedule: Schedule = Schedule.LINEAR
    max_guidance_weight: float = MAX_GUIDANCE_WEIGHT
    prev: np.ndarray | None = None

    def end(self, chunk: int) -> int:
        """Return the first action of a chunk of this length that is free."""
        return min(chunk // 2 if self.horizon is None else self.horizon, chunk)


@dataclass(frozen=True)
class Chunk:
    """A chunk, or the rest of one, in both units.

    Attributes:
        actions: float32 [T, action_dim] in the robot's units.
        normalized: float32 [T, max_action_dim] as the model made them, when it can be guided.
        units: Stands for the model's units, which are another policy's when it differs.
    """

    actions: np.ndarray
    normalized: np.ndarray | None = None
    units: str = ""

    def after(self, executed: int) -> "Chunk":
        """Return what is left after the first `executed` actions."""
        model = None if self.normalized is None else self.normalized[executed:]
        return Chunk(self.actions[executed:], model, self.units)


@dataclass(frozen=True)
class Continuation:
    """The rest of a chunk that a new one continues.

    Attributes:
        left: Its first row and the first row of the new chunk are for the same moment.
        options: Delay, horizon, schedule and strength.
    """

    left: Chunk
    options: RTCOptions = field(default_factory=RTCOptions)

    def to_wire(self) -> dict[str, Any]:
        """Return plain values for the codec."""
        said = {name: value for name, value in vars(self.options).items() if name != "prev"}
        return {**said, "schedule": self.options.schedule.value, **vars(self.left)}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> "Continuation":
        """Return the continuation that `to_wire` wrote."""
        left = Chunk(wire["actions"], wire["normalized"], wire["units"])
        options = RTCOptions(
            executed=wire["executed"],
            delay=wire["delay"],
            horizon=wire["horizon"],
            schedule=Schedule(wire["schedule"]),
            max_guidance_weight=wire["max_guidance_weight"],
        )
        return cls(left, options)
