"""Cosmos3 through the engine: requests, observations, several processes, and what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from phyai.dispatch.config import KernelConfig
from phyai.engine import Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig, ParallelConfig, RuntimeConfig
from phyai.models.cosmos3.droid import ActionSpace, PolicyContract
from phyai.models.cosmos3.main_cosmos3 import Cosmos3Args
from phyai.models.cosmos3.requests import (
    InverseDynamicsRequest,
    PolicyRequest,
    TextToImageRequest,
    TextToVideoRequest,
)
from phyai.models.cosmos3.results import ImageResult
from phyai.models.cosmos3.sampler import Sampling
from phyai.models.pi05.main_pi05 import PI05Args
from phyai.processing import Observation, ProcessingError

TINY = Path(__file__).parents[2] / "fixtures" / "pi05_tiny"
CONTRACT = PolicyContract(chunk=4, tier="256", sampling=Sampling(2, 3.0, 5.0))
TWO = Sampling(2, 3.0, 5.0)


def build(folder, plugin="cosmos3_policy", *, device="cpu", policy=None, parallel=None, **args):
    config = EngineConfig(
        DeviceConfig(device, torch.float32),
        KernelConfig(policy_config=policy),
        RuntimeConfig(freeze_kernel_choices=True),
        parallel=parallel or ParallelConfig(),
    )
    args.setdefault("contract", CONTRACT)
    return Engine(EngineArgs(plugin, Cosmos3Args(folder, **args), config))


def picture(seed, height=90, width=160):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def observe(seed=0, **changes):
    images = {"wrist": picture(seed), "exterior_1": picture(1), "exterior_2": picture(2)}
    state = np.linspace(-1, 1, 8, dtype=np.float32)
    return replace(Observation(images, state, "put the cup away"), **changes)


@pytest.fixture(scope="module")
def policy(tiny_nano):
    return build(tiny_nano)


@pytest.fixture(scope="module")
def generator(tiny_nano):
    return build(tiny_nano, "cosmos3")


def test_an_observation_is_the_request_it_stands_for(policy):
    seen = observe()
    chunk = policy.infer(seen, seed=3)
    request = PolicyRequest(
        prompt=seen.task,
        wrist=seen.images["wrist"],
        exteriors=[picture(1), picture(2)],
        joint_position=seen.state[:7],
        gripper_position=float(seen.state[7]),
        seed=3,
    )
    result = policy.run(request)
    np.testing.assert_array_equal(chunk.actions, result.actions)
    assert chunk.actions.shape == (4, 8)
    assert chunk.video is None
    assert chunk.prompt == result.prompt
    assert {"encode", "denoise", "total", "model"} <= set(chunk.timing_ms)
    assert "decode" not in chunk.timing_ms


def test_several_observations_are_answered_one_by_one(policy):
    items = [observe(0), observe(7)]
    both = policy.infer_batch(items, seed=1)
    alone = [policy.infer(item, seed=1) for item in items]
    for together, apart in zip(both, alone, strict=True):
        np.testing.assert_array_equal(together.actions, apart.actions)
    assert not np.array_equal(both[0].actions, both[1].actions)
    # Two requests without a seed take two numbers of the stream.
    drawn = policy.infer_batch([items[0], items[0]])
    assert not np.array_equal(drawn[0].actions, drawn[1].actions)


def test_steps_are_those_of_the_call_then_of_the_arguments(tiny_nano, policy):
    three = policy.infer(observe(), seed=1, num_steps=3).actions
    other = build(tiny_nano, num_steps=3)
    np.testing.assert_array_equal(other.infer(observe(), seed=1).actions, three)
    assert not np.array_equal(policy.infer(observe(), seed=1).actions, three)
    assert other.describe()["num_steps"] == 3


def test_predicted_frames_need_the_decoder(policy, generator):
    with pytest.raises(ProcessingError, match=r"Cosmos3Args\(decoder=True\)"):
        policy.infer(observe(), video=True)
    with pytest.raises(ProcessingError, match="decoder is not loaded"):
        policy.run(TextToImageRequest(prompt="x", height=32, width=32, sampling=TWO))
    # Finding actions needs no decoder.
    frames = np.stack([picture(index, 32, 32) for index in range(5)])
    request = InverseDynamicsRequest(
        prompt="x", domain="pusht", frames=frames, sampling=Sampling(1, 1.0, 5.0)
    )
    assert policy.run(request).actions.shape == (4, 2)
    assert isinstance(
        generator.run(TextToImageRequest(prompt="x", height=32, width=32, sampling=TWO)),
        ImageResult,
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"state": None}, "the state is missing; this policy reads 8 numbers: 7 joint positions"),
        ({"state": np.zeros(7)}, r"the state is of shape \(7,\)"),
        ({"images": {}}, "the pictures are missing"),
        ({"images": {"wrist": picture(0)}}, "the pictures are wrist; this policy reads wrist, ext"),
        ({"images": {"image": picture(0), "wrist": picture(0)}}, "or image alone"),
    ],
)
def test_observations_that_do_not_fit_are_refused(policy, changes, reason):
    with pytest.raises(ProcessingError, match=reason):
        policy.infer(observe(**changes), seed=0)


def test_noise_is_refused(policy):
    with pytest.raises(ValueError, match="takes no noise but a seed"):
        policy.infer(observe(), noise=torch.zeros(1, 4, 8))


def test_a_policy_of_poses_reads_seven_numbers(tiny_nano):
    engine = build(tiny_nano, contract=replace(CONTRACT, space=ActionSpace.POSE))
    pose = np.array([0.3, 0.0, 0.4, 0.0, 0.0, 0.0, 1.0], np.float32)
    chunk = engine.infer(observe(state=pose), seed=0)
    assert chunk.actions.shape == (4, 8)
    np.testing.assert_allclose(np.linalg.norm(chunk.actions[:, 3:7], axis=1), 1.0, atol=1e-5)
    with pytest.raises(ProcessingError, match="7 numbers: position and quaternion"):
        engine.infer(observe(), seed=0)
    assert engine.describe()["state_dim"] == 7


def test_families_say_what_they_answer(policy, generator):
    with pytest.raises(ValueError, match="'cosmos3' answers no observations; use run"):
        generator.infer(observe())
    other = Engine(EngineArgs("pi05", PI05Args(TINY), EngineConfig(DeviceConfig("cpu"))))
    with pytest.raises(ValueError, match="'pi05' has no requests of its own; use infer"):
        other.run(TextToImageRequest(prompt="x"))
    with pytest.raises(ValueError, match="'pi05' predicts no video"):
        other.infer(observe(), video=True)


def test_the_description_tells_what_runs(policy, generator):
    described = policy.describe()
    assert (described["plugin"], described["family"]) == ("cosmos3_policy", "cosmos3")
    assert (described["variant"], described["ranks"]) == ("qwen", 1)
    assert described["parts"] == ["transformer", "vae"]
    assert (described["decodes_video"], described["sound"]) == (False, False)
    assert described["processing"]["sampling"]["steps"] == 2
    assert generator.describe()["parts"] == ["sound", "transformer", "vae"]
    # The encoder is a part of the VAE.
    parts = (
        policy.describe()["bytes_by_part"]["vae"],
        generator.describe()["bytes_by_part"]["vae"],
    )
    assert 0 < parts[0] < parts[1]
    assert policy.weight_bytes() == sum(described["bytes_by_part"].values())


def test_rules_of_a_policy_see_the_family_and_the_towers(tiny_edge):
    rules = [
        {
            "id": "generation",
            "match": {"op": "gemm", "role": "generation", "model.family": "cosmos3"},
            "restrict_to": "torch.gemm.bf16",
        }
    ]
    engine = build(tiny_edge, policy={"rules": rules})
    engine.infer(observe(), seed=0, num_steps=1)
    matched = {
        trace.role: set(trace.matched_rules) for trace in engine.explain() if trace.op == "gemm"
    }
    assert matched["generation"] == {"generation"}
    assert matched["understanding"] == set()


def test_several_processes_answer_as_one_does(tiny_nano, policy):
    engine = build(tiny_nano, parallel=ParallelConfig(cfg=2))
    try:
        described = engine.describe()
        assert (described["ranks"], described["variant"]) == (2, "qwen")
        chunk = engine.infer(observe(), seed=4)
        np.testing.assert_allclose(
            chunk.actions, policy.infer(observe(), seed=4).actions, atol=1e-4
        )
        with pytest.raises(ProcessingError, match="the pictures are missing"):
            engine.infer(observe(images={}))
        request = InverseDynamicsRequest(
            prompt="x",
            domain="pusht",
            frames=np.stack([picture(index, 32, 32) for index in range(5)]),
            sampling=TWO,
            return_latents=True,
        )
        ours, theirs = engine.run(request), policy.run(request)
        np.testing.assert_allclose(ours.actions, theirs.actions, atol=1e-4)
        torch.testing.assert_close(ours.latents, theirs.latents, atol=1e-4, rtol=1e-4)
        assert {trace.role for trace in engine.explain()} >= {"generation", "understanding"}
        assert engine.weight_bytes() == policy.weight_bytes()
    finally:
        engine.close()


def test_an_engine_alone_leaves_the_process_group_of_its_process_alone(tiny_nano, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    assert build(tiny_nano).infer(observe(), seed=0, num_steps=1).actions.shape == (4, 8)


@pytest.mark.parametrize(
    ("plugin", "device", "reason"),
    [
        ("pi05", "cpu", "'pi05' runs on one device; parallel is"),
        ("cosmos3", "cpu:0", "2 ranks need a device each; use 'cpu'"),
    ],
)
def test_parallelism_that_cannot_be_is_refused(tiny_nano, plugin, device, reason):
    arguments = PI05Args(TINY) if plugin == "pi05" else Cosmos3Args(tiny_nano)
    config = EngineConfig(DeviceConfig(device), parallel=ParallelConfig(tp=2))
    with pytest.raises(ValueError, match=reason):
        Engine(EngineArgs(plugin, arguments, config))


def test_sound_is_loaded_only_if_wanted(tiny_nano):
    quiet = build(tiny_nano, "cosmos3", sound=False)
    request = TextToVideoRequest(
        prompt="x", height=32, width=32, frames=5, sound=True, sampling=TWO
    )
    with pytest.raises(ProcessingError, match="no sound decoder"):
        quiet.run(request)
