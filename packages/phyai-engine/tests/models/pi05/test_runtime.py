"""The graph runtime on the CPU, with graphs that call their function again, and on a GPU."""

import gc

import pytest
import torch

from phyai.guidance import Guidance
from phyai.models.pi05.lane import MOST_LOOPS
from phyai.models.pi05.runtime import PI05Runtime
from phyai.models.pi05.savings import Savings
from phyai.models.pi05.staging import most_padding, prompt_bucket
from phyai.processing import ModelInputs

FAMILIES = ["pi05", "pi0"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("group", ["single", "ragged", "mixed_cameras"])
def test_equals_the_sampler_and_lerobot(golden, load_model, recorded, family, group):
    case, model = golden(family), load_model(family)
    runtime = PI05Runtime(model)
    inputs, noise = case.inputs(group), case.noise(group)
    actions = runtime.sample_actions(inputs, noise=noise)
    expected = model.sample_actions(inputs, noise=noise)
    torch.testing.assert_close(actions, expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(actions, case.actions(group), atol=2e-5, rtol=1e-4)
    count = len(recorded)
    inputs.images.neg_()
    again = runtime.sample_actions(inputs, noise=noise.flip(1))
    expected = model.sample_actions(inputs, noise=noise.flip(1))
    torch.testing.assert_close(again, expected, atol=2e-6, rtol=1e-5)
    assert len(recorded) == count, "the same shapes were recorded again"


def request(config, lengths, cameras, seed):
    """Returns inputs with the given prompt lengths and present cameras of each request."""
    generator = torch.Generator().manual_seed(seed)
    batch, slots = len(lengths), torch.arange(config.tokenizer_max_length)
    mask = slots < torch.tensor(lengths)[:, None]
    tokens = torch.randint(1, config.language.vocab, mask.shape, generator=generator) * mask
    shape = (batch, len(config.cameras), 3, *config.image_resolution)
    images = torch.rand(shape, generator=generator) * 2 - 1
    present = torch.tensor(cameras, dtype=torch.bool)
    images[~present] = torch.nan
    state = torch.randn(batch, config.max_state_dim, generator=generator)
    state = state if config.family == "pi0" else None
    return ModelInputs(images, present, tokens, mask, state, ("",) * batch)


def some_requests(config, count, seed=0):
    """Yields single requests of random prompt lengths and cameras; each sees something."""
    generator = torch.Generator().manual_seed(seed)
    for index in range(count):
        length = int(torch.randint(config.tokenizer_max_length + 1, (), generator=generator))
        cameras = torch.rand(len(config.cameras), generator=generator) < 0.7
        cameras[0] |= not cameras.any()
        yield request(config, [length], [cameras.tolist()], index)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_requests_share_few_graphs(load_model, recorded, family):
    model = load_model(family)
    runtime = PI05Runtime(model)
    runtime.warm_up()
    count = len(recorded)
    for index, inputs in enumerate(some_requests(model.config, 12)):
        actions = runtime.sample_actions(inputs, seed=index)
        expected = model.sample_actions(inputs, seed=index)
        torch.testing.assert_close(actions, expected, atol=2e-6, rtol=1e-5)
    assert len(recorded) == count == runtime.graphs()


def test_batches_of_any_composition(load_model, recorded):
    model = load_model("pi05")
    most, cameras = model.config.tokenizer_max_length, len(model.config.cameras)
    everything, one = [True] * cameras, [True] + [False] * (cameras - 1)
    runtime = PI05Runtime(model)
    for seed, (lengths, present) in enumerate(
        [
            ((0, most, 3), (everything, one, everything)),
            ((most, most, most), (everything,) * 3),
            ((1, 2, 0), (one, everything, one)),
        ]
    ):
        inputs = request(model.config, lengths, present, seed)
        actions = runtime.sample_actions(inputs, seed=seed, num_steps=3)
        expected = model.sample_actions(inputs, seed=seed, num_steps=3)
        torch.testing.assert_close(actions, expected, atol=2e-6, rtol=1e-5)
        assert torch.isfinite(actions).all()


def test_only_what_changed_is_computed(load_model, recorded, monkeypatch):
    model = load_model("pi05")
    runtime = PI05Runtime(model, reuse=True)
    cameras = len(model.config.cameras)
    first = request(model.config, [5], [[True] * cameras], 0)
    runtime.sample_actions(first, seed=0)
    computed = []
    vision = model.vision.forward
    monkeypatch.setattr(
        model.vision, "forward", lambda images: computed.append(len(images)) or vision(images)
    )
    prefixes = []
    fill = model.fill_cache
    monkeypatch.setattr(model, "fill_cache", lambda *args: prefixes.append(1) or fill(*args))

    def check(inputs):
        computed.clear()
        prefixes.clear()
        seen = runtime.sample_actions(inputs, seed=1)
        found = list(computed), len(prefixes)
        torch.testing.assert_close(seen, model.sample_actions(inputs, seed=1), atol=2e-6, rtol=1e-5)
        return found

    assert check(first) == ([], 0)
    first.images[0, 0] = first.images[0, 0].flip(-1)
    assert set(check(first)[0]) == {1}  # recorded for one view: it runs more than once
    assert check(first) == ([], 0)
    images = first.images.clone()
    images[0, -1] = -images[0, -1]
    other = ModelInputs(images, first.image_mask, first.tokens, first.token_mask, None, ("",))
    assert check(other) == ([1], 1)
    tokens = first.tokens.roll(1) * first.token_mask + first.token_mask
    assert check(ModelInputs(images, first.image_mask, tokens, first.token_mask, None, ("",))) == (
        [],
        1,
    )
    assert check(first) == ([1], 1)


def test_nothing_is_reused_of_a_batch_that_failed(load_model, recorded, monkeypatch):
    model = load_model("pi05")
    runtime = PI05Runtime(model, reuse=True)
    first, second = some_requests(model.config, 2)
    expected = runtime.sample_actions(first, seed=0)

    def full(*_):
        raise RuntimeError("no room")

    with monkeypatch.context() as context:
        context.setattr("phyai.models.pi05.lane.Lane._prefix_graph", full)
        with pytest.raises(RuntimeError, match="no room"):
            runtime.sample_actions(second, seed=0)
    assert torch.equal(runtime.sample_actions(first, seed=0), expected)


def test_lanes_do_not_disturb_each_other(load_model, recorded):
    model = load_model("pi05")
    runtime = PI05Runtime(model, lanes=2)
    asked = [*some_requests(model.config, 4)]
    tickets = [runtime.submit(inputs, seed=index) for index, inputs in enumerate(asked)]
    for index, (ticket, inputs) in enumerate(zip(tickets, asked, strict=True)):
        torch.testing.assert_close(
            ticket.result(), model.sample_actions(inputs, seed=index), atol=2e-6, rtol=1e-5
        )


def test_guidance_is_an_input_of_the_graph(load_model, recorded):
    model = load_model("pi05")
    runtime = PI05Runtime(model)
    config = model.config
    inputs = next(some_requests(config, 1))
    shape = config.chunk_size, config.max_action_dim
    counts = []
    for seed in (0, 1):
        left = torch.randn(shape[0] // 2, shape[1], generator=torch.Generator().manual_seed(seed))
        guidance = Guidance.build([left], shape, delay=1, horizon=3, most=3.0 + 4 * seed)
        guided = runtime.sample_actions(inputs, seed=0, guidance=guidance)
        expected = model.sample_actions(inputs, seed=0, guidance=guidance)
        torch.testing.assert_close(guided, expected, atol=2e-6, rtol=1e-5)
        assert not torch.allclose(guided, model.sample_actions(inputs, seed=0), atol=1e-3)
        counts.append(len(recorded))
    assert counts[0] == counts[1]
    free = Guidance.build([None], shape, delay=1)
    unguided = runtime.sample_actions(inputs, seed=0)
    assert torch.equal(runtime.sample_actions(inputs, seed=0, guidance=free), unguided)


def test_loops_used_longest_ago_are_forgotten(load_model, recorded):
    model = load_model("pi05")
    runtime, count = PI05Runtime(model), len(FAMILIES) + MOST_LOOPS
    inputs = request(model.config, [3], [[True] * len(model.config.cameras)], 0)
    first = runtime.sample_actions(inputs, seed=0, num_steps=1)
    for steps in range(1, count):
        runtime.sample_actions(inputs, seed=0, num_steps=steps)
        runtime.sample_actions(inputs, seed=0, num_steps=1)
    loops = runtime.lane(1).loop_graphs
    kept = [steps for steps, _ in loops]
    assert kept == [*range(count - MOST_LOOPS + 1, count), 1]
    before = len(recorded)
    assert torch.equal(runtime.sample_actions(inputs, seed=0, num_steps=1), first)
    assert len(recorded) == before
    runtime.sample_actions(inputs, seed=0, num_steps=2)
    assert len(recorded) == before + 1
    assert len(loops) == MOST_LOOPS


def test_buckets():
    assert [prompt_bucket(count, 1, 200) for count in (0, 1, 16, 17, 200)] == [0, 16, 16, 32, 200]
    assert prompt_bucket(150, 1, 150) == 150
    assert prompt_bucket(33, 2, 200) == 64
    assert prompt_bucket(5, 1, 8) == 8
    for most, gap in ((200, 40), (48, 16), (300, 100), (8, 8)):
        waste = [prompt_bucket(count, 2, most) - count for count in range(2 * most + 1)]
        assert most_padding(most) == gap
        assert 2 * gap - 1 == max(waste)


def test_mistakes_are_named(load_model, recorded):
    model = load_model("pi05")
    with pytest.raises(ValueError, match="needs every saving"):
        PI05Runtime(load_model("pi05", savings=Savings.none()))
    with pytest.raises(ValueError, match="lanes is 0"):
        PI05Runtime(model, lanes=0)
    runtime = PI05Runtime(model)
    inputs = next(some_requests(model.config, 1))
    with pytest.raises(ValueError, match="num_steps is 0"):
        runtime.sample_actions(inputs, num_steps=0)
    with pytest.raises(ValueError, match="either noise or a seed"):
        runtime.sample_actions(inputs, noise=torch.zeros(1), seed=0)
    nothing = request(model.config, [0], [[False] * len(model.config.cameras)], 0)
    with pytest.raises(ValueError, match="no keys to attend to"):
        runtime.sample_actions(nothing, seed=0)
    many = request(model.config, [1] * 33, [[True] * len(model.config.cameras)] * 33, 0)
    with pytest.raises(ValueError, match="33 requests; 1 to 32"):
        runtime.sample_actions(many, seed=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_two_hundred_requests_without_a_sync_or_a_new_graph(load_model, family):
    model = load_model(family, torch.bfloat16, device="cuda")
    runtime = PI05Runtime(model)
    count = runtime.warm_up()
    asked = [*some_requests(model.config, 200)]
    runtime.sample_actions(asked[0], seed=0)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        answers = [runtime.sample_actions(inputs, seed=i) for i, inputs in enumerate(asked)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    size = sum(answer.untyped_storage().nbytes() for answer in answers)
    assert runtime.graphs() == count
    assert torch.cuda.memory_allocated() - before <= 2 * size + 2**20
    for index in range(0, 200, 20):
        expected = model.sample_actions(asked[index], seed=index)
        error = (answers[index] - expected).norm() / expected.norm()
        assert error < 2e-2, f"request {index}: {error}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_free_requests_of_a_guided_batch_are_untouched_on_the_device(load_model, family):
    model = load_model(family, torch.bfloat16, device="cuda")
    runtime, config = PI05Runtime(model), model.config
    cameras = len(config.cameras)
    inputs = request(config, [5, 7, 3], [[True] * cameras] * 3, 1)
    shape = config.chunk_size, config.max_action_dim
    unguided = runtime.sample_actions(inputs, seed=0)
    graphs = []
    for most in (3.0, 10.0):
        left = torch.ones(shape[0] - 1, shape[1])
        parts = [Guidance.build([item], shape, delay=1, most=most) for item in (left, None, left)]
        guided = runtime.sample_actions(inputs, seed=0, guidance=Guidance.join(parts))
        assert torch.equal(guided[1], unguided[1])
        assert not torch.allclose(guided[0], unguided[0], atol=1e-2)
        graphs.append(runtime.graphs())
    assert graphs[0] == graphs[1]
