"""An engine of several processes: one engine for each device, all of them at one request."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phyai.engine_config import DeviceConfig, EngineConfig
from phyai.runtime.workers import Workers

if TYPE_CHECKING:
    from phyai.dispatch.trace import SelectionTrace
    from phyai.engine import ActionChunk, EngineArgs
    from phyai.processing.inputs import Observation


def in_rank() -> bool:
    """Returns whether this process is in a process group, as a rank or below ``torchrun``."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class RankedPlugin:
    """Stands for a model that spawned processes hold, each with a device and an engine of its own.

    Args:
        args: what each engine loads.
        config: settled settings; ``parallel`` says how many processes there are.

    Raises:
        ValueError: if there are too few devices.
        WorkerError: if a process ends while it loads.
        Exception: what the engine raised while it loaded.
    """

    def __init__(self, args: "EngineArgs", config: EngineConfig) -> None:
        ranks = config.parallel.ranks
        kind, _, index = config.device.target.partition(":")
        if index:
            raise ValueError(
                f"device target is {config.device.target!r}, but {ranks} ranks need a device each; "
                f"use {kind!r} and choose devices with CUDA_VISIBLE_DEVICES"
            )
        if kind == "cuda" and torch.cuda.device_count() < ranks:
            raise ValueError(
                f"{ranks} ranks need as many GPUs, this machine shows {torch.cuda.device_count()}; "
                f"parallel is {config.parallel}"
            )
        backend = "nccl" if kind == "cuda" else "gloo"
        self._workers = Workers(ranks, make_rank, args, config, backend=backend)
        self._description = self._workers.call("describe")
        if self._description["answers_observations"]:
            self.infer: Callable[..., list[ActionChunk]] = self._infer

    def run(self, request: Any, **options: Any) -> Any:
        """See `Engine.run`."""
        return self._workers.call("run", request, **options)

    def _infer(
        self,
        observations: "Sequence[Observation]",
        *,
        noise: Tensor | None = None,
        seed: int | None = None,
        num_steps: int | None = None,
        video: bool = False,
    ) -> "list[ActionChunk]":
        options = {"noise": noise, "seed": seed, "num_steps": num_steps, "video": video}
        return self._workers.call("infer_batch", list(observations), **options)

    def explain(self) -> "list[SelectionTrace]":
        """See `Engine.explain`."""
        return self._workers.call("explain")

    def weight_bytes(self) -> int:
        """Returns the bytes of one device's part."""
        return self._workers.call("weight_bytes")

    def describe(self) -> dict[str, Any]:
        """Returns what rank 0 says."""
        return dict(self._description)

    def close(self) -> None:
        """Ends the processes."""
        self._workers.close()


class _Rank:
    """The engine of one process."""

    def __init__(self, args: "EngineArgs") -> None:
        from phyai.engine import Engine

        engine = Engine(args)
        self.run, self.infer_batch = engine.run, engine.infer_batch
        self.explain, self.weight_bytes = engine.explain, engine.weight_bytes
        self._plugin = engine.plugin

    def describe(self) -> dict[str, Any]:
        return {
            **self._plugin.describe(),
            "answers_observations": hasattr(self._plugin, "infer"),
        }


def make_rank(rank: int, args: "EngineArgs", config: EngineConfig) -> _Rank:
    """Returns the engine of a rank, on the device with its number."""
    # The settings are settled; the variable would put all ranks on one device.
    os.environ.pop("PHYAI_DEVICE", None)
    kind = config.device.target
    device = DeviceConfig(f"cuda:{rank}" if kind == "cuda" else kind, config.device.params_dtype)
    return _Rank(replace(args, config=replace(config, device=device)))
