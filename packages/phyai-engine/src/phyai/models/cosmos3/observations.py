"""Between a robot's observations and the requests and answers of a policy."""

from typing import Any

import numpy as np

from phyai.engine import ActionChunk
from phyai.models.cosmos3.droid import ActionSpace, PolicyContract
from phyai.models.cosmos3.requests import PolicyRequest
from phyai.models.cosmos3.results import PolicyResult
from phyai.processing.errors import ProcessingError
from phyai.processing.inputs import Observation

CAMERAS = ("wrist", "exterior_1", "exterior_2")
COMPOSED = "image"
"""Name of a picture with all three views, instead of `CAMERAS`."""

MODEL_STAGES = ("encode", "prefill", "denoise", "decode")
"""Stages of a request's timing that are the model's work."""


def state_width(contract: PolicyContract) -> int:
    """Returns the numbers of a state: joints and gripper, or position and quaternion."""
    return 8 if contract.space is ActionSpace.JOINT_POSITION else 7


def policy_request(
    observation: Observation, contract: PolicyContract, **settings: Any
) -> PolicyRequest:
    """Returns the request that an observation stands for.

    Args:
        observation: see `Cosmos3Policy.infer`.
        contract: whose action space says what the state is.
        settings: further fields of the request.

    Raises:
        ProcessingError: for other pictures, or a state of another width.
    """
    images = dict(observation.images)
    state = observation.state
    joints = contract.space is ActionSpace.JOINT_POSITION
    width = state_width(contract)
    if state is None or np.shape(state) != (width,):
        seen = "missing" if state is None else f"of shape {np.shape(state)}"
        what = (
            "7 joint positions and the gripper" if joints else "position and quaternion x, y, z, w"
        )
        raise ProcessingError(f"the state is {seen}; this policy reads {width} numbers: {what}")
    pictures: dict[str, Any]
    if set(images) == {COMPOSED}:
        pictures = {"image": images[COMPOSED]}
    elif set(images) == set(CAMERAS):
        pictures = {"wrist": images[CAMERAS[0]], "exteriors": [images[n] for n in CAMERAS[1:]]}
    else:
        raise ProcessingError(
            f"the pictures are {', '.join(sorted(images)) or 'missing'}; this policy reads "
            f"{', '.join(CAMERAS)}, or {COMPOSED} alone"
        )
    if joints:
        pose = {"joint_position": state[:7], "gripper_position": float(state[7])}
    else:
        pose = {"eef_position": state[:3], "eef_quaternion": state[3:]}
    return PolicyRequest(prompt=observation.task, **pictures, **pose, **settings)


def chunk_of(result: PolicyResult) -> ActionChunk:
    """Returns a policy's answer as the engine's."""
    timing = dict(result.timing_ms)
    # In an answer to a robot, decoding means its request.
    timing["model"] = sum(timing.get(stage, 0.0) for stage in MODEL_STAGES)
    timing["video"] = timing.pop("decode", 0.0)
    return ActionChunk(result.actions, result.normalized, timing, result.prompt, result.frames)
