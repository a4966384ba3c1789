"""A picture of an episode: what the policy saw, did and planned.

As a script: ``python examples/pi05/reach/rollout.py CHECKPOINT --out rollout.png``.
"""

import argparse
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from reach.chunks import ACTION_STEPS, check_execute, chunk_seed
from reach.env import ReachEnv
from reach.evaluate import EngineRollout, Policy, load_engine, to_observation
from reach.scene import View, render
from reach.world import DISC_RADIUS, Layout, Pointer, move

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PICTURE = 320
_INSET = 0.3
"""Side of the wrist picture as a share of the frame."""


@dataclass(frozen=True)
class Rollout:
    """A recorded episode of S steps.

    Attributes:
        task: the instruction.
        layout: its discs [B = 1].
        path: pointer positions, float32 [S + 1, 2].
        plans: for every call of the policy, the step at which it was called and the positions
            that the predicted chunk leads to, float32 [T + 1, 2] from the pointer on.
        success: whether the episode succeeded.
    """

    task: str
    layout: Layout
    path: np.ndarray
    plans: tuple[tuple[int, np.ndarray], ...]
    success: bool


def record(policy: Policy, seed: int = 0, execute: int = ACTION_STEPS) -> Rollout:
    """Run one episode of the environment.

    Raises:
        ValueError: `execute` is not in a chunk.
    """
    check_execute(execute)
    env = ReachEnv()
    observation, info = env.reset(seed=seed)
    path, plans, over = [observation["state"][:2]], [], False
    while not over:
        noise = chunk_seed(seed, len(plans))
        actions = policy(to_observation(observation), seed=noise)
        plans.append((len(path) - 1, _positions(env.pointer, actions)))
        for action in actions[:execute]:
            observation, _, terminated, truncated, info = env.step(action)
            path.append(observation["state"][:2])
            over = terminated or truncated
            if over:
                break
    return Rollout(
        task=observation["task"],
        layout=env.layout,
        path=np.stack(path),
        plans=tuple(plans),
        success=info["is_success"],
    )


def _positions(pointer: Pointer, actions: np.ndarray) -> np.ndarray:
    """Where the actions [T, 2] lead: [T + 1, 2]."""
    positions = [pointer.position[0].numpy()]
    for action in np.asarray(actions, dtype=np.float32):
        pointer = move(pointer, torch.from_numpy(action)[None])
        positions.append(pointer.position[0].numpy())
    return np.stack(positions)


def draw_rollout(path: Path, rollout: Rollout, frames: int = 5) -> None:
    """Draw moments of an episode side by side into an image file.

    Every frame shows the base camera, the way so far (white and blue), the chunk that was planned
    last (fading from blue), and the wrist camera in the corner with the most room.

    Args:
        path: file to write; its suffix chooses the format.
        rollout: the episode.
        frames: number of moments, evenly spaced from the first step to the last.

    Raises:
        ValueError: `frames` is below 2.
    """
    if frames < 2:
        raise ValueError(f"frames is {frames}; the picture needs at least 2, the start and the end")
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 10}):
        figure = Figure(figsize=(2.6 * frames, 3.2), layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        last = len(rollout.path) - 1
        steps = np.linspace(0, last, frames).round().astype(int).tolist()
        corner = _free_corner(rollout)
        for axes, step in zip(figure.subplots(1, frames), steps, strict=True):
            _draw_frame(axes, rollout, step, corner)
            axes.set_title(f"step {step}", fontsize=9, color="0.35")
        outcome = f"reached in {last} steps" if rollout.success else f"missed after {last} steps"
        figure.suptitle(f"“{rollout.task}” – {outcome}", fontsize=13)
        figure.savefig(path, dpi=150)


def _draw_frame(axes: "Axes", rollout: Rollout, step: int, corner: tuple[float, float]) -> None:
    position = torch.from_numpy(rollout.path[step])[None]
    half = View.BASE.value
    extent = (-half, half, -half, half)
    axes.imshow(_picture(rollout.layout, position, View.BASE), extent=extent)
    called, plan = max((p for p in rollout.plans if p[0] <= step), key=lambda p: p[0])
    way, ahead = rollout.path[: step + 1], plan[step - called :]
    axes.plot(*way.T, color="white", linewidth=4, solid_capstyle="round", alpha=0.8)
    axes.plot(*way.T, color="#2b4c9b", linewidth=1.8, solid_capstyle="round")
    for index, (a, b) in enumerate(pairwise(ahead)):
        fade = 1 - 0.8 * index / len(plan)
        axes.plot(*np.stack([a, b]).T, color="#d6246e", linewidth=2, alpha=fade)
        axes.plot(*b, ".", color="#d6246e", markersize=4, alpha=fade)
    axes.set(xlim=(-half, half), ylim=(-half, half), xticks=[], yticks=[])
    left, bottom = (0.02 if side < 0 else 0.98 - _INSET for side in corner)
    inset = axes.inset_axes((left, bottom, _INSET, _INSET))
    inset.imshow(_picture(rollout.layout, position, View.WRIST))
    inset.set(xticks=[], yticks=[])
    for spine in inset.spines.values():
        spine.set(edgecolor="white", linewidth=1.5)


def _picture(layout: Layout, position: torch.Tensor, view: View) -> np.ndarray:
    return render(layout, position, view, _PICTURE)[0].permute(1, 2, 0).clamp(0, 1).numpy()


def _free_corner(rollout: Rollout) -> tuple[float, float]:
    """The corner (signs of x and y) that is farthest from discs, path and plans."""
    discs = rollout.layout.discs[0].numpy()
    points = np.concatenate([rollout.path, *(plan for _, plan in rollout.plans)])
    centre = (1 - _INSET) * View.BASE.value

    def room(corner: tuple[float, float]) -> float:
        place = np.array(corner) * centre
        to_discs = np.abs(discs - place).max(axis=1).min() - DISC_RADIUS
        return float(min(to_discs, np.abs(points - place).max(axis=1).min()))

    return max(((x, y) for x in (-1.0, 1.0) for y in (-1.0, 1.0)), key=room)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Draw an episode of a reach checkpoint")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, default=Path("rollout.png"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--execute", type=int, default=ACTION_STEPS)
    parser.add_argument("--frames", type=int, default=5)
    args = parser.parse_args()
    engine = load_engine(args.checkpoint, "cpu", "float32")
    rollout = record(EngineRollout(engine), args.seed, args.execute)
    draw_rollout(args.out, rollout, args.frames)
    print(f"{args.out}: {rollout.task}, {'success' if rollout.success else 'miss'}")


if __name__ == "__main__":
    main()
