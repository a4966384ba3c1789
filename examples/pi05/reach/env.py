"""The task as a gymnasium environment, registered as ``phyai/Reach-v0`` on import."""

import string
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from reach.scene import IMAGE_SIZE, View, render, to_uint8
from reach.world import (
    HOLD_STEPS,
    MAX_SPEED,
    STEP_LIMIT,
    TOLERANCE,
    WORKSPACE,
    Layout,
    Pointer,
    at_rest,
    count_hold,
    layout_seed,
    move,
    seeded_layout,
)

ENV_ID = "phyai/Reach-v0"
RENDER_SIZE = 256

Array = np.ndarray[Any, np.dtype[Any]]


class ReachEnv(gymnasium.Env[dict[str, Any], Array]):
    """Lead a pointer to the disc that the instruction names and hold it there.

    Observation: ``base`` and ``wrist`` uint8 [84, 84, 3]; ``state`` float32 [4] = (x, y, vx, vy) in
    workspace units; ``task``, the instruction. Action: float32 [2], the velocity (dx, dy) of one
    step; longer vectors are shortened to `MAX_SPEED`. The reward is 1 in the step that succeeds
    (pointer inside `TOLERANCE` for `HOLD_STEPS` steps in a row), which ends the episode, else 0;
    the episode is cut after `STEP_LIMIT` steps.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        if render_mode not in (None, "rgb_array"):
            raise ValueError(
                f"render_mode is {render_mode!r}; allowed are None and 'rgb_array'. "
                "Use 'rgb_array' and show or save the array that render() returns."
            )
        self.render_mode = render_mode
        image = spaces.Box(0, 255, (IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
        speed = 1.001 * MAX_SPEED  # a difference of rounded positions
        high = np.array([WORKSPACE, WORKSPACE, speed, speed], np.float32)
        self.observation_space = spaces.Dict(
            {
                "base": image,
                "wrist": image,
                "state": spaces.Box(-high, high, dtype=np.float32),
                "task": spaces.Text(max_length=64, charset=string.ascii_lowercase + " "),
            }
        )
        self.action_space = spaces.Box(-MAX_SPEED, MAX_SPEED, (2,), np.float32)
        self._layout: Layout | None = None
        self._pointer = at_rest(torch.zeros(1, 2))
        self._held = torch.zeros(1, dtype=torch.int64)
        self._step = 0

    @property
    def layout(self) -> Layout:
        """Layout of the running episode [B = 1].

        Raises:
            RuntimeError: `reset` has not been called.
        """
        if self._layout is None:
            raise RuntimeError("the environment has no episode yet: call reset() first")
        return self._layout

    @property
    def pointer(self) -> Pointer:
        """Pointer of the running episode [B = 1]."""
        return self._pointer

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode; the same seed makes the same episode. `options` has no entries."""
        super().reset(seed=seed, options=options)
        self._layout = seeded_layout(layout_seed(self.np_random))
        self._pointer = at_rest(self._layout.start)
        self._held = torch.zeros(1, dtype=torch.int64)
        self._step = 0
        return self._observation(), self._info()

    def step(self, action: Array) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Move the pointer by one action [2].

        Raises:
            ValueError: the action has another shape or is not finite.
            RuntimeError: `reset` has not been called.
        """
        command = np.asarray(action, dtype=np.float32)
        if command.shape != (2,) or not np.isfinite(command).all():
            raise ValueError(
                f"action is {action!r}; it must hold two finite numbers (dx, dy). "
                "Pass the policy's actions one row at a time."
            )
        goal = self.layout.goal
        self._pointer = move(self._pointer, torch.from_numpy(command)[None])
        self._held = count_hold(self._pointer.position, goal, self._held)
        self._step += 1
        info = self._info()
        success = info["is_success"]
        truncated = self._step >= STEP_LIMIT and not success
        return self._observation(), float(success), success, truncated, info

    def render(self) -> Array | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The base camera at a higher resolution, uint8 [256, 256, 3]; None without a mode."""
        return self._picture(View.BASE, RENDER_SIZE) if self.render_mode else None

    def _picture(self, view: View, size: int = IMAGE_SIZE) -> Array:
        image = to_uint8(render(self.layout, self._pointer.position, view, size))
        return image[0].permute(1, 2, 0).contiguous().numpy()

    def _observation(self) -> dict[str, Any]:
        return {
            "base": self._picture(View.BASE),
            "wrist": self._picture(View.WRIST),
            "state": self._pointer.state[0].numpy(),
            "task": self.layout.tasks()[0],
        }

    def _info(self) -> dict[str, Any]:
        distance = float((self._pointer.position - self.layout.goal).norm())
        held = int(self._held)
        return {
            "is_success": held >= HOLD_STEPS,
            "distance": distance,
            "inside": distance <= TOLERANCE,
        }


if ENV_ID not in gymnasium.registry:
    gymnasium.register(ENV_ID, entry_point="reach.env:ReachEnv")
