"""Robots' requests to observations and the policy's actions to robots."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phyai.dispatch import PolicyError
from phyai.processing import ProcessingError
from phyai.serving import PolicyConfig, RequestError, built_in_adapter, read_adapter
from phyai.serving.loading import load_policy
from phyai.serving.runner import Runner
from phyai.serving.vectors import ActionPart, relative_mask, unmap_actions

from .conftest import CAMERAS, REACH, REPOSITORY, FakeEngine

PICTURE = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
ARM = """
schema: phyai.adapter/v1
name: lab-arm
control_hz: 20
execute: 4
images: {eye: front, hand_eye: hand}
ignored_images: [depth]
prompt: {key: instruction, default: tidy up}
state:
  - {key: joints, size: 2, scale: [1, -1]}
  - {key: gripper, scale: -1, offset: 1}
actions:
  - {name: joints, size: 2, relative: true, scale: [1, -1]}
  - {name: gripper, scale: -2, offset: 1, threshold: 0.25}
reset_pose: [0.5, -1]
"""


def adapter(name, **options):
    return built_in_adapter(name, FakeEngine(**options).describe())


def test_libero():
    wire = {
        "observation/image": PICTURE,
        "observation/wrist_image": PICTURE + 1,
        "observation/state": np.arange(8.0),
        "prompt": "put the bowl down",
    }
    found = adapter("libero").observation(wire)
    np.testing.assert_array_equal(found.images["front"], PICTURE)
    np.testing.assert_array_equal(found.images["hand"], PICTURE + 1)
    assert found.state.tolist() == list(range(8))
    assert found.task == "put the bowl down"


def test_droid_joins_joints_and_gripper():
    wire = {
        "observation/exterior_image_1_left": PICTURE,
        "observation/wrist_image_left": PICTURE,
        "observation/joint_position": np.arange(7.0),
        "observation/gripper_position": np.array([0.5]),
        "prompt": b"pick",
    }
    found = adapter("droid").observation(wire)
    assert found.state.tolist() == [0, 1, 2, 3, 4, 5, 6, 0.5]
    scalar = adapter("droid").observation(wire | {"observation/gripper_position": 0.5})
    assert scalar.state.tolist() == found.state.tolist()
    del wire["observation/gripper_position"]
    with pytest.raises(ProcessingError, match="lacks 'observation/gripper_position'"):
        adapter("droid").observation(wire)


def test_aloha_takes_channels_first_pictures_and_ignores_the_low_camera():
    names = ("cam_high", "cam_low", "cam_left_wrist")
    wire = {"images": dict.fromkeys(names, PICTURE.transpose(2, 0, 1)), "state": np.zeros(14)}
    found = adapter("aloha").observation(wire | {"prompt": "fold"})
    assert set(found.images) == {"front", "hand"}
    assert found.images["front"].shape == (3, 4, 4)
    assert adapter("aloha").reset_pose == (0.0, -1.5, 1.5, 0.0, 0.0, 0.0)
    assert set(adapter("aloha").example((4, 4), 14)["images"]) == {
        "cam_high",
        "cam_left_wrist",
        "cam_right_wrist",
    }


@pytest.mark.parametrize("state", ["observation.state", "observation/state", "state"])
def test_generic_reads_the_names_of_the_checkpoint(state):
    for images in (
        {"front": PICTURE},
        {"observation.images.front": PICTURE},
        {"images": {"front": PICTURE}},
    ):
        found = adapter("auto").observation({**images, state: np.ones(3), "task": "go"})
        assert set(found.images) == {"front"}
        assert found.state.tolist() == [1, 1, 1]


def test_what_is_wrong_is_named():
    generic = adapter("generic")
    state = {"state": np.ones(3), "prompt": "go"}
    with pytest.raises(RequestError, match="unknown image 'back'; adapter 'generic' reads: front"):
        generic.observation({"images": {"back": PICTURE}, **state})
    with pytest.raises(RequestError, match="two images are for camera 'front'"):
        generic.observation({"front": PICTURE, "observation.images.front": PICTURE, **state})
    with pytest.raises(RequestError, match="no image; send at least one of: front"):
        generic.observation(state)
    with pytest.raises(RequestError, match=r"image 'front' is int64 \(4, 4, 3\)"):
        generic.observation({"front": PICTURE.astype(np.int64), **state})
    with pytest.raises(ProcessingError, match="'prompt' is NoneType"):
        generic.observation({"front": PICTURE, "state": np.ones(3)})
    with pytest.raises(ProcessingError, match=r"'observation\.state' has shape"):
        generic.observation({"front": PICTURE, "observation.state": np.ones((2, 3)), "prompt": ""})
    with pytest.raises(ValueError, match="unknown adapter 'arm'; allowed: auto, generic, libero"):
        adapter("arm")
    with pytest.raises(ValueError, match="'aloha' has 3 cameras but the checkpoint has 1"):
        adapter("aloha", cameras=CAMERAS[:1])


def test_every_built_in_example_is_readable():
    for name, dims in (("libero", 8), ("droid", 8), ("aloha", 14), ("generic", 3)):
        robot = adapter(name)
        found = robot.observation(robot.example((6, 5), dims))
        assert found.state.shape == (dims,)
        assert {image.shape for image in found.images.values()} == {(6, 5, 3)}


@pytest.fixture
def arm(tmp_path):
    file = tmp_path / "arm.yaml"
    file.write_text(ARM)
    return read_adapter(file)


def test_a_file_describes_a_robot(arm):
    wire = {"eye": PICTURE, "depth": PICTURE, "joints": np.array([0.25, 0.5]), "gripper": 0.75}
    found = arm.observation(wire)
    assert found.task == "tidy up"
    assert found.state.tolist() == [0.25, -0.5, 0.25]
    assert arm.observation(wire | {"instruction": "stack"}).task == "stack"
    actions = np.array([[0.1, 0.2, 0.3], [1.0, -2.0, 0.4]], np.float32)
    expected = [[0.1, -0.2, 1.0], [1.0, 2.0, 0.0]]
    np.testing.assert_allclose(arm.actions(actions), expected, rtol=1e-6)
    assert relative_mask(arm.action_parts) == (True, True, False)
    assert (arm.control_hz, arm.execute, arm.reset_pose) == (20.0, 4, (0.5, -1.0))


def test_relative_actions_of_a_file_start_from_the_state(tmp_path):
    robot = """
