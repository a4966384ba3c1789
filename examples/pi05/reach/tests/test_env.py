import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from reach.env import ENV_ID, RENDER_SIZE, ReachEnv
from reach.expert import expert_action
from reach.world import HOLD_STEPS, MAX_SPEED, STEP_LIMIT, episode_layouts


def test_registered_environment_passes_the_checker():
    env = gymnasium.make(ENV_ID, render_mode="rgb_array")
    assert isinstance(env.unwrapped, ReachEnv)
    check_env(env.unwrapped)
    assert env.spec is not None
    env.reset(seed=0)
    assert env.render().shape == (RENDER_SIZE, RENDER_SIZE, 3)


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_same_seed_same_episode(seed):
    first, second = ReachEnv(), ReachEnv()
    a, _ = first.reset(seed=seed)
    b, _ = second.reset(seed=seed)
    for action in np.random.default_rng(seed).uniform(-0.2, 0.2, (5, 2)):
        for name in ("base", "wrist", "state"):
            np.testing.assert_array_equal(a[name], b[name])
        assert a["task"] == b["task"]
        a, b = first.step(action)[0], second.step(action)[0]


def test_episodes_are_those_of_the_batched_world():
    env = ReachEnv()
    for seed in (0, 5, 1_000_003):
        env.reset(seed=seed)
        expected = episode_layouts([seed])
        assert torch.equal(env.layout.discs, expected.discs)
        assert torch.equal(env.layout.start, expected.start)
        assert env.layout.tasks() == expected.tasks()


def test_unseeded_resets_differ():
    env = ReachEnv()
    env.reset(seed=0)
    first = env.layout.discs
    env.reset()
    assert not torch.equal(first, env.layout.discs)


def test_expert_succeeds_and_the_reward_says_so():
    env = ReachEnv()
    for seed in range(20):
        env.reset(seed=seed)
        rewards, inside, terminated, truncated = [], 0, False, False
        while not (terminated or truncated):
            action = expert_action(env.pointer, env.layout.goal)[0].numpy()
            observation, reward, terminated, truncated, info = env.step(action)
            assert observation in env.observation_space
            inside = inside + 1 if info["inside"] else 0
            rewards.append(reward)
        assert terminated
        assert inside == HOLD_STEPS
        assert sum(rewards) == rewards[-1] == 1.0


def test_episode_is_cut_at_the_limit():
    env = ReachEnv()
    env.reset(seed=0)
    for step in range(1, STEP_LIMIT + 1):
        _, reward, terminated, truncated, info = env.step(np.zeros(2))
        assert (reward, terminated, truncated) == (0.0, False, step == STEP_LIMIT)
    assert not info["is_success"]


def test_long_actions_are_shortened():
    env = ReachEnv()
    env.reset(seed=3)
    before = env.pointer.position
    env.step(np.array([-0.3, 0.4]) if before[0, 1] < 0 else np.array([-0.3, -0.4]))
    moved = (env.pointer.position - before).abs()[0]
    assert moved.norm() <= MAX_SPEED + 1e-6
    assert float(moved[1]) == pytest.approx(0.8 * MAX_SPEED, rel=1e-4)


@pytest.mark.parametrize("action", [np.zeros(3), np.array([np.nan, 0]), np.array(0.1)])
def test_wrong_actions_are_refused(action):
    env = ReachEnv()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="two finite numbers"):
        env.step(action)


def test_use_before_reset_is_refused():
    with pytest.raises(RuntimeError, match="reset"):
        ReachEnv().step(np.zeros(2))


def test_unknown_render_mode_is_refused():
    with pytest.raises(ValueError, match="rgb_array"):
        ReachEnv(render_mode="human")


def test_render_without_a_mode_is_none():
    env = ReachEnv()
    env.reset(seed=0)
    assert env.render() is None
