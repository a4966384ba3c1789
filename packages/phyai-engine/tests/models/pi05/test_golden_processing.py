"""Prompts, tokens, images, states and actions against LeRobot's own processors."""

import json
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.testing import assert_close

from phyai.models.pi05.config import PI05Config
from phyai.processing import Observation, PolicyProcessor

FAMILIES = ("pi05", "pi0")
OBSERVATIONS = ("wide", "untidy_task", "truncated_prompt", "newline_at_end", "empty_task")
MODES = ("min_max", "mean_std", "quantile10", "identity", "relative")
MAX_DIM = 8
# fp32 on LeRobot's side; columns are a few units wide.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Shape:
    """What the processors must know, straight from LeRobot's configuration."""

    family: str
    cameras: tuple[str, ...]
    state_dim: int
    action_dim: int
    max_state_dim: int
    max_action_dim: int
    tokenizer_max_length: int
    image_resolution: tuple[int, int]
    empty_cameras: int


def read_shape(checkpoint):
    raw = json.loads((checkpoint / "config.json").read_text())
    prefix = "observation.images."
    return Shape(
        family=raw["type"],
        cameras=tuple(
            name.removeprefix(prefix) for name in raw["input_features"] if name.startswith(prefix)
        ),
        state_dim=raw["input_features"]["observation.state"]["shape"][0],
        action_dim=raw["output_features"]["action"]["shape"][0],
        max_state_dim=raw["max_state_dim"],
        max_action_dim=raw["max_action_dim"],
        tokenizer_max_length=raw["tokenizer_max_length"],
        image_resolution=tuple(raw["image_resolution"]),
        empty_cameras=raw["empty_cameras"],
    )


@cache
def read_cases(checkpoint):
    path = checkpoint / "processing.safetensors"
    with safe_open(path, framework="pt") as file:
        texts = json.loads(file.metadata()["cases"])
    return load_file(path), texts


def observation(tensors, texts, name):
    images = {
        key.removeprefix(f"{name}.image."): value.numpy()
        for key, value in tensors.items()
        if key.startswith(f"{name}.image.")
    }
    return Observation(images, tensors[f"{name}.state"].numpy(), texts[name]["task"])


@pytest.fixture(params=FAMILIES)
def checkpoint(request, golden):
    return golden(request.param).checkpoint


@pytest.fixture
def processor(checkpoint):
    return PolicyProcessor.from_checkpoint(checkpoint, read_shape(checkpoint))


def test_the_models_config_gives_the_same_shape(golden, load_model):
    for family in FAMILIES:
        shape, config = read_shape(golden(family).checkpoint), load_model(family).config
        assert isinstance(config, PI05Config)
        for field, value in vars(shape).items():
            assert getattr(config, field) == value, field


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_preprocessing_equals_lerobots(checkpoint, processor, name):
    tensors, texts = read_cases(checkpoint)
    inputs = processor.preprocess([observation(tensors, texts, name)])
    assert inputs.prompts == (texts[name]["prompt"],)
    assert torch.equal(inputs.token_mask[0], tensors[f"{name}.token_mask"])
    assert torch.equal(inputs.tokens[0], tensors[f"{name}.tokens"])
    for index, camera in enumerate(read_shape(checkpoint).cameras):
        expected = tensors.get(f"{name}.model_image.{camera}")
        assert inputs.image_mask[0, index].item() == (expected is not None)
        if expected is not None:
            assert_close(inputs.images[0, index], expected, atol=2e-6, rtol=0)
    if inputs.state is not None:
        expected = torch.zeros(MAX_DIM)
        expected[: read_shape(checkpoint).state_dim] = tensors[f"{name}.normalized_state"]
        assert_close(inputs.state[0], expected, atol=TOLERANCE, rtol=1e-6)


def test_pi0_has_a_state_and_pi05_reads_it_as_text(golden):
    for family in FAMILIES:
        folder = golden(family).checkpoint
        tensors, texts = read_cases(folder)
        processor = PolicyProcessor.from_checkpoint(folder, read_shape(folder))
        inputs = processor.preprocess([observation(tensors, texts, "wide")])
        assert (inputs.state is None) == (family == "pi05")
        assert ("State:" in inputs.prompts[0]) == (family == "pi05")


def test_a_batch_equals_its_observations(checkpoint, processor):
    tensors, texts = read_cases(checkpoint)
    batch = processor.preprocess([observation(tensors, texts, name) for name in OBSERVATIONS])
    for row, name in enumerate(OBSERVATIONS):
        assert batch.prompts[row] == texts[name]["prompt"]
        assert torch.equal(batch.tokens[row], tensors[f"{name}.tokens"])


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_postprocessing_equals_lerobots(checkpoint, processor, name):
    tensors, texts = read_cases(checkpoint)
    normalized = tensors[f"{name}.normalized_actions"]
    columns = torch.nn.functional.pad(
        normalized, (0, MAX_DIM - normalized.shape[1]), value=torch.nan
    )
    actions = processor.postprocess(columns[None], [observation(tensors, texts, name)])
    assert actions.dtype == np.float32
    expected = tensors[f"{name}.actions"].numpy()
    np.testing.assert_allclose(actions[0], expected, atol=TOLERANCE, rtol=1e-6)


def test_both_tokenizer_files_give_lerobots_tokens(checkpoint):
    tensors, texts = read_cases(checkpoint)
    for file in ("tokenizer.json", "tokenizer.model"):
        processor = PolicyProcessor.from_checkpoint(
            checkpoint, read_shape(checkpoint), tokenizer=checkpoint / file
        )
        for name in OBSERVATIONS:
            inputs = processor.preprocess([observation(tensors, texts, name)])
            assert torch.equal(inputs.tokens[0], tensors[f"{name}.tokens"]), f"{file}, {name}"


def test_float_images_equal_their_bytes(checkpoint, processor):
    tensors, texts = read_cases(checkpoint)
    whole = observation(tensors, texts, "wide")
    floats = {name: image.astype(np.float32) / 255 for name, image in whole.images.items()}
    channels_first = {name: image.transpose(2, 0, 1) for name, image in whole.images.items()}
    expected = processor.preprocess([whole]).images
    for images in (floats, channels_first):
        found = processor.preprocess([replace(whole, images=images)]).images
        assert_close(found, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("mode", MODES)
def test_normalization_modes_equal_lerobots(golden, mode):
    tokenizer = golden("pi05").checkpoint
    folder = tokenizer.parent / f"processors_{mode}"
    tensors, texts = read_cases(folder)
    shape = read_shape(folder)
    processor = PolicyProcessor.from_checkpoint(folder, shape, tokenizer=tokenizer)
    image = np.zeros((28, 28, 3), dtype=np.uint8)
    seen = Observation({shape.cameras[0]: image}, tensors["state"].numpy(), "go")
    assert processor.preprocess([seen]).prompts == (texts["prompt"],)
    normalized = tensors["normalized_actions"]
    columns = torch.nn.functional.pad(normalized, (0, MAX_DIM - normalized.shape[1]))
    actions = processor.postprocess(columns[None], [seen])
    expected = tensors["actions"].numpy()
    np.testing.assert_allclose(actions[0], expected, atol=TOLERANCE, rtol=1e-6)
