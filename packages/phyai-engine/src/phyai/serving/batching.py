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
    """Collects jobs and runs them batch after batch, or as many at a time as the engine has lanes.

    While batches are computed, jobs gather; the next batch takes them at once. An idle engine waits
    up to `window_s` for more jobs, and only while `expected` says that more may come.

    Args:
        run: Answers a batch, in a thread of the engine's.
        max_batch: Jobs of one batch.
        window_s: Longest wait of the first job.
        max_queue: Jobs that may wait.
        expected: Jobs that could come at most at this moment, such as open connections.
        lanes: Batches that are computed at a time, each in a thread of its own.
        sizes: Jobs that a batch may have, 1 among them; any number if None. An engine that records
            its work for each size answers others late the first time.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Job]], list[Outcome]],
        *,
        max_batch: int,
        window_s: float,
        max_queue: int,
        expected: Callable[[], int] | None = None,
        lanes: int = 1,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self._sizes = range(1, max_batch + 1) if sizes is None else sizes
        self._run, self._max_batch, self._window_s = run, max_batch, window_s
        self._max_queue, self._expected = max_queue, expected
        self._queue: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._threads = ThreadPoolExecutor(lanes, thread_name_prefix="phyai-engine")
        self._free = asyncio.Semaphore(lanes)
        self._computing: dict[asyncio.Task[None], float] = {}
        self._task = asyncio.get_running_loop().create_task(self._serve())

    @property
    def waiting(self) -> int:
        """Jobs that wait for the engine."""
        return len(self._queue)

    @property
    def oldest_s(self) -> float:
        """How long the engine has been at its oldest batch; 0 when it is idle."""
        began = min(self._computing.values(), default=None)
        return 0.0 if began is None else asyncio.get_running_loop().time() - began

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
        """Stop; jobs that have no answer yet get an error."""
        tasks = (self._task, *self._computing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for waiting in self._queue:
            if not waiting.future.done():
                waiting.future.set_exception(OverloadedError("the server stops"))
        self._queue.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # A lane first: until one is free, jobs gather.
            await self._free.acquire()
            task = loop.create_task(self._compute(await self._next_batch()))
            self._computing[task] = loop.time()
            task.add_done_callback(self._computing.pop)

    async def _compute(self, batch: list[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        taken = loop.time()
        try:
            outcomes = await loop.run_in_executor(
                self._threads, self._run, [waiting.job for waiting in batch]
            )
        except asyncio.CancelledError:
            outcomes = [OverloadedError("the server stops")] * len(batch)
        except Exception as error:
            outcomes = [EngineFailureError(f"{type(error).__name__}: {error}")] * len(batch)
        finally:
            self._free.release()
        for waiting, outcome in zip(batch, outcomes, strict=True):
            _settle(waiting, outcome, 1e3 * (taken - waiting.since))

    async def _next_batch(self) -> list[_Waiting]:
        while not self._live():
            self._arrived.clear()
            await self._arrived.wait()
        await self._wait_for_more()
        steps = self._queue[0].job.num_steps if self._live() else None
        batch = [w for w in self._queue if w.job.num_steps == steps][: self._max_batch]
        batch = batch[: max((size for size in self._sizes if size <= len(batch)), default=0)]
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
