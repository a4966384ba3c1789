"""Raw observation to robot actions through the engine, against LeRobot's whole pipeline."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from phyai.engine import Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig
from phyai.models.pi05.main_pi05 import PI05Args
from phyai.processing import Observation

FAMILIES = ("pi05", "pi0")
OBSERVATIONS = ("wide", "untidy_task", "truncated_prompt", "newline_at_end", "empty_task")
# Robot units: a normalised error of 2e-6 times column ranges of up to 8.
TOLERANCE = 3e-5


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, golden):
    """Engine, golden tensors and the observations of one family."""
    checkpoint = golden(request.param).checkpoint
    engine = Engine(
        EngineArgs(
            plugin="pi05",
            plugin_args=PI05Args(checkpoint_dir=checkpoint),
            config=EngineConfig(device=DeviceConfig("cpu", torch.float32)),
        )
    )
    path = checkpoint / "processing.safetensors"
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        texts = json.loads(file.metadata()["cases"])
    observations = {
        name: Observation(
            {
                key.removeprefix(f"{name}.image."): value.numpy()
                for key, value in tensors.items()
                if key.startswith(f"{name}.image.")
            },
            tensors[f"{name}.state"].numpy(),
            texts[name]["task"],
        )
        for name in OBSERVATIONS
    }
    return engine, tensors, observations


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_one_observation(served, name):
    engine, tensors, observations = served
    chunk = engine.infer(observations[name], noise=tensors[f"{name}.chunk_noise"][None])
    expected = tensors[f"{name}.chunk_actions"].numpy()
    np.testing.assert_allclose(chunk.actions, expected, atol=TOLERANCE, rtol=0)


def test_a_batch_of_different_views_and_prompts(served):
    engine, tensors, observations = served
    noise = torch.stack([tensors[f"{name}.chunk_noise"] for name in OBSERVATIONS])
    chunks = engine.infer_batch([observations[name] for name in OBSERVATIONS], noise=noise)
    for name, chunk in zip(OBSERVATIONS, chunks, strict=True):
        expected = tensors[f"{name}.chunk_actions"].numpy()
        np.testing.assert_allclose(chunk.actions, expected, atol=TOLERANCE, rtol=0)
