"""The protocol: what a client sees, and what the server refuses."""

import asyncio
import base64
import json

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from phyai.client import Dialect, PolicyClient, ServerError, packb, unpackb
from phyai.client.codec import decode
from phyai.serving import PolicyConfig, ServeConfig, ServerConfig
from phyai.serving.launch import change_policy, running_server

from .conftest import REACH, Running, request, wait_until


def socket_of(server, **options):
    return connect(f"ws://127.0.0.1:{server.port}/any/path", compression=None, **options)


def test_metadata_comes_first_then_one_reply_per_request(serve_fake):
    with serve_fake() as server, socket_of(server) as socket:
        metadata = unpackb(socket.recv())
        assert metadata["action_horizon"] == 6
        assert metadata["image_keys"] == ["front", "hand", "spare"]
        assert metadata["state_keys"] == ["observation.state"]
        for number in range(3):
            socket.send(packb(request(number)))
            reply = unpackb(socket.recv())
            assert reply["actions"].shape == (6, 2)
            assert reply["actions"].dtype == np.float32
            assert reply["actions"][0, 1] == number
            assert reply["policy_timing"] == {"infer_ms": 1.0}
            assert ("prev_total_ms" in reply["server_timing"]) == (number > 0)


@pytest.mark.parametrize("dialect", list(Dialect))
def test_replies_are_spelled_like_requests(serve_fake, dialect):
    with serve_fake() as server, socket_of(server) as socket:
        socket.recv()
        socket.send(packb(request(), dialect))
        assert decode(socket.recv())[1] is dialect


def test_an_error_about_the_request_leaves_the_connection_open(serve_fake):
    bad = [
        packb({"prompt": "no picture"}),
        packb(request(prompt=3)),
        packb(request(front=np.zeros((2, 2), np.uint8))),
        packb(request(front=b"no picture")),
        packb(request(**{"observation.state": "text"})),
        packb([1, 2]),
        b"\xc1",
        packb(request(__options__={"num_step": 1})),
    ]
    with serve_fake() as server, socket_of(server) as socket:
        socket.recv()
        for frame in bad:
            socket.send(frame)
            text = socket.recv()
            assert isinstance(text, str)
            assert text.startswith("Traceback")
        socket.send(packb(request()))
        assert isinstance(socket.recv(), bytes)
        assert server.metric('phyai_requests_total{outcome="bad_request"}') == len(bad)


def test_a_failure_of_the_engine_closes_with_1011_after_its_traceback(serve_fake):
    with serve_fake() as server, socket_of(server) as socket:
        socket.recv()
        server.engine.failure = RuntimeError("a kernel broke")
        socket.send(packb(request()))
        text = socket.recv()
        assert "a kernel broke" in text
        assert "infer_batch" in text
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv()
        assert closed.value.rcvd.code == 1011
        assert closed.value.rcvd.reason == (
            "Internal server error. Traceback included in previous frame."
        )
        server.engine.failure = None
        with PolicyClient(port=server.port) as client:
            client.infer(request())


def test_actions_that_are_not_finite_are_never_sent(serve_fake):
    with (
        serve_fake() as server,
        PolicyClient(port=server.port) as client,
        pytest.raises(ServerError, match="not finite"),
    ):
        client.infer(request(float("nan")))


def test_a_wrong_key_is_refused_everywhere_but_on_the_health_pages(serve_fake):
    with serve_fake(api_key="right") as server:
        for key in (None, "wrong", "right "[:4], "righter"):
            with pytest.raises(ServerError, match="401"):
                PolicyClient(port=server.port, api_key=key)
        for page in ("/metadata", "/metrics", "/dashboard", "/dashboard/data"):
            assert server.get(page)[0] == 401
        for page in ("/healthz", "/readyz"):
            assert server.get(page)[0] == 200
        with PolicyClient(port=server.port, api_key="right") as client:
            client.infer(request())
        basic = base64.b64encode(b"me:right").decode()
        assert server.get("/dashboard", {"Authorization": f"Basic {basic}"})[0] == 200
        assert server.get("/metrics", {"Authorization": "Basic !"})[0] == 401
        assert server.get("/metadata", {"Authorization": "Api-Key right"})[0] == 200


