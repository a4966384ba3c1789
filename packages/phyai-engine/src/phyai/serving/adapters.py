"""From a robot's request to an observation, and from the engine's actions to the robot.

An adapter knows the keys of the wire and maps between the robot's numbers and those that the
checkpoint was trained with. Joint conventions of ALOHA, normalisation and offsets relative to the
state belong to the processing preset and happen there; the maps here are those of a robot that no
preset knows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from phyai.processing import Observation, Preset, get_preset, observation_from_request
from phyai.processing.cameras import PREFIX
from phyai.serving.images import as_image, pictures_of
from phyai.serving.jobs import RequestError
from phyai.serving.vectors import ActionPart, StatePart, map_actions, map_state, unmap_actions

PROMPT_KEYS = ("prompt", "task")
GENERIC_STATES = ("observation.state", "observation/state", "state")
_EXAMPLE_TASK = "pick up the cup"


@dataclass(frozen=True)
class Adapter:
    """How one kind of robot talks.

    Attributes:
        name: Name in the metadata.
        cameras: Request key of a picture to the camera of the checkpoint.
        ignored: Request keys of pictures that are not used.
        state_keys: Alternatives; the first whose keys are all in a request is read, its values in
            this order.
        prompt_keys: Alternatives of the instruction's key.
        default_prompt: Instruction of requests that have none.
        state_parts: Maps of the state's columns; empty leaves them.
        action_parts: Maps of the actions' columns; empty leaves them.
        control_hz: Steps per second that the actions are meant for.
        execute: Actions of a chunk that a client should execute before it asks again.
        reset_pose: Joint angles that the robot should start from.
        optional: Request keys of pictures that can stand for others; made-up requests have none.
        action_key: A second key of the reply for the actions; empty for none.
    """

    name: str
    cameras: Mapping[str, str]
    ignored: tuple[str, ...] = ()
    state_keys: tuple[tuple[str, ...], ...] = (GENERIC_STATES[:1],)
    prompt_keys: tuple[str, ...] = PROMPT_KEYS
    default_prompt: str | None = None
    state_parts: tuple[StatePart, ...] = ()
    action_parts: tuple[ActionPart, ...] = ()
    control_hz: float | None = None
    execute: int | None = None
    reset_pose: tuple[float, ...] | None = None
    optional: tuple[str, ...] = ()
    action_key: str = ""
    _preset: Preset = field(init=False, repr=False)

    def __post_init__(self) -> None:
        wire = Preset(
            name=self.name,
            cameras=tuple(dict.fromkeys(self.cameras.values())),
            camera_aliases=self.cameras,
            ignored_cameras=self.ignored,
        )
        object.__setattr__(self, "_preset", wire)

    def observation(self, request: Mapping[str, Any]) -> Observation:
        """Read one request.

        Raises:
            RequestError, ProcessingError: A picture, the state or the instruction is missing or of
                another form.
        """
        keys = self._state_keys(request)
        wire = replace(self._preset, state_keys=keys)
        prepared = {key: request[key] for key in keys if key in request}
        prepared["images"] = self._images(request)
        prompt = self._prompt(request)
        if prompt is not None:
            prepared["prompt"] = prompt
        found = observation_from_request(wire, prepared, default_task=self.default_prompt)
        state = found.state
        if self.state_parts and state is not None:
            state = map_state(self.state_parts, state)
        return replace(found, state=state)

    def actions(self, actions: np.ndarray) -> np.ndarray:
        """Return the engine's actions [chunk, action_dim] as the robot takes them."""
        return map_actions(self.action_parts, actions) if self.action_parts else actions

    def engine_actions(self, actions: np.ndarray) -> np.ndarray:
        """Return a robot's actions [T, action_dim] as the engine makes them; see `actions`."""
        return unmap_actions(self.action_parts, actions) if self.action_parts else actions

    def example(self, resolution: tuple[int, int], state_dim: int, seed: int = 0) -> dict[str, Any]:
        """Return a request with random pictures and a state of zeros.

        Args:
            resolution: Height and width of the pictures.
            state_dim: Columns of the state, split evenly where no part says more.
            seed: Seed of the pictures.
        """
        random = np.random.default_rng(seed)
        request: dict[str, Any] = {
            key: random.integers(0, 256, (*resolution, 3), dtype=np.uint8)
            for key in self.image_keys
        }
        if self.name == "aloha":
            request = {"images": request}
        keys = self.state_keys[0]
        sizes = [part.size for part in self.state_parts]
        if keys[-1].endswith("eef_quat"):
            sizes = [3, 4]
        if len(sizes) != len(keys):
            # DROID: the last key is the gripper alone.
            sizes = [state_dim - len(keys) + 1, *[1] * (len(keys) - 1)]
        for key, size in zip(keys, sizes, strict=True):
            request[key] = np.zeros(size, np.float32)
        if keys[-1].endswith("eef_quat"):
            # No rotation.
            request[keys[-1]][-1] = 1.0
        request[self.prompt_keys[0]] = self.default_prompt or _EXAMPLE_TASK
        return request

    @property
    def image_keys(self) -> tuple[str, ...]:
        """One request key for each camera."""
        first: dict[str, str] = {}
        for key, camera in self.cameras.items():
            if key not in self.optional:
                first.setdefault(camera, key)
        return tuple(first.values())

    def pictures(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the pictures of a request by their keys, as they came."""
        return pictures_of(request, frozenset((*self.cameras, *self.ignored)))

    def _images(self, request: Mapping[str, Any]) -> dict[str, np.ndarray]:
        images: dict[str, np.ndarray] = {}
        for key, value in self.pictures(request).items():
            if key in self.ignored:
                continue
            camera = self.cameras.get(key)
            if camera is None and key in self.cameras.values():
                camera = key
            if camera is None:
                raise RequestError(
                    f"unknown image {str(key)[:60]!r}; adapter {self.name!r} reads: "
                    f"{', '.join(self.cameras)}"
                )
            if camera in images:
                raise RequestError(f"two images are for camera {camera!r}; send one of them")
            images[camera] = as_image(key, value)
        if not images and self.cameras:
            raise RequestError(f"no image; send at least one of: {', '.join(self.cameras)}")
        return images

    def _state_keys(self, request: Mapping[str, Any]) -> tuple[str, ...]:
        for keys in self.state_keys:
            if all(key in request for key in keys):
                return keys
        return self.state_keys[0]

    def _prompt(self, request: Mapping[str, Any]) -> Any:
        value = next((request[key] for key in self.prompt_keys if key in request), None)
        if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "SU":
            value = value.item()
        if isinstance(value, bytes):
            try:
                value = value.decode()
            except UnicodeDecodeError:
                raise RequestError("the prompt is bytes but no UTF-8 text") from None
        return value


_BUILT_IN: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "libero": ("openpi/pi05_libero", {"control_hz": 20.0, "execute": 5}),
    "droid": ("openpi/pi05_droid", {"control_hz": 15.0, "execute": 8}),
    "aloha": (
        "openpi/pi05_aloha",
        {"control_hz": 50.0, "execute": 25, "reset_pose": (0.0, -1.5, 1.5, 0.0, 0.0, 0.0)},
    ),
}
ADAPTERS = ("auto", "generic", *_BUILT_IN)


def built_in_adapter(
    name: str,
    description: Mapping[str, Any],
    *,
    default_prompt: str | None = None,
) -> Adapter:
    """Return an adapter by name for a loaded engine.

    Args:
        name: ``libero``, ``droid``, ``aloha``, ``generic``, or ``auto``, which follows the engine's
            processing preset and takes ``generic`` when that names no robot. ``generic`` reads the
            checkpoint's own camera names, also as ``observation.images.NAME``, below ``images`` or
            at the top, and ``observation.state``, ``observation/state`` or ``state``.
        description: `Engine.describe()`.
        default_prompt: Instruction of requests that have none.

    Raises:
        ValueError: The name is unknown, or the robot has more cameras than the checkpoint.
    """
    processing = description["processing"]
    if description.get("family") == "cosmos3":
        return _cosmos3(name, description, default_prompt)
    if name == "auto":
        # openpi's presets are named openpi/FAMILY_ROBOT.
        family, _, robot = processing["preset"].partition("_")
        name = robot if family.startswith("openpi/") and robot in _BUILT_IN else "generic"
    cameras = tuple(processing["cameras"])
    if name == "generic":
        return Adapter(
            name=name,
            cameras=_generic_keys(cameras, processing["camera_aliases"]),
            state_keys=tuple((key,) for key in GENERIC_STATES),
            default_prompt=default_prompt,
        )
    if name not in _BUILT_IN:
        raise ValueError(f"unknown adapter {name!r}; allowed: {', '.join(ADAPTERS)}, or a file")
    preset_name, facts = _BUILT_IN[name]
    preset = get_preset(preset_name)
    positions = {camera: index for index, camera in enumerate(preset.cameras or ())}
    used = {key: positions[camera] for key, camera in preset.camera_aliases.items()}
    if max(used.values()) >= len(cameras):
        raise ValueError(
            f"adapter {name!r} has {max(used.values()) + 1} cameras but the checkpoint has "
            f"{len(cameras)} ({', '.join(cameras)})"
        )
    return Adapter(
        name=name,
        cameras={key: cameras[index] for key, index in used.items()},
        ignored=preset.ignored_cameras,
        state_keys=(preset.state_keys,),
        default_prompt=default_prompt,
        **facts,
    )


def _cosmos3(name: str, description: Mapping[str, Any], default_prompt: str | None) -> Adapter:
    """Return the keys of the wire of the model owner's DROID server."""
    if name not in ("auto", "cosmos3_droid"):
        raise ValueError(
            f"unknown adapter {name!r} for a Cosmos3 policy; allowed: auto, cosmos3_droid, or a "
            "file"
        )
    joints = description["processing"]["action_space"] == "joint_position"
    state = ("joint_position", "gripper_position") if joints else ("eef_pos", "eef_quat")
    return Adapter(
        name="cosmos3_droid",
        cameras={
            "observation/wrist_image_left": "wrist",
            "observation/exterior_image_1_left": "exterior_1",
            "observation/exterior_image_2_left": "exterior_2",
            "observation/image": "image",
        },
        optional=("observation/image",),
        state_keys=(tuple(f"observation/{key}" for key in state),),
        default_prompt=default_prompt,
        control_hz=description["fps"],
        action_key="action",
    )


def _generic_keys(cameras: tuple[str, ...], aliases: Mapping[str, str]) -> dict[str, str]:
    keys = {camera: camera for camera in cameras} | dict(aliases)
    return keys | {f"{PREFIX}{key}": camera for key, camera in keys.items()}
