"""LeRobot's batches as requests, and its real-time chunking as options. Imports no LeRobot."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

STATE = "observation.state"
IMAGES = "observation.images."


def requests_of(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one request for each observation of a batch.

    Args:
        batch: ``observation.images.NAME`` float [B, 3, H, W] in [0, 1] or uint8,
            ``observation.state`` [B, state_dim], and ``task``, B strings.

    Raises:
        ValueError: There is no state, or the tasks are not as many as the observations.
    """
    if STATE not in batch:
        raise ValueError(f"the batch has no {STATE!r}; it has: {', '.join(sorted(batch))}")
    states = batch[STATE].detach().to("cpu", torch.float32).numpy()
    tasks = batch.get("task", "")
    tasks = [tasks] * len(states) if isinstance(tasks, str) else list(tasks)
    if len(tasks) != len(states):
        raise ValueError(f"the batch has {len(states)} observations and {len(tasks)} tasks")
    pictures = {key: _pixels(batch[key]) for key in batch if key.startswith(IMAGES)}
    return [
        {
            "prompt": task,
            STATE: states[row],
            "images": {key: frames[row] for key, frames in pictures.items()},
        }
        for row, task in enumerate(tasks)
    ]


def rtc_options(
    delay: int | None, left: Tensor | None, horizon: int | None, schedule: str | None
) -> list[dict[str, Any]] | None:
    """Return the option ``rtc`` for each row of the batch, None without a chunk to continue.

    Args:
        delay: Steps until the chunk arrives.
        left: Rest of the last chunk [T, action_dim] or [B, T, action_dim] in the robot's units.
            LeRobot fills it up with zeros; rows of zeros at its end are cut off.
        horizon: Actions from where on the new chunk is free.
        schedule: Name of the weights' shape.
    """
    if left is None or left.numel() == 0:
        return None
    rows = left.detach().to("cpu", torch.float32).numpy()
    rows = rows[None] if rows.ndim == 2 else rows
    common: dict[str, Any] = {"delay": int(delay or 0)}
    if horizon:
        common["horizon"] = int(horizon)
    if schedule:
        common["schedule"] = schedule.lower()
    return [{**common, "prev": _without_padding(row)} for row in rows]


def _without_padding(rows: np.ndarray) -> np.ndarray:
    used = np.flatnonzero(np.any(rows != 0, axis=1))
    return rows[: used[-1] + 1 if used.size else 1]


def _pixels(frames: Tensor) -> np.ndarray:
    if frames.dtype != torch.uint8:
        frames = (frames * 255.0).round().clamp(0, 255).to(torch.uint8)
    return frames.detach().cpu().numpy()
