"""Branches, their room, masks, errors and dtypes of the transformer."""

import dataclasses

import pytest
import torch

from phyai.layers import Linear
from phyai.models.cosmos3 import branches
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.media import patchify, unpatchify
from phyai.models.cosmos3.random_weights import random_transformer
from phyai.models.cosmos3.state import ActionLayout, Conditions, Layout, Modalities

ACTION = ActionLayout(rows=5, start=0, clean_rows=(0,), raw_dim=6, domain_id=2)
LAYOUT = Layout(3, 5, 6, (0,), 15.0, ACTION, sound_frames=4)
MODALITIES = ("video", "action", "sound")


def make(variant="qwen", dtype=torch.float32, **options):
    config = Cosmos3Config.tiny(variant)
    return random_transformer(config, params_dtype=dtype, device="cpu", gain=0.08, **options)


@pytest.fixture(scope="module")
def model():
    return make()


def draw(layout=LAYOUT, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = 4, layout.frames, layout.height, layout.width
    action = layout.action and torch.randn(layout.action.rows, 8, generator=generator)
    sound = (
        torch.randn(5, layout.sound_frames, generator=generator) if layout.sound_frames else None
    )
    return Modalities(torch.randn(shape, generator=generator), action, sound)


def texts(model, *lengths):
    return [model.prefill(torch.arange(3, 3 + length)) for length in lengths]


def assert_equal(found, expected, tolerance=1e-6):
    for name in MODALITIES:
        ours, theirs = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_nothing_moves_where_it_is_given(model):
    (found,) = model.velocities(draw(), 833, texts(model, 7), LAYOUT)
    assert not found.video[:, 0].any()
    assert found.video[:, 1:].all()
    assert not found.action[0].any()
    assert not found.action[:, 6:].any()
    assert found.action[1:, :6].all()
    assert found.sound.shape == (5, 4)
    assert found.sound.all()


def test_layouts_without_optional_modalities(model):
    layout = Layout(1, 4, 4)
    (found,) = model.velocities(draw(layout), 999, texts(model, 1), layout)
    assert found.action is None
    assert found.sound is None
    assert found.video.all()


@pytest.mark.parametrize("mode", ["together", "apart", "shared room", "shared room, apart"])
def test_room_is_an_optimisation_only(model, mode, monkeypatch):
    """Unwritten memory is NaN, so that a slot that is read but not written shows."""
    conditions = texts(model, 7, 3)
    expected = [model.velocities(draw(), 624, [one], LAYOUT)[0] for one in conditions]
    monkeypatch.setattr(branches, "_TOGETHER_ROWS", 0 if "apart" in mode else 1 << 20)
    monkeypatch.setattr(branches, "_SEPARATE_BYTES", 0 if "shared" in mode else 1 << 20)
    empty = torch.empty
    monkeypatch.setattr(
        branches.torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(torch.nan)
    )
    fresh = make()
    conditions = texts(fresh, 7, 3)
    for _ in range(2):
        for found, wanted in zip(
            fresh.velocities(draw(), 624, conditions, LAYOUT), expected, strict=True
        ):
            assert_equal(found, wanted)
    bound = fresh.bind(conditions, LAYOUT)
    assert len(bound.groups) == (2 if "apart" in mode else 1)
    assert all(group.keys.shape[0] == (1 if "shared" in mode else 3) for group in bound.groups)


def test_the_first_branch_alone_uses_the_same_room(model):
    conditions = texts(model, 7, 3)
    both = model.velocities(draw(), 624, conditions, LAYOUT)
    bound = model.bind(conditions, LAYOUT)
    assert model.bind(conditions[:1], LAYOUT) is bound
    (alone,) = model.velocities(draw(), 624, conditions[:1], LAYOUT)
    assert_equal(alone, both[0])
    assert_equal(model.velocities(draw(), 624, conditions, LAYOUT)[1], both[1])


def test_room_is_filled_anew_for_other_texts_of_the_same_length(model):
    first, other = model.prefill(torch.arange(7)), model.prefill(torch.arange(20, 27))
    (before,) = model.velocities(draw(), 624, [first], LAYOUT)
    bound = model.bind([first], LAYOUT)
    assert model.bind([other], LAYOUT) is bound
    (after,) = model.velocities(draw(), 624, [other], LAYOUT)
    assert not torch.allclose(before.video, after.video, atol=1e-3)
    assert_equal(model.velocities(draw(), 624, [first], LAYOUT)[0], before)
    longer = texts(model, 8)
    assert model.bind(longer, LAYOUT) is not bound
    with pytest.raises(ValueError, match=r"hold texts of \(7,\) tokens, the new ones have \(8,\)"):
        bound.fill(longer)


def test_room_made_in_inference_mode_is_filled_outside(model):
    layout = dataclasses.replace(LAYOUT, fps=6.0)
    with torch.inference_mode():
        first = texts(model, 7)
        (inside,) = model.velocities(draw(layout), 624, first, layout)
    bound = model.bind(first, layout)
    again = texts(model, 7)
    assert model.bind(again, layout) is bound
    assert_equal(model.velocities(draw(layout), 624, again, layout)[0], inside)


def test_other_layouts_and_orders_of_branches(model):
    one, two = texts(model, 7, 3)
    forward = model.velocities(draw(), 624, [one, two], LAYOUT)
    backward = model.velocities(draw(), 624, [two, one], LAYOUT)
    assert_equal(backward[0], forward[1])
    assert_equal(backward[1], forward[0])
    layout = dataclasses.replace(LAYOUT, fps=30.0)
    (found,) = model.velocities(draw(), 624, [one], layout)
    assert not torch.allclose(found.video, forward[0].video, atol=1e-3)


def test_a_text_of_one_token_and_a_video_of_one_patch(model):
    layout = Layout(1, 1, 1)
    (found,) = model.velocities(draw(layout), 0, texts(model, 1), layout)
    assert found.video.shape == (4, 1, 1, 1)


def test_the_padding_of_odd_sides_is_zero_and_cropped():
    video = torch.randn(4, 3, 5, 7)
    patches = patchify(video, 2)
    assert patches.shape == (3 * 3 * 4, 16)
    assert torch.equal(unpatchify(patches, video.shape, 2), video)
    # Token (t, r, c) = (1, 2, 3): its lower row and right column are padding.
    token = patches.view(3, 3, 4, 2, 2, 4)[1, 2, 3]
    assert torch.equal(token[0, 0], video[:, 1, 4, 6])
    assert not token[1].any()
    assert not token[:, 1].any()


@pytest.mark.parametrize("variant", ["qwen", "edge"])
def test_half_precision_is_close(variant):
    layout = dataclasses.replace(LAYOUT, sound_frames=0)
    answers = []
    for dtype in (torch.float32, torch.bfloat16):
        model = make(variant, dtype)
        conditions = texts(model, 7, 3)
        assert {part.dtype for part in (conditions[0].keys, conditions[0].values)} == {dtype}
        answers.append(model.velocities(draw(layout), 833, conditions, layout))
    for exact, rounded in zip(*answers, strict=True):
        for name in ("video", "action"):
            one, other = getattr(exact, name).flatten(), getattr(rounded, name).flatten()
            assert other.dtype == torch.float32
            assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.999


def test_heads_of_actions_and_times_stay_wide():
    model = make(dtype=torch.bfloat16)
    wide = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert {name.split(".")[0] for name in wide} >= {"time", "action"}
    assert model.proj_in.weight.dtype == torch.bfloat16
    rows = draw().action
    tokens = model.action.tokens(rows, 2)
    weight, bias = model.action.proj_in.weight[2], model.action.proj_in.bias[2]
    expected = rows.double() @ weight.double() + bias.double()
    expected += model.action.embedding.weight.double()
    torch.testing.assert_close(tokens.double(), expected, rtol=1e-5, atol=1e-5)


def test_call_sites_tell_the_towers_apart(model):
    roles = {one.prefix: one._site.role for one in model.modules() if isinstance(one, Linear)}
    assert roles["gen_layers.2.cross_attention.to_out"] == "generation"
    assert roles["language_model.layers.0.self_attn.qkv_proj"] == "understanding"
    assert roles["proj_in"] == roles["time_embedder.linear_1"] == "head"


def test_memory_of_a_prompt():
    model = make("qwen", torch.bfloat16)
    (conditions,) = texts(model, 9)
    assert conditions.length == 9
    assert conditions.bytes == 3 * 2 * 2 * 16 * 9 * 2
    assert conditions.keys.shape == (3, 9, 2, 16)


def bad_state(**changes):
    return lambda model: model.velocities(
        dataclasses.replace(draw(), **changes), 624, texts(model, 2), LAYOUT
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.prefill(torch.zeros(2, 3)), r"shape \(2, 3\); expected \[S\]"),
        (lambda m: m.prefill(torch.zeros(0).long()), r"shape \(0,\); expected \[S\] with at least"),
        (lambda m: m.velocities(draw(), 624, [], LAYOUT), "0 branches; allowed: 1 or 2"),
        (lambda m: m.velocities(draw(), 624, texts(m, 1, 2, 3), LAYOUT), "3 branches"),
        (
            lambda m: m.bind([Conditions(*torch.zeros(2, 3, 9, 1, 16))], LAYOUT),
            r"keys of shape \(3, 9, 1, 16\); this model needs \(3, tokens, 2, 16\)",
        ),
        (lambda m: m.velocities(draw(), 1001, texts(m, 1), LAYOUT), "timestep is 1001; allowed"),
        (bad_state(action=None), r"state\.action is absent; the layout needs \(5, 8\)"),
        (
            bad_state(sound=torch.zeros(5, 3)),
            r"state\.sound is \(5, 3\); the layout needs \(5, 4\)",
        ),
        (bad_state(video=torch.zeros(4, 3, 5, 5)), r"state\.video is \(4, 3, 5, 5\)"),
        (
            lambda m: m.velocities(
                draw(), 1, texts(m, 1), dataclasses.replace(LAYOUT, action=None)
            ),
            r"state\.action is \(5, 8\); the layout needs none",
        ),
        (
            lambda m: m.velocities(
                draw(),
                1,
                texts(m, 1),
                dataclasses.replace(LAYOUT, action=dataclasses.replace(ACTION, raw_dim=9)),
            ),
            "raw_dim is 9; this model has 8 action channels",
        ),
    ],
)
def test_what_does_not_fit_is_refused(model, call, message):
    with pytest.raises(ValueError, match=message):
        call(model)


def test_a_model_without_a_head_says_so():
    model = make("edge")
    with pytest.raises(ValueError, match="the layout has sound, for which this model has no head"):
        model.velocities(draw(), 624, texts(model, 2), LAYOUT)
    config = Cosmos3Config.tiny("edge", action_gen=False, action_dim=0)
    with pytest.raises(ValueError, match=r"domains has \[0\]; allowed: none, this model has no"):
        random_transformer(config, params_dtype=torch.float32, device="cpu", domains=[0])


def test_modalities_are_mapped_together():
    one = Modalities(torch.ones(1), None, torch.ones(2))
    other = Modalities(torch.full((1,), 2.0), None, torch.full((2,), 3.0))
    total = one.map(torch.add, other)
    assert total.action is None
    assert (total.video.tolist(), total.sound.tolist()) == ([3.0], [4.0, 4.0])


def test_conditions_are_compared_by_identity(model):
    (one,) = texts(model, 2)
    assert one != Conditions(one.keys, one.values)
