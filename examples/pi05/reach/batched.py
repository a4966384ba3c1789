"""Closed-loop evaluation of many episodes at once, on any device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reach.chunks import ACTION_STEPS, check_execute, chunk_seed
from reach.data import ObservationBatch, observe
from reach.prompts import PromptTable
from reach.world import HOLD_STEPS, STEP_LIMIT, at_rest, count_hold, episode_layouts, move

BatchPolicy = Callable[[ObservationBatch, Sequence[int]], Tensor]
"""Observations of B episodes and a noise seed for each -> actions [B, T, 2], workspace units."""


@dataclass(frozen=True)
class BatchedResult:
    """Outcome of a batched evaluation.

    Attributes:
        success: bool [B].
        steps: steps until success, int64 [B]; the step limit where there was none.
        distance: final distance to the target's centre, float32 [B]; after a success, that of the
            successful step.
    """

    success: Tensor
    steps: Tensor
    distance: Tensor

    @property
    def success_rate(self) -> float:
        """Share of successful episodes."""
        return float(self.success.float().mean())


@torch.no_grad()
def batched_rollout(
    policy: BatchPolicy,
    seeds: Sequence[int],
    prompts: PromptTable,
    device: torch.device | str = "cpu",
    execute: int = ACTION_STEPS,
) -> BatchedResult:
    """Run the episodes that `ReachEnv` makes of `seeds`, with the same motion and success rule.

    Args:
        policy: called before every chunk, for all episodes.
        seeds: episode seeds, B of them.
        prompts: table on `device`.
        device: where the world, the pictures and the policy run.
        execute: actions of a chunk that are executed before the next call.

    Raises:
        ValueError: `execute` is not in a chunk.
    """
    check_execute(execute)
    layout = episode_layouts(list(seeds)).to(device)
    pointer = at_rest(layout.start)
    held = torch.zeros(len(seeds), dtype=torch.int64, device=device)
    success = torch.zeros(len(seeds), dtype=torch.bool, device=device)
    steps = torch.full_like(held, STEP_LIMIT)
    distance = (pointer.position - layout.goal).norm(dim=-1)
    actions = torch.empty(0)
    for step in range(STEP_LIMIT):
        if step % execute == 0:
            if bool(success.all()):
                break
            noise = [chunk_seed(seed, step // execute) for seed in seeds]
            actions = policy(observe(layout, pointer, prompts), noise)
        pointer = move(pointer, actions[:, step % execute])
        held = count_hold(pointer.position, layout.goal, held)
        now = (pointer.position - layout.goal).norm(dim=-1)
        distance = torch.where(success, distance, now)
        fresh = (held >= HOLD_STEPS) & ~success
        steps = torch.where(fresh, torch.full_like(steps, step + 1), steps)
        success = success | fresh
    return BatchedResult(success.cpu(), steps.cpu(), distance.cpu())
