"""Micro-batching: requests of several connections become one batch of the engine."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

from phyai.serving.jobs import Answer, EngineFailureError, Job, OverloadedError
from phyai.serving.runner import Outcome


class Backend(Protocol):
    """What answers jobs: this process or replicas."""

    async def submit(self, job: Job) -> Answer:
        """Answer one job."""
        ...

    async def close(self) -> None:
        """Give everything back."""
        ...

    @property
    def waiting(self) -> int:
        """Jobs that no engine computes yet."""
        ...


@dataclass(eq=False)
class _Waiting:
    job: Job
    future: asyncio.Future[Answer]
    since: float = field(default_factory=lambda: asyncio.get_running_loop().time())


class Batcher:
    """Collects jobs and runs them in one thread, batch after batch.

    While a batch is computed, jobs gather; the next batch takes them at once. An idle engine waits
    up to `window_s` for more jobs, and only while `expected` says that more may come.

    Args:
        run: Answers a batch, in the engine's thread.
        max_batch: Jobs of one batch.
        window_s: Longest wait of the first job.
        max_queue: Jobs that may wait.
        expected: Jobs that could come at most at this moment, such as open connections.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Job]], list[Outcome]],
        *,
        max_batch: int,
        window_s: float,
        max_queue: int,
        expected: Callable[[], int] | None = None,
    ) -> None:
        self._run, self._max_batch, self._window_s = run, max_batch, window_s
        self._max_queue, self._expected = max_queue, expected
        self._queue: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="phyai-engine")
        self._task = asyncio.get_running_loop().create_task(self._serve())

    @property
    def waiting(self) -> int:
        """Jobs that wait for the engine."""
        return len(self._queue)

    async def submit(self, job: Job) -> Answer:
        """Answer one job.

        Raises:
            OverloadedError: Too many jobs wait.
            RequestError, ProcessingError, ValueError: The job is unusable.
            EngineFailureError: The engine failed.
        """
        if len(self._queue) >= self._max_queue:
            raise OverloadedError(
                f"the server is busy: {len(self._queue)} requests wait; try again later"
            )
        waiting = _Waiting(job, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._arrived.set()
        return await waiting.future

    async def close(self) -> None:
        """Stop; jobs that still wait get an error."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for waiting in self._queue:
            if not waiting.future.done():
                waiting.future.set_exception(OverloadedError("the server stops"))
        self._queue.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._next_batch()
            taken = loop.time()
            try:
                outcomes = await loop.run_in_executor(
                    self._thread, self._run, [waiting.job for waiting in batch]
                )
            except Exception as error:
                outcomes = [EngineFailureError(str(error))] * len(batch)
            for waiting, outcome in zip(batch, outcomes, strict=True):
                _settle(waiting, outcome, 1e3 * (taken - waiting.since))

    async def _next_batch(self) -> list[_Waiting]:
        while not self._live():
            self._arrived.clear()
            await self._arrived.wait()
        await self._wait_for_more()
        steps = self._queue[0].job.num_steps if self._live() else None
        batch = [w for w in self._queue if w.job.num_steps == steps][: self._max_batch]
        for waiting in batch:
            self._queue.remove(waiting)
        return batch or await self._next_batch()

    async def _wait_for_more(self) -> None:
        loop = asyncio.get_running_loop()
        until = self._queue[0].since + self._window_s
        while (left := until - loop.time()) > 0 and len(self._queue) < self._wanted():
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except TimeoutError:
                return

    def _wanted(self) -> int:
        expected = self._max_batch if self._expected is None else self._expected()
        return min(self._max_batch, expected)

    def _live(self) -> int:
        """Drop jobs whose client no longer waits; return how many are left."""
        self._queue = deque(waiting for waiting in self._queue if not waiting.future.done())
        return len(self._queue)


def _settle(waiting: _Waiting, outcome: Outcome, queued_ms: float) -> None:
    if waiting.future.done():
        return
    if isinstance(outcome, Exception):
        waiting.future.set_exception(outcome)
    else:
        timing = {"queue": queued_ms, **outcome.timing_ms}
        waiting.future.set_result(replace(outcome, timing_ms=timing))
