"""Replicas with the reach policy: routing, death under load, change of policy."""

import asyncio
import os
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest

from phyai.client import PolicyClient, ServerError
from phyai.serving import PolicyConfig, ReplicaError, ReplicaPool, ServeConfig, ServerConfig
from phyai.serving.jobs import Job, OverloadedError

from .conftest import REACH, wait_until

PICTURE = np.zeros((84, 84, 3), np.uint8)
REQUEST = {
    "images": {"base": PICTURE, "wrist": PICTURE},
    "state": np.zeros(4, np.float32),
    "prompt": "reach the red disc",
}
CLIENTS = 4


class Load:
    """Clients that ask until told to stop; every request ends as a reply or as an error."""

    def __init__(self, port):
        self.replies, self.errors, self.sent = [], [], 0
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(port, n)) for n in range(CLIENTS)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception):
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()

    def wait_for(self, count):
        wait_until(lambda: len(self.replies) >= count)

    def _ask(self, port, number):
        with PolicyClient(port=port, timeout_s=300.0) as client:
            while not self._stop.is_set():
                with self._lock:
                    self.sent += 1
                try:
                    reply = client.infer(REQUEST, seed=number)
                except Exception as error:
                    self.errors.append(error)
                else:
                    self.replies.append((number, reply["actions"]))


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_death_under_load_loses_nothing(serve_reach):
    with serve_reach(replicas=2, max_ongoing_requests=2) as server:
        pool = server.server.service.backend
        with Load(server.port) as load:
            load.wait_for(8)
            victim = pool.pids()[0]
            os.kill(victim, signal.SIGKILL)
            load.wait_for(len(load.replies) + 4)
            assert server.get("/readyz")[0] == 200
            wait_until(lambda: victim not in pool.pids())
            wait_until(lambda: pool.states() == ["ready", "ready"])
            load.wait_for(len(load.replies) + 8)
        assert load.errors == []
        assert len(load.replies) == load.sent
        for number in range(CLIENTS):
            chunks = [actions for client, actions in load.replies if client == number]
            spread = max(float(np.abs(actions - chunks[0]).max()) for actions in chunks)
            assert spread < 1e-4
        assert server.metric("phyai_replica_restarts_total") == 1
        pids = pool.pids()
        with PolicyClient(port=server.port) as client, pytest.raises(ServerError, match="no image"):
            client.infer({"prompt": "x"})
    assert not any(alive(pid) for pid in pids)


def test_a_policy_that_can_not_load_says_why(tmp_path):
    async def start():
        config = ServeConfig(PolicyConfig(tmp_path, device="cpu"), ServerConfig(replicas=1))
        await ReplicaPool(config).start()

    with pytest.raises(ReplicaError, match=r"replica 0: CheckpointError: .*no model\.safetensors"):
        asyncio.run(start())


class FakeReplica:
    """A replica that answers when told to."""

    def __init__(self, index):
        self.index, self.accepting, self.ongoing = index, True, 0
        self.died, self.metadata = asyncio.Event(), {"action_dim": 2}
        self.release = asyncio.Event()

    async def ask(self, job):
        from phyai.serving.replica import ReplicaDiedError

        self.ongoing += 1
        await self.release.wait()
        self.ongoing -= 1
        if self.died.is_set():
            raise ReplicaDiedError("gone")
        return self.index


def fake_pool(**settings):
    server = replace(ServerConfig(replicas=2, max_ongoing_requests=2, max_queue=1), **settings)
    pool = ReplicaPool(ServeConfig(PolicyConfig(REACH), server))
    pool._slots = [FakeReplica(0), FakeReplica(1)]
    return pool


