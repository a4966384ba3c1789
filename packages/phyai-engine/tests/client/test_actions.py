"""Queue, latency and interpolation, and the loop that asks ahead."""

import threading
import time

import numpy as np
import pytest

from phyai.client import ActionInterpolator, ActionQueue, LatencyTracker, RealtimePolicy


def chunk(start, length=6):
    return np.arange(start, start + length, dtype=np.float32)[:, None]


def test_a_queue_gives_a_chunk_row_by_row_and_skips_what_has_passed():
    queue = ActionQueue()
    assert queue.pop() is None
    queue.replace(chunk(0), 0)
    assert [float(queue.pop()[0]) for _ in range(2)] == [0, 1]
    assert (len(queue), queue.position) == (4, 2)
    position, rest = queue.rest()
    assert (position, rest.ravel().tolist()) == (2, [2, 3, 4, 5])
    queue.replace(chunk(10), 3)
    assert (len(queue), float(queue.pop()[0])) == (3, 13)
    queue.replace(chunk(20), 9)
    assert (len(queue), queue.pop()) == (0, None)
    assert (queue.rest()[0], queue.rest()[1].shape) == (9, (0, 1))
    queue.clear()
    assert queue.position == 0
    with pytest.raises(ValueError, match="elapsed is -1"):
        queue.replace(chunk(0), -1)


def test_the_delay_is_that_of_the_slowest_recent_request_rounded_up():
    latency = LatencyTracker(window=2)
    assert latency.delay(50) == 0
    for seconds in (0.5, 0.061, 0.02):
        latency.add(seconds)
    assert latency.delay(50) == 4
    assert LatencyTracker().worst_s == 0
    latency.add(0.04)
    assert latency.delay(50) == 2
    with pytest.raises(ValueError, match="window is 0"):
        LatencyTracker(0)


def test_interpolation_ends_on_every_action():
    smooth = ActionInterpolator(4)
    first = list(smooth.steps(np.array([2.0])))
    assert [float(step[0]) for step in first] == [2, 2, 2, 2]
    second = list(smooth.steps(np.array([4.0])))
    assert [float(step[0]) for step in second] == [2.5, 3.0, 3.5, 4.0]
    smooth.reset()
    assert [float(step[0]) for step in smooth.steps(np.array([0.0]))] == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="factor is 0"):
        ActionInterpolator(0)


class FakeClient:
    """Its chunks count on from the observation, so that every action names its step."""

    def __init__(self, seconds):
        self.metadata = {"action_horizon": 20}
        self.seconds = seconds
        self.rtc = []
        self.failures = 0

    def infer(self, observation, *, rtc=None):
        self.rtc.append(rtc)
        time.sleep(self.seconds)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("lost")
        return {"actions": chunk(observation["step"], 20)}


def test_actions_stay_in_step_with_the_robot_while_the_server_is_slow():
    client, done = FakeClient(0.05), [0]
    with RealtimePolicy(client, lambda: {"step": done[0]}, hz=100, horizon=12) as policy:
        for _ in range(60):
            action = policy.next_action(timeout_s=120)
            # An observation that is taken between two steps may already count the next one.
            assert abs(float(action[0]) - done[0]) <= 1
            done[0] += 1
            time.sleep(0.01)
    assert client.rtc[0].pop("prev").shape[0] == 0
    assert client.rtc[0] == {"delay": 0, "horizon": 12}
    assert not any("prev" in rtc for rtc in client.rtc)
    assert all(rtc["delay"] >= 5 for rtc in client.rtc[1:])
    assert all(rtc["executed"] >= 9 for rtc in client.rtc[1:])
    assert len(client.rtc) >= 3


def test_after_a_failure_the_rest_of_the_chunk_is_sent_along(monkeypatch):
    monkeypatch.setattr("phyai.client.realtime._PAUSE_AFTER_FAILURE_S", 0.0)
    client = FakeClient(0.0)

    def wait_for(requests):
        deadline = time.monotonic() + 120
        while len(client.rtc) < requests and time.monotonic() < deadline:
            time.sleep(0.001)

    with RealtimePolicy(client, lambda: {"step": 100}, hz=100, threshold=5) as policy:
        policy.next_action(timeout_s=120)
        client.failures = 2
        for _ in range(15):
            policy.next_action(timeout_s=120)
        wait_for(4)
        for _ in range(16):
            policy.next_action(timeout_s=120)
        wait_for(5)
    _, lost, second, third, known = client.rtc[:5]
    assert lost["executed"] in (15, 16)
    for rtc in (second, third):
        assert "executed" not in rtc
        assert len(rtc["prev"]) in (4, 5)
        np.testing.assert_array_equal(rtc["prev"], chunk(100, 20)[-len(rtc["prev"]) :])
    assert "prev" not in known


def test_without_rtc_a_chunk_replaces_the_rest():
    client = FakeClient(0.0)
    with RealtimePolicy(client, lambda: {"step": 0}, hz=100, rtc=False) as policy:
        assert policy.next_action(timeout_s=120) is not None
    assert client.rtc[0] is None


def test_a_few_failures_are_outlived_and_ten_end_it(monkeypatch):
    monkeypatch.setattr("phyai.client.realtime._PAUSE_AFTER_FAILURE_S", 0.0)
    client = FakeClient(0.0)
    client.failures = 9
    with RealtimePolicy(client, lambda: {"step": 0}, hz=100) as policy:
        assert policy.next_action(timeout_s=120) is not None
    client.failures = 10**6
    with RealtimePolicy(client, lambda: {"step": 0}, hz=100) as policy:
        with pytest.raises(RuntimeError, match="gave up") as raised:
            policy.next_action(timeout_s=120)
        assert isinstance(raised.value.__cause__, ConnectionError)
    assert threading.active_count() < 50


class HeldClient(FakeClient):
    """It answers once it may."""

    def __init__(self):
        super().__init__(0.0)
        self.may_answer = threading.Event()

    def infer(self, observation, *, rtc=None):
        assert self.may_answer.wait(120)
        return super().infer(observation, rtc=rtc)


def test_nothing_in_time_is_none():
    client = HeldClient()
    with RealtimePolicy(client, lambda: {"step": 0}, hz=100) as policy:
        try:
            assert policy.next_action() is None
        finally:
            client.may_answer.set()
    with pytest.raises(ValueError, match="hz is 0"):
        RealtimePolicy(FakeClient(0.0), dict, hz=0)
