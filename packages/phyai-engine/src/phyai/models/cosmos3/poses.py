"""Poses of an end effector: relative to absolute, six-number rotations and quaternions.

A rotation's six numbers are the first two columns of its matrix (Zhou et al., "On the Continuity of
Rotation Representations in Neural Networks", arXiv 1812.07035).
"""

import numpy as np


def rotation_from_six(six: np.ndarray) -> np.ndarray:
    """Returns rotation matrices [..., 3, 3] by Gram-Schmidt on six numbers [..., 6]."""
    first, second = six[..., :3], six[..., 3:]
    x = _unit(first)
    y = _unit(second - np.sum(x * second, axis=-1, keepdims=True) * x)
    return np.stack([x, y, np.cross(x, y)], axis=-1)


def rotation_to_six(rotation: np.ndarray) -> np.ndarray:
    """Returns six numbers [..., 6] of rotation matrices [..., 3, 3]."""
    return np.concatenate([rotation[..., 0], rotation[..., 1]], axis=-1)


def rotation_from_quaternion(quaternion: np.ndarray) -> np.ndarray:
    """Returns rotation matrices [..., 3, 3] of quaternions [..., 4] as x, y, z, w of any norm."""
    x, y, z, w = np.moveaxis(_unit(quaternion), -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)


def rotation_to_quaternion(rotation: np.ndarray) -> np.ndarray:
    """Returns unit quaternions [..., 4] as x, y, z, w with w not negative.

    The largest of the four squared components, read off the diagonal, divides the others.
    """
    m = rotation
    trace = np.trace(m, axis1=-2, axis2=-1)
    diagonal = np.diagonal(m, axis1=-2, axis2=-1)
    squares = np.stack([*(1 + 2 * np.moveaxis(diagonal, -1, 0) - trace), 1 + trace], axis=-1)
    xy, xz, yz = (m[..., i, j] + m[..., j, i] for i, j in ((0, 1), (0, 2), (1, 2)))
    xw, yw, zw = (m[..., i, j] - m[..., j, i] for i, j in ((2, 1), (0, 2), (1, 0)))
    # Row k holds 4 q_k q; the row of the largest component is the accurate one.
    products = np.stack(
        [
            np.stack([squares[..., 0], xy, xz, xw], axis=-1),
            np.stack([xy, squares[..., 1], yz, yw], axis=-1),
            np.stack([xz, yz, squares[..., 2], zw], axis=-1),
            np.stack([xw, yw, zw, squares[..., 3]], axis=-1),
        ],
        axis=-2,
    )
    best = np.argmax(squares, axis=-1)[..., None, None]
    quaternion = _unit(np.take_along_axis(products, best, axis=-2)[..., 0, :])
    return np.where(quaternion[..., 3:] < 0, -quaternion, quaternion)


def compose_framewise(
    position: np.ndarray, rotation: np.ndarray, steps: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Follows poses that are each given relative to the one before.

    ``R_i = R_(i-1) dR_i`` and ``p_i = p_(i-1) + R_(i-1) dp_i``.

    Args:
        position: [3], of the current pose.
        rotation: [3, 3], of the current pose.
        steps: [T, 9 or more]: displacement, six numbers of a rotation; further columns are ignored.

    Returns:
        Positions [T, 3] and rotations [T, 3, 3], fp64.
    """
    steps = np.asarray(steps, dtype=np.float64)
    turns = rotation_from_six(steps[:, 3:9])
    positions, rotations = [], []
    for displacement, turn in zip(steps[:, :3], turns, strict=True):
        position = position + rotation @ displacement
        rotation = rotation @ turn
        positions.append(position)
        rotations.append(rotation)
    return np.stack(positions), np.stack(rotations)


def split_framewise(positions: np.ndarray, rotations: np.ndarray) -> np.ndarray:
    """Returns the steps [T - 1, 9] between T poses; the way back of `compose_framewise`.

    Args:
        positions: [T, 3].
        rotations: [T, 3, 3].
    """
    back = np.swapaxes(rotations[:-1], -1, -2)
    displacements = (back @ np.diff(positions, axis=0)[..., None])[..., 0]
    return np.concatenate([displacements, rotation_to_six(back @ rotations[1:])], axis=-1)


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True).clip(min=1e-12)
