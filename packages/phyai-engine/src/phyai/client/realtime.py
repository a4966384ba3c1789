"""A robot that goes on moving while the server computes its next chunk."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np

from phyai.client.actions import ActionQueue, LatencyTracker
from phyai.client.policy import PolicyClient

_MOST_FAILURES = 10
_IDLE_S = 0.002
_PAUSE_AFTER_FAILURE_S = 0.2


class RealtimePolicy:
    """Asks for chunks in the background and joins them by real-time chunking.

    The robot's loop calls `next_action` once per step. A chunk is asked for as soon as `threshold`
    actions are left. The request says how many actions of the current chunk were executed and how
    many more will be before the reply is here; the server lets the new chunk begin with those. At
    the start and after a request that failed the server may hold another chunk than the robot: then
    the request brings the rest of the robot's along.

    Args:
        client: Connection to the server; this object is its only user while it runs.
        observe: Returns the newest observation; called in the background thread.
        hz: Steps per second of the robot's loop.
        threshold: Actions left at which the next chunk is asked for; None takes half a chunk.
        horizon: Actions from where on a new chunk is free; None leaves it to the server.
        rtc: Whether chunks are joined; otherwise a new chunk simply replaces the rest.

    Attributes:
        queue: Actions to execute.
        latency: Times of recent requests.
        failure: The error that ended the thread, None while all is well.
    """

    def __init__(
        self,
        client: PolicyClient,
        observe: Callable[[], Mapping[str, Any]],
        *,
        hz: float,
        threshold: int | None = None,
        horizon: int | None = None,
        rtc: bool = True,
    ) -> None:
        if hz <= 0:
            raise ValueError(f"hz is {hz}; the robot makes a positive number of steps per second")
        self.queue: ActionQueue = ActionQueue()
        self.latency: LatencyTracker = LatencyTracker()
        self.failure: Exception | None = None
        self._client, self._observe, self._hz = client, observe, hz
        chunk = int(client.metadata.get("action_horizon", 2))
        self._threshold = max(1, chunk // 2) if threshold is None else threshold
        self._horizon, self._rtc = horizon, rtc
        self._same_chunk = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phyai-realtime", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def next_action(self, timeout_s: float = 0.0) -> np.ndarray | None:
        """Return the next action [action_dim].

        Args:
            timeout_s: How long to wait for one, as at the start.

        Returns:
            None when there is none in time; a robot should hold its pose then.

        Raises:
            RuntimeError: Ten requests in a row failed; the last error is its cause.
        """
        deadline = time.monotonic() + timeout_s
        while (action := self.queue.pop()) is None:
            if self.failure is not None:
                raise RuntimeError("the policy gave up") from self.failure
            if time.monotonic() >= deadline:
                return None
            time.sleep(_IDLE_S)
        return action

    def close(self) -> None:
        """Stop asking; a request in progress is waited for."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            if len(self.queue) > self._threshold:
                self._stop.wait(_IDLE_S)
                continue
            try:
                self._ask()
                failures = 0
            except Exception as error:
                failures += 1
                if failures >= _MOST_FAILURES:
                    self.failure = error
                    return
                self._stop.wait(_PAUSE_AFTER_FAILURE_S)

    def _ask(self) -> None:
        started = time.monotonic()
        before, rest = self.queue.rest()
        rtc: dict[str, Any] | None = None
        if self._rtc:
            left: dict[str, Any] = {"executed": before} if self._same_chunk else {"prev": rest}
            rtc = {**left, "delay": self.latency.delay(self._hz)}
            if self._horizon is not None:
                rtc["horizon"] = self._horizon
        self._same_chunk = False
        reply = self._client.infer(self._observe(), rtc=rtc)
        self._same_chunk = True
        self.latency.add(time.monotonic() - started)
        self.queue.replace(reply["actions"], self.queue.position - before)
