"""The contract of the released DROID policies: views, state row, action spaces."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from phyai.models.cosmos3.canvas import as_uint8
from phyai.models.cosmos3.checks import check_array, check_count, check_rate
from phyai.models.cosmos3.domains import find_domain
from phyai.models.cosmos3.normalizers import ActionNormalizer
from phyai.models.cosmos3.poses import (
    compose_framewise,
    rotation_from_quaternion,
    rotation_to_quaternion,
)
from phyai.models.cosmos3.requests import PolicyRequest
from phyai.models.cosmos3.sampler import Sampling
from phyai.processing.errors import ProcessingError

WRIST_SIZE, EXTERIOR_SIZE, COMPOSED_SIZE = (360, 640), (180, 320), (540, 640)
"""(height, width) of the views and of the picture they make."""


class ActionSpace(StrEnum):
    """What the policy's action columns are."""

    JOINT_POSITION = "joint_position"
    """7 absolute joint positions and the gripper; the current ones are a clean first row."""
    POSE = "midtrain"
    """Displacement, 6 numbers of a rotation and the gripper; relative to the step before."""


class Rounding(StrEnum):
    """How resized views become whole numbers."""

    TRUNCATE = "truncate"
    ROUND = "round"


@dataclass(frozen=True)
class PolicyContract:
    """How a DROID policy wants to be asked and what its rows mean.

    Attributes:
        space: what the action columns are.
        domain: embodiment, whose id selects the action tables.
        chunk: actions per answer, a multiple of 4.
        fps: of actions and frames.
        tier: resolution tier of the canvas.
        sampling: of requests that bring none.
        json_prompt: the text is a JSON caption instead of sentences.
        normalizer: between units of the robot and of the model; None as in the released policies.
        rounding: of the halved exterior views.

    Raises:
        ProcessingError: for an unknown domain, a chunk that is no multiple of 4, or a frame rate
            that is not positive.
    """

    space: ActionSpace = ActionSpace.JOINT_POSITION
    domain: str = "droid_lerobot"
    chunk: int = 32
    fps: float = 15.0
    tier: str = "480"
    sampling: Sampling = field(default_factory=lambda: Sampling(4, 3.0, 5.0))
    json_prompt: bool = False
    normalizer: ActionNormalizer | None = None
    rounding: Rounding = Rounding.TRUNCATE

    def __post_init__(self) -> None:
        find_domain(self.domain)
        check_count("chunk", self.chunk, least=4, step=4)
        check_rate("fps", self.fps)

    @classmethod
    def nano(cls) -> "PolicyContract":
        """Cosmos3-Nano-Policy-DROID."""
        return cls()

    @classmethod
    def edge(cls) -> "PolicyContract":
        """Cosmos3-Edge-Policy-DROID: JSON captions; only the first step is guided."""
        return cls(sampling=Sampling(4, 3.0, 5.0, interval=(960.0, 1001.0)), json_prompt=True)

    def updated(self, policy: Mapping[str, Any]) -> "PolicyContract":
        """Returns the contract with what a checkpoint's ``checkpoint.json`` says of its policy.

        Raises:
            ProcessingError: for values that are not allowed.
        """
        names = {
            "action_chunk_size": ("chunk", int),
            "conditioning_fps": ("fps", float),
            "domain_name": ("domain", str),
        }
        changes: dict[str, Any] = {}
        for key, (name, kind) in names.items():
            value = policy.get(key)
            if value is None:
                continue
            if not isinstance(value, (int, float) if kind is float else kind):
                raise ProcessingError(f"checkpoint.json: policy.{key} is {value!r}")
            changes[name] = kind(value)
        return replace(self, **changes)

    @property
    def raw_dim(self) -> int:
        """Columns of an action."""
        return 8 if self.space is ActionSpace.JOINT_POSITION else 10

    def clean_rows(self, request: PolicyRequest) -> np.ndarray:
        """Returns history and state as fp32 rows [n, raw_dim] in units of the model.

        Raises:
            ProcessingError: for a missing or malformed state, pose or history.
        """
        rows = np.empty((0, self.raw_dim))
        if request.history is not None:
            rows = check_array("history", request.history, (None, self.raw_dim))
        if self.space is ActionSpace.JOINT_POSITION:
            joints = check_array("joint_position", request.joint_position, (7,))
            gripper = check_array("gripper_position", request.gripper_position, ())
            rows = np.concatenate([rows, [[*joints, gripper]]])
        elif len(rows) == 0:
            return rows.astype(np.float32)
        rows = _flip_gripper(rows)
        if self.normalizer is not None:
            return self.normalizer.normalize(rows)
        return rows.astype(np.float32)

    def check(self, request: PolicyRequest) -> None:
        """Checks what only the answer needs.

        Raises:
            ProcessingError: for a missing or malformed pose.
        """
        if self.space is ActionSpace.POSE:
            _pose(request)

    def robot_actions(self, rows: np.ndarray, request: PolicyRequest) -> np.ndarray:
        """Returns the robot's actions of the model's rows [chunk, raw_dim].

        Returns:
            fp32 [chunk, 8]: joint positions and gripper, or position, quaternion as x, y, z, w and
            gripper.
        """
        if self.normalizer is not None:
            rows = self.normalizer.restore(rows)
        rows = _flip_gripper(rows)
        if self.space is ActionSpace.JOINT_POSITION:
            return rows.astype(np.float32)
        positions, rotations = compose_framewise(*_pose(request), rows)
        quaternions = rotation_to_quaternion(rotations)
        return np.concatenate([positions, quaternions, rows[:, 9:]], axis=1).astype(np.float32)


