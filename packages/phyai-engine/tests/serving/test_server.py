"""The protocol: what a client sees, and what the server refuses."""

import base64
import io
import json
import struct
import threading
import time
import zlib

import numpy as np
import pytest
from PIL import Image
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from phyai.client import Dialect, PolicyClient, ServerError, packb, unpackb
from phyai.client.codec import decode

from .conftest import FakeEngine, request


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


def test_handshake_and_pages_answer_at_once_while_the_engine_computes(serve_fake):
    with serve_fake() as server, PolicyClient(port=server.port) as busy:
        server.engine.seconds = 1.0
        thread = threading.Thread(target=busy.infer, args=(request(),))
        thread.start()
        time.sleep(0.1)
        for _ in range(3):
            started = time.perf_counter()
            assert server.get("/healthz") == (200, b"OK\n")
            with socket_of(server) as socket:
                socket.recv()
                assert socket.ping().wait(1)
            assert time.perf_counter() - started < 0.2
        assert thread.is_alive()
        thread.join()


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
    with serve_fake(batch_window_ms=500, max_batch=4) as server:
        started = time.perf_counter()
        replies = ask_together(server, [(request(n), {"seed": n}) for n in range(4)])
        assert time.perf_counter() - started < 0.4
        assert server.engine.batches == [4]
        for number, reply in enumerate(replies):
            assert reply["actions"][0, 1] == number
            assert reply["server_timing"]["batch"] == 4
        alone = [ask_together(server, [(request(n), {"seed": n})])[0] for n in range(4)]
        for reply, single in zip(replies, alone, strict=True):
            np.testing.assert_array_equal(reply["actions"], single["actions"])


def test_a_lone_client_does_not_wait_for_others(serve_fake):
    with serve_fake(batch_window_ms=1000) as server, PolicyClient(port=server.port) as client:
        started = time.perf_counter()
        client.infer(request())
        assert time.perf_counter() - started < 0.5


def test_only_equal_step_counts_share_a_batch(serve_fake):
    with serve_fake(batch_window_ms=300, max_batch=4) as server:
        asked = [(request(n), {"num_steps": steps}) for n, steps in enumerate((2, 2, 5, 5))]
        replies = ask_together(server, asked)
        assert [reply["actions"][0, 1] for reply in replies] == [0, 1, 2, 3]
        assert sorted(server.engine.batches) == [2, 2]
        assert set(server.engine.steps) == {2, 5}


def test_one_unusable_request_does_not_spoil_its_batch(serve_fake):
    with serve_fake(batch_window_ms=300, max_batch=3) as server:
        asked = [(request(1), {}), (request(2, prompt="unusable"), {}), (request(3), {})]
        first, second, third = ask_together(server, asked)
        assert isinstance(second, ServerError)
        assert "this task can not be used" in second.text
        assert (first["actions"][0, 1], third["actions"][0, 1]) == (1, 3)


def test_a_full_queue_is_a_clear_error_and_not_a_stall(serve_fake):
    with serve_fake(max_queue=1, max_batch=1, batch_window_ms=0) as server:
        server.engine.seconds = 0.3
        results = ask_together(server, [(request(n), {}) for n in range(6)])
        refused = [result for result in results if isinstance(result, ServerError)]
        assert len(refused) in (4, 5)
        assert all("the server is busy: 1 requests wait" in error.text for error in refused)
        assert server.metric('phyai_requests_total{outcome="busy"}') == len(refused)


def test_a_request_that_takes_too_long_is_answered(serve_fake):
    with serve_fake(request_timeout_s=0.1) as server, PolicyClient(port=server.port) as client:
        server.engine.seconds = 0.4
        with pytest.raises(ServerError, match=r"no answer within 0\.1 s"):
            client.infer(request())
        server.engine.seconds = 0.0
        time.sleep(0.5)
        client.infer(request())


def test_stopping_answers_what_is_in_progress_and_refuses_the_rest(serve_fake):
    with serve_fake() as server:
        working, idle = (PolicyClient(port=server.port) for _ in range(2))
        server.engine.seconds = 0.6
        replies = []
        thread = threading.Thread(target=lambda: replies.append(working.infer(request(4))))
        thread.start()
        time.sleep(0.2)
        server.stop()
        time.sleep(0.1)
        with pytest.raises(ServerError, match="the server stops"):
            idle.infer(request())
        with pytest.raises((TimeoutError, ServerError)):
            PolicyClient(port=server.port, connect_timeout_s=0.1)
        thread.join()
        assert replies[0]["actions"][0, 1] == 4


