import json

import pytest
import torch
from reach.export import export_checkpoint
from reach.policy import initial_tensors
from reach.sizes import reach_config
from safetensors.torch import load_file

from phyai.checkpoints.reader import CheckpointReader
from phyai.models.pi05.config import PI05Config
from phyai.models.pi05.keys import canonical


@pytest.fixture(scope="module")
def exported(tmp_path_factory, small_config, statistics):
    directory = tmp_path_factory.mktemp("export") / "checkpoint"
    tensors = initial_tensors(small_config, 0)
    export_checkpoint(directory, tensors, small_config, statistics)
    return directory, tensors


def test_engine_reads_the_same_configuration(exported, small_config):
    directory, _ = exported
    shapes = CheckpointReader(directory, canonical).shapes
    assert PI05Config.read(directory, shapes) == small_config


def test_weights_have_lerobots_names_and_are_rounded_once(exported, small_config):
    directory, tensors = exported
    stored = load_file(directory / "model.safetensors")
    head = stored.pop("model.paligemma_with_expert.gemma_expert.lm_head.weight")
    assert head.shape == (small_config.language.vocab, small_config.expert.width)
    assert set(stored) == {f"model.{name}" for name in tensors}
    for name, value in tensors.items():
        assert torch.equal(stored[f"model.{name}"], value.to(torch.bfloat16)), name


def test_statistics_are_in_both_processors(exported, statistics):
    directory, _ = exported
    for name, index in (("policy_preprocessor", 3), ("policy_postprocessor", 0)):
        steps = json.loads((directory / f"{name}.json").read_text())["steps"]
        state = load_file(directory / steps[index]["state_file"])
        assert set(state) == set(statistics.tensors())
        for key, value in statistics.tensors().items():
            assert state[key].dtype == torch.float32
            assert torch.equal(state[key], value.float()), key


def test_processor_steps_are_lerobots(exported):
    directory, _ = exported
    steps = json.loads((directory / "policy_preprocessor.json").read_text())["steps"]
    assert [step["registry_name"] for step in steps] == [
        "rename_observations_processor",
        "to_batch_processor",
        "relative_actions_processor",
        "normalizer_processor",
        "pi05_prepare_state_tokenizer_processor_step",
        "tokenizer_processor",
        "device_processor",
    ]
    config = json.loads((directory / "config.json").read_text())
    assert config["normalization_mapping"]["STATE"] == "QUANTILES"
    assert list(config["input_features"]) == [
        "observation.images.base",
        "observation.images.wrist",
        "observation.state",
    ]
    assert json.loads((directory / "phyai_config.json").read_text()) == {"vision_num_heads": 1}
    assert (directory / "tokenizer.json").is_file()


def test_shipped_size_fits(tmp_path, statistics):
    config = reach_config()
    export_checkpoint(tmp_path, initial_tensors(config, 0), config, statistics)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 10_000_000


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_weights_that_do_not_fit_are_refused(exported, small_config, statistics, tmp_path, change):
    tensors = dict(exported[1])
    value = tensors.pop("time_mlp_in.bias")
    if change == "unknown":
        tensors |= {"time_mlp_in.bias": value, "state_proj.bias": value}
    if change == "shape":
        tensors["time_mlp_in.bias"] = value[:-1]
    named = "state_proj.bias" if change == "unknown" else "time_mlp_in.bias"
    with pytest.raises(ValueError, match=named):
        export_checkpoint(tmp_path / "no", tensors, small_config, statistics)
    assert not (tmp_path / "no").exists()
