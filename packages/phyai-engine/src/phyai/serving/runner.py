"""Answering a batch of jobs with an engine, in one thread."""

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from phyai.guidance import Guidance
from phyai.processing import Observation, ProcessingError
from phyai.serving.adapters import Adapter
from phyai.serving.continuation import Chunk, Continuation
from phyai.serving.guiding import Guide
from phyai.serving.jobs import Answer, EngineFailureError, Job, RequestError
from phyai.serving.loading import Answering, LoadedPolicy

Outcome = Answer | Exception


class Runner:
    """Runs jobs on one policy; to be called from no more threads at once than it has lanes.

    Every job gets its own noise, so that an answer does not depend on the batch it came in (up to
    rounding). An engine without batches computes them one after another, from seeds.

    Args:
        policy: The engine and its adapter.

    Attributes:
        batches: Whether the engine computes several jobs at once.
        lanes: Batches that may be in flight.
        on_gpu: Whether the engine computes on an NVIDIA or AMD GPU.
    """

    def __init__(self, policy: LoadedPolicy) -> None:
        self.engine: Answering = policy.engine
        self.adapter: Adapter = policy.adapter
        self._description = described = self.engine.describe()
        self.batches: bool = described.get("batched", True)
        self.lanes: int = described.get("lanes", 1)
        self.on_gpu: bool = str(described.get("device", "")).startswith("cuda")
        guides = described.get("guidance", False)
        self._guide = Guide(self.engine, self.adapter, described) if guides else None
        self._noise_shape: tuple[int, int] | None = None

    def warm_up(self, batches: Sequence[int] = (1,)) -> float:
        """Answer random observations, so that the first real request is as fast as the next.

        Args:
            batches: Batch sizes to run, each on every lane; lanes take turns.

        Returns:
            Seconds of all runs.

        Raises:
            EngineFailureError, RequestError, ProcessingError: The policy can not answer.
        """
        started = time.perf_counter()
        job = Job(self.example(), seed=0)
        for batch in batches:
            first = self._on_all_lanes([job] * batch)
            if self._guide is not None:
                rest = Continuation(Chunk(first.actions, first.normalized, first.units))
                self._on_all_lanes([replace(job, continues=rest)] * batch)
        return time.perf_counter() - started

    def example(self) -> dict[str, Any]:
        """Return a request that the policy can answer."""
        height, width = self._description["image_resolution"]
        return self.adapter.example((height, width), self._description["processing"]["state_dim"])

    def metadata(self) -> dict[str, Any]:
        """Return what a client can know about the policy."""
        described, adapter = self._description, self.adapter
        processing = described["processing"]
        return {
            "model": described["plugin"],
            "preset": processing["preset"],
            "adapter": adapter.name,
            "action_horizon": described["chunk_size"],
            "action_dim": sum(part.size for part in adapter.action_parts)
            or processing["action_dim"],
            "state_dim": processing["state_dim"],
            "state_keys": list(adapter.state_keys[0]),
            "image_keys": list(adapter.image_keys),
            "image_shape": [*described["image_resolution"], 3],
            "num_steps": described["num_steps"],
            "rtc": "blended" if self._guide is None else "guided",
            **({"video": described["decodes_video"]} if "decodes_video" in described else {}),
            **({} if adapter.control_hz is None else {"control_hz": adapter.control_hz}),
            **({} if adapter.execute is None else {"execute": adapter.execute}),
            **({} if adapter.reset_pose is None else {"reset_pose": list(adapter.reset_pose)}),
        }

    def run_one(self, request: Mapping[str, Any], seed: int | None = None) -> Answer:
        """Answer one request alone.

        Raises:
            RequestError, ProcessingError, EngineFailureError: It can not be answered.
        """
        return self._all([Job(request, seed=seed)])[0]

    def _on_all_lanes(self, jobs: Sequence[Job]) -> Answer:
        """Answer jobs once on each lane; return the first answer."""
        answers = [self._all(jobs) for _ in range(self.lanes)]
        return answers[0][0]

    def _all(self, jobs: Sequence[Job]) -> list[Answer]:
        answers = []
        for outcome in self.run(jobs):
            if isinstance(outcome, Exception):
                raise outcome
            answers.append(outcome)
        return answers

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Answer jobs that share `num_steps`; each gets its answer or its own error."""
        outcomes: list[Outcome | None] = [None] * len(jobs)
        observations: dict[int, Observation] = {}
        started = time.perf_counter()
        for index, job in enumerate(jobs):
            try:
                observations[index] = self.adapter.observation(job.request)
            except (RequestError, ProcessingError) as error:
                outcomes[index] = error
            except Exception as error:
                outcomes[index] = _failure(error)
        prepared_ms = 1e3 * (time.perf_counter() - started)
        if observations:
            found = self._infer(jobs, observations, prepared_ms)
            for index, outcome in found.items():
                outcomes[index] = outcome
        return [outcome for outcome in outcomes if outcome is not None]

    def _infer(
        self, jobs: Sequence[Job], observations: dict[int, Observation], prepared_ms: float
    ) -> dict[int, Outcome]:
        indices = list(observations)
        if not self.batches:
            return {i: self._alone(jobs[i], observations[i], prepared_ms) for i in indices}
        try:
            chosen, seen = [jobs[index] for index in indices], list(observations.values())
            if any(job.video for job in chosen):
                raise RequestError("this policy predicts no video; leave out the option video")
            noise = self._noise(chosen)
            guidance = self._guidance(chosen, seen)
            more: dict[str, Any] = {} if guidance is None else {"guidance": guidance}
            chunks = self.engine.infer_batch(
                seen, noise=noise, num_steps=chosen[0].num_steps, **more
            )
            return {
                index: self._answer(jobs[index], chunk, len(indices), prepared_ms)
                for index, chunk in zip(indices, chunks, strict=True)
            }
        except ValueError as error:
            if len(indices) == 1:
                return {indices[0]: error}
        except Exception as error:
            return dict.fromkeys(indices, _failure(error))
        # One of several is unusable: find out which, and answer the others.
        alone = [self._infer(jobs, {i: observations[i]}, prepared_ms) for i in indices]
        return {index: outcome for part in alone for index, outcome in part.items()}

    def _alone(self, job: Job, observation: Observation, prepared_ms: float) -> Outcome:
        """Answer one job with an engine that takes a seed, and may return predicted frames."""
        try:
            if job.noise is not None:
                raise RequestError("this policy takes a seed, not noise")
            (chunk,) = self.engine.infer_batch(
                [observation],
                noise=None,
                num_steps=job.num_steps,
                seed=job.seed,
                video=job.video,
            )
            answer = self._answer(job, chunk, 1, prepared_ms)
            return replace(answer, video=chunk.video) if isinstance(answer, Answer) else answer
        except ValueError as error:
            return error
        except Exception as error:
            return _failure(error)

    def _guidance(
        self, jobs: Sequence[Job], observations: Sequence[Observation]
    ) -> Guidance | None:
        if self._guide is None or self._noise_shape is None:
            return None
        return self._guide.batch(jobs, observations, self._noise_shape)

    def _answer(self, job: Job, chunk: Any, batch: int, prepared_ms: float) -> Outcome:
        actions = self.adapter.actions(chunk.actions)
        if not np.isfinite(actions).all():
            return EngineFailureError("the policy computed actions that are not finite")
        self._noise_shape = chunk.normalized.shape
        timing = {"decode": prepared_ms, **chunk.timing_ms}
        key = self.adapter.action_key
        answer = Answer(actions, timing, batch, chunk.prompt, action_key=key)
        if self._guide is None:
            return answer
        guided = job.continues is not None
        return replace(
            answer, normalized=chunk.normalized.copy(), units=self._guide.units, guided=guided
        )

    def _noise(self, jobs: Sequence[Job]) -> torch.Tensor | None:
        if self._noise_shape is None:
            # Before the first answer the width of the noise is not known.
            self._learn_shape()
        shape = self._noise_shape
        if shape is None:
            return None
        return torch.stack([_noise(job, shape) for job in jobs])

    def _learn_shape(self) -> None:
        observation = self.adapter.observation(self.example())
        chunk = self.engine.infer_batch([observation], noise=None, num_steps=None)[0]
        self._noise_shape = chunk.normalized.shape


def _noise(job: Job, shape: tuple[int, int]) -> torch.Tensor:
    """Return the noise of one job; a seed gives the same as `Engine.infer` with that seed."""
    if job.noise is not None:
        if job.noise.shape != shape:
            raise RequestError(f"noise has shape {job.noise.shape}; this policy needs {shape}")
        return torch.from_numpy(np.array(job.noise, np.float32))
    generator = torch.Generator()
    if job.seed is None:
        generator.seed()
    else:
        generator.manual_seed(job.seed)
    return torch.randn((1, *shape), generator=generator)[0]


def _failure(error: Exception) -> EngineFailureError:
    trace = "".join(traceback.format_exception(error))
    return EngineFailureError(f"{type(error).__name__}: {error}", trace)
