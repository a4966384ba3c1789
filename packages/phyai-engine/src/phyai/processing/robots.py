"""Conversions between a robot's joint conventions and those that π0/π0.5 were trained in."""

from enum import StrEnum

import numpy as np

from phyai.processing.errors import ProcessingError

ALOHA_DIM = 14
_ALOHA_GRIPPERS = [6, 13]
_ALOHA_SIGNS = np.array([1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0] * 2)

# Metres of the ALOHA gripper's finger, and of the linkage that moves it.
_FINGER_OPEN_SPAN = (0.01844, 0.05800)
_ARM_LENGTH, _HORN_RADIUS = 0.036, 0.022
# Radians: the training data's gripper range (encoder counts 2405..3110 around 2048), the robot's.
_TRAINED_SPAN = (0.5476, 1.6296)
_ROBOT_SPAN = (-0.6213, 1.4910)


class RobotTransform(StrEnum):
    """Which joint conventions are converted."""

    NONE = "none"
    ALOHA = "aloha"


def make_mask(*counts: int) -> tuple[bool, ...]:
    """Spells a mask by runs: a positive count is that many True, a negative one False."""
    return tuple(count > 0 for count in counts for _ in range(abs(count)))


def decode_state(robot: RobotTransform, state: np.ndarray) -> np.ndarray:
    """Robot state to the convention of the model.

    Args:
        robot: The conversion.
        state: `[..., state_dim]` in robot units; 14 columns for ALOHA.

    Returns:
        A float64 array of the same shape. ALOHA: signs of flipped joints, grippers from linear
        opening to the normalised angle.

    Raises:
        ProcessingError: ALOHA with another number of columns.
    """
    state = np.asarray(state, dtype=np.float64)
    if robot is RobotTransform.NONE:
        return state
    if state.shape[-1] != ALOHA_DIM:
        raise ProcessingError(
            f"an ALOHA state has {ALOHA_DIM} columns (6 joints and a gripper per arm), got "
            f"{state.shape[-1]}"
        )
    decoded = state * _ALOHA_SIGNS
    decoded[..., _ALOHA_GRIPPERS] = _gripper_to_angle(decoded[..., _ALOHA_GRIPPERS])
    return decoded


def encode_actions(robot: RobotTransform, actions: np.ndarray) -> np.ndarray:
    """Actions in the convention of the model to robot units; the way back of `decode_state`.

    Args:
        robot: The conversion.
        actions: `[..., action_dim]`; 14 columns for ALOHA.

    Returns:
        An array of the same shape. ALOHA: signs of flipped joints, grippers from the model's angle
        to the robot's normalised joint range.
    """
    if robot is RobotTransform.NONE:
        return actions
    encoded = actions * _ALOHA_SIGNS
    angle = encoded[..., _ALOHA_GRIPPERS] + _TRAINED_SPAN[0]
    encoded[..., _ALOHA_GRIPPERS] = _to_unit(angle, _ROBOT_SPAN)
    return encoded


def decode_actions(robot: RobotTransform, actions: np.ndarray) -> np.ndarray:
    """Robot units to the convention of the model; the exact way back of `encode_actions`.

    Args:
        robot: The conversion.
        actions: `[..., action_dim]`; 14 columns for ALOHA.

    Returns:
        A new float64 array of the same shape.
    """
    decoded = np.array(actions, dtype=np.float64)
    if robot is RobotTransform.NONE:
        return decoded
    low, high = _ROBOT_SPAN
    angle = decoded[..., _ALOHA_GRIPPERS] * (high - low) + low
    decoded[..., _ALOHA_GRIPPERS] = angle - _TRAINED_SPAN[0]
    return decoded * _ALOHA_SIGNS


def _to_unit(values: np.ndarray, span: tuple[float, float]) -> np.ndarray:
    return (values - span[0]) / (span[1] - span[0])


def _gripper_to_angle(opening: np.ndarray) -> np.ndarray:
    """Normalised finger opening to the normalised horn angle, by the linkage's law of cosines."""
    low, high = _FINGER_OPEN_SPAN
    metres = opening * (high - low) + low
    sine = (_HORN_RADIUS**2 + metres**2 - _ARM_LENGTH**2) / (2.0 * _HORN_RADIUS * metres)
    return _to_unit(np.arcsin(np.clip(sine, -1.0, 1.0)), _TRAINED_SPAN)