def compose_views(
    request: PolicyRequest, rounding: Rounding, device: torch.device | str = "cpu"
) -> Tensor:
    """Returns the picture the policy sees, uint8 [1, 3, 540, 640] on the device.

    The wrist view is on top, the exterior views share the row below. A composed picture is taken as
    it is. Pictures of other sizes are resized bilinearly, without antialiasing.

    Raises:
        ProcessingError: for missing, superfluous or malformed pictures.
    """
    views = request.wrist is not None or request.exteriors is not None
    if (request.image is not None) == views:
        raise ProcessingError(
            "the policy reads either 'image' or 'wrist' with 'exteriors', got "
            f"{'both' if views else 'neither'}"
        )
    if request.image is not None:
        return _resized(request.image, COMPOSED_SIZE, rounding, "image", device)[None]
    if request.wrist is None or request.exteriors is None or len(request.exteriors) != 2:
        wrists = int(request.wrist is not None)
        exteriors = 0 if request.exteriors is None else len(request.exteriors)
        raise ProcessingError(
            f"the policy reads one 'wrist' and two 'exteriors', got {wrists} and {exteriors}"
        )
    wrist = _resized(request.wrist, WRIST_SIZE, rounding, "wrist", device)
    left, right = (
        _resized(view, EXTERIOR_SIZE, rounding, f"exteriors[{index}]", device)
        for index, view in enumerate(request.exteriors)
    )
    return torch.cat([wrist, torch.cat([left, right], dim=2)], dim=1)[None]


def _resized(
    picture: np.ndarray,
    size: tuple[int, int],
    rounding: Rounding,
    name: str,
    device: torch.device | str,
) -> Tensor:
    """Returns uint8 [3, height, width] on the device."""
    owned = torch.from_numpy(np.array(as_uint8(picture, name)))
    pixels = owned.to(device).permute(2, 0, 1)
    if pixels.shape[1:] == size:
        return pixels
    floats = functional.interpolate(
        pixels[None].to(torch.float32), size=size, mode="bilinear", align_corners=False
    )[0]
    return (floats.round() if rounding is Rounding.ROUND else floats).to(torch.uint8)


def _flip_gripper(rows: np.ndarray) -> np.ndarray:
    """The robot counts 0 open and 1 closed, the model the other way round."""
    flipped = np.array(rows, dtype=np.float64)
    flipped[:, -1] = 1 - flipped[:, -1]
    return flipped


def _pose(request: PolicyRequest) -> tuple[np.ndarray, np.ndarray]:
    position = check_array("eef_position", request.eef_position, (3,))
    quaternion = check_array("eef_quaternion", request.eef_quaternion, (4,))
    if not np.linalg.norm(quaternion) > 1e-6:
        raise ProcessingError("'eef_quaternion' is zero; send x, y, z, w of a rotation")
    return position, rotation_from_quaternion(quaternion)
