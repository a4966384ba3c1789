import torch
from reach.chunks import CHUNK
from reach.expert import MAX_ACCELERATION, expert_action, expert_chunk, sample_states
from reach.world import (
    HOLD_STEPS,
    MAX_SPEED,
    STEP_LIMIT,
    Pointer,
    at_rest,
    count_hold,
    move,
    sample_layouts,
)


def run(pointer: Pointer, goal: torch.Tensor) -> torch.Tensor:
    """Step at which each episode succeeds, beyond the limit where it does not."""
    held = torch.zeros(len(goal), dtype=torch.int64)
    done = torch.full_like(held, STEP_LIMIT + 1)
    for step in range(1, STEP_LIMIT + 1):
        pointer = move(pointer, expert_action(pointer, goal))
        held = count_hold(pointer.position, goal, held)
        done = torch.where((held >= HOLD_STEPS) & (done > STEP_LIMIT), step, done)
    return done


def test_expert_always_succeeds():
    layout = sample_layouts(4001, torch.Generator().manual_seed(1))
    assert run(at_rest(layout.start), layout.goal).max() <= STEP_LIMIT


def test_expert_recovers_from_every_sampled_state():
    generator = torch.Generator().manual_seed(2)
    layout = sample_layouts(4001, generator)
    assert run(sample_states(layout, generator), layout.goal).max() <= STEP_LIMIT


def test_expert_is_smooth_and_does_not_overshoot():
    goal = torch.tensor([[0.6, 0.0]])
    pointer = at_rest(torch.tensor([[-0.9, 0.0]]))
    for action in expert_chunk(pointer, goal, 50)[0]:
        before = pointer
        pointer = move(pointer, action[None])
        assert action.norm() <= MAX_SPEED + 1e-6
        assert (pointer.velocity - before.velocity).norm() <= MAX_ACCELERATION + 1e-6
        assert pointer.position[0, 0] <= 0.6 + 1e-3
    torch.testing.assert_close(pointer.position, goal, rtol=0, atol=1e-3)


def test_chunk_is_the_closed_loop():
    layout = sample_layouts(5, torch.Generator().manual_seed(3))
    pointer = at_rest(layout.start)
    chunk = expert_chunk(pointer, layout.goal)
    assert chunk.shape == (5, CHUNK, 2)
    for step in range(CHUNK):
        action = expert_action(pointer, layout.goal)
        assert torch.equal(chunk[:, step], action)
        pointer = move(pointer, action)


def test_sampled_states_are_legal_and_spread():
    generator = torch.Generator().manual_seed(4)
    layout = sample_layouts(8009, generator)
    pointer = sample_states(layout, generator)
    assert pointer.position.abs().max() <= 1
    assert pointer.velocity.norm(dim=1).max() <= MAX_SPEED + 1e-6
    distance = (pointer.position - layout.goal).norm(dim=1)
    assert (distance < 0.1).float().mean() > 0.1
    assert (distance > 0.5).float().mean() > 0.2
    others = (pointer.position[:, None] - layout.discs).norm(dim=2).sort(dim=1).values
    wrong = (others[:, 0] < 0.16) & (distance > 0.4)
    assert wrong.float().mean() > 0.03  # on a distractor


def test_sampling_is_deterministic():
    a, b = (
        sample_states(sample_layouts(9, g), g)
        for g in (torch.Generator().manual_seed(5), torch.Generator().manual_seed(5))
    )
    assert torch.equal(a.state, b.state)
