"""The policy server: openpi's WebSocket protocol and a few pages on one port."""

import asyncio
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Self

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from phyai.client.codec import packb
from phyai.serving.access import allowed, is_loopback
from phyai.serving.batching import Backend
from phyai.serving.config import ServerConfig
from phyai.serving.jobs import OverloadedError
from phyai.serving.logs import event
from phyai.serving.metrics import Metrics
from phyai.serving.pages import OPEN_PATHS, Pages, response
from phyai.serving.recording import Recorder
from phyai.serving.service import Service, describe_failure, is_bad_request

PROTOCOL_VERSION = 1
_FAILURE = "Internal server error. Traceback included in previous frame."
_GOING_AWAY = 1001
_INTERNAL_ERROR = 1011
_BAD_DATA = 1007


class PolicyServer:
    """Serves a backend until `stop`.

    The first frame that a client gets is the metadata. Then every binary frame is a request and is
    answered by one binary frame, or by a text frame that says what is wrong. A text frame about the
    request leaves the connection open; one about the engine is followed by close code 1011.

    Args:
        backend: What computes.
        metadata: Of the policy.
        config: Address, limits and timeouts.
        engines: Returns a state for each engine.

    Attributes:
        port: Where it listens, once started.
        connections: Connected clients.
        in_progress: Requests whose reply is not sent yet.
    """

    def __init__(
        self,
        backend: Backend,
        metadata: Mapping[str, Any],
        config: ServerConfig,
        engines: Callable[[], list[str]] = lambda: ["ready"],
    ) -> None:
        self.config = config
        self.connections: int = 0
        self.in_progress: int = 0
        self.port: int = config.port
        self.metrics: Metrics = Metrics(
            waiting=lambda: backend.waiting,
            connections=lambda: self.connections,
            replicas=lambda: engines().count("ready"),
        )
        recorder = Recorder(config.record, config.record_limit) if config.record else None
        self._recorder = recorder
        self.service: Service = Service(backend, config, self.metrics, recorder)
        self._backend, self._engines = backend, engines
        self.describe(metadata)
        self._draining = False
        self._server: Server | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    def state(self) -> dict[str, Any]:
        """Return the server's state and that of its engines."""
        engines = self._engines()
        state = next((name for name in ("ready", "hangs") if name in engines), "loading")
        return {
            "state": "draining" if self._draining else state,
            "engines": engines,
            "connections": self.connections,
            "in_progress": self.in_progress,
        }

    def describe(self, metadata: Mapping[str, Any]) -> None:
        """Tell these metadata of the policy from now on, to new connections and on the pages."""
        self._hello = packb({**metadata, "protocol_version": PROTOCOL_VERSION})
        self._pages = Pages(self.service, metadata, self.state)

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: The address can not be used.
        """
        config = self.config
        self._server = await serve(
            self._connection,
            config.host,
            config.port,
            process_request=self._http,
            compression=None,
            max_size=config.max_frame_bytes,
            max_queue=2,
            # A browser page of another site must not talk to a robot: browsers send an Origin.
            origins=[None],
            server_header=None,
        )
        self.port = next(iter(self._server.sockets)).getsockname()[1]
        if config.api_key is None and not is_loopback(config.host):
            event("listening on the network without an API key", level=30, host=config.host)
        event("listening", host=config.host, port=self.port)

    async def stop(self) -> None:
        """Refuse new work, let requests in progress end, and close."""
        if self._server is None:
            return
        self._draining = True
        event("draining", in_progress=self.in_progress)
        self._server.close(close_connections=False)
        deadline = time.monotonic() + self.config.drain_s
        while self.in_progress and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self._server.connections):
            await connection.close(_GOING_AWAY, "the server stops")
        # Before the wait: requests that are still in progress would be waited for.
        await self._backend.close()
        await self._server.wait_closed()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
        event("stopped", unanswered=self.in_progress)
        self._server = None

    async def _http(self, connection: ServerConnection, request: Request) -> Response | None:
        path = request.path.partition("?")[0]
        upgrade = "websocket" in request.headers.get("Upgrade", "").lower()
        if path not in OPEN_PATHS and not allowed(self.config.api_key, request.headers):
            self.metrics.refused("key")
            event("wrong API key", level=30, peer=str(connection.remote_address))
            refusal = response(HTTPStatus.UNAUTHORIZED, "the API key is missing or wrong\n")
            refusal.headers["WWW-Authenticate"] = 'Basic realm="phyai"'
            return refusal
        if not upgrade:
            page = await self._pages.answer(request)
            return page or response(HTTPStatus.NOT_FOUND, "no such page\n")
        if path in OPEN_PATHS:
            return await self._pages.answer(request)
        if self._draining:
            self.metrics.refused("draining")
            return response(HTTPStatus.SERVICE_UNAVAILABLE, "the server stops\n")
        if self.connections >= self.config.max_connections:
            self.metrics.refused("full")
            return response(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"all {self.config.max_connections} connections are taken\n",
            )
        return None

    async def _connection(self, connection: ServerConnection) -> None:
        self.connections += 1
        event("connected", peer=str(connection.remote_address), connections=self.connections)
        try:
            await connection.send(self._hello)
            await self._serve(connection)
        except ConnectionClosed:
            pass
        finally:
            self.connections -= 1
            self.service.sessions.forget(connection)
            event("disconnected", connections=self.connections)

    async def _serve(self, connection: ServerConnection) -> None:
        prev_total_ms: float | None = None
        async for frame in connection:
            started = time.perf_counter()
            if isinstance(frame, str):
                await connection.close(_BAD_DATA, "requests are binary frames")
                return
            self.in_progress += 1
            try:
                if self._draining:
                    raise OverloadedError("the server stops; connect to another one")
                reply = await self.service.handle(frame, connection, prev_total_ms)
            except Exception as error:
                await connection.send(describe_failure(error))
                if not is_bad_request(error):
                    await connection.close(_INTERNAL_ERROR, _FAILURE)
                    return
            else:
                await connection.send(reply)
                prev_total_ms = 1e3 * (time.perf_counter() - started)
            finally:
                self.in_progress -= 1
