"""Replicas on Ray, where Ray is installed."""

import asyncio
import json
import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest

from phyai.cli import deploy, main
from phyai.client import PolicyClient, ServerError, unpackb
from phyai.serving import PolicyConfig, ReplicaError, ServeConfig, ServerConfig
from phyai.serving.launch import running_server

from .conftest import REACH, Running

PICTURE = np.zeros((84, 84, 3), np.uint8)
REQUEST = {
    "images": {"base": PICTURE, "wrist": PICTURE},
    "state": np.zeros(4, np.float32),
    "prompt": "reach the red disc",
}


def short_chunks(folder):
    """The reach policy with chunks of three actions."""
    copied = shutil.copytree(REACH, folder / "short")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"chunk_size": 3, "n_action_steps": 3}))
    return copied


def test_without_ray_the_command_names_the_package(monkeypatch, capsys):
    monkeypatch.setattr(deploy.importlib.util, "find_spec", lambda name: name != "ray" or None)
    assert main(["deploy", "--checkpoint", str(REACH)]) == 1
    assert 'pip install "phyai-engine[serve,ray]"' in capsys.readouterr().err


def test_ray_serves_outlives_a_dead_replica_and_changes_the_policy(monkeypatch, tmp_path):
    pytest.importorskip("ray")
    from phyai.serving.ray_pool import RayPool

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    server = ServerConfig(port=0, replicas=2, max_ongoing_requests=4, request_timeout_s=300.0)
    config = ServeConfig(PolicyConfig(REACH, device="cpu"), server)
    pool = RayPool(config, None, 0.0)
    with Running(lambda: running_server(config, pool), start_s=180) as running:
        errors, replies, stop = [], [], threading.Event()

        def ask(number):
            with PolicyClient(port=running.port, timeout_s=300.0) as client:
                while not stop.is_set():
                    try:
                        replies.append(client.infer(REQUEST, seed=number)["actions"])
                    except Exception as error:
                        errors.append(error)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()

        async def victim():
            return unpackb(await pool._handle.metadata.remote())["pid"]

        pid = asyncio.run_coroutine_threadsafe(victim(), running.loop).result(120)
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 300
        while pool.states().count("ready") == 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        while pool.states().count("ready") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        stop.set()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(replies) > 8
        with PolicyClient(port=running.port, timeout_s=300.0) as client:
            before = client.infer(REQUEST, seed=0)["actions"]
            with pytest.raises(ServerError, match="no image"):
                client.infer({"prompt": "x"})
            policy = PolicyConfig(REACH, device="cpu", num_steps=2)
            asyncio.run_coroutine_threadsafe(pool.change(policy), running.loop).result(300)
            after = client.infer(REQUEST, seed=0)["actions"]
            other = PolicyConfig(short_chunks(tmp_path), device="cpu")
            changing = asyncio.run_coroutine_threadsafe(pool.change(other), running.loop)
            with pytest.raises(ReplicaError, match="action_horizon 3, the served one 16"):
                changing.result(300)
            assert np.array_equal(after, client.infer(REQUEST, seed=0)["actions"])
        assert not np.allclose(before, after)
