"""The recorded Euler loop, replayed on the CPU, against the sampler."""

import pytest
import torch

from phyai.models.pi05.captured import CapturedDenoise

pytestmark = pytest.mark.usefixtures("recorded")


@pytest.mark.parametrize("family", ["pi05", "pi0"])
@pytest.mark.parametrize("group", ["ragged", "mixed_cameras"])
def test_one_recording_serves_other_images_and_noise(golden, load_model, family, group):
    case, model = golden(family), load_model(family)
    inputs, noise = case.inputs(group), case.noise(group)
    state = inputs.state if family == "pi0" else None
    recorded = CapturedDenoise(model, *model.encode_prefix(inputs))
    assert torch.equal(
        recorded(*model.encode_prefix(inputs), noise, state),
        model.sample_actions(inputs, noise=noise),
    )
    inputs.images.neg_()
    noise = noise.flip(1)
    assert torch.equal(
        recorded(*model.encode_prefix(inputs), noise, state),
        model.sample_actions(inputs, noise=noise),
    )


def test_the_number_of_steps_is_recorded(golden, load_model):
    case, model = golden("pi05"), load_model("pi05")
    inputs, noise = case.inputs("single"), case.noise("single")
    recorded = CapturedDenoise(model, *model.encode_prefix(inputs), num_steps=1)
    expected = model.sample_actions(inputs, noise=noise, num_steps=1)
    assert torch.equal(recorded(*model.encode_prefix(inputs), noise), expected)
    with pytest.raises(ValueError, match="num_steps is 0"):
        CapturedDenoise(model, *model.encode_prefix(inputs), num_steps=0)


def test_another_layout_is_refused(golden, load_model):
    case, model = golden("pi05"), load_model("pi05")
    recorded = CapturedDenoise(model, *model.encode_prefix(case.inputs("single")))
    other = model.encode_prefix(case.inputs("ragged"))
    with pytest.raises(ValueError, match="record another graph for this layout"):
        recorded(*other, case.noise("ragged"))
