import math

import numpy as np
import pytest

from phyai.processing.errors import ProcessingError
from phyai.processing.robots import (
    RobotTransform,
    decode_actions,
    decode_state,
    encode_actions,
    make_mask,
)

FLIPPED = [1, 2, 8, 9]


def angle_of_opening(opening: float) -> float:
    """The horn angle of a finger position by the linkage, normalised to the training range."""
    metres = 0.01844 + opening * (0.05800 - 0.01844)
    sine = (0.022**2 + metres**2 - 0.036**2) / (2 * 0.022 * metres)
    return (math.asin(max(-1.0, min(1.0, sine))) - 0.5476) / (1.6296 - 0.5476)


def test_make_mask():
    assert make_mask(6, -1, 6, -1) == ((True,) * 6 + (False,)) * 2
    assert make_mask(7, -1) == (True,) * 7 + (False,)


def test_aloha_state():
    state = np.random.default_rng(0).uniform(-1, 1, (3, 14))
    state[:, [6, 13]] = [[0.0, 1.0], [0.5, 0.25], [1.0, 0.0]]
    before = state.copy()
    decoded = decode_state(RobotTransform.ALOHA, state)
    for row in range(3):
        for column in range(14):
            value = state[row, column]
            expected = -value if column in FLIPPED else value
            if column in (6, 13):
                expected = angle_of_opening(value)
            assert decoded[row, column] == pytest.approx(expected, abs=1e-12)
    assert np.array_equal(state, before)


def test_aloha_gripper_grows_with_the_opening_over_its_range():
    state = np.zeros((50, 14))
    state[:, 6] = np.linspace(0, 1, 50)
    angles = decode_state(RobotTransform.ALOHA, state)[:, 6]
    assert (np.diff(angles) > 0).all()
    assert -1.2 < angles[0] < 0.1
    assert 0.2 < angles[-1] < 1.1


def test_aloha_actions():
    actions = np.random.default_rng(1).normal(size=(2, 5, 14))
    before = actions.copy()
    encoded = encode_actions(RobotTransform.ALOHA, actions)
    for column in range(14):
        expected = -before[..., column] if column in FLIPPED else before[..., column]
        if column in (6, 13):
            expected = (before[..., column] + 0.5476 + 0.6213) / (1.4910 + 0.6213)
        assert np.allclose(encoded[..., column], expected, atol=1e-12)
    assert np.array_equal(actions, before)


def test_without_a_robot_nothing_changes():
    values = np.arange(6.0).reshape(2, 3)
    assert np.array_equal(decode_state(RobotTransform.NONE, values), values)
    assert np.array_equal(encode_actions(RobotTransform.NONE, values), values)


def test_aloha_needs_fourteen_columns():
    with pytest.raises(ProcessingError, match=r"14 columns.*got 7"):
        decode_state(RobotTransform.ALOHA, np.zeros((1, 7)))


@pytest.mark.parametrize("robot", list(RobotTransform))
def test_actions_come_back_exactly(robot):
    actions = np.random.default_rng(1).normal(size=(2, 5, 14))
    encoded = encode_actions(robot, actions.copy())
    before = encoded.copy()
    np.testing.assert_allclose(decode_actions(robot, encoded), actions, atol=1e-12)
    assert np.array_equal(encoded, before)
