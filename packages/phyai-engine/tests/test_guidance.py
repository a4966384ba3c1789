"""Guidance of a chunk by the one before, against published numbers and a loop in plain Python."""

import math

import pytest
import torch

from phyai.guidance import (
    SCHEDULES,
    Guidance,
    guidance_strength,
    guidance_weights,
)


def test_published_strengths_of_ten_steps():
    found = [guidance_strength(1 - step / 10, 10.0) for step in range(10)]
    published = [10, 9.111, 4.25, 2.762, 2.167, 2.0, 2.167, 2.762, 4.25, 9.111]
    assert found == pytest.approx(published, abs=5e-4)


def plain_weights(chunk, delay, horizon, schedule):
    horizon = min(horizon, chunk)
    delay = min(delay, horizon)
    found = []
    for index in range(chunk):
        if index >= horizon:
            weight = 0.0
        elif index < delay or schedule == "ones":
            weight = 1.0
        elif schedule == "zeros":
            weight = 0.0
        else:
            weight = 1.0 - (index - delay + 1) / (horizon - delay + 1)
        if schedule == "exp":
            weight = weight * math.expm1(weight) / (math.e - 1)
        found.append(weight)
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("delay", "horizon"), [(0, 0), (0, 5), (2, 7), (3, 3), (5, 2), (1, 50), (0, 1), (12, 12)]
)
def test_weights(schedule, delay, horizon):
    found = guidance_weights(12, delay, horizon, schedule)
    assert found.tolist() == pytest.approx(plain_weights(12, delay, horizon, schedule), abs=1e-6)


def test_correction_is_the_derivative_free_form():
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(4, 3, generator=generator)
    guidance = Guidance.build([left, None], (6, 5), delay=1, horizon=10)
    velocity, actions = torch.randn(2, 2, 6, 5, generator=generator).unbind()
    found = guidance.correct(velocity, actions, 0.7)
    weights = plain_weights(6, 1, 4, "linear")
    for row in range(6):
        for column in range(5):
            target = left[row, column] if row < 4 and column < 3 else 0.0
            clean = actions[0, row, column] - 0.7 * velocity[0, row, column]
            strength = (0.3**2 + 0.7**2) / (0.3 * 0.7)
            expected = velocity[0, row, column] - strength * weights[row] * (target - clean)
            assert found[0, row, column].item() == pytest.approx(expected.item(), abs=1e-5)
    assert torch.equal(found[1], velocity[1])


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="allowed: linear, exp, ones, zeros"):
        guidance_weights(4, 0, 2, "cubic")
    with pytest.raises(ValueError, match="must not be negative"):
        guidance_weights(4, -1, 2, "ones")
    with pytest.raises(ValueError, match=r"request 1 has left-over actions of shape \(7, 2\)"):
        Guidance.build([None, torch.zeros(7, 2)], (6, 5), delay=0)


def test_joined_guidance_keeps_the_bound_of_each_request():
    left = torch.ones(4, 3)
    parts = [
        Guidance.build([left], (6, 5), delay=1, most=2.0),
        Guidance.build([None], (6, 5), delay=0),
        Guidance.build([left, -left], (6, 5), delay=2, most=100.0),
    ]
    together = Guidance.join(parts).to("cpu")
    velocity, actions = torch.randn(2, 4, 6, 5).unbind()
    for time in (1.0, 0.7, 0.1):
        found = together.correct(velocity, actions, time)
        rows = (slice(0, 1), slice(1, 2), slice(2, 4))
        for part, row in zip(parts, rows, strict=True):
            expected = part.correct(velocity[row], actions[row], time)
            torch.testing.assert_close(found[row], expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(found[1], velocity[1])
