"""Intermediate values against LeRobot's, to tell where a difference begins."""

import pytest
import torch
from torch.testing import assert_close

from phyai.models.pi05.heads import time_embedding
from phyai.models.pi05.savings import Savings
from phyai.models.pi05.stream import Stream

FAMILIES = ("pi05", "pi0")
GROUP = "mixed_cameras"
TIMES = (1.0, 0.9, 0.1)
# (time, index) to value, computed in fp64 from the published formula.
PUBLISHED_TIME_VALUES = {
    (1.0, 1): -0.783219,
    (1.0, 2): 0.871741,
    (1.0, 255): -0.252886,
    (1.0, 511): 1.0,
    (1.0, 513): -0.621746,
    (0.9, 1): -0.132246,
    (0.9, 255): 0.855513,
    (0.9, 511): 0.987688,
    (0.9, 1023): 0.156434,
    (0.1, 1): -0.858563,
    (0.1, 255): -0.958645,
    (0.1, 511): 0.156434,
    (0.1, 1023): 0.987688,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_image_features(golden, load_model, family):
    case, model = golden(family), load_model(family)
    images = case.inputs(GROUP).images
    features = model.vision(images.flatten(0, 1)).unflatten(0, images.shape[:2])
    assert_close(features, case.stage("image_features"), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_embeddings_are_scaled_by_the_root_of_the_width(golden, load_model, family):
    case, model = golden(family), load_model(family)
    embeddings = model.embed_prompt(case.inputs(GROUP).tokens.flatten())
    expected = case.stage("prompt_embeddings").flatten(0, 1)
    assert_close(embeddings, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("savings", [Savings.all(), Savings.none()], ids=["lean", "plain"])
def test_prefix_keys_and_values(golden, load_model, family, savings):
    case, model = golden(family), load_model(family, savings=savings)
    inputs = case.inputs(GROUP)
    with torch.inference_mode():
        cache, layout = model.encode_prefix(inputs)
    tokens_per_view = model.config.vision.tokens
    valid = torch.cat(
        [inputs.image_mask.repeat_interleave(tokens_per_view, dim=1), inputs.token_mask], dim=1
    )
    rows = torch.cat(layout.visible)
    for layer in range(model.config.language.layers):
        for kind, found in (("key", cache.keys[layer]), ("value", cache.values[layer])):
            expected = case.stage(f"prefix_{kind}_{layer}")[:, 0][valid]
            assert_close(
                found.reshape(-1, expected.shape[1])[rows],
                expected,
                atol=1e-5,
                rtol=1e-5,
                msg=lambda text, kind=kind, layer=layer: f"{kind} of layer {layer}: {text}",
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_first_velocity(golden, load_model, family):
    case, model = golden(family), load_model(family)
    inputs, noise = case.inputs(GROUP), case.noise(GROUP)
    # One Euler step of length one: the actions are the noise minus the velocity at t = 1.
    actions = model.sample_actions(inputs, noise=noise, num_steps=1)
    assert_close(noise - actions, case.stage("first_velocity"), atol=1e-5, rtol=0)


def test_first_velocity_of_an_expert_that_leaves_nothing_to_add(golden, load_model, monkeypatch):
    """As fused layers do; norm and action head are then one operation."""
    case, model = golden("pi05"), load_model("pi05")
    forward = model.expert.forward

    def whole(*arguments):
        stream = forward(*arguments)
        return Stream(stream.residual + stream.gate * stream.update)

    monkeypatch.setattr(model.expert, "forward", whole)
    noise = case.noise(GROUP)
    actions = model.sample_actions(case.inputs(GROUP), noise=noise, num_steps=1)
    assert_close(noise - actions, case.stage("first_velocity"), atol=1e-5, rtol=0)
    (trace,) = model._velocity_site.traces()
    assert (trace.op, trace.selected) == ("flow_velocity", "layers.flow_velocity")
    facts = trace.as_dict()["facts"]
    width, actions = model.config.expert.width, model.config.max_action_dim
    assert (facts["shape.hidden"], facts["shape.actions"]) == (width, actions)
    assert facts["attrs.shared_modulation"] is True


@pytest.mark.parametrize("width", [16, 32, 1024])
def test_time_embedding_equals_lerobots(golden, width):
    case = golden("pi0" if width == 16 else "pi05")
    found = time_embedding(torch.tensor(TIMES), width, 4e-3, 4.0)
    assert found.dtype == torch.float32
    assert_close(found, case.stage(f"time_embedding_{width}"), atol=1e-6, rtol=0)


@pytest.mark.parametrize("time", TIMES)
def test_time_embedding_has_the_published_values(time):
    found = time_embedding(torch.tensor([time]), 1024, 4e-3, 4.0)[0]
    for (at, index), value in PUBLISHED_TIME_VALUES.items():
        if at == time:
            # The fp32 time itself is off by up to 4e-8, which the shortest period multiplies.
            assert found[index].item() == pytest.approx(value, abs=5e-5), f"index {index}"
