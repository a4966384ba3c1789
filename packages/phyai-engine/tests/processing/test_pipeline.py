import dataclasses
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from phyai.processing import (
    ModelInputs,
    Observation,
    PolicyProcessor,
    ProcessingError,
    PromptForm,
    get_preset,
)

from .observations import STATE, bins, frame, observe, quantile

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


def test_lerobot_batch(processor, build):
    observations = [
        observe(base_0_rgb=frame(1), right_wrist_0_rgb=frame(2)),
        observe(STATE * 0, "  fold_the\nshirt ", left_wrist_0_rgb=frame(3, (480, 640))),
    ]
    inputs = processor.preprocess(observations)
    assert isinstance(inputs, ModelInputs)
    assert inputs.images.shape == (2, 3, 3, 224, 224)
    assert inputs.images.dtype == torch.float32
    assert inputs.image_mask.tolist() == [[True, False, True], [False, True, False]]
    scaled = torch.from_numpy(frame(2)).permute(2, 0, 1) / 255.0 * 2 - 1
    assert torch.equal(inputs.images[0, 2], scaled)
    assert (inputs.images[~inputs.image_mask] == -1).all()
    assert (inputs.images[1, 1, :, :28] == -1).all()
    for row, (state, task) in enumerate([(STATE, "pick up"), (STATE * 0, "fold the shirt")]):
        text = bins(quantile(state, build.state_stats()))
        assert inputs.prompts[row] == f"Task: {task}, State: {text};\nAction: "
        ids = processor.spec.tokenizer.encode([inputs.prompts[row]])
        assert inputs.tokens[row, : len(ids)].tolist() == ids
        assert inputs.token_mask[row].sum() == len(ids)
    assert inputs.tokens.shape == (2, 200)
    assert inputs.state is None


def test_state_below_the_range_is_spelled_minus_one(processor):
    prompt = processor.preprocess([observe(STATE - 100)]).prompts[0]
    assert "State: -1 -1 -1 -1 -1;" in prompt


def test_old_lerobot_pads_the_text_and_the_letterbox(lerobot, build):
    processor = PolicyProcessor.from_checkpoint(
        lerobot().folder, build.Shape(), preset="lerobot-0.4"
    )
    inputs = processor.preprocess([observe(base_0_rgb=frame(0, (480, 640)))])
    text = bins(quantile(STATE, build.state_stats())) + " 128" * 27
    assert inputs.prompts[0] == f"Task: pick up, State: {text};\nAction: "
    assert (inputs.images[0, 0, :, :28] == -3).all()
    assert (inputs.images[0, 1:] == -1).all()


def test_rename_map_accepts_the_datasets_names(lerobot, build):
    checkpoint = lerobot()
    checkpoint.step("rename_observations_processor")["config"]["rename_map"] = {
        "observation.images.top": "observation.images.base_0_rgb",
        "observation.state.joints": "observation.state",
    }
    processor = PolicyProcessor.from_checkpoint(checkpoint.write(), build.Shape())
    expected = processor.preprocess([observe(base_0_rgb=frame(5))]).images
    for name in ("top", "observation.images.top", "observation.images.base_0_rgb"):
        assert torch.equal(processor.preprocess([observe(**{name: frame(5)})]).images, expected)


def test_pi0_reads_a_continuous_state_and_an_uncleaned_task(lerobot, build):
    checkpoint = lerobot(mode="MEAN_STD")
    step = checkpoint.step("pi05_prepare_state_tokenizer_processor_step")
    step["registry_name"] = "pi0_new_line_processor"
    shape = build.Shape(family="pi0", tokenizer_max_length=48)
    checkpoint.step("tokenizer_processor")["config"]["max_length"] = 48
    processor = PolicyProcessor.from_checkpoint(checkpoint.write(), shape)
    inputs = processor.preprocess([observe(task=" pick_up ")])
    assert inputs.prompts == (" pick_up \n",)
    assert inputs.tokens.shape == (1, 48)
    stats = build.state_stats()
    assert inputs.state.shape == (1, 32)
    assert inputs.state.dtype == torch.float32
    expected = (STATE - stats["mean"]) / stats["std"]
    assert np.allclose(inputs.state[0, :5], expected, atol=1e-6)
    assert (inputs.state[0, 5:] == 0).all()
    with pytest.raises(ProcessingError, match="observation 0 has no state"):
        processor.preprocess([observe(None)])


def test_raw_leaves_state_and_actions_normalised(tmp_path, build):
    build.write_tokenizer(tmp_path / "tokenizer.json")
    processor = PolicyProcessor.from_checkpoint(tmp_path, build.Shape(), preset="raw")
    state = np.array([-1.0, -0.5, 0.0, 0.5, 2.0])
    assert "State: 0 64 128 192 255;" in processor.preprocess([observe(state)]).prompts[0]
    actions = torch.randn(1, 3, 32)
    result = processor.postprocess(actions, [observe(state)])
    assert np.array_equal(result, actions[..., :4].numpy())


def test_normalisation_of_the_state_does_not_need_an_action(lerobot, build):
    """A state that was normalised only together with an action made a policy useless once."""
    checkpoint = lerobot()
    name = checkpoint.step("normalizer_processor")["state_file"]
    build.write_state_file(checkpoint.folder / name, {"observation.state": build.state_stats()})
    processor = PolicyProcessor.from_checkpoint(checkpoint.folder, build.Shape())
    text = bins(quantile(STATE, build.state_stats()))
    assert f"State: {text};" in processor.preprocess([observe()]).prompts[0]


