import json

import numpy as np
import pytest

from phyai.processing.errors import ProcessingError
from phyai.processing.stats import load_stats

OPENPI = {
    "norm_stats": {
        "state": {"mean": [0, 1.5], "std": [1, 2], "q01": None, "q99": None},
        "actions": {"mean": [0.5], "std": [1], "q01": [-1], "q99": [1]},
    }
}
DATASET = {
    "observation.state": {"min": [0.0], "max": [1.0], "count": [7]},
    "action": {"q01": [0.0], "q99": [2.0]},
    "observation.images.top": {"mean": [[[0.5]]]},
    "timestamp": {"mean": 3},
}


def test_openpi_file(tmp_path, build):
    stats = load_stats(build.write_json(tmp_path / "norm_stats.json", OPENPI))
    assert stats["state"].values["mean"].tolist() == [0.0, 1.5]
    assert set(stats["state"].values) == {"mean", "std"}
    assert stats["action"].values["q99"].tolist() == [1.0]
    assert stats["action"].values["q99"].dtype == np.float64
    assert stats["action"].source == str(tmp_path / "norm_stats.json")


def test_dataset_file(tmp_path, build):
    stats = load_stats(build.write_json(tmp_path / "stats.json", DATASET))
    assert set(stats) == {"state", "action"}
    assert set(stats["state"].values) == {"min", "max"}


def test_state_file_of_a_normaliser(tmp_path, build):
    path = tmp_path / "state.safetensors"
    build.write_state_file(
        path,
        {
            "observation.state": {"q01": [1.0, 2.0]},
            "action": {"q01": [3.0]},
            "observation.images.top": {"mean": [0.5]},
        },
    )
    stats = load_stats(path)
    assert stats["state"].values["q01"].tolist() == [1.0, 2.0]
    assert stats["action"].values["q01"].tolist() == [3.0]
    assert set(stats) == {"state", "action"}


@pytest.mark.parametrize("name", ["norm_stats.json", "stats.json", "meta/stats.json"])
def test_folder(name, tmp_path, build):
    build.write_json(tmp_path / name, DATASET)
    assert set(load_stats(tmp_path)) == {"state", "action"}


def test_folder_without_statistics(tmp_path):
    with pytest.raises(ProcessingError, match=r"no statistics; looked for norm_stats.json, stats"):
        load_stats(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "root must be an object, found list"),
        ("{", "not valid JSON"),
        ("[" * 5000, "not valid JSON"),
        ("{}", "no statistics of a state or action"),
        ('{"norm_stats": 3}', "norm_stats must be an object"),
        ('{"state": {"mean": 3}}', "state.mean must be an array, found int 3"),
        ('{"state": {"mean": [1, "2"]}}', r"state.mean\[1\] must be a number, found str '2'"),
        ('{"state": {"mean": [true]}}', "must be a number, found bool"),
        ('{"state": {"mean": [[1]]}}', "must be a number, found list"),
        ('{"action": []}', "action must be an object"),
        (json.dumps({"action": {"q01": [10**400]}}), "beyond float64"),
    ],
)
def test_malformed_json(content, message, tmp_path):
    path = tmp_path / "stats.json"
    path.write_text(content)
    with pytest.raises(ProcessingError, match=message) as caught:
        load_stats(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["gone.json", "gone.safetensors"])
def test_missing_file(name, tmp_path):
    with pytest.raises(ProcessingError, match=f"{name} can not be read"):
        load_stats(tmp_path / name)


def test_broken_safetensors(tmp_path):
    path = tmp_path / "state.safetensors"
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(ProcessingError, match="can not be read as safetensors"):
        load_stats(path)
