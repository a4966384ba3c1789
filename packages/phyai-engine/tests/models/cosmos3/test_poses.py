"""Rotations and relative poses."""

import numpy as np
import pytest

from phyai.models.cosmos3.poses import (
    compose_framewise,
    rotation_from_quaternion,
    rotation_from_six,
    rotation_to_quaternion,
    rotation_to_six,
    split_framewise,
)


@pytest.fixture
def quaternions():
    values = np.random.default_rng(0).standard_normal((101, 4))
    values /= np.linalg.norm(values, axis=-1, keepdims=True)
    return np.where(values[:, 3:] < 0, -values, values)


def test_quarter_turn_about_z():
    half = np.sqrt(0.5)
    rotation = rotation_from_quaternion(np.array([0, 0, half, half]))
    np.testing.assert_allclose(rotation, [[0, -1, 0], [1, 0, 0], [0, 0, 1]], atol=1e-15)
    assert rotation_to_six(rotation) == pytest.approx([0, 1, 0, -1, 0, 0])


def test_round_trips(quaternions):
    rotations = rotation_from_quaternion(3 * quaternions)
    identity = rotations @ np.swapaxes(rotations, -1, -2)
    np.testing.assert_allclose(identity, np.broadcast_to(np.eye(3), identity.shape), atol=1e-14)
    np.testing.assert_allclose(np.linalg.det(rotations), 1, atol=1e-14)
    np.testing.assert_allclose(rotation_to_quaternion(rotations), quaternions, atol=1e-14)
    np.testing.assert_allclose(rotation_from_six(rotation_to_six(rotations)), rotations, atol=1e-14)


@pytest.mark.parametrize("axis", range(3))
def test_half_turns_where_w_vanishes(axis):
    quaternion = np.zeros(4)
    quaternion[axis] = 1
    found = rotation_to_quaternion(rotation_from_quaternion(quaternion))
    np.testing.assert_allclose(np.abs(found), quaternion, atol=1e-15)


def test_six_numbers_need_not_be_orthonormal(quaternions):
    rotations = rotation_from_quaternion(quaternions)
    six = rotation_to_six(rotations)
    bent = np.concatenate([5 * six[:, :3], 0.5 * six[:, 3:] + 2 * six[:, :3]], axis=1)
    np.testing.assert_allclose(rotation_from_six(bent), rotations, atol=1e-13)


def test_steps_lead_from_pose_to_pose(quaternions):
    rotations = rotation_from_quaternion(quaternions)
    positions = np.random.default_rng(1).standard_normal((101, 3))
    steps = split_framewise(positions, rotations)
    found = compose_framewise(positions[0], rotations[0], np.hstack([steps, np.ones((100, 1))]))
    np.testing.assert_allclose(found[0], positions[1:], atol=1e-12)
    np.testing.assert_allclose(found[1], rotations[1:], atol=1e-12)


def test_displacements_are_in_the_frame_of_the_step_before():
    half = np.sqrt(0.5)
    turn = rotation_from_quaternion(np.array([0, 0, half, half]))
    step = np.concatenate([[1, 0, 0], rotation_to_six(turn)])
    positions, _ = compose_framewise(np.zeros(3), np.eye(3), np.stack([step] * 4))
    np.testing.assert_allclose(positions, [[1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 0]], atol=1e-15)
