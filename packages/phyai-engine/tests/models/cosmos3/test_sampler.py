"""G2: schedules and solver against literal values and against trajectories of diffusers."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode

from phyai.models.cosmos3.denoise import denoise, guide
from phyai.models.cosmos3.sampler import Sampling, karras_schedule, native_schedule
from phyai.models.cosmos3.state import ActionLayout, Conditions, Layout, Modalities
from phyai.models.cosmos3.unipc import UniPC, solver_steps

FIXTURE = Path(__file__).parent / "fixtures" / "sampler.safetensors"
CASES = [
    *(
        (f"native.{n}.{shift}", native_schedule(n, shift))
        for n in (1, 2, 4, 30)
        for shift in (5, 10)
    ),
    *((f"karras.{n}", karras_schedule(n)) for n in (1, 2, 4, 30)),
]
TRAJECTORY_BAR = 2e-6


def field(sample, timestep):
    """The velocity field of the script that made the fixture."""
    return 0.8 * sample - torch.sin(0.5 * sample + 0.01 * timestep)


@pytest.mark.parametrize(
    ("schedule", "sigmas", "timesteps"),
    [
        (
            native_schedule(4, 5),
            [0.99979984, 0.93726545, 0.83305537, 0.62468734],
            [999, 937, 833, 624],
        ),
        (
            native_schedule(30, 10),
            [0.9999, 0.996461, 0.992802, 0.988902, 0.984736],
            [999, 996, 992, 988, 984],
        ),
        (native_schedule(35, 10), [0.9999, 0.996965, 0.993871, 0.990605], [999, 996, 993, 990]),
        (native_schedule(50, 3), [0.999666, 0.992907, 0.985963], [999, 992, 985]),
        (karras_schedule(4), [0.995025, 0.973633, 0.798597, 0.128160], [995, 973, 798, 128]),
    ],
)
def test_published_levels(schedule, sigmas, timesteps):
    assert schedule.sigmas[: len(sigmas)] == pytest.approx(sigmas, abs=6e-7)
    assert list(schedule.timesteps[: len(timesteps)]) == timesteps
    assert schedule.sigmas[-1] == 0.0
    assert len(schedule.sigmas) == len(schedule.timesteps) + 1


@pytest.mark.parametrize(("name", "schedule"), CASES, ids=[name for name, _ in CASES])
def test_trajectory_of_diffusers(name, schedule):
    golden = load_file(FIXTURE)
    expected = golden[f"{name}.samples"]
    assert torch.tensor(schedule.sigmas) == pytest.approx(golden[f"{name}.sigmas"], abs=1e-7)
    assert list(schedule.timesteps) == golden[f"{name}.timesteps"].tolist()
    steps = solver_steps(schedule)
    solver, state = UniPC(steps), Modalities(golden["noise"])
    for step, wanted in zip(steps, expected, strict=True):
        velocity = state.map(lambda x, t=step.timestep: field(x, t))
        state = solver.advance(state, velocity)
        torch.testing.assert_close(state.video, wanted, rtol=0, atol=TRAJECTORY_BAR)


@pytest.mark.parametrize(
    "mutate",
    [
        lambda step: replace(step, correct=None),
        lambda step: replace(step, sigma=step.sigma - 1e-4),
        lambda step: replace(step, predict=replace(step.predict, previous=0.0)),
        lambda step: step.correct and replace(step, correct=replace(step.correct, oldest=0.0)),
    ],
)
def test_the_bar_tells_mistakes_from_rounding(mutate):
    golden = load_file(FIXTURE)
    schedule = native_schedule(4, 5)
    steps = [mutate(step) or step for step in solver_steps(schedule)]
    solver, state = UniPC(steps), Modalities(golden["noise"])
    for step in steps:
        state = solver.advance(state, state.map(lambda x, t=step.timestep: field(x, t)))
    error = (state.video - golden["native.4.5.samples"][-1]).abs().max()
    assert error > 20 * TRAJECTORY_BAR


def test_log_signal_to_noise_and_orders_of_the_released_policy():
    steps = solver_steps(native_schedule(4, 5))
    lambdas = [math.log((1 - step.sigma) / step.sigma) for step in steps]
    assert lambdas == pytest.approx([-8.5162, -2.7041, -1.6074, -0.5095], abs=5e-4)
    assert [step.predict.previous != 0 for step in steps] == [False, True, True, False]
    assert steps[0].correct is None
    assert steps[1].correct is not None
    assert steps[1].correct.oldest == 0
    assert steps[2].correct is not None
    assert steps[2].correct.oldest != 0


def test_last_step_returns_the_data_prediction():
    last = solver_steps(native_schedule(4, 5))[-1].predict
    assert (last.sample, last.newest, last.previous) == (0.0, 1.0, 0.0)


def test_constant_data_is_reached_exactly_from_any_noise():
    """With v = (x - data) / sigma every data prediction is the data."""
    data = torch.linspace(-2, 2, 11)
    steps = solver_steps(native_schedule(7, 10))
    solver, state = (
        UniPC(steps),
        Modalities(torch.randn(11, generator=torch.Generator().manual_seed(1))),
    )
    for step in steps:
        state = solver.advance(state, Modalities((state.video - data) / step.sigma))
    torch.testing.assert_close(state.video, data, rtol=0, atol=2e-6)


class Field:
    """A model with a field per branch that records its calls."""

    def __init__(self, layout, offsets=(0.0, 1.0)):
        self.layout, self.offsets, self.calls = layout, offsets, []

    def velocities(self, state, timestep, branches, layout):
        assert layout is self.layout
        self.calls.append((timestep, len(branches)))
        answers = []
        for _, offset in zip(branches, self.offsets, strict=False):
            answer = state.map(lambda x, o=offset: field(x + o, timestep))
            answer.video[:, list(layout.clean_frames)] = 0
            if layout.action is not None:
                answer.action[list(layout.action.clean_rows)] = 0
                answer.action[:, layout.action.raw_dim :] = 0
            answers.append(answer)
        return answers


@pytest.fixture
def layout():
    action = ActionLayout(rows=7, start=0, clean_rows=(0, 1), raw_dim=3, domain_id=2)
    return Layout(
        frames=3, height=5, width=2, clean_frames=(0, 2), fps=15, action=action, sound_frames=4
    )


@pytest.fixture
def noise():
    generator = torch.Generator().manual_seed(5)
    action = torch.randn(7, 6, generator=generator)
    action[:, 3:] = 0
    return Modalities(
        torch.randn(4, 3, 5, 2, generator=generator), action, torch.randn(5, 4, generator=generator)
    )


BRANCHES = [Conditions(torch.empty(1, n, 1, 2), torch.empty(1, n, 1, 2)) for n in (5, 3)]


def test_clean_frames_and_rows_stay_bitwise_and_unused_channels_zero(layout, noise):
    before = noise.map(torch.clone)
    result = denoise(Field(layout), noise, BRANCHES, layout, Sampling(4, 3.0, 5.0))
    assert torch.equal(result.video[:, [0, 2]], noise.video[:, [0, 2]])
    assert torch.equal(result.action[:2], noise.action[:2])
    assert not result.action[:, 3:].any()
    assert (result.video[:, 1] != noise.video[:, 1]).all()
    assert (result.action[2:, :3] != noise.action[2:, :3]).all()
    assert (result.sound != noise.sound).all()
    for now, then in zip(vars(noise).values(), vars(before).values(), strict=True):
        assert torch.equal(now, then), "the starting point was written to"


def test_every_modality_is_integrated_as_if_alone(layout, noise):
    together = denoise(Field(layout), noise, BRANCHES, layout, Sampling(4, 3.0, 5.0))
    steps = solver_steps(native_schedule(4, 5))
    solver, state = UniPC(steps), Modalities(noise.sound)
    for step in steps:
        given, without = (field(state.video + o, step.timestep) for o in (0.0, 1.0))
        state = solver.advance(state, Modalities(without + 3 * (given - without)))
    torch.testing.assert_close(together.sound, state.video, rtol=2e-6, atol=2e-6)


def test_guidance_of_one_runs_one_branch(layout, noise):
    model = Field(layout)
    denoise(model, noise, BRANCHES[:1], layout, Sampling(4, 1.0, 5.0))
    assert model.calls == [(999, 1), (937, 1), (833, 1), (624, 1)]


def test_interval_is_exclusive_and_leaves_five_forwards(layout, noise):
    sampling = Sampling(4, 3.0, 5.0, interval=(960, 1001))
    model = Field(layout)
    denoise(model, noise, BRANCHES, layout, sampling)
    assert model.calls == [(999, 2), (937, 1), (833, 1), (624, 1)]
    assert sampling.forwards == 5
    assert Sampling(4, 3.0, 5.0).forwards == 8
    assert Sampling(4, 3.0, 5.0, interval=(937, 999)).forwards == 4
    assert Sampling(4, 3.0, 5.0, interval=(936, 1000)).forwards == 6


def test_guidance_without_second_branch_is_refused(layout, noise):
    with pytest.raises(ValueError, match="pass both or set guidance to 1"):
        denoise(Field(layout), noise, BRANCHES[:1], layout, Sampling(4, 3.0, 5.0))


def test_steps_are_announced(layout, noise):
    seen = []
    sampling = Sampling(3, 1.0, 5.0)
    denoise(
        Field(layout), noise, BRANCHES, layout, sampling, on_step=lambda *step: seen.append(step)
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("scale", [3.0, 0.25, 1e3])
def test_normalised_guidance(scale, noise):
    given = noise
    without = noise.map(lambda x: x.roll(1, 0))
    plain = guide(given, without, Sampling(4, scale, 5.0))
    scaled = guide(given, without, Sampling(4, scale, 5.0, normalize_cfg=True))

    def flat(state):
        return torch.cat([part.flatten() for part in vars(state).values()]).double()

    expected = flat(without) + scale * (flat(given) - flat(without))
    torch.testing.assert_close(flat(plain), expected, rtol=1e-5, atol=1e-4)
    factor = min(1.0, float(flat(given).norm() / expected.norm()))
    torch.testing.assert_close(flat(scaled), factor * expected, rtol=1e-5, atol=1e-4)


def test_normalised_guidance_of_zero_is_zero():
    zero = Modalities(torch.zeros(3))
    assert not guide(zero, zero, Sampling(4, 3.0, 5.0, normalize_cfg=True)).video.any()
    opposite = Modalities(torch.tensor([2.0])), Modalities(torch.tensor([3.0]))
    assert guide(*opposite, Sampling(4, 3.0, 5.0, normalize_cfg=True)).video == 0


def test_half_precision_velocities_are_integrated_in_fp32(layout, noise):
    class Half(Field):
        def velocities(self, *args):
            return [answer.map(torch.Tensor.bfloat16) for answer in super().velocities(*args)]

    result = denoise(Half(layout), noise, BRANCHES, layout, Sampling(4, 3.0, 5.0))
    exact = denoise(Field(layout), noise, BRANCHES, layout, Sampling(4, 3.0, 5.0))
    assert result.video.dtype == torch.float32
    torch.testing.assert_close(result.video, exact.video, rtol=0, atol=0.1)


@pytest.mark.parametrize("schedule", ["native", "karras"])
def test_nothing_is_read_back(layout, noise, schedule):
    """Tensors without contents pass through: no value decides anything on the host."""
    with FakeTensorMode() as mode:
        state = noise.map(mode.from_tensor)
        sampling = Sampling(3, 3.0, 5.0, normalize_cfg=True, schedule=schedule)
        result = denoise(Field(layout), state, BRANCHES, layout, sampling)
    assert result.video.shape == noise.video.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"steps": True}, "steps is True"),
        ({"steps": 2.5}, "steps is 2.5"),
        ({"guidance": -1.0}, "guidance is -1.0"),
        ({"guidance": math.nan}, "guidance is nan"),
        ({"shift": 0.0}, "shift is 0.0"),
        ({"shift": math.inf}, "shift is inf"),
        ({"schedule": "linear"}, "allowed: native, karras"),
        ({"interval": (5, 5)}, "low < high"),
        ({"interval": (1, 2, 3)}, "low < high"),
        ({"shift": 1e9}, "smaller shift"),
        ({"steps": 1001}, "from 1 to 1000"),
    ],
)
def test_bad_settings_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**{"steps": 4, "guidance": 3.0, "shift": 5.0, **change})
