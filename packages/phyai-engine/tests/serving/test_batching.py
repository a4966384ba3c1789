"""Requests that come together: one batch, one queue, one limit of time."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from phyai.client import PolicyClient, ServerError
from phyai.serving import PolicyConfig, ServeConfig, ServerConfig, built_in_adapter
from phyai.serving.batching import Batcher
from phyai.serving.jobs import Answer, Job
from phyai.serving.launch import running_server
from phyai.serving.loading import LoadedPolicy
from phyai.serving.runner import Runner

from .conftest import REACH, FakeEngine, Running, request, wait_until

# A server that waited for the end of its window would answer no test in time.
ENDLESS_MS = 600_000


def ask_together(server, requests):
    """Send each request on a connection of its own at the same time; return replies or errors."""
    clients = [PolicyClient(port=server.port) for _ in requests]
    results = [None] * len(requests)
    barrier = threading.Barrier(len(requests))

    def ask(index, options):
        barrier.wait()
        try:
            results[index] = clients[index].infer(options[0], **options[1])
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=ask, args=item) for item in enumerate(requests)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()
    return results


def test_requests_of_several_connections_are_one_batch(serve_fake):
    with serve_fake(batch_window_ms=ENDLESS_MS, max_batch=4) as server:
        replies = ask_together(server, [(request(n), {"seed": n}) for n in range(4)])
        assert server.engine.batches == [4]
    for number, reply in enumerate(replies):
        assert reply["actions"][0, 1] == number
        assert reply["server_timing"]["batch"] == 4
    with serve_fake() as server, PolicyClient(port=server.port) as client:
        for number, reply in enumerate(replies):
            alone = client.infer(request(number), seed=number)
            np.testing.assert_array_equal(reply["actions"], alone["actions"])


def test_a_lone_client_does_not_wait_for_others(serve_fake):
    with (
        serve_fake(batch_window_ms=ENDLESS_MS) as server,
        PolicyClient(port=server.port) as client,
    ):
        assert client.infer(request(3))["actions"][0, 1] == 3


def test_only_equal_step_counts_share_a_batch(serve_fake):
    asked = [(request(n), {"num_steps": steps}) for n, steps in enumerate((2, 2, 5, 5))]
    with serve_fake(batch_window_ms=0, max_batch=4) as server:
        replies = []
        thread = threading.Thread(target=lambda: replies.extend(ask_together(server, asked)))
        with server.busy():
            thread.start()
            wait_until(lambda: server.server.service.backend.waiting == 4)
        thread.join()
        assert [reply["actions"][0, 1] for reply in replies] == [0, 1, 2, 3]
        assert server.engine.batches == [1, 2, 2]
        assert set(server.engine.steps[1:]) == {2, 5}


def test_as_many_batches_are_in_flight_as_the_engine_has_lanes(serve_fake):
    asked = [(request(n), {}) for n in range(5)]
    with serve_fake(FakeEngine(lanes=2), batch_window_ms=0, max_batch=2) as server:
        engine, backend = server.engine, server.server.service.backend
        engine.open.clear()
        replies = []
        thread = threading.Thread(target=lambda: replies.extend(ask_together(server, asked)))
        thread.start()
        try:
            wait_until(lambda: sum(engine.batches, backend.waiting) == 5)
            wait_until(lambda: len(engine.batches) == 2)
            assert 1 <= backend.waiting <= 3
        finally:
            engine.open.set()
            thread.join()
        assert [reply["actions"][0, 1] for reply in replies] == [0, 1, 2, 3, 4]


def test_every_lane_is_warm():
    engine = FakeEngine(lanes=3)
    runner = Runner(LoadedPolicy(engine, built_in_adapter("auto", engine.describe())))
    runner.warm_up((1, 4))
    # One more tells the width of the noise.
    assert engine.batches == [1, 1, 1, 1, 4, 4, 4]


def test_one_unusable_request_does_not_spoil_its_batch(serve_fake):
    with serve_fake(batch_window_ms=ENDLESS_MS, max_batch=3) as server:
        asked = [(request(1), {}), (request(2, prompt="unusable"), {}), (request(3), {})]
        first, second, third = ask_together(server, asked)
        assert server.engine.batches[0] == 3
        assert isinstance(second, ServerError)
        assert "this task can not be used" in second.text
        assert (first["actions"][0, 1], third["actions"][0, 1]) == (1, 3)


def test_a_full_queue_is_a_clear_error_and_not_a_stall(serve_fake):
    with serve_fake(max_queue=1, max_batch=1, batch_window_ms=0) as server:
        results = []
        asked = [(request(n), {}) for n in range(6)]
        thread = threading.Thread(target=lambda: results.extend(ask_together(server, asked)))
        busy = 'phyai_requests_total{outcome="busy"}'
        with server.busy():
            thread.start()
            wait_until(lambda: server.metric(busy) == 5)
        thread.join()
        refused = [result for result in results if isinstance(result, ServerError)]
        assert len(refused) == server.metric(busy) == 5
        assert all("the server is busy: 1 requests wait" in error.text for error in refused)


def test_a_request_that_takes_too_long_is_answered(serve_fake):
    with serve_fake(request_timeout_s=0.5) as server, PolicyClient(port=server.port) as client:
        server.engine.open.clear()
        with pytest.raises(ServerError, match=r"no answer within 0\.5 s"):
            client.infer(request())
        server.engine.open.set()
        service = server.server.service
        service.config = replace(service.config, request_timeout_s=120.0)
        client.infer(request())


@pytest.mark.parametrize(("sizes", "batches"), [([1, 2, 4, 6], [4, 1]), (None, [5])])
def test_batches_have_the_sizes_that_were_recorded(sizes, batches):
    async def run():
        ran = []

        def answer(jobs):
            ran.append(len(jobs))
            return [Answer(np.zeros(1), {}, len(jobs), "") for _ in jobs]

        batcher = Batcher(answer, max_batch=6, window_s=0, max_queue=9, sizes=sizes)
        await asyncio.gather(*(batcher.submit(Job(request(n))) for n in range(5)))
        await batcher.close()
        return ran

    assert asyncio.run(run()) == batches


def test_a_server_whose_engine_hangs_is_not_ready(monkeypatch):
    engine = FakeEngine()
    runner = Runner(LoadedPolicy(engine, built_in_adapter("auto", engine.describe())))
    runner.warm_up()
    monkeypatch.setattr("phyai.serving.launch.load_runner", lambda config: runner)
    config = ServeConfig(PolicyConfig(REACH), ServerConfig(port=0, request_timeout_s=0.1))
    with Running(lambda: running_server(config)) as server:
        assert server.get("/readyz") == (200, b"ready\n")
        engine.open.clear()
        try:
            with PolicyClient(port=server.port) as client:
                with pytest.raises(ServerError, match="no answer within"):
                    client.infer(request())
                wait_until(lambda: server.get("/readyz") == (503, b"hangs\n"))
                assert server.get("/healthz")[0] == 200
        finally:
            engine.open.set()
        wait_until(lambda: server.get("/readyz") == (200, b"ready\n"))