def test_a_web_page_of_another_site_can_not_connect(serve_fake):
    with serve_fake() as server, pytest.raises(InvalidStatus) as refused:
        socket_of(server, origin="http://example.org")
    assert refused.value.response.status_code == 403


def test_only_this_machine_can_reach_it_by_default(serve_fake):
    with serve_fake() as server:
        addresses = {sock.getsockname()[0] for sock in server.server._server.sockets}
        assert addresses == {"127.0.0.1"}


def test_frames_beyond_the_limit_close_the_connection(serve_fake):
    with serve_fake(max_frame_bytes=100_000) as server:
        with socket_of(server) as socket:
            socket.recv()
            socket.send(b"\0" * 100_001)
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv()
            assert closed.value.rcvd.code == 1009
        with socket_of(server) as socket:
            socket.recv()
            socket.send("text")
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv()
            assert closed.value.rcvd.code == 1007
        with PolicyClient(port=server.port) as client:
            client.infer(request())


def test_too_many_connections_are_refused(serve_fake):
    with serve_fake(max_connections=1) as server, PolicyClient(port=server.port) as client:
        with pytest.raises(ServerError, match="503: all 1 connections are taken"):
            PolicyClient(port=server.port, connect_timeout_s=0.1)
        client.infer(request())
        assert server.metric('phyai_refused_total{reason="full"}') == 1


def test_handshake_and_pages_answer_while_the_engine_computes(serve_fake):
    with serve_fake() as server, server.busy() as replies:
        for _ in range(3):
            assert server.get("/healthz") == (200, b"OK\n")
            with socket_of(server) as socket:
                socket.recv(10)
                assert socket.ping().wait(120)
        assert replies == []


def test_stopping_answers_what_is_in_progress_and_refuses_the_rest(serve_fake):
    with serve_fake() as server, PolicyClient(port=server.port) as idle:
        with server.busy() as replies:
            server.stop()
            wait_until(lambda: server.server.state()["state"] == "draining")
            with pytest.raises(ServerError, match="the server stops"):
                idle.infer(request())
            with pytest.raises((TimeoutError, ServerError)):
                PolicyClient(port=server.port, connect_timeout_s=0.1)
        assert replies[0]["actions"][0, 1] == 4


def test_what_takes_longer_than_the_drain_is_not_waited_for(serve_fake):
    with serve_fake(drain_s=0.1, request_timeout_s=3600.0) as server:
        server.engine.open.clear()
        with socket_of(server) as socket:
            socket.recv()
            server.engine.computing.clear()
            socket.send(packb(request()))
            assert server.engine.computing.wait(120)
            server.stop()
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(120)
            assert closed.value.rcvd.code == 1001
        try:
            # The fake engine gives up after 120 s.
            server.thread.join(60)
            assert not server.thread.is_alive()
        finally:
            server.engine.open.set()


class OtherPool:
    """Replicas that change to a policy with other metadata, or can not."""

    waiting = 0

    def __init__(self, answer):
        self.answer = answer

    async def start(self):
        return {"model": "old", "rtc": "guided"}

    def states(self):
        return ["ready"]

    async def submit(self, job):
        raise NotImplementedError

    async def close(self):
        pass

    async def change(self, policy):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "rtc"),
    [({"model": "new", "rtc": "blended"}, "blended"), (ValueError("no such policy"), "guided")],
)
def test_after_a_change_of_policy_clients_are_told_the_new_metadata(answer, rtc):
    config = ServeConfig(PolicyConfig(REACH), ServerConfig(port=0))
    with Running(lambda: running_server(config, OtherPool(answer))) as server:
        changing = change_policy(server.server, lambda: config)
        asyncio.run_coroutine_threadsafe(changing, server.loop).result(120)
        with PolicyClient(port=server.port) as client:
            assert client.metadata["rtc"] == rtc
        assert json.loads(server.get("/metadata")[1])["rtc"] == rtc
