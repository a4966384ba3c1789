import torch
from reach.data import dataset_statistics, observe, sample_batch
from reach.expert import expert_chunk
from reach.scene import View, render
from reach.tokenizer import MAX_LENGTH
from reach.world import Pointer, at_rest, sample_layouts


def test_batch_has_the_stated_shapes(prompts):
    batch = sample_batch(5, torch.Generator().manual_seed(0), "cpu", prompts)
    assert batch.images.shape == (5, 2, 3, 84, 84)
    assert batch.images.dtype == torch.float32
    assert batch.image_mask.tolist() == [[True, True]] * 5
    assert batch.tokens.shape == batch.token_mask.shape == (5, MAX_LENGTH)
    assert batch.state.shape == (5, 4)
    assert batch.actions.shape == (5, 16, 2)


def test_batch_is_deterministic_and_moves_on(prompts):
    a, b = (torch.Generator().manual_seed(1) for _ in range(2))
    first, same = sample_batch(3, a, "cpu", prompts), sample_batch(3, b, "cpu", prompts)
    for name in ("images", "tokens", "state", "actions"):
        assert torch.equal(getattr(first, name), getattr(same, name))
    assert not torch.equal(first.state, sample_batch(3, a, "cpu", prompts).state)


def test_pictures_are_bytes_scaled_to_minus_one_and_one(prompts):
    layout = sample_layouts(3, torch.Generator().manual_seed(2))
    images = observe(layout, at_rest(layout.start), prompts).images
    levels = (images + 1) / 2 * 255
    assert (levels - levels.round()).abs().max() < 1e-4
    for index, view in enumerate((View.BASE, View.WRIST)):
        exact = render(layout, layout.start, view)
        assert ((images[:, index] + 1) / 2 - exact).abs().max() <= 0.5 / 255 + 1e-5


def test_actions_lead_to_the_named_disc(prompts):
    generator = torch.Generator().manual_seed(3)
    batch = sample_batch(64, generator, "cpu", prompts)
    generator.manual_seed(3)
    layout = sample_layouts(64, generator)
    pointer = Pointer(batch.state[:, :2], batch.state[:, 2:])
    assert torch.equal(batch.actions, expert_chunk(pointer, layout.goal))


def test_statistics_are_repeatable_and_sensible():
    a, b = dataset_statistics(2000), dataset_statistics(2000)
    assert all(torch.equal(v, b.tensors()[k]) for k, v in a.tensors().items())
    assert (a.action["q99"] > 0.08).all()
    assert (a.state["q01"][:2] < -0.9).all()
