"""The graph runtime on the CPU, with graphs that call their function again, and on a GPU."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from phyai.dispatch.types import Profile
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.denoise import denoise
from phyai.models.cosmos3.parallel import Parallel
from phyai.models.cosmos3.random_weights import random_transformer
from phyai.models.cosmos3.runtime import MOST_TOKENS, Cosmos3Runtime, FrameEncoder
from phyai.models.cosmos3.sampler import Sampling
from phyai.models.cosmos3.state import ActionLayout, Layout, Modalities
from phyai.runtime import graphs

ACTION = ActionLayout(rows=5, start=0, clean_rows=(0,), raw_dim=6, domain_id=2)
POLICY = Layout(3, 5, 6, clean_frames=(0,), fps=15.0, action=ACTION)
SOUND = Layout(2, 4, 4, fps=24.0, sound_frames=7)
SAMPLING = Sampling(steps=3, guidance=3.0, shift=5.0)


def make_model(variant):
    config = Cosmos3Config.tiny(variant, num_hidden_layers=2)
    return random_transformer(config, params_dtype=torch.float32, device="cpu", gain=0.08)


@pytest.fixture(scope="module")
def model():
    return make_model("qwen")


def recording(model):
    found = Cosmos3Runtime(model)
    found.records = True
    return found


@pytest.fixture
def runtime(model, recorded):
    return recording(model)


def start(model, layout, seed=0):
    config, generator = model.config, torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(model.device)

    action = None if layout.action is None else draw(layout.action.rows, config.action_dim)
    sound = draw(config.sound_dim, layout.sound_frames) if layout.sound_frames else None
    video = draw(config.latent_channel, layout.frames, layout.height, layout.width)
    return Modalities(video, action, sound)


def text(model, length, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + length)
    return model.prefill(torch.randint(1, 64, (length,), generator=generator))


def assert_same(found, expected):
    for name in ("video", "action", "sound"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("variant", ["qwen", "edge"])
def test_one_graph_serves_other_noise_and_other_texts(variant, recorded):
    model = make_model(variant)
    runtime = recording(model)
    for seed in range(3):
        conditions = [text(model, 7, seed), text(model, 3)]
        state = start(model, POLICY, seed)
        kept = state.map(torch.clone)
        found = runtime(model, state, conditions, POLICY, SAMPLING)
        assert_same(found, denoise(model, state, conditions, POLICY, SAMPLING))
        assert_same(state, kept)
    assert len(recorded) == runtime.recorded() == 1


def test_the_run_before_a_recording_is_an_answer(model, runtime, recorded, monkeypatch):
    warm = []
    monkeypatch.setattr(
        graphs, "_run_on_side_stream", lambda function, device: warm.append(function())
    )
    for length, runs in ((7, 2), (8, 3), (9, 4)):
        conditions = [text(model, length), text(model, 3)]
        state = start(model, POLICY, length)
        found = runtime(model, state, conditions, POLICY, SAMPLING)
        assert_same(found, denoise(model, state, conditions, POLICY, SAMPLING))
        assert len(warm) == runs, "the first key alone runs once more, eagerly"
    assert len(recorded) == 3
    tuning = SimpleNamespace(policy=SimpleNamespace(profile=Profile.AUTOTUNE))
    monkeypatch.setattr("phyai.models.cosmos3.runtime.get_kernel_selector", lambda: tuning)
    runtime.warm_up([text(model, 5), text(model, 3)], POLICY, SAMPLING)
    assert len(warm) == 6, "what is tuned is measured eagerly"


def test_a_result_is_not_overwritten_by_the_next(model, runtime):
    conditions = [text(model, 7), text(model, 3)]
    first = runtime(model, start(model, POLICY), conditions, POLICY, SAMPLING)
    before = first.map(torch.clone)
    runtime(model, start(model, POLICY, 1), conditions, POLICY, SAMPLING)
    assert_same(first, before)


def test_nothing_of_the_run_before_is_read(model, runtime):
    """Every buffer is full of not-a-numbers but those that a call fills."""
    conditions = [text(model, 7), text(model, 3)]
    expected = runtime(model, start(model, POLICY), conditions, POLICY, SAMPLING)
    (loop,) = runtime._loops.values()
    buffers = [loop.state.video, loop.state.action, loop._call._output]
    for group in loop.bound.groups:
        buffers += [group.keys, group.values]
    with torch.inference_mode():  # as the graph's own output is
        for buffer in buffers:
            buffer.fill_(torch.nan)
    again = [text(model, 7), text(model, 3)]  # equal texts in other tensors are filled anew
    assert_same(runtime(model, start(model, POLICY), again, POLICY, SAMPLING), expected)


def test_what_is_part_of_the_key(model, runtime):
    conditions = [text(model, 7), text(model, 3)]
    other = Sampling(steps=2, guidance=3.0, shift=5.0, interval=(960, 1001))
    alone = Sampling(steps=2, guidance=1.0, shift=5.0)
    for layout, texts, sampling in (
        (POLICY, conditions, SAMPLING),
        (POLICY, conditions, other),
        (POLICY, conditions[:1], alone),
        (POLICY, [text(model, 8), conditions[1]], SAMPLING),
        (Layout(1, 5, 6), conditions, SAMPLING),
    ):
        state = start(model, layout)
        found = runtime(model, state, texts, layout, sampling)
        assert_same(found, denoise(model, state, texts, layout, sampling))
    assert runtime.recorded() == runtime.kept == 4
    first = (POLICY, (7, 3), SAMPLING)
    assert first not in runtime._loops, "the graph used longest ago is dropped"


def test_a_dropped_graph_is_freed_at_once(model, recorded):
    runtime = Cosmos3Runtime(model, kept=1)
    runtime.records = True
    gc.disable()
    try:
        first = weakref.ref(runtime.warm_up([text(model, 7), text(model, 3)], POLICY, SAMPLING))
        pool = runtime._pool
        assert first() is not None
        runtime.warm_up([text(model, 8), text(model, 3)], POLICY, SAMPLING)
        assert first() is None
    finally:
        gc.enable()
    assert runtime._pool is not pool, "no graph is left that keeps the pool"
    assert runtime.recorded() == 1


def test_sound_and_warm_up(model, runtime, recorded):
    conditions = [text(model, 4), text(model, 2)]
    loop = runtime.warm_up(conditions, SOUND, SAMPLING)
    assert loop is not None
    state = start(model, SOUND)
    found = runtime(model, state, [text(model, 4, 1), conditions[1]], SOUND, SAMPLING)
    expected = denoise(model, state, [text(model, 4, 1), conditions[1]], SOUND, SAMPLING)
    assert_same(found, expected)
    assert len(recorded) == 1


def test_masks_of_a_graph_outlive_the_models_cache(model, runtime):
    conditions = [text(model, 3), text(model, 2)]
    loop = runtime.warm_up(conditions, POLICY, SAMPLING)
    for width in range(2, 12):
        model.masks(Layout(1, 2, width))
    assert model.masks(POLICY) is not loop._masks
    assert loop._masks.video.shape == (1, 3, 1, 1)


def test_where_nothing_is_recorded(model, recorded):
    conditions = [text(model, 3), text(model, 2)]
    runtime = Cosmos3Runtime(model)
    assert not runtime.records
    assert runtime.warm_up(conditions, POLICY, SAMPLING) is None
    state = start(model, POLICY)
    found = runtime(model, state, conditions, POLICY, SAMPLING)
    assert_same(found, denoise(model, state, conditions, POLICY, SAMPLING))
    assert recorded == []


def test_long_loops_are_not_recorded(model, runtime, recorded, monkeypatch):
    conditions = [text(model, 3), text(model, 2)]
    forwards = SAMPLING.forwards * POLICY.tokens(model.config.latent_patch_size)
    for most, count in ((forwards - 1, 0), (forwards, 1)):
        monkeypatch.setattr("phyai.models.cosmos3.runtime.MOST_TOKENS", most)
        state = start(model, POLICY)
        found = runtime(model, state, conditions, POLICY, SAMPLING)
        assert_same(found, denoise(model, state, conditions, POLICY, SAMPLING))
        assert runtime.recorded() == len(recorded) == count
    droid = Layout(9, 33, 40, action=ActionLayout(33, 0, (0,), 8, 8))
    assert droid.tokens(2) * Sampling(4, 3.0, 5.0).forwards == 24_744 <= MOST_TOKENS


def test_ranks_and_a_switch_keep_the_loop_eager(model, monkeypatch):
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    assert Cosmos3Runtime(model).records
    assert not Cosmos3Runtime(model, graphs=False).records
    monkeypatch.setattr(model, "parallel", Parallel(branch=0, branches=2))
    assert not Cosmos3Runtime(model).records


def test_mistakes_are_named(model, runtime):
    with pytest.raises(ValueError, match="kept is 0"):
        Cosmos3Runtime(model, kept=0)
    conditions = [text(model, 3)]
    with pytest.raises(ValueError, match="needs a conditional and an unconditional branch"):
        runtime(model, start(model, POLICY), conditions, POLICY, SAMPLING)
    with pytest.raises(ValueError, match="graphs of another model"):
        runtime(object(), start(model, POLICY), conditions, POLICY, SAMPLING)


def test_pictures_of_one_size_share_a_graph(recorded):
    def encode(pixels):
        return pixels.flatten(1).mean(1) + 1

    encoder = FrameEncoder(encode, records=True)
    for size, count in ((4, 1), (4, 1), (6, 2)):
        pixels = torch.randn(3, size, 4)
        assert torch.equal(encoder(pixels), encode(pixels))
        assert len(recorded) == count
    assert torch.equal(FrameEncoder(encode, records=False)(pixels), encode(pixels))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", ["qwen", "edge"])
def test_replays_without_a_sync_or_new_memory(variant):
    config = Cosmos3Config.tiny(variant, head_dim=64, mrope_section=(16, 8, 8), hidden_size=256)
    model = random_transformer(config, params_dtype=torch.bfloat16, device="cuda")
    runtime = Cosmos3Runtime(model)
    assert runtime.records
    texts = [[text(model, 7, seed), text(model, 3)] for seed in range(3)]
    states = [start(model, POLICY, seed) for seed in range(6)]
    runtime(model, states[0], texts[0], POLICY, SAMPLING)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        answers = [
            runtime(model, state, texts[index % 3], POLICY, SAMPLING)
            for index, state in enumerate(states)
        ]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert runtime.recorded() == 1
    assert torch.cuda.memory_allocated() - before < 2**20
    for index, state in enumerate(states):
        expected = denoise(model, state, texts[index % 3], POLICY, SAMPLING)
        for ours, theirs in ((answers[index].video, expected.video),
                             (answers[index].action, expected.action)):  # fmt: skip
            assert (ours - theirs).norm() < 2e-2 * theirs.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_single_kept_graph_makes_room_for_the_next():
    config = Cosmos3Config.tiny("qwen", head_dim=64, mrope_section=(16, 8, 8), hidden_size=256)
    model = random_transformer(config, params_dtype=torch.bfloat16, device="cuda")
    runtime = Cosmos3Runtime(model, kept=1)
    for length in (7, 8, 9, 7):
        conditions, state = [text(model, length), text(model, 3)], start(model, POLICY, length)
        expected = denoise(model, state, conditions, POLICY, SAMPLING).video
        for _ in range(2):
            found = runtime(model, state, conditions, POLICY, SAMPLING).video
            assert (found - expected).norm() < 2e-2 * expected.norm()
        assert runtime.recorded() == 1
