"""The bridge to the reach example, which lives in the repository and not in the wheel."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phyai.cli.errors import CliError
from phyai.cli.plotting import picture_error

if TYPE_CHECKING:
    import numpy as np

    from phyai.engine import Engine
    from phyai.processing import Observation

EXAMPLE = Path("examples", "pi05")
PACKAGE = "reach"
MARKER = Path(PACKAGE, "evaluate.py")
CHECKPOINT = Path(PACKAGE, "checkpoint")


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


@dataclass(frozen=True)
class TimedPolicy:
    """An engine as a reach policy that remembers how long it took.

    Attributes:
        engine: What answers.
        times_ms: Wall time of each call.
    """

    engine: "Engine"
    times_ms: list[float] = field(default_factory=list)

    def __call__(self, observation: "Observation", *, seed: int) -> "np.ndarray":
        """Return the actions [steps, 2] for one observation; `seed` fixes the noise."""
        started = time.perf_counter()
        actions = self.engine.infer(observation, seed=seed).actions
        self.times_ms.append((time.perf_counter() - started) * 1e3)
        return actions


def run_episodes(
    examples: Path, policy: TimedPolicy, episodes: int, seed: int, advance: Callable[[], None]
) -> list[Any]:
    """Evaluate `policy` on episodes with the seeds ``seed``, ``seed + 1``, ...

    Args:
        examples: Folder that holds the ``reach`` package.
        policy: Called before every chunk.
        episodes: Number of episodes.
        seed: Seed of the first one.
        advance: Called after each episode.

    Returns:
        The ``reach.evaluate.EpisodeResult`` of each.
    """
    module = import_reach(examples, "evaluate")
    results = []
    for index in range(episodes):
        results.extend(module.evaluate(policy, episodes=1, seed=seed + index).episodes)
        advance()
    return results


def draw_episode(examples: Path, engine: "Engine", seed: int, path: Path) -> None:
    """Run the episode `seed` once more and draw moments of it side by side.

    Args:
        examples: Folder that holds the ``reach`` package.
        engine: The policy.
        seed: Seed of the episode.
        path: Picture file; the suffix picks the format.

    Raises:
        CliError: The format is unknown.
        OSError: The file cannot be written.
    """
    rollout = import_reach(examples, "rollout")
    recorded = rollout.record(TimedPolicy(engine), seed=seed)
    try:
        rollout.draw_rollout(path, recorded)
    except ValueError as error:
        raise picture_error(path, error) from None
