import logging

import numpy as np
import pytest

from phyai.processing.errors import ProcessingError
from phyai.processing.lerobot import POST_STEPS, PRE_STEPS, RelativeActions, read_lerobot
from phyai.processing.normalize import NormMode
from phyai.processing.prompt import PromptForm

NAMES = ("shoulder", "elbow", "Gripper_left", "wrist")


@pytest.mark.parametrize("index", [2, 3])
def test_the_named_state_file_is_read(index, lerobot, build):
    checkpoint = lerobot(index)
    name = checkpoint.step("normalizer_processor")["state_file"]
    assert f"step_{index}_" in name
    processors = read_lerobot(checkpoint.folder)
    expected = build.state_stats()["q01"].astype(np.float32)
    assert np.array_equal(processors.state.stats.values["q01"], expected)
    assert processors.state.stats.source.endswith(name)
    assert np.allclose(processors.action.stats.values["q99"], build.action_stats()["q99"])


def test_a_state_file_of_any_name_is_read(lerobot):
    checkpoint = lerobot()
    step = checkpoint.step("normalizer_processor")
    (checkpoint.folder / step["state_file"]).rename(checkpoint.folder / "odd name.safetensors")
    step["state_file"] = "odd name.safetensors"
    assert read_lerobot(checkpoint.write()).state.stats is not None


def test_plain_checkpoint(lerobot):
    processors = read_lerobot(lerobot().folder)
    assert processors.rename == {}
    assert processors.relative is None
    assert processors.prompt_form is PromptForm.TASK_STATE
    assert not processors.pads_state
    assert processors.tokenizer_name == "google/paligemma-3b-pt-224"
    assert processors.max_length == 200
    assert (processors.state.mode, processors.state.eps) == (NormMode.QUANTILES, 1e-8)


@pytest.mark.parametrize("mode", list(NormMode))
def test_modes(mode, lerobot):
    processors = read_lerobot(lerobot(mode=mode.value).folder)
    assert processors.state.mode is processors.action.mode is mode


def test_state_and_action_modes_and_eps_are_separate(lerobot):
    checkpoint = lerobot()
    checkpoint.step("normalizer_processor")["config"]["norm_map"]["STATE"] = "MIN_MAX"
    checkpoint.step("unnormalizer_processor")["config"]["eps"] = 1
    processors = read_lerobot(checkpoint.write())
    assert (processors.state.mode, processors.action.mode) == (
        NormMode.MIN_MAX,
        NormMode.QUANTILES,
    )
    assert (processors.state.eps, processors.action.eps) == (1e-8, 1.0)


def test_base_checkpoint_without_features_and_state_files_has_no_statistics(lerobot):
    checkpoint = lerobot()
    for name in ("normalizer_processor", "unnormalizer_processor"):
        step = checkpoint.step(name)
        del step["state_file"]
        step["config"]["features"] = {}
    processors = read_lerobot(checkpoint.write())
    assert processors.state.stats is None
    assert processors.action.stats is None
    assert "names no state_file" in processors.state.searched


@pytest.mark.parametrize(
    ("keys", "mode"),
    [(["observation.images.top"], NormMode.IDENTITY), (["observation.state"], NormMode.QUANTILES)],
)
def test_only_selected_observations_are_normalised(keys, mode, lerobot):
    checkpoint = lerobot()
    checkpoint.step("normalizer_processor")["config"]["normalize_observation_keys"] = keys
    processors = read_lerobot(checkpoint.write())
    assert processors.state.mode is mode
    assert processors.action.mode is NormMode.QUANTILES


def test_old_prompt_step_declares_its_padding(lerobot):
    checkpoint = lerobot()
    step = checkpoint.step("pi05_prepare_state_tokenizer_processor_step")
    step["config"] = {"max_state_dim": 32}
    assert read_lerobot(checkpoint.write()).pads_state


def test_pi0_prompt_step(lerobot):
    checkpoint = lerobot()
    step = checkpoint.step("pi05_prepare_state_tokenizer_processor_step")
    step["registry_name"] = "pi0_new_line_processor"
    assert read_lerobot(checkpoint.write()).prompt_form is PromptForm.TASK_NEWLINE


def test_config_may_be_absent(lerobot):
    checkpoint = lerobot()
    del checkpoint.step("to_batch_processor")["config"]
    del checkpoint.step("rename_observations_processor")["config"]
    assert read_lerobot(checkpoint.write()).rename == {}


@pytest.mark.parametrize(
    ("excluded", "names", "mask"),
    [
        (("gripper",), NAMES, (True, True, False, True)),
        (("GRIPPER", "elbow"), NAMES, (True, False, False, True)),
        ((), NAMES, (True,) * 4),
        (("",), NAMES, (True,) * 4),
        (("gripper",), None, (True,) * 4),
        (("gripper",), ("gripper",), (False, True, True, True)),
        (("gripper",), (*NAMES, "gripper"), (True, True, False, True)),
    ],
)
def test_relative_mask(excluded, names, mask):
    assert RelativeActions(excluded, names).mask(4) == mask


def test_relative_step(lerobot):
    checkpoint = lerobot(3, absolute=True)
    config = checkpoint.step("relative_actions_processor")["config"]
    config.update(enabled=True, action_names=list(NAMES))
    relative = read_lerobot(checkpoint.write()).relative
    assert relative == RelativeActions(("gripper",), NAMES)


