"""What guides a batch of jobs: the ends of the chunks before, in the model's units."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from phyai.guidance import Guidance
from phyai.processing import Observation
from phyai.serving.adapters import Adapter
from phyai.serving.continuation import Continuation
from phyai.serving.jobs import Job
from phyai.serving.loading import Answering


class Guide:
    """Turns what jobs continue into the guidance of their batch.

    Args:
        engine: Of a family that takes guidance.
        adapter: Its robot.
        description: `Engine.describe()`.

    Attributes:
        units: Stands for the units of the policy's normalised actions.
    """

    def __init__(self, engine: Answering, adapter: Adapter, description: Mapping[str, Any]) -> None:
        processing = description["processing"]
        text = json.dumps([description.get("checkpoint"), processing], sort_keys=True, default=str)
        self.units: str = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._engine, self._adapter = engine, adapter
        self._relative = np.flatnonzero(processing.get("delta_mask", ()))

    def batch(
        self, jobs: Sequence[Job], observations: Sequence[Observation], shape: tuple[int, int]
    ) -> Guidance | None:
        """Return what guides the jobs, None when none of them continues a chunk.

        Args:
            jobs: Those that continue nothing get the weight 0.
            observations: Theirs.
            shape: (chunk, max_action_dim) of the model.

        Raises:
            RequestError, ProcessingError: The rest of a chunk does not fit the robot.
        """
        if all(job.continues is None for job in jobs):
            return None
        return Guidance.join(
            [self._one(*pair, shape) for pair in zip(jobs, observations, strict=True)]
        )

    def _one(self, job: Job, observation: Observation, shape: tuple[int, int]) -> Guidance:
        if job.continues is None:
            return Guidance.build([None], shape, delay=0)
        options = job.continues.options
        rest = torch.from_numpy(self._rest(job.continues, observation, shape[0]))
        return Guidance.build(
            [rest],
            shape,
            delay=options.delay,
            horizon=options.end(shape[0]),
            schedule=options.schedule.value,
            most=options.max_guidance_weight,
        )

    def _rest(self, continues: Continuation, observation: Observation, chunk: int) -> np.ndarray:
        """Return the rest of the chunk as the model would make it now, [T, max_action_dim].

        The model's own numbers are used where they are known and mean the same now; actions
        relative to the state are taken from the robot's units, since the state has changed.
        """
        left = continues.left
        known = left.normalized if left.units == self.units else None
        if known is not None and not self._relative.size:
            return np.array(known[:chunk], np.float32)
        robot = self._adapter.engine_actions(left.actions[:chunk])
        found = self._engine.normalize_actions(robot, observation)
        if known is not None:
            anchored = np.array(known[:chunk], np.float32)
            anchored[:, self._relative] = found[:, self._relative]
            return anchored
        return found
