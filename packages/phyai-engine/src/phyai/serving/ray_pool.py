"""Replicas on a Ray cluster, through Ray Serve.

Ray starts the processes, spreads requests, restarts what dies and rolls out new policies; this
server stays the only door. Clients' data reaches Ray as bytes of the codec and nothing else.
"""

# pyright: reportMissingImports=false

import asyncio
import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError

from phyai.client.codec import packb, unpackb
from phyai.serving.batching import Batcher
from phyai.serving.config import PolicyConfig, ServeConfig
from phyai.serving.fit import check_fit
from phyai.serving.framing import INNER_LIMITS
from phyai.serving.jobs import Answer, EngineFailureError, Job, OverloadedError
from phyai.serving.logs import event
from phyai.serving.replica import ReplicaError
from phyai.serving.replica_main import answer_of, config_from_json, config_to_json, reply_to
from phyai.serving.runner_setup import load_runner, make_batcher

APPLICATION = "phyai"
DEPLOYMENT = "PolicyReplica"
# Ray replaces 127.0.0.1 by the address of the machine in its network.
_LOOPBACK = "127.0.0.2"
_ATTEMPTS = 3
# A policy that does not fit or can not load fails the same way again.
_STARTS = 2
_POLL_S = 1.0
_HEALTH_EVERY_S = 2.0


class PolicyReplica:
    """One engine inside Ray.

    Args:
        config: What `config_to_json` wrote.
        served: Metadata of the policy that this one replaces, as bytes of the codec; None for
            the first.

    Raises:
        ReplicaError: Clients would be surprised by the difference of the two.
    """

    def __init__(self, config: str, served: bytes | None) -> None:
        self._config = config_from_json(config)
        self._runner = load_runner(self._config)
        if served is not None:
            check_fit(self._runner.metadata(), unpackb(served, INNER_LIMITS))
        self._batcher: Batcher | None = None

    def metadata(self) -> bytes:
        """Return the metadata of the policy, and this process."""
        return packb({**self._runner.metadata(), "pid": os.getpid()})

    async def infer(self, frame: bytes) -> bytes:
        """Answer one job, both as bytes of the codec."""
        if self._batcher is None:
            self._batcher = make_batcher(self._runner, self._config.server, lambda: 0)
        return packb(await reply_to(self._batcher, unpackb(frame, INNER_LIMITS)))


