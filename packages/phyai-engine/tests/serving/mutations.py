"""Requests that were right before something happened to them."""

import random
from typing import Any

import numpy as np

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 3, 0.5, 2**63 - 1, 1e300, float("nan"), float("inf")),
    *("", "\ud7ff", "a" * 1000, "linear", "zeros"),
    *(b"", b"\xff", b"\xff\xd8\xff" + bytes(50), b"\x89PNG\r\n\x1a\n" + bytes(50)),
    *([], [1, [2]], ["a", 1], {}, {"a": {}}, [None] * 4),
    *(np.zeros(0), np.zeros((3, 0, 3), np.uint8), np.zeros((2,) * 7), np.zeros((3, 3), bool)),
    *(np.array("x"), np.array(["x", "y"]), np.array(b"\xff"), np.zeros(4, ">f8")),
    *(np.float16(6e4), np.int64(-(2**63)), np.uint64(2**64 - 1), np.full(4, np.inf)),
    *(np.full((8, 8, 3), np.nan, np.float32), np.zeros((1, 1, 3), np.uint8), np.ones((5,) * 4)),
    *(np.full((16, 32), 1e9), np.full((4, 2), -1e9), np.full((4, 2), 1e38)),
)
KEYS = (
    *("x", "task", "state", "images", "observation.state", "observation.images.base", "prompt"),
    *("__options__", "session", "prev", "noise", "video", "reset", "schedule", "delay", "seed"),
    *("observation/state", "observation/image", "observation/gripper_position", "num_steps"),
)


def mutate(request: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Return the request after one to three keys were dropped, added or given other values."""
    changed = dict(request)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        key = draw.choice(list(changed)) if changed else "x"
        inner, chance = changed.get(key), draw.random()
        if chance < 0.15:
            changed.pop(key, None)
        elif chance < 0.3:
            changed[draw.choice(KEYS)] = draw.choice(VALUES)
        elif isinstance(inner, dict) and chance < 0.9:
            changed[key] = mutate(inner, draw)
        else:
            changed[key] = draw.choice(VALUES)
    return changed
