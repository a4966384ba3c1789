"""Presets: how the training pipeline of a checkpoint prepared prompts, images and actions."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from phyai.processing.errors import ProcessingError
from phyai.processing.images import ABSENT_PIXEL, ResizeFilter
from phyai.processing.normalize import NormMode, NormSystem
from phyai.processing.prompt import PromptForm, StateTextDims
from phyai.processing.robots import RobotTransform, make_mask

PI_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
OPENPI_EPS = 1e-6
OLD_LEROBOT_PAD = -3.0


@dataclass(frozen=True)
class Preset:
    """Everything about processing that a checkpoint's weights do not tell.

    Derive your own with `dataclasses.replace(get_preset("openpi/pi05_libero"), name=..., ...)`.

    Attributes:
        name: Name of the preset.
        family: Model family that it is for, None for any.
        system: Normaliser formulas; None returns normalised actions and takes normalised states.
        prompt_form: None takes it from LeRobot's processor files, else from the family.
        state_text_dims: State columns that the prompt spells out.
        resize: Filter for camera frames.
        pad_value: Letterbox value after scaling to [-1, 1].
        cameras: Camera order; None takes the checkpoint's.
        camera_aliases: Other accepted camera names to the name of the camera.
        ignored_cameras: Names that are accepted and not used.
        state_keys: Request keys whose values, concatenated, are the state (openpi wire format).
        state_dim: Columns of the robot's state; None takes the checkpoint's.
        action_dim: Columns returned to the robot; None takes the checkpoint's.
        delta_mask: Columns whose actions are offsets from the state; None takes LeRobot's files.
        robot: Joint conventions that are converted, grippers included.
        state_mode: Normaliser of the state; None takes it from LeRobot's files.
        action_mode: Normaliser of the action; None takes it from LeRobot's files.
        eps: Epsilon of the normalisers; None takes it from LeRobot's files.
        asset_ids: openpi asset ids whose statistics fit this robot.
    """

    name: str
    family: str | None = None
    system: NormSystem | None = None
    prompt_form: PromptForm | None = None
    state_text_dims: StateTextDims = StateTextDims.ROBOT
    resize: ResizeFilter = ResizeFilter.INTERPOLATE
    pad_value: float = ABSENT_PIXEL
    cameras: tuple[str, ...] | None = None
    camera_aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    ignored_cameras: tuple[str, ...] = ()
    state_keys: tuple[str, ...] = ("observation/state",)
    state_dim: int | None = None
    action_dim: int | None = None
    delta_mask: tuple[bool, ...] | None = None
    robot: RobotTransform = RobotTransform.NONE
    state_mode: NormMode | None = None
    action_mode: NormMode | None = None
    eps: float | None = None
    asset_ids: tuple[str, ...] = ()


def _openpi(
    name: str,
    *,
    form: PromptForm,
    aliases: Mapping[str, str],
    state_keys: tuple[str, ...],
    state_dim: int,
    action_dim: int,
    asset_ids: tuple[str, ...],
    ignored: tuple[str, ...] = (),
    delta_mask: tuple[bool, ...] = (),
    robot: RobotTransform = RobotTransform.NONE,
) -> Preset:
    return Preset(
        name=name,
        family="pi05",
        system=NormSystem.OPENPI,
        prompt_form=form,
        resize=ResizeFilter.PIL,
        cameras=PI_CAMERAS,
        camera_aliases=MappingProxyType(dict(aliases)),
        ignored_cameras=ignored,
        state_keys=state_keys,
        state_dim=state_dim,
        action_dim=action_dim,
        delta_mask=delta_mask,
        robot=robot,
        state_mode=NormMode.QUANTILES,
        action_mode=NormMode.QUANTILES,
        eps=OPENPI_EPS,
        asset_ids=asset_ids,
    )


_LIBERO = _openpi(
    "openpi/pi05_libero",
    form=PromptForm.TASK_NEWLINE,
    aliases={
        "observation/image": PI_CAMERAS[0],
        "observation/wrist_image": PI_CAMERAS[1],
        "image": PI_CAMERAS[0],
        "wrist_image": PI_CAMERAS[1],
    },
    state_keys=("observation/state",),
    state_dim=8,
    action_dim=7,
    asset_ids=("physical-intelligence/libero", "libero"),
)
_DROID = _openpi(
    "openpi/pi05_droid",
    form=PromptForm.TASK_STATE,
    aliases={
        "observation/exterior_image_1_left": PI_CAMERAS[0],
        "observation/wrist_image_left": PI_CAMERAS[1],
        "exterior_image_1_left": PI_CAMERAS[0],
        "wrist_image_left": PI_CAMERAS[1],
    },
    state_keys=("observation/joint_position", "observation/gripper_position"),
    state_dim=8,
    action_dim=8,
    asset_ids=("droid",),
)
_ALOHA = _openpi(
    "openpi/pi05_aloha",
    form=PromptForm.TASK_STATE,
    aliases={
        "cam_high": PI_CAMERAS[0],
        "cam_left_wrist": PI_CAMERAS[1],
        "cam_right_wrist": PI_CAMERAS[2],
    },
    ignored=("cam_low",),
    state_keys=("state",),
    state_dim=14,
    action_dim=14,
    asset_ids=("trossen",),
    delta_mask=make_mask(6, -1, 6, -1),
    robot=RobotTransform.ALOHA,
)


def _for_pi0(preset: Preset, name: str, **changes: Any) -> Preset:
    """Return a robot's preset for π0: mean and deviation, and a prompt without the state."""
    return replace(
        preset,
        name=name,
        family="pi0",
        prompt_form=PromptForm.TASK_NEWLINE,
        state_mode=NormMode.MEAN_STD,
        action_mode=NormMode.MEAN_STD,
        **changes,
    )


_PI0_LIBERO = _for_pi0(_LIBERO, "openpi/pi0_libero", delta_mask=make_mask(6, -1))
_PI0_DROID = _for_pi0(_DROID, "openpi/pi0_droid")
_PI0_ALOHA = _for_pi0(_ALOHA, "openpi/pi0_aloha")
_LEROBOT = Preset("lerobot", system=NormSystem.LEROBOT)
_LEROBOT_OLD = Preset(
    "lerobot-0.4",
    system=NormSystem.LEROBOT,
    state_text_dims=StateTextDims.PADDED,
    pad_value=OLD_LEROBOT_PAD,
)
_RAW = Preset("raw", delta_mask=(), state_mode=NormMode.IDENTITY, action_mode=NormMode.IDENTITY)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            *(_LEROBOT, _LEROBOT_OLD),
            *(_LIBERO, _DROID, _ALOHA),
            *(_PI0_LIBERO, _PI0_DROID, _PI0_ALOHA),
            _RAW,
        )
    }
)


def get_preset(name: str) -> Preset:
    """Returns a built-in preset.

    Raises:
        ProcessingError: There is none of that name; the message lists all.
    """
    preset = PRESETS.get(name)
    if preset is None:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ProcessingError(f"unknown preset {name!r}; allowed: {', '.join(PRESETS)}.{hint}")
    return preset
