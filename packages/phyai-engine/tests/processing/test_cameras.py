import pytest

from phyai.processing.cameras import CameraNames
from phyai.processing.errors import ProcessingError

NAMES = CameraNames(
    ("base_0_rgb", "left_wrist_0_rgb"), {"cam_high": "base_0_rgb"}, ignored=("cam_low",)
)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("base_0_rgb", 0),
        ("observation.images.base_0_rgb", 0),
        ("left_wrist_0_rgb", 1),
        ("observation.images.left_wrist_0_rgb", 1),
        ("cam_high", 0),
        ("observation.images.cam_high", 0),
        ("cam_low", None),
    ],
)
def test_accepted_names(name, index):
    assert NAMES.index(name) == index


def test_unknown_name_lists_the_allowed_ones_and_the_nearest():
    with pytest.raises(ProcessingError) as caught:
        NAMES.index("left_wrist_rgb")
    message = str(caught.value)
    assert "'left_wrist_rgb'; allowed: base_0_rgb, left_wrist_0_rgb, cam_high." in message
    assert message.endswith("Did you mean 'left_wrist_0_rgb'?")


def test_a_name_far_from_all_gets_no_hint():
    with pytest.raises(ProcessingError, match=r"cam_high\.$"):
        NAMES.index("zzz")


def test_a_name_that_is_no_string_is_refused():
    with pytest.raises(ProcessingError, match="camera name 3 is int, expected one of"):
        NAMES.index(3)


def test_assign_maps_positions():
    assert NAMES.assign({"left_wrist_0_rgb": "b", "cam_low": "c", "cam_high": "a"}) == {
        1: "b",
        0: "a",
    }


def test_two_names_of_one_camera():
    with pytest.raises(ProcessingError, match="'cam_high' and 'base_0_rgb' are both camera 'base"):
        NAMES.assign({"cam_high": 1, "base_0_rgb": 2})


@pytest.mark.parametrize("images", [{}, {"cam_low": 1}])
def test_no_camera(images):
    with pytest.raises(ProcessingError, match="at least one of: base_0_rgb, left_wrist_0_rgb"):
        NAMES.assign(images)