schema: phyai.adapter/v1
name: pointer
images: {eye: base, hand_eye: wrist}
state: [{key: place, size: 2, scale: 0.5}, {key: speed, size: 2}]
actions: [{name: x, relative: true, scale: 2}, {name: y, offset: 10}]
"""
    file = tmp_path / "pointer.yaml"
    file.write_text(robot)
    config = PolicyConfig(REACH, device="cpu", adapter=str(file), num_steps=2)
    runner = Runner(load_policy(config))
    plain = Runner(load_policy(PolicyConfig(REACH, device="cpu", num_steps=2)))
    state = np.array([0.25, -0.5, 0.01, 0.02], np.float32)
    pictures = {"base": np.zeros((84, 84, 3), np.uint8), "wrist": np.ones((84, 84, 3), np.uint8)}
    told = {"prompt": "reach the red disc"}
    reference = plain.run_one({**pictures, "state": state, **told}, seed=1).actions
    wire = {"eye": pictures["base"], "hand_eye": pictures["wrist"]}
    place, speed = state[:2] * 2, state[2:]
    found = runner.run_one({**wire, "place": place, "speed": speed, **told}, seed=1).actions
    np.testing.assert_allclose(found[:, 0], 2 * (reference[:, 0] + state[0]), atol=1e-5)
    np.testing.assert_allclose(found[:, 1], reference[:, 1] + 10, atol=1e-5)
    assert runner.metadata()["state_keys"] == ["place", "speed"]


def test_a_file_whose_camera_the_checkpoint_lacks_is_refused(tmp_path):
    file = tmp_path / "arm.yaml"
    file.write_text(ARM.partition("state:")[0])
    with pytest.raises(ValueError, match="maps 'eye' to camera 'front', which the checkpoint"):
        load_policy(PolicyConfig(REACH, device="cpu", adapter=str(file)))


def test_widths_that_do_not_fit_a_file_are_errors(arm):
    wire = {"eye": PICTURE, "joints": np.zeros(3), "gripper": 0.0}
    with pytest.raises(RequestError, match="the state has 4 columns, the adapter describes 3"):
        arm.observation(wire)
    with pytest.raises(RequestError, match="an action has 2 columns, the adapter describes 3"):
        arm.actions(np.zeros((4, 2), np.float32))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("schema: phyai.adapter/v1", "schema: other", "expected 'phyai.adapter/v1'"),
        ("name: lab-arm", "", "'name' is missing"),
        ("images: {eye: front, hand_eye: hand}", "images: {}", "at least one request key"),
        ("control_hz: 20", "control_hz: 0", "no number from 0.001"),
        ("size: 2, scale: [1, -1]}", "size: 2, scale: [1]}", "one number or 2 numbers, got 1"),
        ("threshold: 0.25", "clip: [1, 0]", "lowest and the highest"),
        ("relative: true", "relativ: true", "unknown key 'relativ'; allowed: name, size"),
        ("execute: 4", "execute: 4\nexecute: 5", "duplicate"),
    ],
)
def test_mistakes_in_a_file_are_named_with_their_line(tmp_path, old, new, reason):
    file = tmp_path / "arm.yaml"
    assert old in ARM
    file.write_text(ARM.replace(old, new))
    with pytest.raises(PolicyError) as raised:
        read_adapter(file)
    assert reason in str(raised.value)
    assert "arm.yaml:" in str(raised.value)


def test_the_adapter_of_the_page_is_valid(tmp_path):
    page = Path(REPOSITORY, "docs", "serving.md").read_text()
    (block,) = [part for part in page.split("```yaml\n")[1:] if part.startswith("schema")]
    file = tmp_path / "page.yaml"
    file.write_text(block.split("```")[0])
    found = read_adapter(file)
    assert [part.size for part in found.action_parts] == [6, 1]
    assert replace(found, name="x").cameras == {"front": "base_0_rgb", "hand": "left_wrist_0_rgb"}


def test_actions_of_a_file_are_mapped_back(arm):
    actions = np.array([[0.1, -0.2, 1.0], [1.0, 2.0, 0.0]], np.float32)
    expected = [[0.1, 0.2, 0.0], [1.0, -2.0, 0.5]]
    np.testing.assert_allclose(arm.engine_actions(actions), expected, rtol=1e-6)
    np.testing.assert_allclose(arm.actions(arm.engine_actions(actions))[:, :2], actions[:, :2])
    still = (ActionPart("x", 2, scale=(0.0, 2.0), offset=1.0),)
    assert unmap_actions(still, np.ones((1, 2))).tolist() == [[0.0, 0.0]]
    with pytest.raises(RequestError, match="an action has 1 columns, the adapter describes 3"):
        arm.engine_actions(actions[:, :1])
