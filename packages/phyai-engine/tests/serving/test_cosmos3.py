"""A Cosmos3 policy speaks the wire of the model owner's DROID server."""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from phyai.cli import main
from phyai.client import PolicyClient, ServerError
from phyai.engine import Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig, ParallelConfig
from phyai.models.cosmos3.droid import PolicyContract
from phyai.models.cosmos3.main_cosmos3 import Cosmos3Args
from phyai.models.cosmos3.random_checkpoint import POLICY, write_random_checkpoint
from phyai.models.cosmos3.sampler import Sampling
from phyai.models.families import detect_family
from phyai.serving import (
    PolicyConfig,
    PolicyServer,
    ServeConfig,
    ServerConfig,
    built_in_adapter,
    read_config,
)
from phyai.serving.jobs import Job
from phyai.serving.loading import LoadedPolicy, load_policy
from phyai.serving.replica_main import config_from_json, config_to_json
from phyai.serving.runner import Runner
from phyai.serving.runner_setup import make_batcher

from .conftest import REACH, Running

SHORT = {**POLICY, "action_chunk_size": 4}


def picture(seed, height=180, width=320):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def request(**changes):
    views = {
        "observation/wrist_image_left": picture(0, 360, 640),
        "observation/exterior_image_1_left": picture(1),
        "observation/exterior_image_2_left": picture(2),
    }
    state = {
        "observation/joint_position": np.linspace(-1, 1, 7),
        "observation/gripper_position": 0.25,
    }
    return views | state | {"prompt": "put the cup on the plate"} | changes


def asking(served):
    """A client that waits as long as a busy machine needs."""
    return PolicyClient(port=served.port, timeout_s=300.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("nano"), policy=SHORT)


@pytest.fixture(scope="module")
def runner(checkpoint):
    """A policy of small pictures, so that answers take tenths of a second."""
    contract = PolicyContract(chunk=4, tier="256", sampling=Sampling(1, 3.0, 5.0))
    arguments = Cosmos3Args(checkpoint, decoder=True, contract=contract)
    device = EngineConfig(DeviceConfig("cpu", torch.float32))
    engine = Engine(EngineArgs("cosmos3_policy", arguments, device))
    return Runner(LoadedPolicy(engine, built_in_adapter("auto", engine.describe())))


@pytest.fixture
def served(runner):
    config = ServerConfig(port=0, request_timeout_s=300.0)

    @contextlib.asynccontextmanager
    async def opened():
        async with PolicyServer(make_batcher(runner, config), runner.metadata(), config) as server:
            yield server

    with Running(opened) as running:
        yield running


def test_a_robot_asks_with_the_keys_of_the_published_server(served):
    with asking(served) as client:
        described = client.metadata
        assert described["model"] == "cosmos3_policy"
        assert (described["action_horizon"], described["action_dim"]) == (4, 8)
        assert described["state_keys"] == list(request())[3:5]
        assert described["image_keys"] == list(request())[:3]
        assert (described["control_hz"], described["video"]) == (15.0, True)
        first, again, other = (client.infer(request(), seed=seed) for seed in (1, 1, 2))
        assert first["actions"].shape == (4, 8)
        np.testing.assert_array_equal(first["action"], first["actions"])
        np.testing.assert_array_equal(first["actions"], again["actions"])
        assert not np.array_equal(first["actions"], other["actions"])
        assert "video" not in first
        # Fresh noise for each request without a seed.
        drawn = [client.infer(request())["actions"] for _ in range(2)]
        assert not np.array_equal(*drawn)


def test_views_may_come_composed_and_the_state_matters(served):
    whole = request()
    views = [whole.pop(key) for key in list(whole)[:3]]
    composed = np.concatenate([views[0], np.concatenate(views[1:], axis=1)])
    with asking(served) as client:
        apart = client.infer(request(), seed=3)["actions"]
        together = client.infer(whole | {"observation/image": composed}, seed=3)["actions"]
        np.testing.assert_array_equal(apart, together)
        open_gripper = client.infer(request(**{"observation/gripper_position": 0.9}), seed=3)
        assert np.abs(open_gripper["actions"] - apart).max() > 1e-4


