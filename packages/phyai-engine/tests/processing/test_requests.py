import numpy as np
import pytest

from phyai.processing.errors import ProcessingError
from phyai.processing.presets import get_preset
from phyai.processing.requests import observation_from_request

IMAGE = np.zeros((4, 4, 3), np.uint8)
LIBERO = {
    "observation/image": IMAGE,
    "observation/wrist_image": IMAGE + 1,
    "observation/state": np.arange(8.0),
    "prompt": "open the drawer",
}


def test_libero():
    observation = observation_from_request(get_preset("openpi/pi05_libero"), LIBERO)
    assert set(observation.images) == {"observation/image", "observation/wrist_image"}
    assert observation.state.tolist() == list(range(8))
    assert observation.task == "open the drawer"


@pytest.mark.parametrize("gripper", [0.5, np.float32(0.5), np.array([0.5])])
def test_droid_appends_the_gripper_to_the_joints(gripper):
    request = {
        "observation/exterior_image_1_left": IMAGE,
        "observation/wrist_image_left": IMAGE,
        "observation/joint_position": np.arange(7.0),
        "observation/gripper_position": gripper,
        "prompt": "go",
    }
    observation = observation_from_request(get_preset("openpi/pi05_droid"), request)
    assert observation.state.tolist() == [*range(7), 0.5]
    assert len(observation.images) == 2


def test_aloha_nests_its_images():
    request = {
        "images": {"cam_high": IMAGE, "cam_low": IMAGE},
        "state": np.zeros(14),
        "prompt": "go",
    }
    observation = observation_from_request(get_preset("openpi/pi05_aloha"), request)
    assert set(observation.images) == {"cam_high", "cam_low"}


def test_default_task():
    request = {key: value for key, value in LIBERO.items() if key != "prompt"}
    preset = get_preset("openpi/pi05_libero")
    assert observation_from_request(preset, request, default_task="x").task == "x"
    with pytest.raises(ProcessingError, match=r"'prompt' is NoneType.*default prompt"):
        observation_from_request(preset, request)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observation/state": None}, "'observation/state' has shape .* dtype object"),
        ({"observation/state": np.zeros((2, 4))}, r"shape \(2, 4\)"),
        ({"observation/state": np.array(["a"])}, "dtype <U1"),
        ({"observation/state": [1.0, [2.0]]}, "list of lists of several lengths"),
        ({"images": [IMAGE]}, "'images' is list, expected a mapping"),
        ({"prompt": b"go"}, "'prompt' is bytes"),
    ],
)
def test_wrong_types(change, message):
    with pytest.raises(ProcessingError, match=message):
        observation_from_request(get_preset("openpi/pi05_libero"), LIBERO | change)


def test_missing_state_names_the_keys():
    with pytest.raises(ProcessingError) as caught:
        observation_from_request(get_preset("openpi/pi05_droid"), {"prompt": "go"})
    for part in ("joint_position", "gripper_position", "openpi/pi05_droid", "found: prompt"):
        assert part in str(caught.value)
