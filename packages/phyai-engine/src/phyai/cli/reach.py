"""The bridge to the reach example, which lives in the repository and not in the wheel."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phyai.cli.errors import CliError

if TYPE_CHECKING:
    import numpy as np

    from phyai.engine import Engine
    from phyai.processing import Observation

EXAMPLE = Path("examples", "pi05")
PACKAGE = "reach"
MARKER = Path(PACKAGE, "evaluate.py")
CHECKPOINT = Path(PACKAGE, "checkpoint")
PICTURE_COLUMNS = 4
PICTURE_EPISODES = 12


def find_examples(given: Path | None) -> Path:
    """Return the folder that holds the ``reach`` package.

    Args:
        given: Folder typed by the user: ``examples/pi05``, its parent, the repository, or ``reach``
            itself. None looks below the current folder, then below the repository of this file.

    Raises:
        CliError: No such folder.
    """
    here = Path(__file__).resolve()
    roots = [given] if given is not None else [Path.cwd(), *here.parents]
    for root in roots:
        for folder in (root / EXAMPLE, root / EXAMPLE.name, root, root.parent):
            if (folder / MARKER).is_file():
                return folder.resolve()
        if given is not None:
            raise CliError(
                f"{given} does not hold the reach example ({MARKER} is not in it)",
                "give the folder examples/pi05 of the repository",
            )
    raise CliError(
        f"the reach example ({EXAMPLE / PACKAGE}) is not here: the wheel does not contain it",
        "clone the repository and run there, or give --examples /path/to/repository",
    )


def import_reach(examples: Path, module: str) -> Any:
    """Import ``reach.<module>`` from the folder `examples`.

    Raises:
        CliError: A library that the environment needs is missing.
    """
    if str(examples) not in sys.path:
        sys.path.insert(0, str(examples))
    try:
        return import_module(f"{PACKAGE}.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in (PACKAGE, "phyai"):
            raise
        raise CliError(
            f"the reach environment needs {error.name}, which is not installed",
            f"pip install {error.name}",
        ) from None


@dataclass
class RecordingPolicy:
    """An engine as a policy that remembers its times and actions.

    Attributes:
        engine: What answers.
        times_ms: Wall time of each call.
        actions: Chunks of the running episode, [steps, 2] each, robot units.
    """

    engine: "Engine"
    times_ms: list[float] = field(default_factory=list)
    actions: list["np.ndarray"] = field(default_factory=list)

    def __call__(self, observation: "Observation", *, seed: int) -> "np.ndarray":
        """Return the actions [steps, 2] for one observation; `seed` fixes the noise."""
        started = time.perf_counter()
        actions = self.engine.infer(observation, seed=seed).actions
        self.times_ms.append((time.perf_counter() - started) * 1e3)
        self.actions.append(actions)
        return actions


@dataclass(frozen=True)
class Episode:
    """One episode: its outcome and the chunks of actions that were returned."""

    result: Any
    actions: tuple["np.ndarray", ...]


def run_episodes(
    examples: Path, policy: RecordingPolicy, episodes: int, seed: int, advance: Callable[[], None]
) -> list[Episode]:
    """Evaluate `policy` on episodes with the seeds ``seed``, ``seed + 1``, ...

    Args:
        examples: Folder that holds the ``reach`` package.
        policy: Called before every chunk.
        episodes: Number of episodes.
        seed: Seed of the first one.
        advance: Called after each episode.
    """
    module = import_reach(examples, "evaluate")
    done = []
    for index in range(episodes):
        policy.actions.clear()
        outcome = module.evaluate(policy, episodes=1, seed=seed + index)
        done.append(Episode(outcome.episodes[0], tuple(policy.actions)))
        advance()
    return done


def draw_episodes(examples: Path, episodes: list[Episode], path: Path) -> None:
    """Draw the first episodes: the scene at the start, and the way of the pointer over it.

    Args:
        examples: Folder that holds the ``reach`` package.
        episodes: What `run_episodes` returned.
        path: Picture file; the suffix picks the format.

    Raises:
        CliError: The format is unknown.
        OSError: The file cannot be written.
    """
    from matplotlib.figure import Figure

    from phyai.cli.plotting import save_figure

    shown = episodes[:PICTURE_EPISODES]
    columns = min(PICTURE_COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(2.6 * columns, 2.9 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    half = import_reach(examples, "scene").View.BASE.value
    for panel in panels.flat:
        panel.set_axis_off()
    for episode, panel in zip(shown, panels.flat, strict=False):
        scene, way = _replay(examples, episode)
        panel.imshow(scene, extent=(-half, half, -half, half))
        panel.plot(*way.T, color="black", linewidth=1.2)
        panel.plot(*way[-1], marker="o", markersize=5, color="black")
        outcome = "reached" if episode.result.success else "missed"
        panel.set_title(
            f"{episode.result.task}\n{outcome}, {episode.result.steps} steps", fontsize=8
        )
    save_figure(figure, path)


def _replay(examples: Path, episode: Episode) -> tuple["np.ndarray", "np.ndarray"]:
    """Return the first picture [H, W, 3] and the positions [steps + 1, 2] of an episode."""
    import numpy as np

    environment = import_reach(examples, "env").ReachEnv(render_mode="rgb_array")
    execute = import_reach(examples, "sizes").ACTION_STEPS
    observation, _ = environment.reset(seed=episode.result.seed)
    scene = environment.render()
    positions = [observation["state"][:2]]
    executed = np.concatenate([chunk[:execute] for chunk in episode.actions])
    for action in executed[: episode.result.steps]:
        observation, *_ = environment.step(action)
        positions.append(observation["state"][:2])
    return scene, np.stack(positions)
