"""Chunks whose flow is guided by the chunk before, as the server makes them."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from phyai.client import PolicyClient, ServerError, packb, unpackb
from phyai.guidance import Guidance
from phyai.processing import ProcessingError
from phyai.serving import PolicyConfig, read_recording, replay
from phyai.serving.continuation import Chunk, Continuation, RTCOptions, Schedule
from phyai.serving.jobs import Job
from phyai.serving.loading import LoadedPolicy, load_policy
from phyai.serving.runner import Runner

from .conftest import REACH, FakeEngine

STEPS = 4
PICTURE = np.zeros((84, 84, 3), np.uint8)
REQUEST = {"base": PICTURE, "wrist": PICTURE + 9, "prompt": "reach the red disc"}
STATE = np.array([0.25, -0.5, 0.01, 0.02], np.float32)


def ask(state=STATE, **changes):
    return {**REQUEST, "state": state, **changes}


class Watched:
    """The reach policy's engine, and what it was asked for."""

    def __init__(self, engine):
        self._engine = engine
        self.batches, self.observations, self.steps, self.guidance = [], [], [], []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def infer_batch(self, observations, **options):
        self.batches.append(len(observations))
        self.guidance.append(options.get("guidance"))
        return self._engine.infer_batch(observations, **options)


@pytest.fixture(scope="module")
def policy():
    return load_policy(PolicyConfig(REACH, device="cpu", num_steps=STEPS))


@pytest.fixture
def serve_policy(serve_fake, policy):
    return lambda **settings: serve_fake(Watched(policy.engine), adapter=policy.adapter, **settings)


@pytest.fixture(scope="module")
def runner(policy):
    return Runner(policy)


def direct(policy, seed, left=None, state=STATE, **options):
    """The engine's own answer: normalised and in the robot's units."""
    observation = policy.adapter.observation(ask(state))
    shape = (16, 32)
    guidance = None if left is None else Guidance.build([left], shape, **options)
    return policy.engine.infer(observation, seed=seed, guidance=guidance)


def test_a_served_chunk_is_what_the_engine_makes_with_guidance(serve_policy, policy):
    first = direct(policy, 1)
    left = torch.from_numpy(first.normalized[3:])
    second = direct(policy, 2, left, delay=2, horizon=9, schedule="exp", most=5.0)
    third = direct(policy, 3, torch.from_numpy(second.normalized[5:]), delay=0, horizon=8)
    with serve_policy() as server, PolicyClient(port=server.port) as client:
        assert client.metadata["rtc"] == "guided"
        reply = client.infer(ask(), seed=1, rtc={})
        assert reply["rtc"] == {"continued": False}
        np.testing.assert_allclose(reply["actions"], first.actions, atol=1e-5)
        names = (("delay", "horizon"), ("inference_delay", "execution_horizon"))
        for delay, horizon in names:
            rtc = {"executed": 3, delay: 2, horizon: 9, "max_guidance_weight": 5}
            with PolicyClient(port=server.port) as fresh:
                fresh.infer(ask(), seed=1, rtc={})
                reply = fresh.infer(ask(), seed=2, rtc={**rtc, "schedule": "exp"})
                assert reply["rtc"] == {"continued": True, "mode": "guided"}
                np.testing.assert_allclose(reply["actions"], second.actions, atol=1e-5)
                reply = fresh.infer(ask(), seed=3, rtc={"executed": 5})
                np.testing.assert_allclose(reply["actions"], third.actions, atol=1e-5)
    free = direct(policy, 2).actions
    assert np.abs(second.actions - free).max() > 1e-3


def test_sessions_outlive_connections_and_are_reset(serve_policy, policy):
    free = direct(policy, 2).actions
    with serve_policy() as server:
        with PolicyClient(port=server.port, session="arm-1") as client:
            client.infer(ask(), seed=1)
        with PolicyClient(port=server.port, session="arm-2") as other:
            assert not other.infer(ask(), rtc={})["rtc"]["continued"]
        with PolicyClient(port=server.port, session="arm-1") as client:
            reply = client.infer(ask(), seed=2, rtc={"executed": 1})
            assert reply["rtc"] == {"continued": True, "mode": "guided"}
            assert np.abs(reply["actions"] - free).max() > 1e-3
            client.reset()
            reply = client.infer(ask(), seed=2, rtc={"executed": 1})
            assert reply["rtc"] == {"continued": False}
            np.testing.assert_array_equal(reply["actions"], free)
            assert server.engine.guidance[-1] is None
            assert not client.infer(ask(), rtc={"executed": 16})["rtc"]["continued"]


def mixed(answer):
    rest = Chunk(answer.actions, answer.normalized, answer.units).after(2)
    one = RTCOptions(delay=2, horizon=9, schedule=Schedule.EXP, max_guidance_weight=3.0)
    two = RTCOptions(delay=1, schedule=Schedule.ONES)
    free = [Job(ask(STATE * scale), seed=seed) for scale, seed in ((1, 2), (0.5, 3), (-1, 4))]
    guided = [
        replace(free[0], continues=Continuation(rest, one)),
        free[1],
        replace(free[2], continues=Continuation(rest.after(3), two)),
    ]
    return free, guided


