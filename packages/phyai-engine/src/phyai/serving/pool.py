"""Several replicas behind one server: routing, health, replacement, change of policy."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from phyai.serving.config import PolicyConfig, ServeConfig
from phyai.serving.fit import check_fit
from phyai.serving.jobs import Answer, EngineFailureError, Job, OverloadedError
from phyai.serving.logs import event
from phyai.serving.replica import Replica, ReplicaDiedError, ReplicaError

_ATTEMPTS = 3
_HEALTH_EVERY_S = 2.0
_PING_TIMEOUT_S = 15.0
_LONGEST_BACKOFF_S = 10.0


class ReplicaPool:
    """A backend of several processes, one engine each.

    A job goes to the replica that holds the fewest. When a replica dies, its jobs go to others and
    a new one takes its place.

    Args:
        config: What each replica loads, and how many there are.

    Attributes:
        on_restart: Called when a replica is replaced after its death.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._slots: list[Replica | None] = [None] * config.server.replicas
        self._room = asyncio.Condition()
        self._waiting = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self.on_restart: Callable[[], None] = lambda: None

    @property
    def waiting(self) -> int:
        """Jobs that no replica holds yet."""
        return self._waiting

    def states(self) -> list[str]:
        """Return ``ready``, ``draining`` or ``loading`` for each replica."""
        return [
            "loading" if slot is None else "ready" if slot.accepting else "draining"
            for slot in self._slots
        ]

    def pids(self) -> list[int | None]:
        """Return the process ids, None for a replica that loads."""
        return [None if slot is None else slot.process.pid for slot in self._slots]

    async def start(self) -> dict[str, Any]:
        """Start all replicas at once and return the metadata of their policy.

        Raises:
            ReplicaError: One of them can not start.
        """
        started = await asyncio.gather(
            *(self._make(index, self._config.policy) for index in range(len(self._slots))),
            return_exceptions=True,
        )
        failed = [found for found in started if isinstance(found, BaseException)]
        self._slots = [found if isinstance(found, Replica) else None for found in started]
        if failed:
            await self.close()
            raise failed[0]
        self._tasks = [
            asyncio.create_task(work(index))
            for index in range(len(self._slots))
            for work in (self._supervise, self._watch)
        ]
        first = self._slots[0]
        return first.metadata if first is not None else {}

    async def submit(self, job: Job) -> Answer:
        """Answer one job with the replica that holds the fewest.

        Raises:
            OverloadedError: Too many jobs wait.
            RequestError: The job is unusable.
            EngineFailureError: The engine failed, or three replicas died at this job.
        """
        for _ in range(_ATTEMPTS):
            replica = await self._choose()
            try:
                return await replica.ask(job)
            except ReplicaDiedError:
                event("request goes to another replica", level=30, dead=replica.index)
            finally:
                async with self._room:
                    self._room.notify_all()
        raise EngineFailureError(f"{_ATTEMPTS} replicas died while they computed this request")

    async def close(self) -> None:
        """End all replicas; jobs that have no answer yet get an error."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(slot.kill() for slot in self._slots if slot is not None))
        async with self._room:
            self._room.notify_all()

    async def change(self, policy: PolicyConfig) -> dict[str, Any]:
        """Change all replicas to another policy, one after the other, without a pause.

        A new replica is warm before the old one stops taking jobs, so both are in memory for a
        while. When the first new one can not start or does not fit, nothing has changed.

        Args:
            policy: What to load.

        Returns:
            The metadata of the new policy.

        Raises:
            ReplicaError: The policy can not start, or what clients read in the metadata differs.
        """
        event("change of policy begins", checkpoint=str(policy.checkpoint))
        metadata: dict[str, Any] = {}
        for index in range(len(self._slots)):
            fresh = await self._make(index, policy)
            old = self._slots[index]
            try:
                if old is not None:
                    check_fit(fresh.metadata, old.metadata)
            except ReplicaError:
                await fresh.kill()
                raise
            metadata = fresh.metadata
            self._config = replace(self._config, policy=policy)
            self._slots[index] = fresh
            async with self._room:
                self._room.notify_all()
            if old is not None:
                await old.drain(self._config.server.drain_s)
        event("change of policy is done", checkpoint=str(policy.checkpoint))
        return metadata

    async def _choose(self) -> Replica:
        limit = self._config.server.max_ongoing_requests
        async with self._room:
            if self._waiting >= self._config.server.max_queue:
                raise OverloadedError(
                    f"the server is busy: {self._waiting} requests wait; try again later"
                )
            self._waiting += 1
            try:
                while not self._closing:
                    free = [r for r in self._slots if r and r.accepting and r.ongoing < limit]
                    if free:
                        return min(free, key=lambda replica: replica.ongoing)
                    await self._room.wait()
                raise OverloadedError("the server stops")
            finally:
                self._waiting -= 1

    async def _supervise(self, index: int) -> None:
        backoff_s = 0.2
        while not self._closing:
            current = self._slots[index]
            if current is not None:
                await current.died.wait()
                if self._slots[index] is not current:
                    continue
                event("replica died", level=40, replica=index, pid=current.process.pid)
                self._slots[index] = None
                await current.kill()
                self.on_restart()
            try:
                fresh = await self._make(index, self._config.policy)
            except (ReplicaError, OSError) as error:
                event("replica can not be replaced", level=40, replica=index, error=str(error))
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
                continue
            backoff_s = 0.2
            if self._slots[index] is not None:
                # A change of policy filled the slot meanwhile.
                await fresh.kill()
                continue
            self._slots[index] = fresh
            async with self._room:
                self._room.notify_all()

    async def _watch(self, index: int) -> None:
        """Kill the replica of a slot when it no longer answers."""
        longest_s = 2 * self._config.server.request_timeout_s + _PING_TIMEOUT_S
        while True:
            await asyncio.sleep(_HEALTH_EVERY_S)
            replica = self._slots[index]
            if replica is None or replica.died.is_set():
                continue
            hangs = replica.oldest_s > longest_s or not await replica.ping(_PING_TIMEOUT_S)
            if hangs and not replica.died.is_set():
                event("replica hangs", level=40, replica=index, pid=replica.process.pid)
                await replica.kill()

    async def _make(self, index: int, policy: PolicyConfig) -> Replica:
        environment = self._environment(index, policy.device)
        return await Replica.start(index, replace(self._config, policy=policy), environment)

    def _environment(self, index: int, device: str | None) -> dict[str, str]:
        """Return what a replica's environment has besides this one: its GPU or its threads."""
        gpus = torch.cuda.device_count()
        if device in (None, "cuda") and gpus:
            # The replica sees its own GPUs alone, so that every library in it means the same ones.
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            names = [name for name in visible.split(",") if name] or [str(n) for n in range(gpus)]
            ranks = self._config.policy.parallel.ranks
            mine = (names[(index * ranks + rank) % gpus] for rank in range(min(ranks, gpus)))
            return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}
        if (device or "cpu").startswith("cuda") or "OMP_NUM_THREADS" in os.environ:
            return {}
        return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(self._slots)))}
