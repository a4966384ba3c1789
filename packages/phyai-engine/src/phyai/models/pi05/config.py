"""What a π0 or π0.5 checkpoint says about itself: files first, tensor shapes for the sizes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phyai.checkpoints import CheckpointError
from phyai.checkpoints.json_file import read_json_object
from phyai.models.pi05 import keys
from phyai.models.pi05.sizes import (
    SIDECAR,
    DecoderSizes,
    Shapes,
    VisionSizes,
    decoder_sizes,
    shape_of,
    vision_sizes,
)

Family = Literal["pi05", "pi0"]

OPENPI_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
_IMAGE_PREFIX = "observation.images."
_MOST = 1_000_000


@dataclass(frozen=True)
class PI05Config:
    """Everything needed to build the model and its processors.

    Attributes:
        family: ``pi05`` (adaptive norms, state as text) or ``pi0`` (state token).
        layout: who wrote the checkpoint, ``lerobot`` or ``openpi``.
        cameras: camera names in checkpoint order, without ``observation.images.``.
        state_dim: width of the robot's state.
        action_dim: columns of an action that the robot uses.
        max_state_dim: padded state width.
        max_action_dim: padded action width, the one the sampler integrates.
        chunk_size: actions in a chunk.
        num_steps: default number of Euler steps.
        tokenizer_max_length: prompt slots.
        image_resolution: (height, width) the vision tower sees.
        empty_cameras: always absent cameras that the training configuration added.
        min_period: shortest period of the time embedding.
        max_period: longest period of the time embedding.
        vision: sizes of the vision tower.
        language: sizes of the language model.
        expert: sizes of the action expert.
    """

    family: Family
    layout: Literal["lerobot", "openpi"]
    cameras: tuple[str, ...]
    state_dim: int
    action_dim: int
    max_state_dim: int
    max_action_dim: int
    chunk_size: int
    num_steps: int
    tokenizer_max_length: int
    image_resolution: tuple[int, int]
    empty_cameras: int
    min_period: float
    max_period: float
    vision: VisionSizes
    language: DecoderSizes
    expert: DecoderSizes

    @property
    def suffix_len(self) -> int:
        """Rows of the expert's input: the chunk, and π0's state token in front of it."""
        return self.chunk_size + (self.family == "pi0")

    @property
    def longest_prefix(self) -> int:
        """Rows of a prefix with every camera and a full prompt."""
        return len(self.cameras) * self.vision.tokens + self.tokenizer_max_length

    @classmethod
    def read(cls, directory: Path, shapes: Shapes) -> "PI05Config":
        """Reads ``config.json`` (and the sidecar) and takes all sizes from ``shapes``.

        Args:
            directory: checkpoint folder.
            shapes: tensor shapes by canonical name.

        Raises:
            CheckpointError: for missing files, fields or tensors, or contradictions.
        """
        raw = read_json_object(Path(directory) / "config.json")
        family: Family = "pi05" if "time_mlp_in.weight" in shapes else "pi0"
        declared = raw.get("type", family)
        if declared not in ("pi05", "pi0"):
            raise CheckpointError(
                f"{directory}/config.json: type is {declared!r}; this loader reads pi05 and pi0"
            )
        if declared != family:
            raise CheckpointError(
                f"{directory}/config.json says type {declared!r} but the tensors are {family}'s "
                "(time_mlp_in belongs to pi05, action_time_mlp_in to pi0)"
            )
        sidecar = Path(directory) / SIDECAR
        extra = read_json_object(sidecar) if sidecar.is_file() else {}
        head_count = extra.get("vision_num_heads")
        vision = vision_sizes(shapes, head_count)
        language = decoder_sizes(shapes, keys.LANGUAGE, vocab=True)
        expert = decoder_sizes(shapes, keys.EXPERT, vocab=False)
        if (language.layers, language.kv_heads, language.head_dim) != (
            expert.layers,
            expert.kv_heads,
            expert.head_dim,
        ):
            raise CheckpointError(
                "language model and action expert cannot share attention: "
                f"{language} against {expert}"
            )
        fields = _lerobot(raw) if "input_features" in raw else _openpi(raw, family)
        side = round(vision.tokens**0.5) * vision.patch
        fields.setdefault("image_resolution", (side, side))
        height, width = fields["image_resolution"]
        if (height // vision.patch) * (width // vision.patch) != vision.tokens:
            raise CheckpointError(
                f"image resolution {height}x{width} gives "
                f"{(height // vision.patch) * (width // vision.patch)} patches, "
                f"the position table has {vision.tokens}"
            )
        fields["max_action_dim"] = shape_of(shapes, "action_in_proj.weight")[1]
        if family == "pi0":
            fields["max_state_dim"] = shape_of(shapes, "state_proj.weight")[1]
        return cls(family=family, vision=vision, language=language, expert=expert, **fields)


def _number(raw: Mapping[str, Any], name: str, default: float) -> float:
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {name} is {value!r}; expected a positive number")
    return value


def _count(raw: Mapping[str, Any], name: str, default: int) -> int:
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MOST:
        raise CheckpointError(
            f"config.json: {name} is {value!r}; expected an int from 1 to {_MOST}"
        )
    return value


def _resolution(raw: Mapping[str, Any]) -> tuple[int, int]:
    value = raw.get("image_resolution") or (224, 224)
    sides = value if isinstance(value, list | tuple) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise CheckpointError(
            f"config.json: image_resolution is {value!r}; expected [height, width]"
        )
    return sides[0], sides[1]


def _feature_width(raw: Mapping[str, Any], group: str, name: str, fallback: int) -> int:
    feature = (raw.get(group) or {}).get(name)
    if feature is None:
        return fallback
    try:
        return int(feature["shape"][0])
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"config.json: {group}.{name} has no usable shape ({feature!r})"
        ) from error


def _lerobot(raw: Mapping[str, Any]) -> dict[str, Any]:
    features = raw["input_features"]
    if not isinstance(features, dict):
        raise CheckpointError(f"config.json: input_features is {features!r}; expected an object")
    if raw.get("n_obs_steps", 1) != 1:
        raise CheckpointError(f"config.json: n_obs_steps is {raw['n_obs_steps']}; only 1 is known")
    names = [n.removeprefix(_IMAGE_PREFIX) for n in features if n.startswith(_IMAGE_PREFIX)]
    cameras = tuple(name for name in names if not name.startswith("empty_camera_"))
    if not cameras:
        raise CheckpointError(
            f"config.json: input_features names no camera ({_IMAGE_PREFIX}NAME); found "
            f"{', '.join(features) or 'nothing'}"
        )
    max_state, max_action = _count(raw, "max_state_dim", 32), _count(raw, "max_action_dim", 32)
    return {
        "layout": "lerobot",
        "cameras": cameras,
        "state_dim": _feature_width(raw, "input_features", "observation.state", max_state),
        "action_dim": _feature_width(raw, "output_features", "action", max_action),
        "max_state_dim": max_state,
        "chunk_size": _count(raw, "chunk_size", 50),
        "num_steps": _count(raw, "num_inference_steps", 10),
        "tokenizer_max_length": _count(
            raw, "tokenizer_max_length", 48 if raw.get("type") == "pi0" else 200
        ),
        "image_resolution": _resolution(raw),
        "empty_cameras": raw.get("empty_cameras") or 0,
        "min_period": _number(raw, "min_period", 4e-3),
        "max_period": _number(raw, "max_period", 4.0),
    }


def _openpi(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    width = _count(raw, "action_dim", 32)
    return {
        "layout": "openpi",
        "cameras": OPENPI_CAMERAS,
        "state_dim": width,
        "action_dim": width,
        "max_state_dim": width,
        "chunk_size": _count(raw, "action_horizon", 50),
        "num_steps": 10,
        "tokenizer_max_length": 48 if family == "pi0" else 200,
        "empty_cameras": 0,
        "min_period": 4e-3,
        "max_period": 4.0,
    }
