"""Sampling settings of Cosmos3 and the noise schedules they stand for."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

ScheduleKind = Literal["native", "karras"]
SCHEDULES: tuple[ScheduleKind, ...] = ("native", "karras")
TRAIN_STEPS = 1000

_KARRAS_MAX, _KARRAS_MIN, _KARRAS_RHO = 200.0, 0.147, 7.0


@dataclass(frozen=True)
class NoiseSchedule:
    """Noise levels of a flow: ``x = (1 - sigma) data + sigma noise``.

    Attributes:
        sigmas: steps + 1 numbers rounded to fp32, falling, in (0, 1), the last one 0.
        timesteps: what the model is told at each step, ``trunc(1000 sigma)``.
    """

    sigmas: tuple[float, ...]
    timesteps: tuple[int, ...]


@dataclass(frozen=True)
class Sampling:
    """How to integrate the flow.

    Attributes:
        steps: model evaluations per branch.
        guidance: weight of classifier-free guidance; 1 evaluates the conditional branch alone.
        shift: of the native schedule; larger spends more steps on high noise.
        interval: guide only steps with ``interval[0] < timestep < interval[1]``, None: all.
        normalize_cfg: scale guided velocities down to at most the conditional one's norm.
        schedule: ``native`` is the schedule of the model owner's server; ``karras`` the one of the
            published scheduler file of Nano, which ignores ``shift``.

    Raises:
        ValueError: for a value out of range; it says which and what is allowed.
    """

    steps: int
    guidance: float
    shift: float
    interval: tuple[float, float] | None = None
    normalize_cfg: bool = False
    schedule: ScheduleKind = "native"

    def __post_init__(self) -> None:
        counts = isinstance(self.steps, int) and not isinstance(self.steps, bool)
        if not (counts and 1 <= self.steps <= TRAIN_STEPS):
            raise ValueError(f"steps is {self.steps!r}; allowed: integers from 1 to {TRAIN_STEPS}")
        if not (math.isfinite(self.guidance) and self.guidance >= 0):
            raise ValueError(f"guidance is {self.guidance!r}; allowed: finite numbers from 0 on")
        if not (math.isfinite(self.shift) and self.shift > 0):
            raise ValueError(f"shift is {self.shift!r}; allowed: finite positive numbers")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}; allowed: {', '.join(SCHEDULES)}")
        if self.interval is not None and not (
            len(self.interval) == 2 and self.interval[0] < self.interval[1]
        ):
            raise ValueError(
                f"interval is {self.interval!r}; allowed: None or (low, high) with low < high, in "
                f"timesteps of 0..{TRAIN_STEPS}"
            )
        self.noise_schedule()

    def noise_schedule(self) -> NoiseSchedule:
        """Returns the noise levels.

        Raises:
            ValueError: for a shift so large that noise levels coincide in fp32.
        """
        if self.schedule == "karras":
            return karras_schedule(self.steps)
        return native_schedule(self.steps, self.shift)

    def guides(self, timestep: int) -> bool:
        """Returns whether the step at ``timestep`` needs both branches."""
        if self.guidance == 1:
            return False
        return self.interval is None or self.interval[0] < timestep < self.interval[1]

    @property
    def branches(self) -> int:
        """Texts that are needed: 1, or 2 if any step is guided."""
        return 1 + any(map(self.guides, self.noise_schedule().timesteps))

    @property
    def forwards(self) -> int:
        """How many times the generation tower runs, all branches counted."""
        return sum(1 + self.guides(t) for t in self.noise_schedule().timesteps)


@lru_cache(maxsize=64)
def native_schedule(steps: int, shift: float) -> NoiseSchedule:
    """Returns the model owner's schedule, ``s`` linear from 0.999 and shifted.

    ``sigma = shift s / (1 + (shift - 1) s)`` for ``s = linspace(1 - 1/1000, 0, steps + 1)[:-1]``.

    Raises:
        ValueError: if two levels coincide in fp32 or the first one rounds to 1.
    """
    line = np.linspace(1 - 1 / TRAIN_STEPS, 0.0, steps + 1)[:-1]
    return _schedule(shift * line / (1 + (shift - 1) * line))


@lru_cache(maxsize=64)
def karras_schedule(steps: int) -> NoiseSchedule:
    """Returns Karras' levels (arXiv 2206.00364, eq. 5) from 200 to 0.147 as flow noise levels.

    Raises:
        ValueError: if two levels coincide in fp32.
    """
    ramp = np.linspace(0.0, 1.0, steps)
    low, high = _KARRAS_MIN ** (1 / _KARRAS_RHO), _KARRAS_MAX ** (1 / _KARRAS_RHO)
    sigmas = (high + ramp * (low - high)) ** _KARRAS_RHO
    return _schedule(sigmas / (1 + sigmas))


def _schedule(sigmas: np.ndarray) -> NoiseSchedule:
    rounded = sigmas.astype(np.float32)
    if not (rounded[0] < 1 and np.all(np.diff(rounded) < 0)):
        raise ValueError(
            f"{len(sigmas)} noise levels from {sigmas[0]!r} down do not differ in fp32; "
            "use fewer steps or a smaller shift"
        )
    timesteps = (rounded * np.float32(TRAIN_STEPS)).astype(np.int64)
    return NoiseSchedule((*(float(s) for s in rounded), 0.0), tuple(int(t) for t in timesteps))