def test_options(serve_fake):
    with serve_fake() as server, PolicyClient(port=server.port) as client:
        noise = np.full((6, 4), 0.25, np.float32)
        assert client.infer(request(), noise=noise)["actions"][0, 0] == 0.25
        one, two = (client.infer(request(), seed=3)["actions"] for _ in range(2))
        np.testing.assert_array_equal(one, two)
        assert client.infer(request())["actions"][0, 0] != client.infer(request())["actions"][0, 0]
        client.infer(request(), num_steps=4)
        assert server.engine.steps[-1] == 4
        with pytest.raises(ServerError, match=r"noise has shape \(5, 4\); this policy needs"):
            client.infer(request(), noise=noise[:5])
        with pytest.raises(ServerError, match="either noise or seed"):
            client.infer(request(), noise=noise, seed=1)
        with pytest.raises(
            ServerError, match="num_steps is '0', expected an integer from 1 to 100"
        ):
            client.infer(request(), num_steps=0)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_encoded_pictures(serve_fake, kind):
    pixels = np.full((16, 24, 3), (200, 40, 90), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, quality=95)
    data = file.getvalue()
    with serve_fake() as server, PolicyClient(port=server.port) as client:
        for value in (data, np.frombuffer(data, np.uint8)):
            client.infer(request(front=value))
            seen = server.engine.observations[-1].images["front"]
            assert seen.shape == (16, 24, 3)
            assert np.abs(seen.astype(int) - pixels).max() < 12
        with pytest.raises(ServerError, match="can not be decoded"):
            client.infer(request(front=data[: len(data) // 2]))


def test_a_picture_that_claims_to_be_huge_is_refused_before_it_is_decoded(serve_fake):
    head = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    bomb = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    with (
        serve_fake() as server,
        PolicyClient(port=server.port) as client,
        pytest.raises(ServerError, match="pixels"),
    ):
        client.infer(request(front=bomb))


def test_prompts_of_every_kind(serve_fake):
    with serve_fake() as server, PolicyClient(port=server.port) as client:
        for prompt in ("go π", "go π".encode(), np.array("go π"), np.array(["go π"])):
            client.infer(request(prompt=prompt))
            assert server.engine.observations[-1].task == "go π"
        without = request()
        without["task"] = without.pop("prompt")
        client.infer(without)
        with pytest.raises(ServerError, match="no UTF-8"):
            client.infer(request(prompt=b"\xff"))


def test_pages(serve_fake):
    with serve_fake() as server, PolicyClient(port=server.port) as client:
        assert server.get("/readyz") == (200, b"ready\n")
        assert server.get("/nothing")[0] == 404
        assert json.loads(server.get("/dashboard/data")[1])["last"] is None
        assert server.get("/dashboard/image/front")[0] == 404
        client.infer(request(), seed=1)
        data = json.loads(server.get("/dashboard/data")[1])
        assert data["connections"] == 1
        assert data["latency"]["count"] == sum(data["latency"]["counts"]) == 1
        assert data["last"]["images"] == ["front"]
        assert np.array(data["last"]["actions"]).shape == (6, 2)
        picture = Image.open(io.BytesIO(server.get("/dashboard/image/front")[1]))
        assert np.asarray(picture).tolist() == np.full((8, 8, 3), 7).tolist()
        assert json.loads(server.get("/metadata")[1])["action_dim"] == 2
        assert b"fake \xc2\xb7 generic" in server.get("/dashboard")[1]
        assert server.metric('phyai_requests_total{outcome="ok"}') == 1
        assert server.metric("phyai_connections") == 1
        assert server.metric("phyai_batch_size_sum") == 1
        assert server.metric('phyai_stage_seconds_count{stage="queue"}') == 1


def test_the_page_can_be_turned_off(serve_fake):
    with serve_fake(dashboard=False) as server:
        assert server.get("/dashboard")[0] == 404
        assert server.get("/dashboard/data")[0] == 404


def test_an_unready_engine_is_not_ready(serve_fake):
    with serve_fake() as server:
        server.server._engines = lambda: ["loading"]
        assert server.get("/readyz") == (503, b"loading\n")
        assert server.get("/healthz")[0] == 200


def test_adapter_of_the_preset_is_taken(serve_fake):
    engine = FakeEngine("openpi/pi05_libero", state_dim=8)
    with serve_fake(engine) as server, PolicyClient(port=server.port) as client:
        assert client.metadata["adapter"] == "libero"
        assert client.metadata["control_hz"] == 20.0
        picture = np.zeros((8, 8, 3), np.uint8)
        keys = {"observation/image": picture, "observation/wrist_image": picture}
        client.infer({**keys, "observation/state": np.zeros(8), "prompt": "go"})
        assert set(server.engine.observations[-1].images) == {"front", "hand"}
