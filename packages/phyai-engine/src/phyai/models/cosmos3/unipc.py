"""The UniPC solver of order 2 with B(h) = expm1(h), for data predictions of a flow.

Zhao et al., "UniPC: A Unified Predictor-Corrector Framework for Fast Sampling of Diffusion Models",
arXiv 2302.04867. Every update is a weighted sum of known tensors whose weights depend on the
schedule alone; they are computed once in fp64 and are plain numbers, so that a CUDA graph can hold
the loop.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from phyai.models.cosmos3.sampler import NoiseSchedule
from phyai.models.cosmos3.state import Modalities


@dataclass(frozen=True)
class Prediction:
    """Weights of ``x_next = sample x + newest m_i + previous m_(i-1)``; ``m`` predicts the data."""

    sample: float
    newest: float
    previous: float


@dataclass(frozen=True)
class Correction:
    """Weights of ``x_i = sample x_(i-1) + newest m_i + previous m_(i-1) + oldest m_(i-2)``."""

    sample: float
    newest: float
    previous: float
    oldest: float


@dataclass(frozen=True)
class SolverStep:
    """One model evaluation.

    Attributes:
        timestep: what the model is told.
        sigma: noise level of the sample it sees.
        correct: how its answer refines that sample, None on the first step.
        predict: how the next sample follows.
    """

    timestep: int
    sigma: float
    correct: Correction | None
    predict: Prediction


def solver_steps(schedule: NoiseSchedule) -> tuple[SolverStep, ...]:
    """Returns the weights of all steps; orders are 1, 2, ..., 2, 1."""
    count = len(schedule.timesteps)
    steps = []
    for i in range(count):
        order = min(2, i + 1, count - i)
        correct = _correction(schedule.sigmas, i) if i else None
        predict = _prediction(schedule.sigmas, i, order)
        steps.append(SolverStep(schedule.timesteps[i], schedule.sigmas[i], correct, predict))
    return tuple(steps)


class UniPC:
    """Integrates one request; every modality with the same weights.

    Args:
        steps: all steps of the schedule.
    """

    def __init__(self, steps: Sequence[SolverStep]) -> None:
        self._left = iter(steps)
        self._sample: Modalities | None = None
        self._data: tuple[Modalities, ...] = ()

    def advance(self, sample: Modalities, velocity: Modalities) -> Modalities:
        """Returns the sample of the next noise level, in tensors of its own.

        Args:
            sample: fp32, what the model saw.
            velocity: what the model answered, of the same shapes.
        """
        step = next(self._left)
        # The data prediction is of the sample the model saw, not of the corrected one.
        data = sample.map(partial(_data, sigma=step.sigma), velocity)
        known = (data, *self._data)
        if step.correct is not None:
            assert self._sample is not None, "the first step has no correction"
            weights = (step.correct.newest, step.correct.previous, step.correct.oldest)
            sample = _weighted(self._sample, step.correct.sample, known, weights)
        self._sample, self._data = sample, known[:2]
        weights = (step.predict.newest, step.predict.previous)
        return _weighted(sample, step.predict.sample, known, weights)


def _data(sample: Tensor, velocity: Tensor, *, sigma: float) -> Tensor:
    return torch.add(sample, velocity.float(), alpha=-sigma)


def _weighted(
    sample: Modalities, factor: float, data: Sequence[Modalities], weights: Sequence[float]
) -> Modalities:
    used = [(part, weight) for part, weight in zip(data, weights, strict=False) if weight]

    def add(first: Tensor, *others: Tensor) -> Tensor:
        total = first * factor
        for other, (_, weight) in zip(others, used, strict=True):
            total.add_(other, alpha=weight)
        return total

    return sample.map(add, *(part for part, _ in used))


def _log_snr(sigma: float) -> float:
    return math.log1p(-sigma) - math.log(sigma) if sigma > 0 else math.inf


def _prediction(sigmas: tuple[float, ...], i: int, order: int) -> Prediction:
    now, following = sigmas[i], sigmas[i + 1]
    h = _log_snr(following) - _log_snr(now)
    gain = -(1 - following) * math.expm1(-h)
    if order == 1:
        return Prediction(following / now, gain, 0.0)
    ratio = (_log_snr(sigmas[i - 1]) - _log_snr(now)) / h
    return Prediction(following / now, gain * (1 - 0.5 / ratio), gain * 0.5 / ratio)


def _correction(sigmas: tuple[float, ...], i: int) -> Correction:
    """Refines the sample of level ``i``, reached from ``i - 1`` by the order used there."""
    before, now = sigmas[i - 1], sigmas[i]
    h = _log_snr(now) - _log_snr(before)
    shrink = math.expm1(-h)
    gain = -(1 - now) * shrink
    if i == 1:
        return Correction(now / before, gain * 0.5, gain * 0.5, 0.0)
    ratio = (_log_snr(sigmas[i - 2]) - _log_snr(before)) / h
    # rho solves [[1, 1], [ratio, 1]] rho = b, with b_k = k! phi_k / shrink.
    phi_1 = shrink / -h - 1
    phi_2 = phi_1 / -h - 0.5
    b_1, b_2 = phi_1 / shrink, 2 * phi_2 / shrink
    inner = (b_1 - b_2) / (1 - ratio)
    last = b_1 - inner
    return Correction(
        now / before, gain * last, gain * (1 - inner / ratio - last), gain * inner / ratio
    )
