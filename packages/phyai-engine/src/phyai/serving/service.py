"""From a request's bytes to a reply's bytes, independent of the wire."""

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phyai.client.codec import Dialect, decode, packb
from phyai.client.scan import Limits
from phyai.serving.batching import Backend
from phyai.serving.config import ServerConfig
from phyai.serving.continuation import Chunk, Continuation
from phyai.serving.jobs import Answer, EngineFailureError, Job, OverloadedError, RequestError
from phyai.serving.logs import event
from phyai.serving.metrics import Metrics
from phyai.serving.options import RequestOptions, split_options
from phyai.serving.recording import Recorder
from phyai.serving.rtc import Sessions, blend

# Above this a frame is decoded in a thread, so that copying does not hold up other connections.
_LARGE_FRAME = 4 * 2**20
# Every model family takes a seed of 31 bits.
_DRAWN_SEEDS = 2**31


class RequestTimeoutError(RequestError):
    """The request took longer than the server allows."""


@dataclass
class LastExchange:
    """What the page shows: the last request that was answered.

    Attributes:
        request: The observation.
        actions: [chunk, action_dim].
        prompt: The text that the model read.
    """

    request: Mapping[str, Any]
    actions: np.ndarray
    prompt: str


class Service:
    """Answers requests with a backend.

    Args:
        backend: What computes.
        config: Limits and timeouts.
        metrics: Counted here.
        recorder: Gets every exchange, when given.
    """

    def __init__(
        self,
        backend: Backend,
        config: ServerConfig,
        metrics: Metrics,
        recorder: Recorder | None = None,
    ) -> None:
        self.backend = backend
        self.config = config
        self.metrics = metrics
        self.recorder = recorder
        self.sessions: Sessions = Sessions()
        self.last: LastExchange | None = None
        self._limits = Limits(frame_bytes=config.max_frame_bytes)

    async def handle(self, frame: bytes, connection: object, prev_total_ms: float | None) -> bytes:
        """Answer one request.

        Args:
            frame: The encoded request.
            connection: Stands for the session of requests that name none.
            prev_total_ms: Time of the connection's last request, None for the first one.

        Returns:
            The encoded reply, arrays spelled as in the request.

        Raises:
            RequestError, CodecError, ProcessingError, ValueError: The request can not be answered.
            EngineFailureError: The engine failed.
        """
        started = time.perf_counter()
        try:
            reply, dialect, answer = await self._answer(frame, connection)
        except Exception as error:
            self.metrics.failed(_outcome(error))
            raise
        seconds = time.perf_counter() - started
        server = {"infer_ms": 1e3 * seconds, "queue_ms": answer.timing_ms.get("queue", 0.0)}
        server["batch"] = answer.batch
        if prev_total_ms is not None:
            server["prev_total_ms"] = prev_total_ms
        self.metrics.answered(seconds, answer.timing_ms, answer.batch)
        reply["server_timing"] = server
        return packb(reply, dialect)

    async def _answer(
        self, frame: bytes, connection: object
    ) -> tuple[dict[str, Any], Dialect, Answer]:
        decoded = decode(frame, self._limits) if len(frame) < _LARGE_FRAME else None
        value, dialect = decoded or await asyncio.to_thread(decode, frame, self._limits)
        request, options = split_options(value)
        seed = options.seed
        if seed is None and options.noise is None and self.recorder is not None:
            seed = secrets.randbelow(_DRAWN_SEEDS)
        session = connection if options.session is None else options.session
        continues = self._continuation(session, options)
        job = Job(request, options.num_steps, seed, options.noise, continues, options.video)
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                answer = await self.backend.submit(job)
        except TimeoutError:
            raise RequestTimeoutError(
                f"no answer within {self.config.request_timeout_s:g} s; the server is overloaded"
            ) from None
        if self.recorder is not None:
            self.recorder.add(job, answer)
        if continues is not None and not answer.guided:
            joined = blend(answer.actions, continues.left.actions, continues.options)
            answer = replace(answer, actions=joined)
        if options.rtc is not None or options.session is not None:
            chunk = Chunk(answer.actions, answer.normalized, answer.units)
            self.sessions.put(session, chunk)
        self.last = LastExchange(request, answer.actions, answer.prompt)
        reply: dict[str, Any] = {
            "actions": answer.actions,
            "policy_timing": {"infer_ms": float(answer.timing_ms.get("model", 0.0))},
        }
        if answer.action_key:
            reply[answer.action_key] = answer.actions
        if answer.video is not None:
            reply["video"] = answer.video
        if options.rtc is not None:
            mode = {"mode": "guided" if answer.guided else "blended"}
            used = continues is not None
            reply["rtc"] = {"continued": used, **(mode if used else {})}
        return reply, dialect or Dialect.OPENPI, answer

    def _continuation(self, session: object, options: RequestOptions) -> Continuation | None:
        """Return what the request continues, None when it begins anew."""
        if options.reset:
            self.sessions.forget(session)
        if options.rtc is None:
            return None
        if options.rtc.prev is not None:
            left = Chunk(options.rtc.prev) if len(options.rtc.prev) else None
        else:
            left = self.sessions.left(session, options.rtc.executed)
        return None if left is None else Continuation(left, options.rtc)


def describe_failure(error: Exception) -> str:
    """Return the text frame of an error: a last line like a traceback's, and why."""
    if isinstance(error, EngineFailureError):
        return error.trace
    return f"Traceback (most recent call last):\n{type(error).__name__}: {error}"


def is_bad_request(error: Exception) -> bool:
    """Return whether an error is about the request, so that the connection may go on.

    Errors of requests, frames and processing are ValueErrors, and so are those that the engine
    raises for its arguments.
    """
    return isinstance(error, ValueError)


def _outcome(error: Exception) -> str:
    if isinstance(error, OverloadedError):
        return "busy"
    if isinstance(error, RequestTimeoutError):
        return "timeout"
    if is_bad_request(error):
        return "bad_request"
    event("request failed", level=40, error=str(error))
    return "error"
