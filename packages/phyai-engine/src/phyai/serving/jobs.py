"""One request on its way through the server, its answer, and what can go wrong."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phyai.serving.continuation import Continuation


class RequestError(ValueError):
    """The request can not be answered as it is; the connection stays usable."""


class OverloadedError(RequestError):
    """The server has no room for the request now; the same request may succeed later."""


class EngineFailureError(RuntimeError):
    """The engine failed at a request that looked right.

    Attributes:
        trace: Traceback as text.
    """

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace: str = trace or f"{type(self).__name__}: {message}"


@dataclass(frozen=True)
class Job:
    """A decoded request.

    Attributes:
        request: The observation as it came, without the options.
        num_steps: Integration steps; None takes the checkpoint's.
        seed: Seed of the noise, when `noise` is None.
        noise: Starting point float32 [chunk, max_action_dim].
        continues: What the new chunk continues; a model that can not be guided does not read it.
        video: Whether to return the frames that the model predicts.
    """

    request: Mapping[str, Any]
    num_steps: int | None = None
    seed: int | None = None
    noise: np.ndarray | None = None
    continues: Continuation | None = None
    video: bool = False

    def to_wire(self) -> dict[str, Any]:
        """Return the job as plain values for the codec."""
        options = {"num_steps": self.num_steps, "seed": self.seed, "noise": self.noise}
        options["video"] = self.video
        continues = None if self.continues is None else self.continues.to_wire()
        return {"request": dict(self.request), **options, "continues": continues}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> "Job":
        """Return the job that `to_wire` wrote."""
        rest = wire["continues"]
        continues = None if rest is None else Continuation.from_wire(rest)
        return cls(
            wire["request"],
            wire["num_steps"],
            wire["seed"],
            wire["noise"],
            continues,
            wire["video"],
        )


@dataclass(frozen=True)
class Answer:
    """What the engine says to a job.

    Attributes:
        actions: float32 [chunk, action_dim] in the robot's units.
        timing_ms: Milliseconds by stage, of the whole batch.
        batch: Jobs that were computed together.
        prompt: The text that the model read.
        replica: Which replica computed it; 0 without replicas.
        normalized: float32 [chunk, max_action_dim] as the model made them, when it can be guided.
        units: Stands for the model's units; see `Chunk`.
        guided: Whether it was guided by the job's `continues`.
        video: uint8 [T, H, W, 3] predicted frames, if the job asked for them.
        action_key: A second key of the reply for the actions; empty for none.
    """

    actions: np.ndarray
    timing_ms: Mapping[str, float] = field(default_factory=dict)
    batch: int = 1
    prompt: str = ""
    replica: int = 0
    normalized: np.ndarray | None = None
    units: str = ""
    guided: bool = False
    video: np.ndarray | None = None
    action_key: str = ""

    def to_wire(self) -> dict[str, Any]:
        """Return the answer as plain values for the codec."""
        return {
            "actions": self.actions,
            "timing_ms": {name: float(value) for name, value in self.timing_ms.items()},
            "batch": self.batch,
            "prompt": self.prompt,
            "normalized": self.normalized,
            "units": self.units,
            "guided": self.guided,
            "video": self.video,
            "action_key": self.action_key,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any], replica: int) -> "Answer":
        """Return the answer that `to_wire` wrote, as computed by `replica`."""
        return cls(**wire, replica=replica)