class RayPool:
    """A backend on Ray.

    Args:
        config: What each replica loads, and how many there are.
        address: Of the cluster; None starts Ray on this machine, and ends it again.
        gpus: GPUs of one replica; 0 computes on CPUs.
    """

    def __init__(self, config: ServeConfig, address: str | None, gpus: float) -> None:
        self._config, self._address, self._gpus = config, address, gpus
        self._handle: Any = None
        self._served: bytes | None = None
        self._waiting = 0
        self._running = 0
        self._poll: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Jobs that were sent to Ray and have no answer."""
        return self._waiting

    def states(self) -> list[str]:
        """Return ``ready`` or ``loading`` for each replica, as Ray last reported."""
        wanted = self._config.server.replicas
        ready = min(self._running, wanted)
        return ["ready"] * ready + ["loading"] * (wanted - ready)

    async def start(self) -> dict[str, Any]:
        """Connect to Ray, deploy, and return the metadata of the policy.

        Raises:
            ReplicaError: Ray can not be reached, or the policy can not start.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            await asyncio.to_thread(self._connect)
            await asyncio.to_thread(self._deploy)
            metadata = await self._read_metadata()
            self._served = packb(metadata)
        except (RayError, RuntimeError, ConnectionError) as error:
            await self.close()
            raise ReplicaError(f"Ray can not serve the policy: {error}") from None
        await self._refresh()
        self._poll = asyncio.create_task(self._watch())
        return metadata

    async def submit(self, job: Job) -> Answer:
        """Answer one job with a replica that Ray chooses.

        Raises:
            OverloadedError: Too many jobs wait.
            RequestError: The job is unusable.
            EngineFailureError: The engine failed, or three replicas died at this job.
        """
        frame = packb({"job": job.to_wire()})
        self._waiting += 1
        try:
            for _ in range(_ATTEMPTS):
                try:
                    reply = unpackb(await self._handle.infer.remote(frame), INNER_LIMITS)
                    return answer_of(reply, 0)
                except BackPressureError as error:
                    raise OverloadedError(f"the server is busy: {error}; try again later") from None
                except RayTaskError as error:
                    raise EngineFailureError("the replica failed", str(error)) from None
                except RayError as error:
                    event("request goes to another replica", level=30, error=str(error)[:200])
        finally:
            self._waiting -= 1
        raise EngineFailureError(f"{_ATTEMPTS} replicas died while they computed this request")

    async def change(self, policy: PolicyConfig) -> dict[str, Any]:
        """Let Ray replace the replicas one after the other, and return the new metadata.

        Args:
            policy: What to load.

        Raises:
            ReplicaError: The policy can not start, or what clients read in the metadata differs;
                the old one goes on.
        """
        event("change of policy begins", checkpoint=str(policy.checkpoint))
        before = self._config
        self._config = replace(before, policy=policy)
        try:
            await asyncio.to_thread(self._deploy)
        except (RayError, RuntimeError) as error:
            reason = await asyncio.to_thread(_reason) or error
            self._config = before
            await asyncio.to_thread(self._deploy)
            raise ReplicaError(f"Ray can not serve the new policy: {reason}") from None
        event("change of policy is done", checkpoint=str(policy.checkpoint))
        return await self._read_metadata()

    async def close(self) -> None:
        """Take the deployment away; end Ray when it was started here."""
        if self._poll is not None:
            self._poll.cancel()
            await asyncio.gather(self._poll, return_exceptions=True)
        if ray.is_initialized():
            await asyncio.to_thread(self._disconnect)

    async def _read_metadata(self) -> dict[str, Any]:
        found = unpackb(await self._handle.metadata.remote(), INNER_LIMITS)
        return {name: value for name, value in found.items() if name != "pid"}

    def _connect(self) -> None:
        if self._address is None:
            ray.init(include_dashboard=False, _node_ip_address=_LOOPBACK, log_to_driver=False)
        else:
            ray.init(self._address, log_to_driver=False)
        serve.start(proxy_location="Disabled")

    def _deploy(self) -> None:
        server = self._config.server
        deployment = serve.deployment(
            name=DEPLOYMENT,
            num_replicas=server.replicas,
            max_ongoing_requests=server.max_ongoing_requests,
            max_queued_requests=server.max_queue,
            health_check_period_s=_HEALTH_EVERY_S,
            graceful_shutdown_timeout_s=server.drain_s,
            max_constructor_retry_count=_STARTS,
            ray_actor_options={"num_cpus": 1, "num_gpus": self._gpus},
        )(PolicyReplica)
        application = deployment.bind(config_to_json(self._config), self._served)
        self._handle = serve.run(application, name=APPLICATION, route_prefix=None)

    def _disconnect(self) -> None:
        with contextlib.suppress(RayError, RuntimeError):
            serve.delete(APPLICATION)
            if self._address is None:
                serve.shutdown()
        ray.shutdown()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            with contextlib.suppress(RayError, RuntimeError):
                await self._refresh()

    async def _refresh(self) -> None:
        status = await asyncio.to_thread(serve.status)
        application = status.applications.get(APPLICATION)
        deployment = application.deployments.get(DEPLOYMENT) if application else None
        states: Mapping[str, int] = deployment.replica_states if deployment else {}
        self._running = sum(count for state, count in states.items() if str(state) == "RUNNING")


def _reason() -> str:
    """Return the last line of what Ray tells about a deployment, which names the error."""
    application = serve.status().applications.get(APPLICATION)
    deployment = application.deployments.get(DEPLOYMENT) if application else None
    lines = deployment.message.strip().splitlines() if deployment else []
    return next((line for line in reversed(lines) if "Error" in line), "")
