"""Chunks that continue the last one."""

import numpy as np
import pytest

from phyai.client import PolicyClient, ServerError
from phyai.serving.continuation import Chunk, RTCOptions
from phyai.serving.jobs import RequestError
from phyai.serving.rtc import Sessions, blend

from .conftest import request


def test_blend_keeps_what_is_already_decided_and_frees_the_rest():
    new, left = np.ones((8, 2), np.float32), np.full((5, 2), 3.0, np.float32)
    joined = blend(new, left, RTCOptions(delay=2, horizon=8))
    assert joined[:2].tolist() == [[3, 3], [3, 3]]
    assert joined[5:].tolist() == [[1, 1]] * 3
    assert (np.diff(joined[:, 0]) <= 0).all()
    np.testing.assert_allclose(joined[2:5, 0], [1 + 2 * w for w in (0.75, 0.5, 0.25)])
    assert new.tolist() == np.ones((8, 2)).tolist()


def test_half_a_chunk_is_the_default_horizon():
    joined = blend(np.zeros((8, 1), np.float32), np.ones((8, 1), np.float32), RTCOptions())
    assert (joined[:4, 0] > 0).all()
    assert (joined[4:] == 0).all()


def test_other_widths_are_refused():
    with pytest.raises(RequestError, match="has 3 columns, the new chunk 2"):
        blend(np.zeros((4, 2), np.float32), np.zeros((4, 3), np.float32), RTCOptions())


def test_sessions_forget_what_is_old_or_too_much():
    now = [0.0]
    sessions = Sessions(limit=2, max_age_s=10, clock=lambda: now[0])
    for name in "abc":
        sessions.put(name, Chunk(np.arange(6.0).reshape(3, 2)))
    assert sessions.left("a", 0) is None
    assert sessions.left("b", 2).actions.tolist() == [[4, 5]]
    assert sessions.left("b", 3) is None
    now[0] = 11.0
    assert sessions.left("c", 0) is None
    sessions.forget("c")
    assert len(sessions) == 1


def test_the_server_continues_the_chunk_of_a_connection(serve_fake):
    with serve_fake() as server, PolicyClient(port=server.port) as client:
        first = client.infer(request(), seed=1, rtc={})
        assert first["rtc"] == {"continued": False}
        rtc = {"executed": 2, "delay": 2, "horizon": 4}
        second = client.infer(request(), seed=2, rtc=rtc)
        assert second["rtc"] == {"continued": True, "mode": "blended"}
        alone = client.infer(request(), seed=2)["actions"]
        left = first["actions"][2:]
        np.testing.assert_array_equal(second["actions"][:2], left[:2])
        np.testing.assert_array_equal(second["actions"][4:], alone[4:])
        between = second["actions"][2:4, 0]
        expected = [w * left[i, 0] + (1 - w) * alone[i, 0] for w, i in ((2 / 3, 2), (1 / 3, 3))]
        np.testing.assert_allclose(between, expected, rtol=1e-5)
        with PolicyClient(port=server.port) as other:
            assert not other.infer(request(), rtc=rtc)["rtc"]["continued"]


def test_a_named_session_outlives_its_connection_and_can_be_reset(serve_fake):
    with serve_fake() as server:
        with PolicyClient(port=server.port, session="arm-1") as client:
            client.infer(request())
        with PolicyClient(port=server.port, session="arm-1") as client:
            assert client.infer(request(), rtc={"executed": 1})["rtc"]["continued"]
            client.reset()
            assert not client.infer(request(), rtc={"executed": 1})["rtc"]["continued"]
            assert client.infer(request(), rtc={"executed": 1})["rtc"]["continued"]
            assert not client.infer(request(), rtc={"executed": 6})["rtc"]["continued"]


def test_a_client_may_bring_the_rest_itself(serve_fake):
    with serve_fake() as server, PolicyClient(port=server.port) as client:
        rest = np.full((3, 2), 9.0)
        reply = client.infer(request(), rtc={"prev": rest, "delay": 3})
        assert (reply["actions"][:3] == 9.0).all()
        for rtc, reason in (
            ({"prev": rest[:, :1]}, "has 1 columns"),
            ({"prev": rest * np.nan}, "not finite"),
            ({"delay": -1}, "rtc.delay is '-1'"),
            ({"schedule": "cubic"}, "allowed: linear, exp, ones, zeros"),
            ({"schedule": np.zeros(2)}, "allowed: linear, exp, ones, zeros"),
            ({"delays": 1}, "has no 'delays'; allowed: executed"),
        ):
            with pytest.raises(ServerError, match=reason):
                client.infer(request(), rtc=rtc)