def test_state_width_of_a_base_checkpoint_is_the_robots(lerobot, build):
    processor = PolicyProcessor.from_checkpoint(lerobot().folder, build.Shape(state_dim=32))
    prompt = processor.preprocess([observe(STATE[:3])]).prompts[0]
    assert f"State: {bins(quantile(STATE[:3], build.state_stats()))};" in prompt
    with pytest.raises(ProcessingError, match="has 6 columns but its statistics cover 5"):
        processor.preprocess([observe(np.zeros(6))])
    with pytest.raises(ProcessingError, match=r"different widths \[2, 3\]"):
        processor.preprocess([observe(STATE[:3]), observe(STATE[:2])])
    with pytest.raises(ProcessingError, match="expected one vector of at most 32 columns"):
        processor.preprocess([observe(np.zeros(33))])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "observation 1 has no state; this policy reads 5 columns"),
        (np.zeros(4), r"observation 1: the state has shape \(4,\), expected one vector of 5"),
        (np.zeros((1, 5)), r"shape \(1, 5\)"),
        (np.float64(3), r"shape \(\)"),
        (np.array([0, 1, np.nan, 0, 0]), "state column 2 is nan"),
        (np.array([0, 1, 0, 0, -np.inf]), "state column 4 is -inf"),
        (np.array(["1"] * 5), "dtype <U1, expected numbers"),
    ],
)
def test_states_that_are_refused(state, message, processor):
    with pytest.raises(ProcessingError, match=message):
        processor.preprocess([observe(), observe(state)])


def test_a_state_that_normalises_beyond_float32_is_refused(processor):
    state = STATE * 1.0
    state[3] = -1e39
    with pytest.raises(ProcessingError, match=r"observation 1: state column 3 is -1e.39, "):
        processor.preprocess([observe(), observe(state)])


def test_tasks_that_are_no_text_are_refused(processor):
    with pytest.raises(ProcessingError, match=r"observation 0: the task holds '\\udcff', which is"):
        processor.preprocess([observe(task="pick \udcff up")])


def test_integer_states_are_numbers(processor):
    whole = processor.preprocess([observe(np.arange(5))]).prompts
    assert whole == processor.preprocess([observe(np.arange(5.0))]).prompts


def test_observations_that_are_refused(processor):
    with pytest.raises(ProcessingError, match="no observation"):
        processor.preprocess([])
    with pytest.raises(ProcessingError, match=r"'base_0_rgbb'.*Did you mean 'base_0_rgb'"):
        processor.preprocess([observe(base_0_rgbb=frame(0))])
    with pytest.raises(ProcessingError, match="no camera image"):
        processor.preprocess([Observation({}, STATE, "go")])
    with pytest.raises(ProcessingError, match=r"camera 'left_wrist_0_rgb': .*four channels"):
        processor.preprocess([observe(left_wrist_0_rgb=np.zeros((8, 8, 4), np.uint8))])
    with pytest.raises(ProcessingError, match="observation 0: the task is bytes"):
        processor.preprocess([observe(task=b"go")])


def test_long_prompts_are_cut_with_a_warning(lerobot, build, caplog):
    processor = PolicyProcessor.from_checkpoint(
        lerobot().folder, build.Shape(tokenizer_max_length=200)
    )
    with caplog.at_level(logging.WARNING):
        inputs = processor.preprocess([observe(task="pick up " * 40)])
    assert inputs.token_mask.all()
    assert "truncated to the 200 slots" in caplog.text


def test_describe_is_plain_and_complete(processor):
    description = json.loads(json.dumps(processor.describe()))
    assert description["preset"] == "lerobot"
    assert "policy_preprocessor.json" in description["preset_reason"]
    example = "Task: pick up the red block, State: 128 128 128 128 128;\nAction: "
    assert description["prompt_example"] == example
    assert description["cameras"] == list(CAMERAS)
    assert description["state_normalization"] == "QUANTILES"
    assert description["state_statistics"].endswith("normalizer_processor.safetensors")
    assert description["action_dim"] == 4
    assert description["tokenizer"].endswith("tokenizer.json")


def test_nothing_is_remembered_between_calls(processor):
    before = processor.preprocess([observe()])
    processor.preprocess([observe(STATE * 3, "else", right_wrist_0_rgb=frame(9))])
    after = processor.preprocess([observe()])
    assert before.prompts == after.prompts
    assert torch.equal(before.images, after.images)


def test_prompt_form_of_a_derived_preset_wins(lerobot, build):
    preset = dataclasses.replace(
        get_preset("lerobot"), name="mine", prompt_form=PromptForm.TASK_NEWLINE
    )
    processor = PolicyProcessor.from_checkpoint(lerobot().folder, build.Shape(), preset=preset)
    assert processor.preprocess([observe(None)]).prompts == ("pick up\n",)
    assert processor.describe()["preset"] == "mine"


ONE_THREAD = """
import os
import numpy as np
import torch
from phyai.processing.images import ResizeFilter, prepare_image

def threads():
    return len(os.listdir("/proc/self/task"))

frames = np.zeros((480, 640, 3), np.uint8), np.zeros((3, 224, 224), np.float32)
before = threads()
for frame in frames:
    prepare_image(frame, (224, 224), resize=ResizeFilter.PIL)
after = threads()
torch.zeros(1 << 20).add_(1)
print(before, after, threads())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_frames_are_prepared_by_the_calling_thread_alone():
    run = subprocess.run(
        [sys.executable, "-c", ONE_THREAD],
        env=os.environ | {"OMP_NUM_THREADS": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    before, after, with_torch = map(int, run.stdout.split())
    assert after == before
    assert with_torch > before, "torch starts its threads lazily, so the test can fail"