def test_offsets_that_stay_offsets_are_reported(lerobot, caplog):
    checkpoint = lerobot(3)
    checkpoint.step("relative_actions_processor")["config"]["enabled"] = True
    with caplog.at_level(logging.WARNING):
        assert read_lerobot(checkpoint.write()).relative is None
    assert "actions are returned as offsets" in caplog.text


def test_absolute_without_relative_step(lerobot):
    with pytest.raises(ProcessingError, match=r"absolute_actions_processor is enabled but .*json"):
        read_lerobot(lerobot(2, absolute=True).folder)


def change(name, key, value):
    def apply(checkpoint):
        target = checkpoint.step(name)
        *path, last = key.split("/")
        for part in path:
            target = target[part]
        if value is None:
            target.pop(last)
        else:
            target[last] = value

    return apply


NORMALIZER, TOKENIZER = "normalizer_processor", "tokenizer_processor"
RENAME, UNNORMALIZER = "rename_observations_processor", "unnormalizer_processor"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change(NORMALIZER, "config/norm_map", None), r"config.norm_map is missing; found: eps"),
        (change(NORMALIZER, "config/norm_map", []), "norm_map must be an object, found list"),
        (
            change(NORMALIZER, "config/norm_map/STATE", "ZSCORE"),
            r"norm_map.STATE is 'ZSCORE'; allowed: IDENTITY, MEAN_STD, MIN_MAX, QUANTILES, QUANT",
        ),
        (change(NORMALIZER, "config/norm_map/STATE", 3), "STATE must be a string, found int 3"),
        (change(NORMALIZER, "config/norm_map/VISUAL", "MEAN_STD"), "VISUAL is MEAN_STD; images"),
        (change(NORMALIZER, "config/eps", "1e-8"), "config.eps must be a number, found str"),
        (change(NORMALIZER, "config/eps", True), "config.eps must be a number, found bool"),
        (change(NORMALIZER, "config", "x"), "config must be an object"),
        (change(NORMALIZER, "state_file", 3), "state_file must be a string"),
        (change(NORMALIZER, "state_file", "gone.safetensors"), "gone.safetensors can not be read"),
        (change(NORMALIZER, "state_file", "../x.safetensors"), "name of a file beside the JSON"),
        (change(NORMALIZER, "state_file", "/etc/passwd"), "name of a file beside the JSON"),
        (change(NORMALIZER, "registry_name", None), r"steps\[2\].registry_name is missing"),
        (change(NORMALIZER, "registry_name", 5), r"registry_name must be a string, found int"),
        (change(NORMALIZER, "registry_name", "to_batch_processor"), "step normalizer_processor is"),
        (change(UNNORMALIZER, "registry_name", "device_processor"), "unnormalizer_processor is mi"),
        (change(TOKENIZER, "config/padding_side", "left"), "padding_side is 'left'; allowed: righ"),
        (change(TOKENIZER, "config/max_length", 0), "max_length is 0; it must be positive"),
        (change(TOKENIZER, "config/max_length", 20.5), "max_length must be an integer"),
        (change(TOKENIZER, "config/tokenizer_name", 1), "tokenizer_name must be a string"),
        (change(RENAME, "config/rename_map", {"a": 1}), r"rename_map.a must be a string"),
        (change(RENAME, "config/rename_map", ["a"]), "rename_map must be an object"),
        (change(TOKENIZER, "registry_name", "pi0_new_line_processor"), "exclude another"),
        (change(RENAME, "registry_name", "normalizer_processor"), "appears 2 times"),
        (
            change("absolute_actions_processor", "config/enabled", "yes"),
            "enabled must be true or false, found str 'yes'",
        ),
    ],
)
def test_malformed_files(edit, message, lerobot):
    checkpoint = lerobot()
    edit(checkpoint)
    with pytest.raises(ProcessingError, match=message) as caught:
        read_lerobot(checkpoint.write())
    assert str(checkpoint.folder) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("exclude_joints", "gripper", "exclude_joints must be an array"),
        ("exclude_joints", [1], r"exclude_joints\[0\] must be a string"),
        ("action_names", ["a", None], r"action_names\[1\] must be a string"),
        ("enabled", 1, "enabled must be true or false"),
    ],
)
def test_malformed_relative_step(key, value, message, lerobot):
    checkpoint = lerobot(3, absolute=True)
    config = checkpoint.step("relative_actions_processor")["config"]
    config["enabled"] = True
    config[key] = value
    with pytest.raises(ProcessingError, match=message):
        read_lerobot(checkpoint.write())


@pytest.mark.parametrize(("side", "known"), [("pre", PRE_STEPS), ("post", POST_STEPS)])
def test_unknown_step_lists_the_known_ones(side, known, lerobot):
    checkpoint = lerobot()
    getattr(checkpoint, side).append({"registry_name": "my_filter", "config": {}})
    with pytest.raises(ProcessingError, match="unknown processor step 'my_filter'") as caught:
        read_lerobot(checkpoint.write())
    for name in known:
        assert name in str(caught.value)


@pytest.mark.parametrize("name", ["policy_preprocessor.json", "policy_postprocessor.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "can not be read: No such file"),
        ("nope", "not valid JSON"),
        ("3", "root must be an object"),
        ("{}", "steps is missing"),
        ('{"steps": {}}', "steps must be an array"),
        ('{"steps": [3]}', r"steps\[0\] must be an object"),
    ],
)
def test_broken_files(name, content, message, lerobot):
    folder = lerobot().folder
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ProcessingError, match=message) as caught:
        read_lerobot(folder)
    assert name in str(caught.value)