def test_free_requests_of_a_guided_batch_are_untouched(runner):
    before = runner.run_one(ask(), seed=1)
    free, guided = mixed(before)
    alike, together = runner.run(free), runner.run(guided)
    np.testing.assert_array_equal(together[1].actions, alike[1].actions)
    np.testing.assert_array_equal(together[1].normalized, alike[1].normalized)
    assert [answer.guided for answer in together] == [True, False, True]
    assert [answer.batch for answer in together] == [3, 3, 3]
    for index in (0, 2):
        (alone,) = runner.run([guided[index]])
        np.testing.assert_allclose(together[index].normalized, alone.normalized, atol=1e-5)
        assert np.abs(together[index].normalized - alike[index].normalized).max() > 1e-2


def test_a_bad_rest_fails_alone(runner):
    before = runner.run_one(ask(), seed=1)
    _, guided = mixed(before)
    wrong = Continuation(Chunk(np.zeros((4, 3), np.float32)))
    outcomes = runner.run([*guided, replace(guided[1], continues=wrong)])
    assert [answer.guided for answer in outcomes[:3]] == [True, False, True]
    assert isinstance(outcomes[3], ProcessingError)
    assert "expected [T, action_dim=2]" in str(outcomes[3])


def test_a_client_brings_the_rest_in_the_robots_units(serve_policy, policy):
    first = direct(policy, 1)
    rest = first.actions[2:]
    found = policy.engine.normalize_actions(rest, policy.adapter.observation(ask()))
    np.testing.assert_allclose(found[:, :2], first.normalized[2:, :2], atol=1e-5)
    assert not found[:, 2:].any()
    left = torch.from_numpy(first.normalized[2:, :2])
    expected = direct(policy, 2, left, delay=4, horizon=8)
    with serve_policy() as server, PolicyClient(port=server.port) as client:
        reply = client.infer(ask(), seed=2, rtc={"prev": rest, "delay": 4})
        np.testing.assert_allclose(reply["actions"], expected.actions, atol=1e-5)
        long = np.concatenate([rest, rest, rest])
        assert client.infer(ask(), rtc={"prev": long})["rtc"]["mode"] == "guided"
        assert not client.infer(ask(), rtc={"prev": rest[:0]})["rtc"]["continued"]


@pytest.mark.parametrize(
    ("rtc", "reason"),
    [
        ({"prev": np.zeros((4, 3))}, r"actions have shape \(4, 3\), expected \[T, action_dim=2\]"),
        ({"delay": 1, "inference_delay": 1}, "give either delay or inference_delay, not both"),
        ({"horizon": 1, "execution_horizon": 1}, "give either horizon or execution_horizon"),
        ({"execution_horizon": 0}, "rtc.execution_horizon is '0', expected an integer from 1"),
        ({"inference_delay": -1}, "rtc.inference_delay is '-1', expected an integer from 0"),
        ({"schedule": "cubic"}, "rtc.schedule is 'cubic'; allowed: linear, exp, ones, zeros"),
        ({"max_guidance_weight": 0}, "max_guidance_weight is '0', expected a number above 0"),
        ({"max_guidance_weight": float("nan")}, "max_guidance_weight is 'nan'"),
        ({"max_guidance_weight": 1001.0}, "at most 1000"),
        ({"max_guidance_weight": True}, "max_guidance_weight is 'True'"),
        ({"max_guidance_weight": "10"}, "max_guidance_weight is '10'"),
        ({"guidance": 1}, "has no 'guidance'; allowed: executed, .*inference_delay"),
    ],
)
def test_options_that_are_refused(serve_policy, rtc, reason):
    with (
        serve_policy() as server,
        PolicyClient(port=server.port) as client,
        pytest.raises(ServerError, match=reason),
    ):
        client.infer(ask(), rtc=rtc)


def test_numbers_of_numpy_are_options(serve_policy):
    with serve_policy() as server, PolicyClient(port=server.port) as client:
        client.infer(ask(), rtc={})
        rtc = {"max_guidance_weight": np.float32(2.5), "delay": np.int64(1)}
        assert client.infer(ask(), rtc=rtc)["rtc"]["mode"] == "guided"
        assert server.engine.guidance[-1].most.tolist() == [[[2.5]]]


