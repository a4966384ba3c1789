import dataclasses

import pytest

from phyai.processing.errors import ProcessingError
from phyai.processing.images import ResizeFilter
from phyai.processing.normalize import NormMode, NormSystem
from phyai.processing.presets import PRESETS, get_preset
from phyai.processing.prompt import PromptForm, StateTextDims
from phyai.processing.robots import RobotTransform

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


def test_names():
    assert list(PRESETS) == [
        "lerobot",
        "lerobot-0.4",
        "openpi/pi05_libero",
        "openpi/pi05_droid",
        "openpi/pi05_aloha",
        "openpi/pi0_libero",
        "openpi/pi0_droid",
        "openpi/pi0_aloha",
        "raw",
    ]
    assert all(get_preset(name).name == name for name in PRESETS)


@pytest.mark.parametrize(
    ("name", "form", "state_dim", "action_dim", "delta"),
    [
        ("openpi/pi05_libero", PromptForm.TASK_NEWLINE, 8, 7, ()),
        ("openpi/pi05_droid", PromptForm.TASK_STATE, 8, 8, ()),
        ("openpi/pi05_aloha", PromptForm.TASK_STATE, 14, 14, ((True,) * 6 + (False,)) * 2),
        ("openpi/pi0_libero", PromptForm.TASK_NEWLINE, 8, 7, (True,) * 6 + (False,)),
        ("openpi/pi0_droid", PromptForm.TASK_NEWLINE, 8, 8, ()),
        ("openpi/pi0_aloha", PromptForm.TASK_NEWLINE, 14, 14, ((True,) * 6 + (False,)) * 2),
    ],
)
def test_openpi(name, form, state_dim, action_dim, delta):
    preset = get_preset(name)
    assert (preset.prompt_form, preset.state_dim, preset.action_dim) == (
        form,
        state_dim,
        action_dim,
    )
    assert preset.delta_mask == delta
    assert (preset.system, preset.eps) == (NormSystem.OPENPI, 1e-6)
    pi0 = name.startswith("openpi/pi0_")
    assert preset.family == ("pi0" if pi0 else "pi05")
    mode = NormMode.MEAN_STD if pi0 else NormMode.QUANTILES
    assert preset.state_mode is preset.action_mode is mode
    assert (preset.resize, preset.pad_value) == (ResizeFilter.PIL, -1.0)
    assert preset.cameras == CAMERAS
    assert set(preset.camera_aliases.values()) <= set(CAMERAS)
    is_aloha = name.endswith("aloha")
    assert (preset.robot is RobotTransform.ALOHA) == is_aloha


def test_old_lerobot_differs_in_padding_only():
    new, old = get_preset("lerobot"), get_preset("lerobot-0.4")
    assert (new.state_text_dims, new.pad_value) == (StateTextDims.ROBOT, -1.0)
    assert (old.state_text_dims, old.pad_value) == (StateTextDims.PADDED, -3.0)
    same = dataclasses.replace(
        old, name="lerobot", state_text_dims=StateTextDims.ROBOT, pad_value=-1.0
    )
    assert same == new


@pytest.mark.parametrize(
    ("name", "hint"), [("pi05_libero", "openpi/pi05_libero"), ("lerobot_0.4", "lerobot-0.4")]
)
def test_unknown_name(name, hint):
    with pytest.raises(ProcessingError, match=r"allowed: lerobot, lerobot-0.4") as caught:
        get_preset(name)
    assert f"Did you mean {hint!r}?" in str(caught.value)
