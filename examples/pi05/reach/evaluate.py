"""Success of a policy over episodes with fixed seeds, in the environment, one at a time.

As a script: ``python examples/pi05/reach/evaluate.py CHECKPOINT`` runs phyai's engine.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from phyai.processing.inputs import Observation
from reach.chunks import ACTION_STEPS, check_execute, chunk_seed
from reach.env import ReachEnv

if TYPE_CHECKING:
    from phyai.engine import Engine


class Policy(Protocol):
    """Anything that answers an observation with a chunk of actions."""

    def __call__(self, observation: Observation, *, seed: int) -> np.ndarray:
        """Actions [T, 2] in workspace units per step; `seed` fixes the policy's noise."""
        ...


@dataclass(frozen=True)
class EngineRollout:
    """phyai's engine as a policy."""

    engine: "Engine"

    def __call__(self, observation: Observation, *, seed: int) -> np.ndarray:
        """One inference, in robot units."""
        return self.engine.infer(observation, seed=seed).actions


@dataclass(frozen=True)
class EpisodeResult:
    """Outcome of one episode; `distance` is the final one to the target's centre."""

    seed: int
    task: str
    success: bool
    steps: int
    distance: float


@dataclass(frozen=True)
class EvalResult:
    """Outcome of an evaluation.

    Attributes:
        success_rate: share of successful episodes.
        steps: mean number of steps of the successful ones, nan if there is none.
        ms_per_chunk: median time of one call of the policy.
        episodes: every episode in order.
    """

    success_rate: float
    steps: float
    ms_per_chunk: float
    episodes: tuple[EpisodeResult, ...]


def to_observation(observation: dict[str, Any]) -> Observation:
    """The environment's observation as a policy reads it."""
    images = {name: observation[name] for name in ("base", "wrist")}
    return Observation(images=images, state=observation["state"], task=observation["task"])


def evaluate(
    policy: Policy, episodes: int = 100, seed: int = 0, execute: int = ACTION_STEPS
) -> EvalResult:
    """Run `policy` in the environment.

    Args:
        policy: called before every chunk.
        episodes: number of episodes; episode i has the seed ``seed + i``.
        seed: seed of the first episode.
        execute: actions of a chunk that are executed before the next call.

    Raises:
        ValueError: `episodes` is below 1, or `execute` is not in a chunk.
    """
    check_execute(execute)
    if episodes < 1:
        raise ValueError(f"episodes is {episodes}; an evaluation needs at least 1")
    env = ReachEnv()
    times: list[float] = []
    results = [_run_episode(env, policy, seed + i, execute, times) for i in range(episodes)]
    steps = [result.steps for result in results if result.success]
    return EvalResult(
        success_rate=fmean(result.success for result in results),
        steps=fmean(steps) if steps else float("nan"),
        ms_per_chunk=median(times),
        episodes=tuple(results),
    )


def _run_episode(
    env: ReachEnv, policy: Policy, seed: int, execute: int, times: list[float]
) -> EpisodeResult:
    observation, info = env.reset(seed=seed)
    task, steps, chunk, over = observation["task"], 0, 0, False
    while not over:
        start = time.perf_counter()
        actions = policy(to_observation(observation), seed=chunk_seed(seed, chunk))
        times.append((time.perf_counter() - start) * 1e3)
        chunk += 1
        for action in actions[:execute]:
            observation, _, terminated, truncated, info = env.step(action)
            steps += 1
            over = terminated or truncated
            if over:
                break
    return EpisodeResult(seed, task, info["is_success"], steps, info["distance"])


def load_engine(checkpoint: Path, target: str, dtype: str) -> "Engine":
    """Phyai's engine on a checkpoint folder."""
    import torch

    from phyai.engine import Engine, EngineArgs
    from phyai.engine_config import DeviceConfig, EngineConfig
    from phyai.models.pi05.main_pi05 import PI05Args

    device = DeviceConfig(target=target, params_dtype=getattr(torch, dtype))
    return Engine(
        EngineArgs(
            plugin="pi05",
            plugin_args=PI05Args(checkpoint_dir=checkpoint),
            config=EngineConfig(device=device),
        )
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Success of a reach checkpoint in phyai's engine")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--execute", type=int, default=ACTION_STEPS)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args()
    engine = load_engine(args.checkpoint, args.target, args.dtype)
    result = evaluate(EngineRollout(engine), args.episodes, args.seed, args.execute)
    for episode in result.episodes:
        if not episode.success:
            print(f"missed: seed {episode.seed}, {episode.task!r}, {episode.distance:.3f} away")
    print(
        f"success {result.success_rate:.1%} of {len(result.episodes)} episodes, "
        f"{result.steps:.1f} steps on average, {result.ms_per_chunk:.1f} ms per chunk"
    )


if __name__ == "__main__":
    main()
