"""Reading the requests that openpi clients send into observations."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from phyai.processing.errors import ProcessingError
from phyai.processing.inputs import Observation
from phyai.processing.presets import Preset


def observation_from_request(
    preset: Preset, request: Mapping[str, Any], *, default_task: str | None = None
) -> Observation:
    """Builds an observation from the keys that openpi's robot transforms read.

    LIBERO: `observation/image`, `observation/wrist_image`, `observation/state`. DROID:
    `observation/exterior_image_1_left`, `observation/wrist_image_left`, and the state is
    `observation/joint_position` with `observation/gripper_position` appended. ALOHA: `images`, a
    mapping of camera names, and `state`. The instruction is `prompt` everywhere.

    Args:
        preset: The preset of the checkpoint; its aliases and state keys are read.
        request: The decoded request.
        default_task: Instruction for requests without `prompt`.

    Raises:
        ProcessingError: The state or the prompt is missing or of another type.
    """
    nested = request.get("images", {})
    if not isinstance(nested, Mapping):
        raise ProcessingError(
            f"request key 'images' is {type(nested).__name__}, expected a mapping of camera names"
        )
    names = (*preset.camera_aliases, *(preset.cameras or ()), *preset.ignored_cameras)
    images = {name: request[name] for name in names if name in request} | dict(nested)
    missing = [key for key in preset.state_keys if key not in request]
    if missing:
        raise ProcessingError(
            f"request lacks {', '.join(map(repr, missing))}; preset {preset.name!r} reads the "
            f"state from {', '.join(preset.state_keys)}; found: {', '.join(sorted(request))}"
        )
    parts = [_vector(key, request[key]) for key in preset.state_keys]
    task = request.get("prompt", default_task)
    if not isinstance(task, str):
        raise ProcessingError(
            f"request key 'prompt' is {type(task).__name__}, expected a string; send one or set a "
            "default prompt"
        )
    return Observation(images=images, state=np.concatenate(parts), task=task)


def _vector(key: str, value: Any) -> np.ndarray:
    try:
        array = np.atleast_1d(np.asarray(value))
    except ValueError:
        raise ProcessingError(
            f"request key {key!r} is a list of lists of several lengths, expected a number or a "
            "vector of numbers"
        ) from None
    if array.ndim != 1 or array.dtype.kind not in "fiu":
        raise ProcessingError(
            f"request key {key!r} has shape {array.shape} and dtype {array.dtype}, expected a "
            "number or a vector of numbers"
        )
    return array
