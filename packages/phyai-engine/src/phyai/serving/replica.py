"""The server's side of one replica."""

import asyncio
import contextlib
import itertools
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, Self

from phyai.client.errors import CodecError
from phyai.serving.config import ServeConfig
from phyai.serving.framing import read_message, write_message
from phyai.serving.jobs import Answer, Job
from phyai.serving.logs import event
from phyai.serving.replica_main import answer_of, config_to_json

_STREAM_LIMIT = 2**20
_PROGRAM = "import sys; from phyai.serving.replica_main import main; sys.exit(main(sys.argv))"


class ReplicaError(RuntimeError):
    """A replica could not start."""


class ReplicaDiedError(RuntimeError):
    """A replica ended before it answered."""


class Replica:
    """One process and the jobs it holds. Make it with `Replica.start`.

    Attributes:
        index: Position among the replicas.
        metadata: Of its policy.
        died: Set when the process or its socket is gone.
        accepting: Whether it gets new jobs.
    """

    def __init__(
        self,
        index: int,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.index = index
        self.process = process
        self.metadata: dict[str, Any] = {}
        self.died: asyncio.Event = asyncio.Event()
        self.accepting: bool = True
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count()
        self._pending: dict[int, tuple[asyncio.Future[dict[str, Any]], float]] = {}
        self._listener: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, index: int, config: ServeConfig, environment: Mapping[str, str]) -> Self:
        """Start a process and wait until its policy is warm.

        Args:
            index: Position among the replicas.
            config: Policy and batching.
            environment: Variables of the process besides those of this one.

        Raises:
            ReplicaError: The policy can not be loaded, or the process ended.
        """
        ours, theirs = socket.socketpair()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _PROGRAM, str(theirs.fileno())),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **environment},
            start_new_session=True,
        )
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=_STREAM_LIMIT)
        replica = cls(index, process, reader, writer)
        try:
            await replica._greet(config)
        except BaseException:
            await replica.kill()
            raise
        return replica

    async def _greet(self, config: ServeConfig) -> None:
        if self.process.stdin is not None:
            self.process.stdin.write(config_to_json(config).encode() + b"\n")
            with contextlib.suppress(ConnectionError):
                await self.process.stdin.drain()
        hello = await read_message(self._reader)
        if hello is None:
            status = await self.process.wait()
            raise ReplicaError(f"replica {self.index} ended with status {status} while it loaded")
        if "failed" in hello:
            raise ReplicaError(f"replica {self.index}: {hello['failed']}")
        self.metadata = hello["ready"]
        self._listener = asyncio.create_task(self._listen())
        event("replica ready", replica=self.index, pid=self.process.pid)

    @property
    def ongoing(self) -> int:
        """Jobs that it holds."""
        return len(self._pending)

    @property
    def oldest_s(self) -> float:
        """Age of the oldest job, also of one whose client gave up."""
        now = time.monotonic()
        return max((now - since for _, since in self._pending.values()), default=0.0)

    async def ask(self, job: Job) -> Answer:
        """Compute one job.

        Raises:
            ReplicaDiedError: The process ended first.
            RequestError: The job is unusable.
            EngineFailureError: The engine failed.
        """
        return answer_of(await self._send({"job": job.to_wire()}), self.index)

    async def ping(self, timeout_s: float) -> bool:
        """Return whether the process answers in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._send({})
        except (TimeoutError, ReplicaDiedError):
            return False
        return True

    async def kill(self) -> None:
        """End the process now."""
        self.accepting = False
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        self._writer.close()
        if self._listener is not None:
            await self._listener
        self._fail()

    async def drain(self, timeout_s: float) -> None:
        """Take no new jobs, let the others end, then end the process."""
        self.accepting = False
        deadline = time.monotonic() + timeout_s
        while self._pending and not self.died.is_set() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await self.kill()

    async def _send(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if self.died.is_set():
            raise ReplicaDiedError(f"replica {self.index} has ended")
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._pending[number] = (future, time.monotonic())
        write_message(self._writer, {"id": number, **message})
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()
        return await future

    async def _listen(self) -> None:
        try:
            while (message := await read_message(self._reader)) is not None:
                future, _ = self._pending.pop(message["id"])
                if not future.done():
                    future.set_result(message)
        except (CodecError, KeyError, OSError) as error:
            event("replica talks nonsense", level=40, replica=self.index, error=str(error))
        self._fail()

    def _fail(self) -> None:
        self.accepting = False
        self.died.set()
        for future, _ in self._pending.values():
            if not future.done():
                future.set_exception(ReplicaDiedError(f"replica {self.index} has ended"))
        self._pending.clear()