def test_relative_actions_continue_where_the_robot_is_now(tmp_path):
    file = tmp_path / "pointer.yaml"
    file.write_text("""
schema: phyai.adapter/v1
name: pointer
images: {base: base, wrist: wrist}
state: [{key: state, size: 4}]
actions: [{name: x, relative: true, scale: 2, offset: 1}, {name: y, threshold: 0.1}]
""")
    config = PolicyConfig(REACH, device="cpu", num_steps=STEPS, adapter=str(file))
    found = load_policy(config)
    engine = Watched(found.engine)
    runner = Runner(LoadedPolicy(engine, found.adapter))
    before = runner.run_one(ask(), seed=1)
    moved = STATE + np.array([0.125, 0.25, 0, 0], np.float32)
    rest = Chunk(before.actions, before.normalized, before.units).after(4)
    job = Job(ask(moved), seed=2, continues=Continuation(rest))
    (answer,) = runner.run([job])
    assert answer.guided
    previous = engine.guidance[-1].previous[0, :12].numpy()
    # Columns that are not relative stay as the model made them, though the robot saw a threshold.
    np.testing.assert_array_equal(previous[:, 1:], before.normalized[4:, 1:])
    now = found.adapter.observation(ask(moved))
    again = found.engine.plugin.processor.postprocess(torch.from_numpy(previous)[None], [now])[0]
    np.testing.assert_allclose(2 * again[:, 0] + 1, before.actions[4:, 0], atol=1e-5)
    assert np.abs(previous[:, 0] - before.normalized[4:, 0]).min() > 1e-2


def test_numbers_of_another_policy_are_not_used(policy):
    engine = Watched(policy.engine)
    runner = Runner(LoadedPolicy(engine, policy.adapter))
    before = runner.run_one(ask(), seed=1)
    foreign = Chunk(before.actions, before.normalized + 7, "another policy")
    runner.run([Job(ask(), seed=2, continues=Continuation(foreign))])
    previous = engine.guidance[-1].previous[0].numpy()
    np.testing.assert_allclose(previous[:, :2], before.normalized[:, :2], atol=1e-5)
    assert not previous[:, 2:].any()


def test_warming_up_guides_once_for_every_batch_size(policy):
    engine = Watched(policy.engine)
    Runner(LoadedPolicy(engine, policy.adapter)).warm_up([1, 2])
    asked = [(n, g is not None) for n, g in zip(engine.batches, engine.guidance, strict=True)]
    assert asked[-4:] == [(1, False), (1, True), (2, False), (2, True)]


def test_families_without_guidance_are_blended(serve_fake):
    with serve_fake(FakeEngine()) as server, PolicyClient(port=server.port) as client:
        assert client.metadata["rtc"] == "blended"
        request = {"front": PICTURE[:8, :8], "observation.state": STATE[:3], "prompt": "go"}
        first = client.infer(request, seed=1, rtc={})
        rtc = {"delay": 6, "horizon": 6, "max_guidance_weight": 2}
        second = client.infer(request, seed=2, rtc=rtc)
        assert second["rtc"] == {"continued": True, "mode": "blended"}
        np.testing.assert_array_equal(second["actions"], first["actions"])


def test_jobs_and_answers_cross_the_wire(runner):
    before = runner.run_one(ask(), seed=1)
    _, guided = mixed(before)
    for job in guided:
        found = Job.from_wire(unpackb(packb(job.to_wire())))
        (one,), (two,) = runner.run([job]), runner.run([found])
        np.testing.assert_array_equal(one.normalized, two.normalized)
        again = type(two).from_wire(unpackb(packb(two.to_wire())), 3)
        np.testing.assert_array_equal(again.normalized, two.normalized)
        assert (again.units, again.guided, again.replica) == (two.units, two.guided, 3)


def test_guided_traffic_is_answered_again_exactly(serve_policy, policy, tmp_path):
    with (
        serve_policy(record=tmp_path) as server,
        PolicyClient(port=server.port) as client,
    ):
        sent = [client.infer(ask(), rtc={"executed": n, "delay": 1})["actions"] for n in (0, 4, 4)]
    exchanges = list(read_recording(tmp_path))
    assert [exchange.job.continues is None for exchange in exchanges] == [True, False, False]
    np.testing.assert_array_equal(replay(exchanges, Runner(policy)), sent)


def test_a_session_goes_on_in_another_replica(serve_reach, policy):
    first = direct(policy, 1)
    left = torch.from_numpy(first.normalized[3:])
    expected = direct(policy, 2, left, delay=2, horizon=8)
    reach = PolicyConfig(REACH, device="cpu", num_steps=STEPS)
    with serve_reach(reach, replicas=2) as server:
        pool = server.server.service.backend
        with PolicyClient(port=server.port, session="arm") as client:
            assert client.metadata["rtc"] == "guided"
            client.infer(ask(), seed=1)
            # Without other traffic requests go to the first replica that lives.
            os.kill(pool.pids()[0], signal.SIGKILL)
            reply = client.infer(ask(), seed=2, rtc={"executed": 3, "delay": 2})
            assert reply["rtc"] == {"continued": True, "mode": "guided"}
            np.testing.assert_allclose(reply["actions"], expected.actions, atol=1e-5)