def test_jobs_go_to_the_replica_with_the_fewest_and_wait_when_all_are_full():
    async def run():
        pool = fake_pool()
        jobs = [asyncio.create_task(pool.submit(None)) for _ in range(4)]
        await asyncio.sleep(0)
        assert [slot.ongoing for slot in pool._slots] == [2, 2]
        waiting = asyncio.create_task(pool.submit(None))
        await asyncio.sleep(0)
        assert pool.waiting == 1
        with pytest.raises(ValueError, match="the server is busy: 1 requests wait"):
            await pool.submit(None)
        pool._slots[1].release.set()
        assert await waiting == 1
        pool._slots[0].release.set()
        assert sorted(await asyncio.gather(*jobs)) == [0, 0, 1, 1]
        assert pool.waiting == 0

    asyncio.run(run())


def test_jobs_of_a_dead_replica_go_to_another_and_a_deadly_job_ends():
    async def run():
        pool = fake_pool()
        first = asyncio.create_task(pool.submit(None))
        await asyncio.sleep(0)
        pool._slots[0].accepting = False
        pool._slots[0].died.set()
        pool._slots[0].release.set()
        pool._slots[1].release.set()
        assert await first == 1
        pool._slots[1].died.set()
        with pytest.raises(RuntimeError, match="3 replicas died"):
            await pool.submit(None)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("visible", "gpus", "device", "expected"),
    [
        (None, 2, None, ["0", "1", "0"]),
        ("5,GPU-7", 2, "cuda", ["5", "GPU-7", "5"]),
    ],
)
def test_every_replica_sees_one_gpu(monkeypatch, visible, gpus, device, expected):
    monkeypatch.setattr("phyai.serving.pool.torch.cuda.device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    async def run():
        pool = fake_pool(replicas=3)
        found = [pool._environment(index, device) for index in range(3)]
        assert found == [{"CUDA_VISIBLE_DEVICES": name} for name in expected]
        assert pool._environment(0, "cuda:1") == {}

    asyncio.run(run())


def test_cpu_replicas_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("phyai.serving.pool.os.cpu_count", lambda: 9)

    async def run():
        assert fake_pool()._environment(0, "cpu") == {"OMP_NUM_THREADS": "4"}
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        assert fake_pool()._environment(0, "cpu") == {}

    asyncio.run(run())


def test_a_policy_changes_one_replica_after_the_other():
    async def run():
        pool, events = fake_pool(), []
        old = list(pool._slots)
        policy = PolicyConfig(REACH, num_steps=3)

        async def make(index, given):
            assert given is policy
            assert pool.states().count("ready") == 2
            events.append(("make", index))
            return FakeReplica(index)

        def drain(index):
            async def end(timeout_s):
                assert pool._slots[index] is not old[index]
                events.append(("drain", index))

            return end

        for index, replica in enumerate(old):
            replica.drain = drain(index)
        pool._make = make
        assert await pool.change(policy) == pool._slots[0].metadata
        assert events == [("make", 0), ("drain", 0), ("make", 1), ("drain", 1)]
        assert pool._config.policy is policy

    asyncio.run(run())


def test_a_policy_of_other_sizes_is_refused():
    async def run():
        pool = fake_pool()
        fresh, killed = FakeReplica(0), []
        fresh.metadata = {"action_dim": 7}

        async def kill():
            killed.append(True)

        async def make(index, policy):
            return fresh

        fresh.kill, pool._make = kill, make
        before = list(pool._slots)
        with pytest.raises(ReplicaError, match="the new policy has action_dim 7, the served one 2"):
            await pool.change(PolicyConfig(REACH))
        assert pool._slots == before
        assert killed

    asyncio.run(run())


def test_a_job_that_waits_when_the_replicas_are_closed_gets_an_error():
    async def run():
        pool = ReplicaPool(ServeConfig(PolicyConfig(REACH), ServerConfig(replicas=1)))
        waiting = asyncio.create_task(pool.submit(Job(REQUEST)))
        while not pool.waiting:
            await asyncio.sleep(0)
        await pool.close()
        async with asyncio.timeout(120):
            with pytest.raises(OverloadedError, match="the server stops"):
                await waiting

    asyncio.run(run())
