"""Whole pipelines of openpi's presets."""

import json
import math

import numpy as np
import torch

from phyai.processing import NormMode, Observation, PolicyProcessor

from .observations import bins, frame, observe, quantile


def test_pi0_reads_the_state_and_adds_it_to_its_actions(openpi, build):
    processor = PolicyProcessor.from_checkpoint(
        openpi(8, 7, "assets/libero"), build.Shape(family="pi0"), preset="openpi/pi0_libero"
    )
    state = np.linspace(-1, 1, 8)
    observations = [observe(state, " pick_up ", image=frame(0))]
    inputs = processor.preprocess(observations)
    assert inputs.prompts == ("pick up\n",)
    stats = build.state_stats(8)
    expected = (state - stats["mean"]) / (stats["std"] + 1e-6)
    assert np.allclose(inputs.state[0, :8], expected, atol=1e-6)
    actions = torch.rand(1, 10, 32)
    stats = build.action_stats(7)
    robot = actions[..., :7].double().numpy() * (stats["std"] + 1e-6) + stats["mean"]
    robot[..., :6] += state[:6]
    assert np.allclose(processor.postprocess(actions, observations), robot, atol=1e-6)


def test_libero(openpi, build):
    shape = build.Shape(state_dim=32, action_dim=32)
    processor = PolicyProcessor.from_checkpoint(openpi(8, 7, "assets/libero"), shape)
    assert processor.spec.preset.name == "openpi/pi05_libero"
    images = {"observation/image": frame(1), "observation/wrist_image": frame(2)}
    observations = [Observation(images, None, "open_it"), Observation(images, np.ones(8), "x")]
    inputs = processor.preprocess(observations)
    assert inputs.prompts == ("open it\n", "x\n")
    assert inputs.image_mask.tolist() == [[True, True, False]] * 2
    assert inputs.state is None
    actions = torch.rand(2, 10, 32) * 2 - 1
    stats = build.action_stats(7)
    width = stats["q99"] - stats["q01"] + 1e-6
    expected = (actions[..., :7].double().numpy() + 1) / 2 * width + stats["q01"]
    assert np.allclose(processor.postprocess(actions, observations), expected, atol=1e-6)


def test_libero_needs_no_statistics_of_the_state_it_does_not_read(openpi, build):
    folder = openpi(8, 7, "assets/libero")
    path = folder / "assets/libero/norm_stats.json"
    content = json.loads(path.read_text())
    del content["norm_stats"]["state"]
    path.write_text(json.dumps(content))
    processor = PolicyProcessor.from_checkpoint(folder, build.Shape())
    assert processor.spec.state_norm.mode is NormMode.IDENTITY


def test_droid(openpi, build):
    shape = build.Shape(state_dim=32, action_dim=32)
    processor = PolicyProcessor.from_checkpoint(openpi(8, 8, "assets/droid"), shape)
    state = np.linspace(-0.9, 0.9, 8)
    inputs = processor.preprocess([observe(state, wrist_image_left=frame(0))])
    text = bins(quantile(state, build.state_stats(8), 1e-6))
    assert inputs.prompts[0] == f"Task: pick up, State: {text};\nAction: "
    assert inputs.image_mask.tolist() == [[False, True, False]]
    assert processor.postprocess(torch.zeros(1, 15, 32), [observe(state)]).shape == (1, 15, 8)


def test_aloha(openpi, build):
    shape = build.Shape(state_dim=32, action_dim=32)
    processor = PolicyProcessor.from_checkpoint(openpi(14, 14), shape)
    state = np.random.default_rng(0).uniform(-0.5, 0.5, 14)
    state[[6, 13]] = 0.4, 0.8
    signs = np.array([1, -1, -1, 1, 1, 1, 1] * 2)
    decoded = state * signs
    for column in (6, 13):
        metres = 0.01844 + state[column] * 0.03956
        sine = (0.022**2 + metres**2 - 0.036**2) / (2 * 0.022 * metres)
        decoded[column] = (math.asin(sine) - 0.5476) / 1.082
    observation = observe(state, cam_high=frame(0).transpose(2, 0, 1), cam_low=frame(1))
    inputs = processor.preprocess([observation])
    text = bins(quantile(decoded, build.state_stats(14), 1e-6))
    assert inputs.prompts[0] == f"Task: pick up, State: {text};\nAction: "
    assert inputs.image_mask.tolist() == [[True, False, False]]
    actions = torch.rand(1, 5, 32) - 0.5
    stats = build.action_stats(14)
    model_units = (actions[..., :14].double().numpy() + 1) / 2 * (
        stats["q99"] - stats["q01"] + 1e-6
    ) + stats["q01"]
    joints = np.array([True] * 6 + [False] + [True] * 6 + [False])
    expected = (model_units + np.where(joints, decoded, 0)) * signs
    for column in (6, 13):
        expected[..., column] = (model_units[..., column] + 0.5476 + 0.6213) / 2.1123
    result = processor.postprocess(actions, [observation])
    assert result.shape == (1, 5, 14)
    assert np.allclose(result, expected, atol=1e-5)
