"""A fake policy that can be slow or fail, and servers that run beside the test."""

import asyncio
import contextlib
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phyai.client import PolicyClient
from phyai.engine import ActionChunk
from phyai.serving import PolicyConfig, PolicyServer, ServeConfig, ServerConfig, built_in_adapter
from phyai.serving.launch import running_server
from phyai.serving.loading import LoadedPolicy
from phyai.serving.runner import Runner
from phyai.serving.runner_setup import make_batcher

REPOSITORY = Path(__file__).resolve().parents[4]
REACH = REPOSITORY / "examples" / "pi05" / "reach" / "checkpoint"
CAMERAS = ("front", "hand", "spare")


class FakeEngine:
    """Its first action column is the mean of the noise, the second the first state column.

    It computes only while `open` is set; `computing` says that a batch has begun.
    """

    def __init__(self, preset="lerobot", cameras=CAMERAS, action_dim=2, state_dim=3, lanes=1):
        self.preset, self.cameras, self.lanes = preset, cameras, lanes
        self.action_dim, self.state_dim = action_dim, state_dim
        self.computing, self.open = threading.Event(), threading.Event()
        self.open.set()
        self.failure: Exception | None = None
        self.batches: list[int] = []
        self.observations: list = []
        self.steps: list = []

    def describe(self):
        return {
            "plugin": "fake",
            "device": "cpu",
            "image_resolution": [8, 8],
            "chunk_size": 6,
            "num_steps": 10,
            "lanes": self.lanes,
            "processing": {
                "preset": self.preset,
                "cameras": list(self.cameras),
                "camera_aliases": {},
                "state_dim": self.state_dim,
                "action_dim": self.action_dim,
            },
        }

    def infer_batch(self, observations, *, noise, num_steps):
        self.batches.append(len(observations))
        self.observations += observations
        self.steps.append(num_steps)
        self.computing.set()
        assert self.open.wait(120)
        if self.failure is not None:
            raise self.failure
        for observation in observations:
            if observation.task == "unusable":
                raise ValueError("this task can not be used")
        chunks = []
        for index, observation in enumerate(observations):
            actions = np.zeros((6, self.action_dim), np.float32)
            actions[:, 0] = 0.0 if noise is None else float(noise[index].mean())
            actions[:, 1] = observation.state[0]
            normalized = np.zeros((6, 4), np.float32)
            chunks.append(ActionChunk(actions, normalized, {"model": 1.0}, observation.task))
        return chunks


def request(state=0.0, **changes):
    picture = np.full((8, 8, 3), 7, np.uint8)
    found = {"front": picture, "observation.state": np.array([state, 0.0, 0.0], np.float32)}
    return found | {"prompt": "go"} | changes


def wait_until(condition, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Running:
    """A server in a thread with its own event loop."""

    def __init__(self, opened, start_s=180):
        self._opened, self._start_s = opened, start_s
        self._started = threading.Event()
        self._error = None
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    async def _main(self):
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with self._opened() as self.server:
                self._started.set()
                await self._stop.wait()
        except Exception as error:
            self._error = error
            self._started.set()

    def __enter__(self):
        self.thread.start()
        assert self._started.wait(self._start_s)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *exception):
        self.stop()
        self.thread.join(120)
        assert not self.thread.is_alive()

    def stop(self):
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._stop.set)

    @property
    def port(self):
        return self.server.port

    def get(self, path, headers=None):
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers or {})
        try:
            with urllib.request.urlopen(asked, timeout=120) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    @contextlib.contextmanager
    def busy(self):
        """The fake engine computes a request until the block ends; yields the replies to it."""
        self.engine.computing.clear()
        self.engine.open.clear()
        replies = []

        def ask():
            with PolicyClient(port=self.port) as client:
                replies.append(client.infer(request(4)))

        thread = threading.Thread(target=ask)
        try:
            thread.start()
            assert self.engine.computing.wait(120)
            yield replies
        finally:
            self.engine.open.set()
            thread.join(120)

    def metric(self, line):
        text = self.get("/metrics")[1].decode()
        found = [row.split()[-1] for row in text.splitlines() if row.startswith(f"{line} ")]
        return float(found[0]) if found else 0.0


@pytest.fixture(autouse=True)
def _plain(plain_environment):
    """Every test of this folder runs that way."""


@pytest.fixture
def serve_fake():
    """Serve a `FakeEngine`: ``serve_fake(engine, max_batch=4)``, as a context manager."""

    @contextlib.contextmanager
    def start(engine=None, adapter=None, **settings):
        engine = engine or FakeEngine()
        config = replace(ServerConfig(port=0, drain_s=5.0), **settings)
        adapter = adapter or built_in_adapter("auto", engine.describe())
        runner = Runner(LoadedPolicy(engine, adapter))
        runner.warm_up()
        engine.batches.clear()
        engine.observations.clear()
        engine.steps.clear()

        @contextlib.asynccontextmanager
        async def opened():
            servers = []
            batcher = make_batcher(runner, config, lambda: servers[0].connections)
            servers.append(PolicyServer(batcher, runner.metadata(), config))
            async with servers[0]:
                yield servers[0]

        with Running(opened) as running:
            running.engine = engine
            yield running

    return start


@pytest.fixture
def serve_reach():
    """Serve the reach policy: ``serve_reach(replicas=2)``, as a context manager."""

    def start(policy=None, **settings):
        policy = policy or PolicyConfig(REACH, device="cpu")
        server = replace(ServerConfig(port=0, request_timeout_s=300.0), **settings)
        config = ServeConfig(policy, server)
        return Running(lambda: running_server(config))

    return start
