import pytest
import torch
from reach.data import dataset_statistics, observe
from reach.env import ReachEnv
from reach.evaluate import EngineRollout, load_engine, to_observation
from reach.export import export_checkpoint
from reach.normalisation import denormalise
from reach.policy import batch_policy, build_model, checkpoint_tensors, initial_tensors
from reach.prompts import PromptTable
from reach.tokenizer import build_tokenizer
from reach.world import at_rest, episode_layouts, sample_layouts

from phyai.checkpoints import CheckpointError
from phyai.models.pi05.loading import load_pi05


@pytest.fixture(scope="module")
def tensors(small_config):
    generator = torch.Generator().manual_seed(9)
    first = initial_tensors(small_config, 1)
    return {k: v + 0.02 * torch.randn(v.shape, generator=generator) for k, v in first.items()}


@pytest.fixture(scope="module")
def observation(prompts):
    layout = sample_layouts(3, torch.Generator().manual_seed(5))
    return observe(layout, at_rest(layout.start), prompts)


def test_weights_come_out_as_they_went_in(small_config, tensors):
    model = build_model(small_config, tensors, "cpu")
    assert all(parameter.requires_grad for parameter in model.parameters())
    back = checkpoint_tensors(model)
    assert set(back) == set(tensors)
    for name, value in tensors.items():
        assert torch.equal(back[name], value), name


def test_first_weights(small_config):
    first = initial_tensors(small_config, 3)
    dense = first["paligemma_with_expert.gemma_expert.model.layers.1.input_layernorm.dense.bias"]
    width = small_config.expert.width
    assert dense.tolist() == [0.0] * (2 * width) + [1.0] * width
    assert first["action_out_proj.weight"].count_nonzero() == 0
    query = first["paligemma_with_expert.gemma_expert.model.layers.0.self_attn.q_proj.weight"]
    assert float(query.std()) == pytest.approx(width**-0.5, rel=0.1)
    assert not torch.equal(
        first["action_in_proj.weight"], initial_tensors(small_config, 4)["action_in_proj.weight"]
    )


def test_wrong_weights_are_refused(small_config, tensors):
    with pytest.raises(CheckpointError, match=r"time_mlp_in\.weight"):
        build_model(
            small_config, {k: v for k, v in tensors.items() if k != "time_mlp_in.weight"}, "cpu"
        )


def test_exported_model_acts_like_the_trained_one(
    small_config, tensors, statistics, observation, tmp_path
):
    rounded = {name: value.bfloat16().float() for name, value in tensors.items()}
    model = build_model(small_config, rounded, "cpu")
    export_checkpoint(tmp_path, rounded, small_config, statistics)
    served = load_pi05(tmp_path)
    got = batch_policy(model, statistics)(observation, [3, 4, 5])
    expected = batch_policy(served, statistics)(observation, [3, 4, 5])
    assert got.shape == (3, small_config.chunk_size, small_config.action_dim)
    assert got.std() > 1e-3
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_noise_belongs_to_the_seed(small_config, tensors, statistics, observation):
    model = build_model(small_config, tensors, "cpu")
    act = batch_policy(model, statistics)
    a, b = act(observation, [3, 4, 5]), act(observation, [9, 4, 5])
    assert not torch.allclose(a[0], b[0])
    torch.testing.assert_close(a[1:], b[1:], rtol=1e-4, atol=1e-6)


def test_actions_are_in_workspace_units(small_config, tensors, statistics, observation):
    """With a velocity of zero the actions are the noise, in workspace units."""
    still = dict(tensors)
    for part in ("weight", "bias"):
        still[f"action_out_proj.{part}"] = torch.zeros_like(still[f"action_out_proj.{part}"])
    model = build_model(small_config, still, "cpu")
    got = batch_policy(model, statistics)(observation, [1, 2, 3])
    noise = torch.randn(
        (1, small_config.chunk_size, small_config.max_action_dim),
        generator=torch.Generator().manual_seed(2),
    )
    expected = denormalise(noise[0, :, :2], statistics.action)
    torch.testing.assert_close(got[1], expected)


def test_model_follows_changed_weights(small_config, tensors, statistics, observation):
    """Nothing that depends on weights may be kept from one call to the next."""
    model = build_model(small_config, tensors, "cpu")
    act = batch_policy(model, statistics)
    before = act(observation, [1, 2, 3])
    with torch.no_grad():
        for parameter in model.time.parameters():
            parameter.add_(0.3)
    after = act(observation, [1, 2, 3])
    fresh = build_model(small_config, checkpoint_tensors(model), "cpu")
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, batch_policy(fresh, statistics)(observation, [1, 2, 3]))


def test_engine_answers_like_the_batched_policy(small_config, tensors, tmp_path):
    """The whole way, with pictures, prompt and statistics: the engine on one observation."""
    statistics = dataset_statistics(512)
    rounded = {name: value.bfloat16().float() for name, value in tensors.items()}
    export_checkpoint(tmp_path, rounded, small_config, statistics)
    rollout = EngineRollout(load_engine(tmp_path, "cpu", "float32"))
    env = ReachEnv()
    seen, _ = env.reset(seed=12)
    got = rollout(to_observation(seen), seed=34)
    table = PromptTable.build(build_tokenizer(), statistics.state)
    policy = batch_policy(build_model(small_config, rounded, "cpu"), statistics)
    layout = episode_layouts([12])
    expected = policy(observe(layout, at_rest(layout.start), table), [34])[0]
    torch.testing.assert_close(torch.from_numpy(got), expected, rtol=1e-4, atol=1e-6)
