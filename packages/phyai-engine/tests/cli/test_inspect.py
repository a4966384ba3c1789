"""`phyai inspect` on the tiny LeRobot checkpoint of the fixtures."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

FIXTURE = Path(__file__).parents[1] / "fixtures" / "pi05_tiny"


@pytest.fixture
def checkpoint(tmp_path):
    return Path(shutil.copytree(FIXTURE, tmp_path / "checkpoint"))


def test_the_json_summary_agrees_with_the_files(phyai):
    result = phyai("inspect", FIXTURE, "--json")
    assert result.code == 0
    assert result.err == ""
    summary = result.json
    config = json.loads((FIXTURE / "config.json").read_text())
    assert summary["family"] == "pi05"
    assert summary["layout"] == "lerobot"
    assert summary["chunk_size"] == config["chunk_size"]
    assert summary["state_dim"] == config["input_features"]["observation.state"]["shape"][0]
    assert summary["action_dim"] == config["output_features"]["action"]["shape"][0]
    cameras = [name for name in config["input_features"] if "images" in name]
    assert summary["cameras"] == [name.rsplit(".", 1)[1] for name in cameras]
    with safe_open(FIXTURE / "model.safetensors", framework="np") as file:
        stored = len(list(file.keys()))
    assert summary["tensors"] + summary["tensors_unused"] == stored
    assert sum(summary["dtypes"].values()) == summary["tensors"]
    assert summary["bytes_on_disk"] == (FIXTURE / "model.safetensors").stat().st_size
    assert summary["processing"]["preset"] == "lerobot"
    assert "unnormalizer" in summary["processing"]["action_statistics"]


def test_the_text_summary_is_one_line_per_fact(phyai):
    result = phyai("inspect", FIXTURE)
    assert result.code == 0
    assert "family      pi05, lerobot layout" in result.out
    assert "base_0_rgb, left_wrist_0_rgb, right_wrist_0_rgb  at 28x28" in result.out
    assert "prompt_example" in result.out
    assert ";\\nAction: " in result.out


def test_a_preset_can_be_tried(phyai):
    summary = phyai("inspect", FIXTURE, "--preset", "lerobot-0.4", "--json").json
    assert summary["processing"]["preset"] == "lerobot-0.4"


def test_an_unknown_preset_is_reported_beside_the_sizes(phyai):
    summary = phyai("inspect", FIXTURE, "--preset", "nonsense", "--json").json
    assert "nonsense" in summary["processing"]["problem"]
    assert summary["family"] == "pi05"


def test_missing_processor_files_are_reported_beside_the_sizes(phyai, checkpoint):
    for path in [*checkpoint.glob("tokenizer*")]:
        path.unlink()
    result = phyai("inspect", checkpoint)
    assert result.code == 0
    assert "problem" in result.out
    assert "tokenizer" in result.out


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_an_error(phyai, checkpoint, name):
    (checkpoint / name).unlink()
    result = phyai("inspect", checkpoint)
    assert result.code == 1
    assert result.err.startswith("error: ")
    assert name in result.err
    assert result.out == ""


def test_a_truncated_file_is_an_error(phyai, checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    result = phyai("inspect", checkpoint)
    assert result.code == 1
    assert "model.safetensors" in result.err


def test_a_broken_config_is_an_error(phyai, checkpoint):
    (checkpoint / "config.json").write_text("{")
    result = phyai("inspect", checkpoint)
    assert result.code == 1
    assert "config.json" in result.err
