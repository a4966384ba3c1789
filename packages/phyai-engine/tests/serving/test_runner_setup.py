"""What a process that computes sets up, with the engine replaced."""

import asyncio
import errno
import socket
from types import SimpleNamespace

import pytest
import torch

from phyai.serving import launch, runner_setup
from phyai.serving.config import PolicyConfig, ServeConfig, ServerConfig


@pytest.fixture
def load(monkeypatch):
    """Loads a runner on a device; returns the batches it was warmed for and torch's threads."""
    threads = torch.get_num_threads()

    def run(device, variable=None):
        warmed = []
        runner = SimpleNamespace(
            batches=True,
            on_gpu=device.startswith("cuda"),
            warm_up=lambda sizes: warmed.extend(sizes) or 0.5,
        )
        recorded = []
        policy = SimpleNamespace(engine=SimpleNamespace(warm_up=recorded.extend))
        monkeypatch.setattr(runner_setup, "load_policy", lambda _: policy)
        monkeypatch.setattr(runner_setup, "Runner", lambda policy: runner)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if variable is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", variable)
        torch.set_num_threads(3)
        config = SimpleNamespace(policy=None, server=SimpleNamespace(max_batch=12))
        assert runner_setup.load_runner(config) is runner
        assert recorded == warmed
        return warmed, torch.get_num_threads()

    yield run
    torch.set_num_threads(threads)


def test_a_gpu_is_warm_for_powers_of_two_and_its_host_keeps_to_one_thread(load):
    assert load("cuda:1") == ([1, 2, 4, 8, 12], 1)


def test_threads_that_the_environment_asks_for_stay(load):
    assert load("cuda", variable="3") == ([1, 2, 4, 8, 12], 3)


def test_a_cpu_keeps_its_threads_and_is_warm_for_one(load):
    assert load("cpu") == ([1], 3)


@pytest.mark.parametrize("replicas", [0, 2])
def test_a_taken_port_is_found_before_anything_is_loaded(monkeypatch, tmp_path, replicas):
    def load(config):
        raise AssertionError("loaded")

    monkeypatch.setattr(launch, "load_runner", load)
    monkeypatch.setattr(launch, "ReplicaPool", load)

    async def run(port):
        server = ServerConfig(port=port, replicas=replicas)
        async with launch.running_server(ServeConfig(PolicyConfig(tmp_path), server)):
            pass

    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(OSError, match="in use") as error:
            asyncio.run(run(taken.getsockname()[1]))
        assert error.value.errno == errno.EADDRINUSE
    with pytest.raises(AssertionError, match="loaded"):
        asyncio.run(run(0))
