"""Reading statistics files: openpi norm_stats.json, LeRobot stats.json, LeRobot state tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file

from phyai.processing.errors import ProcessingError
from phyai.processing.json_reader import JsonObject, check_type, read_json
from phyai.processing.normalize import STATISTICS, FeatureStats

STATE, ACTION = "state", "action"
_FEATURES = {
    "state": STATE,
    "observation.state": STATE,
    "actions": ACTION,
    "action": ACTION,
}
_STATISTICS = {name for pair in STATISTICS.values() for name in pair}
_FOLDER_FILES = ("norm_stats.json", "stats.json", "meta/stats.json")

Statistics = Mapping[str, FeatureStats]
"""`state` and `action` to their statistics; either may be absent."""


def load_stats(path: Path) -> Statistics:
    """Reads the statistics of states and actions.

    Args:
        path: An openpi `norm_stats.json`, a LeRobot dataset's `stats.json`, a LeRobot normalizer's
            `.safetensors`, or a folder that holds one of the JSON files.

    Returns:
        `state` and `action` to their statistics; a feature that the file lacks is absent.

    Raises:
        ProcessingError: The file is missing, malformed, or has neither feature.
    """
    path = path.expanduser()
    if path.is_dir():
        path = _file_in(path)
    if path.suffix == ".safetensors":
        stats = load_state_file(path)
    else:
        root = read_json(path)
        stats = read_json_stats(root.child("norm_stats") if "norm_stats" in root else root)
    if not stats:
        raise ProcessingError(
            f"{path} has no statistics of a state or action; expected one of the keys "
            f"{', '.join(_FEATURES)}"
        )
    return stats


def read_json_stats(features: JsonObject) -> Statistics:
    """Reads `{feature: {statistic: [numbers]}}`; other features than state and action are skipped.

    Raises:
        ProcessingError: A statistic is not an array of numbers.
    """
    stats: dict[str, FeatureStats] = {}
    for key, feature in _FEATURES.items():
        if key not in features:
            continue
        entry = features.child(key)
        values = {
            name: _vector(value, entry.where(name))
            for name, value in entry.values.items()
            if name in _STATISTICS and value is not None
        }
        stats[feature] = FeatureStats(values, str(features.file))
    return stats


def load_state_file(path: Path) -> Statistics:
    """Reads a normalizer's tensors, keyed `<feature>.<statistic>`.

    Raises:
        ProcessingError: The file is missing or is not a safetensors file.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ProcessingError(f"{path} can not be read as safetensors: {error}") from error
    grouped: dict[str, dict[str, np.ndarray]] = {}
    for key, tensor in tensors.items():
        name, _, statistic = key.rpartition(".")
        if name in _FEATURES:
            values = tensor.double().numpy()
            grouped.setdefault(_FEATURES[name], {})[statistic] = values
    return {feature: FeatureStats(values, str(path)) for feature, values in grouped.items()}


def _file_in(folder: Path) -> Path:
    for name in _FOLDER_FILES:
        if (folder / name).is_file():
            return folder / name
    raise ProcessingError(
        f"{folder} holds no statistics; looked for {', '.join(_FOLDER_FILES)}; pass the file itself"
    )


def _vector(value: Any, where: str) -> np.ndarray:
    check_type(value, list, where)
    for index, number in enumerate(value):
        check_type(number, float, f"{where}[{index}]")
    try:
        return np.array([float(number) for number in value], dtype=np.float64)
    except OverflowError as error:
        raise ProcessingError(f"{where} holds a number beyond float64: {error}") from error
