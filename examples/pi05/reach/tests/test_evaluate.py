import numpy as np
import pytest
import torch
from reach.batched import batched_rollout
from reach.chunks import CHUNK, check_execute, chunk_seed
from reach.env import ReachEnv
from reach.evaluate import EngineRollout, evaluate
from reach.expert import expert_chunk
from reach.world import STEP_LIMIT, Pointer, episode_layouts


def noisy_chunk(state, goal, seeds):
    """The expert with noise that depends on the seed only."""
    actions = expert_chunk(Pointer(state[:, :2], state[:, 2:]), goal)
    noise = [torch.randn(CHUNK, 2, generator=torch.Generator().manual_seed(s)) for s in seeds]
    return actions + 0.03 * torch.stack(noise)


class NoisyExpert:
    """The expert as a policy that knows the episode from the noise seed."""

    def __init__(self):
        self.seeds = []
        self.tasks = []

    def __call__(self, observation, *, seed):
        self.seeds.append(seed)
        self.tasks.append(observation.task)
        goal = episode_layouts([seed // 1000]).goal
        state = torch.from_numpy(observation.state)[None]
        return noisy_chunk(state, goal, [seed])[0].numpy()


def still(observation, *, seed):
    assert observation.images["base"].shape == observation.images["wrist"].shape == (84, 84, 3)
    return np.zeros((CHUNK, 2), np.float32)


def test_expert_succeeds_in_every_episode():
    policy = NoisyExpert()
    result = evaluate(policy, episodes=8, seed=40, execute=8)
    assert result.success_rate == 1.0
    assert [episode.seed for episode in result.episodes] == list(range(40, 48))
    assert result.steps == np.mean([episode.steps for episode in result.episodes])
    assert result.ms_per_chunk > 0
    assert len(set(policy.seeds)) == len(policy.seeds)
    assert policy.seeds[0] == chunk_seed(40, 0)
    assert result.episodes[0].task == policy.tasks[0]


def test_a_still_policy_fails_after_the_limit():
    result = evaluate(still, episodes=2, execute=16)
    assert result.success_rate == 0.0
    assert np.isnan(result.steps)
    assert {episode.steps for episode in result.episodes} == {STEP_LIMIT}
    assert min(episode.distance for episode in result.episodes) >= 0.5 - 1e-5


def test_evaluation_is_deterministic():
    first, second = (evaluate(NoisyExpert(), episodes=3, execute=5) for _ in range(2))
    assert first.episodes == second.episodes


@pytest.mark.parametrize("execute", [3, 8])
def test_batched_rollout_is_the_environment(prompts, execute):
    seeds = range(20, 27)
    goal = episode_layouts(list(seeds)).goal
    batched = batched_rollout(
        lambda seen, noise: noisy_chunk(seen.state, goal, noise), seeds, prompts, execute=execute
    )
    single = evaluate(NoisyExpert(), episodes=7, seed=20, execute=execute)
    assert batched.success.tolist() == [episode.success for episode in single.episodes]
    assert batched.steps.tolist() == [episode.steps for episode in single.episodes]
    distances = torch.tensor([episode.distance for episode in single.episodes])
    torch.testing.assert_close(batched.distance, distances, rtol=0, atol=1e-5)


def test_batched_rollout_sees_what_the_environment_shows(prompts):
    env = ReachEnv()
    observation, _ = env.reset(seed=6)
    seen = []

    def look(batch, noise):
        seen.append(batch)
        return torch.zeros(1, CHUNK, 2)

    result = batched_rollout(look, [6], prompts)
    assert result.success_rate == 0.0
    for index, name in enumerate(("base", "wrist")):
        image = ((seen[0].images[0, index] + 1) / 2 * 255).round().byte().permute(1, 2, 0)
        np.testing.assert_array_equal(image.numpy(), observation[name])


@pytest.mark.parametrize("execute", [0, CHUNK + 1])
def test_execute_outside_the_chunk_is_refused(prompts, execute):
    for call in (
        lambda: check_execute(execute),
        lambda: evaluate(still, execute=execute),
        lambda: batched_rollout(lambda *_: torch.zeros(1), [0], prompts, execute=execute),
    ):
        with pytest.raises(ValueError, match=f"execute is {execute}"):
            call()


def test_no_episodes_is_refused():
    with pytest.raises(ValueError, match="episodes is 0"):
        evaluate(still, episodes=0)


def test_engine_rollout_passes_observation_and_seed():
    class FakeEngine:
        def infer(self, observation, *, seed):
            self.asked = (observation, seed)
            return type("Chunk", (), {"actions": np.ones((CHUNK, 2))})

    engine = FakeEngine()
    assert EngineRollout(engine)("observation", seed=5).sum() == 2 * CHUNK
    assert engine.asked == ("observation", 5)
