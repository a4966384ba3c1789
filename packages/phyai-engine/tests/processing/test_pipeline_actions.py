"""Actions of the model in robot units, and back."""

import dataclasses

import numpy as np
import pytest
import torch

from phyai.processing import PolicyProcessor, ProcessingError, get_preset

from .observations import STATE, observe


def test_actions_are_decoded_by_the_postprocessors_statistics(processor, build):
    actions = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))
    stats = build.action_stats()
    result = processor.postprocess(actions, [observe(), observe()])
    width = stats["q99"] - stats["q01"]
    expected = (actions[..., :4].numpy() + 1) / 2 * width + stats["q01"]
    assert result.dtype == np.float32
    assert result.shape == (2, 7, 4)
    assert np.allclose(result, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_actions_of_any_dtype_strided_and_with_gradient(processor, dtype):
    actions = torch.randn(1, 64, 7).to(dtype).requires_grad_().transpose(1, 2)[:, :, ::2]
    result = processor.postprocess(actions, [observe()])
    reference = processor.postprocess(actions.float().contiguous(), [observe()])
    assert np.allclose(result, reference, atol=1e-6)


def test_relative_actions_use_the_state_of_their_own_request(lerobot, build):
    checkpoint = lerobot(3, absolute=True)
    config = checkpoint.step("relative_actions_processor")["config"]
    config.update(enabled=True, action_names=["a", "b", "gripper", "d"])
    processor = PolicyProcessor.from_checkpoint(checkpoint.write(), build.Shape())
    first, second = observe(STATE), observe(STATE * -2)
    processor.preprocess([first])
    processor.preprocess([second])  # another session in between
    actions = torch.zeros(1, 3, 32)
    stats = build.action_stats()
    centre = (stats["q99"] + stats["q01"]) / 2
    for observation in (first, second):
        expected = centre + observation.state[:4] * [1, 1, 0, 1]
        result = processor.postprocess(actions, [observation])
        assert np.allclose(result, expected, atol=1e-6)
    both = processor.postprocess(torch.zeros(2, 3, 32), [second, first])
    assert np.allclose(both[0], centre + second.state[:4] * [1, 1, 0, 1], atol=1e-6)
    assert np.allclose(both[1], centre + first.state[:4] * [1, 1, 0, 1], atol=1e-6)


def test_relative_column_beyond_the_state(lerobot, build):
    checkpoint = lerobot(3, absolute=True)
    checkpoint.step("relative_actions_processor")["config"]["enabled"] = True
    folder = checkpoint.write()
    with pytest.raises(ProcessingError, match=r"column 3 is relative to the state.*has 3 columns"):
        PolicyProcessor.from_checkpoint(folder, build.Shape(state_dim=3))
    padded = PolicyProcessor.from_checkpoint(folder, build.Shape(state_dim=32))
    with pytest.raises(ProcessingError, match=r"column 3 .* has only 2 columns"):
        padded.postprocess(torch.zeros(1, 1, 32), [observe(STATE[:2])])


@pytest.mark.parametrize("shape", [(1, 6, 31), (2, 6, 32), (6, 32)])
def test_actions_of_another_shape_are_refused(shape, processor):
    with pytest.raises(ProcessingError, match=r"expected \[B=1, T, max_action_dim=32\]"):
        processor.postprocess(torch.zeros(shape), [observe()])


def test_actions_come_back_to_the_models_numbers(processor):
    generator = torch.Generator().manual_seed(0)
    model = torch.randn(1, 7, processor.spec.shape.max_action_dim, generator=generator)
    robot = processor.postprocess(model, [observe()])[0]
    found = processor.normalize_actions(robot, observe())
    width = robot.shape[1]
    np.testing.assert_allclose(found[:, :width], model[0, :, :width], atol=1e-5)
    assert found.dtype == np.float32
    assert found.shape == model.shape[1:]
    assert not found[:, width:].any()
    with pytest.raises(ProcessingError, match=rf"expected \[T, action_dim={width}\]"):
        processor.normalize_actions(robot[:, 1:], observe())


def test_relative_actions_come_back_relative_to_another_state(lerobot, build):
    built = lerobot()
    preset = dataclasses.replace(get_preset("lerobot"), delta_mask=(True, False, True))
    processor = PolicyProcessor.from_checkpoint(built.folder, build.Shape(), preset=preset)
    generator = torch.Generator().manual_seed(0)
    model = torch.randn(1, 7, processor.spec.shape.max_action_dim, generator=generator)
    robot = processor.postprocess(model, [observe()])[0]
    moved = observe(STATE + 0.5)
    found = processor.normalize_actions(robot, moved)
    again = processor.postprocess(torch.from_numpy(found)[None], [moved])[0]
    np.testing.assert_allclose(again, robot, atol=1e-5)
    np.testing.assert_allclose(found[:, 1], model[0, :, 1], atol=1e-5)
    assert np.abs(found[:, 0] - model[0, :, 0].numpy()).min() > 1e-3
    with pytest.raises(ProcessingError, match="no state"):
        processor.normalize_actions(robot, observe(None))
