"""Running a server until it is told to stop."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, runtime_checkable

from phyai.serving.batching import Backend
from phyai.serving.config import PolicyConfig, ServeConfig
from phyai.serving.logs import event
from phyai.serving.pool import ReplicaPool
from phyai.serving.runner_setup import load_runner, make_batcher
from phyai.serving.server import PolicyServer


@runtime_checkable
class Pool(Backend, Protocol):
    """Several engines as one backend."""

    async def start(self) -> dict[str, Any]:
        """Start the engines and return the metadata of their policy."""
        ...

    def states(self) -> list[str]:
        """Return a state for each engine."""
        ...

    async def change(self, policy: PolicyConfig) -> dict[str, Any]:
        """Change to another policy without a pause and return its metadata."""
        ...


@contextlib.asynccontextmanager
async def running_server(
    config: ServeConfig, pool: Pool | None = None
) -> AsyncIterator[PolicyServer]:
    """Load a policy, start its server, and stop both at the end.

    Args:
        config: What to serve.
        pool: Engines to start; None takes processes of this machine when the configuration has
            replicas, else this process.

    Raises:
        ValueError, CheckpointError, ProcessingError, PolicyError, QuantConfigError: As the engine
            and the adapter find them.
        ReplicaError: The replicas can not start.
        OSError: The address can not be used; this is found before anything is loaded.
    """
    _try_address(config.server.host, config.server.port)
    if pool is None and config.server.replicas:
        pool = ReplicaPool(config)
    if pool is not None:
        metadata = await pool.start()
        server = PolicyServer(pool, metadata, config.server, pool.states)
        if isinstance(pool, ReplicaPool):
            pool.on_restart = server.metrics.restarted
    else:
        # In a thread, so that the event loop goes on.
        runner = await asyncio.to_thread(load_runner, config)
        servers: list[PolicyServer] = []
        batcher = make_batcher(runner, config.server, lambda: servers[0].connections)
        limit_s = 2 * config.server.request_timeout_s

        def engines() -> list[str]:
            return ["ready" if batcher.oldest_s < limit_s else "hangs"]

        server = PolicyServer(batcher, runner.metadata(), config.server, engines)
        servers.append(server)
    async with server:
        yield server


def _try_address(host: str, port: int) -> None:
    if port:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()


async def serve_until_told(
    config: ServeConfig, reload: Callable[[], ServeConfig], pool: Pool | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    SIGHUP reads the configuration again and changes the replicas to its policy, one at a time.

    Args:
        config: What to serve.
        reload: Returns the configuration as it is at that time.
        pool: Engines to start, see `running_server`.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running_server(config, pool) as server:
        changes: set[asyncio.Task[None]] = set()

        def change() -> None:
            task = loop.create_task(change_policy(server, reload))
            changes.add(task)
            task.add_done_callback(changes.discard)

        loop.add_signal_handler(signal.SIGHUP, change)
        await stop.wait()


async def change_policy(server: PolicyServer, reload: Callable[[], ServeConfig]) -> None:
    """Change the replicas to the policy of the configuration; when that fails, log why.

    Args:
        server: What `running_server` gave.
        reload: Returns the configuration as it is now.
    """
    pool = server.service.backend
    if not isinstance(pool, Pool):
        event("the policy is changed without a pause only with replicas", level=30)
        return
    try:
        server.describe(await pool.change(reload().policy))
    except Exception as error:
        event("the policy was not changed", level=40, error=str(error))
