import numpy as np
import pytest
import torch
from reach.instructions import COLOUR_NAMES, TEMPLATES, instruction
from reach.world import (
    DISC_AREA,
    DISCS,
    HOLD_STEPS,
    MAX_SPEED,
    SEPARATION,
    START_DISTANCE,
    TOLERANCE,
    Layout,
    Pointer,
    at_rest,
    count_hold,
    episode_layouts,
    limit_norm,
    move,
    sample_layouts,
)


@pytest.fixture(scope="module")
def layouts() -> Layout:
    return sample_layouts(2003, torch.Generator().manual_seed(7))


def test_layouts_keep_their_distances(layouts):
    for discs, start, target in zip(layouts.discs, layouts.start, layouts.target, strict=True):
        for i in range(DISCS):
            for j in range(i):
                assert np.hypot(*(discs[i] - discs[j]).tolist()) >= SEPARATION - 1e-6
        assert np.hypot(*(start - discs[target]).tolist()) >= START_DISTANCE - 1e-6
    assert layouts.discs.abs().max() <= DISC_AREA


def test_layouts_cover_all_choices(layouts):
    for row in layouts.colours.tolist():
        assert len(set(row)) == DISCS
    assert set(layouts.target_colour.tolist()) == set(range(len(COLOUR_NAMES)))
    assert set(layouts.template.tolist()) == set(range(len(TEMPLATES)))
    assert set(layouts.target.tolist()) == set(range(DISCS))
    spread = layouts.discs.flatten(0, 1)
    assert spread.amin() < -0.75
    assert spread.amax() > 0.75


def test_goal_is_the_disc_of_the_named_colour(layouts):
    for index in (0, 1, 1999):
        task = layouts.tasks()[index]
        named = [c for c in COLOUR_NAMES if f" {c} " in f" {task} "]
        place = layouts.colours[index].tolist().index(COLOUR_NAMES.index(named[0]))
        assert len(named) == 1
        assert torch.equal(layouts.goal[index], layouts.discs[index, place])


def test_instruction_rejects_an_unknown_index():
    with pytest.raises(IndexError):
        instruction(len(TEMPLATES), 0)


def test_limit_norm_shortens_only_long_vectors():
    vectors = torch.tensor([[3.0, 4.0], [0.03, 0.04], [0.0, 0.0], [-1e20, 0.0]])
    got = limit_norm(vectors, 0.5)
    expected = torch.tensor([[0.3, 0.4], [0.03, 0.04], [0.0, 0.0], [-0.5, 0.0]])
    torch.testing.assert_close(got, expected)


def test_move_limits_speed_and_stops_at_the_edge():
    pointer = at_rest(torch.tensor([[0.98, 0.0], [0.0, 0.0]]))
    moved = move(pointer, torch.tensor([[1.0, 0.0], [0.03, -0.04]]))
    torch.testing.assert_close(moved.position, torch.tensor([[1.0, 0.0], [0.03, -0.04]]))
    torch.testing.assert_close(moved.velocity, torch.tensor([[0.02, 0.0], [0.03, -0.04]]))
    far = move(pointer, torch.tensor([[-5.0, 0.0], [3.0, 4.0]]))
    torch.testing.assert_close(far.velocity.norm(dim=1), torch.full((2,), MAX_SPEED))


def test_state_is_position_then_velocity():
    pointer = Pointer(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
    assert pointer.state.tolist() == [[1.0, 2.0, 3.0, 4.0]]


def test_hold_counts_steps_in_a_row():
    goal = torch.zeros(1, 2)
    held = torch.zeros(1, dtype=torch.int64)
    counts = []
    for x in (0.9, 0.99, 1.01, 0.5, 0.0, -0.99):
        held = count_hold(torch.tensor([[x * TOLERANCE, 0.0]]), goal, held)
        counts.append(int(held))
    assert counts == [1, 2, 0, 1, 2, HOLD_STEPS]


def test_same_seed_same_layout_whatever_the_batch():
    together, alone = episode_layouts([3, 11, 3]), episode_layouts([11])
    assert torch.equal(together.discs[1], alone.discs[0])
    assert torch.equal(together.discs[0], together.discs[2])
    assert not torch.equal(together.discs[0], together.discs[1])
    assert together.tasks()[1] == alone.tasks()[0]