def test_predicted_frames_come_if_asked_for(served):
    with asking(served) as client:
        asked = request() | {"__options__": {"video": True, "seed": 5}}
        reply = client.infer(asked)
    video = reply["video"]
    # The picture of 540 x 640 in a canvas of 256 x 320, whole cells of 16; 4 actions after it.
    assert (video.dtype, video.shape) == (np.uint8, (5, 256, 288, 3))
    assert video.std() > 1


def test_requests_are_computed_one_at_a_time(served):
    def ask(seed):
        with asking(served) as client:
            return client.infer(request(), seed=seed)

    with ThreadPoolExecutor(3) as threads:
        replies = list(threads.map(ask, [7, 8, 7]))
    assert [reply["server_timing"]["batch"] for reply in replies] == [1, 1, 1]
    np.testing.assert_array_equal(replies[0]["actions"], replies[2]["actions"])


MISTAKES = [
    ({"observation/joint_position": np.zeros(6)}, "the state is of shape (7,)"),
    ({"observation/joint_position": np.full(7, np.nan)}, "not finite"),
    ({"observation/image": picture(3, 540, 640)}, "the pictures are exterior_1"),
    ({"prompt": 3}, "'prompt' is int"),
    ({"__options__": {"noise": np.zeros((4, 8), np.float32)}}, "a seed, not noise"),
    ({"__options__": {"seed": 2**40}}, "seed is 1099511627776"),
    ({"__options__": {"video": 1}}, "video is 1, expected true or false"),
]


def test_what_a_request_lacks_is_said_and_the_connection_goes_on(served):
    with asking(served) as client:
        for change, reason in MISTAKES:
            with pytest.raises(ServerError) as raised:
                client.infer(request(**change))
            assert reason in str(raised.value)
        assert client.infer(request(), seed=0)["actions"].shape == (4, 8)


def test_check_answers_a_made_up_request(checkpoint, capsys):
    command = ["serve", "--checkpoint", str(checkpoint), "--device", "cpu", "--check", "--json"]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["shape"] == [4, 8]
    assert document["metadata"]["adapter"] == "cosmos3_droid"
    assert document["metadata"]["video"] is False


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--preset", "lerobot"], "preset is 'lerobot', but a Cosmos3 checkpoint carries"),
        (["--adapter", "libero"], "unknown adapter 'libero' for a Cosmos3 policy"),
        (["--model", "cosmos3"], "answers no observations"),
    ],
)
def test_options_that_do_not_fit_are_named(checkpoint, words, reason, capsys):
    command = ["serve", "--checkpoint", str(checkpoint), "--device", "cpu", "--check", *words]
    assert main(command) == 1
    assert reason in capsys.readouterr().err


def test_frames_without_the_decoder_are_refused(checkpoint):
    runner = Runner(load_policy(PolicyConfig(checkpoint, device="cpu", num_steps=1)))
    job = {"request": request(), "num_steps": None, "seed": 0, "noise": None}
    (outcome,) = runner.run([Job.from_wire(job | {"continues": None, "video": True})])
    assert "--video" in str(outcome)


def test_the_configuration_file_says_the_same(checkpoint, tmp_path):
    (tmp_path / "server.yaml").write_text(
        f"plugin: cosmos3_policy\nplugin_args: {{checkpoint_dir: {checkpoint}, video: true}}\n"
        "config: {device: {target: cuda}, parallel: {cfg: 2, tp: 4}}\n"
    )
    policy = read_config(tmp_path / "server.yaml").policy
    assert (policy.family, policy.video) == ("cosmos3_policy", True)
    assert policy.parallel == ParallelConfig(cfg=2, tp=4)
    # What a replica reads is what the server was told.
    config = ServeConfig(policy, ServerConfig())
    assert config_from_json(config_to_json(config)).policy == policy


def test_families_are_found_by_the_files(checkpoint):
    assert detect_family(checkpoint) == "cosmos3_policy"
    assert detect_family(REACH) == "pi05"
