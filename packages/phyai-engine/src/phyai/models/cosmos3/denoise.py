"""The one primitive under all modes: integrate the flow of one request from noise to data."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from phyai.models.cosmos3.noise import runs
from phyai.models.cosmos3.sampler import Sampling
from phyai.models.cosmos3.state import Conditions, Layout, Modalities
from phyai.models.cosmos3.unipc import SolverStep, UniPC, solver_steps


class VelocityModel(Protocol):
    """What the sampler needs of the transformer."""

    def velocities(
        self,
        state: Modalities,
        timestep: int,
        branches: Sequence[Conditions],
        layout: Layout,
    ) -> Sequence[Modalities]:
        """Returns one velocity per branch, zero where the layout is clean or unused."""
        ...


def denoise(
    model: VelocityModel,
    state: Modalities,
    conditions: Sequence[Conditions],
    layout: Layout,
    sampling: Sampling,
    *,
    on_step: Callable[[int, int], None] | None = None,
) -> Modalities:
    """Integrates from noise to data with UniPC in fp32; nothing waits for the device.

    Args:
        model: makes velocities.
        state: fp32 starting point of every modality of the layout.
        conditions: the conditional branch, and the unconditional one if ``sampling`` guides.
        layout: shapes, and the frames and rows that are clean and stay as they are.
        sampling: steps, schedule and guidance.
        on_step: called with (steps done, steps) after each step.

    Returns:
        fp32 data of every modality.

    Raises:
        ValueError: if guidance needs a second branch and there is none.
    """
    steps = _solver_steps(sampling)
    _check(conditions, sampling)
    solver = UniPC(steps)
    clean = state
    for index, step in enumerate(steps):
        guided = sampling.guides(step.timestep)
        branches = conditions[: 1 + guided]
        velocities = model.velocities(state, step.timestep, branches, layout)
        velocity = guide(velocities[0], velocities[1], sampling) if guided else velocities[0]
        state = _impose(solver.advance(state, velocity), clean, layout)
        if on_step is not None:
            on_step(index + 1, len(steps))
    return state


def guide(conditional: Modalities, unconditional: Modalities, sampling: Sampling) -> Modalities:
    """Combines two branches by classifier-free guidance, ``v = v_u + g (v_c - v_u)``, in fp32.

    With ``sampling.normalize_cfg`` the result is scaled by ``min(|v_c| / |v|, 1)``, the norms over
    all modalities together; a zero ``v`` stays zero.
    """

    def combine(given: Tensor, without: Tensor) -> Tensor:
        return torch.lerp(without.float(), given.float(), sampling.guidance)

    guided = conditional.map(combine, unconditional)
    if not sampling.normalize_cfg:
        return guided
    # 0 / 0 is NaN: a zero velocity has no norm to keep.
    ratio = (_norm(conditional) / _norm(guided)).nan_to_num(nan=1.0).clamp(max=1.0)
    return guided.map(lambda velocity: velocity * ratio)


def _norm(velocity: Modalities) -> Tensor:
    norms = [torch.linalg.vector_norm(part.float()) for part in velocity.parts]
    return torch.linalg.vector_norm(torch.stack(norms))


@lru_cache(maxsize=64)
def _solver_steps(sampling: Sampling) -> tuple[SolverStep, ...]:
    return solver_steps(sampling.noise_schedule())


def _check(conditions: Sequence[Conditions], sampling: Sampling) -> None:
    if len(conditions) < sampling.branches:
        raise ValueError(
            f"guidance {sampling.guidance} needs a conditional and an unconditional branch, got "
            f"{len(conditions)} of them; pass both or set guidance to 1"
        )


def _impose(state: Modalities, clean: Modalities, layout: Layout) -> Modalities:
    """Writes clean frames and rows, and zeros of unused action channels, into fresh tensors."""
    for run in runs(layout.clean_frames):
        state.video[:, run] = clean.video[:, run]
    if layout.action is not None:
        assert state.action is not None
        assert clean.action is not None
        for run in runs(layout.action.clean_rows):
            state.action[run] = clean.action[run]
        state.action[:, layout.action.raw_dim :] = 0
    return state
