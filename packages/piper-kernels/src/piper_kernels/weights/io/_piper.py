"""The layout of this package: tensors ``<name>.<field>`` and one JSON entry in the header."""

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from piper_kernels.weights.io._errors import WeightFileError
from piper_kernels.weights.io._formats import PackedWeight

METADATA_KEY = "piper_kernels.weights"
VERSION = 1
FIELDS = ("qdata", "scale", "per_tensor_scale", "act_per_tensor_scale")


def encode(weights: Mapping[str, PackedWeight]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and header entries of packed weights."""
    tensors = {
        f"{name}.{field}": tensor
        for name, packed in weights.items()
        for field, tensor in packed.tensors.items()
    }
    described = {name: packed.config for name, packed in weights.items()}
    text = json.dumps({"version": VERSION, "weights": described}, separators=(",", ":"))
    return tensors, {METADATA_KEY: text}


def describe(metadata: Mapping[str, str], source: str) -> dict[str, dict[str, Any]]:
    """Return the description of every weight in a header.

    Raises:
        WeightFileError: The entry is no such JSON or of another version.
    """
    try:
        entry = json.loads(metadata[METADATA_KEY])
        version, weights = entry["version"], entry["weights"]
        described = {str(name): dict(config) for name, config in weights.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightFileError(
            f"{source}: header entry {METADATA_KEY} is not "
            f'{{"version": 1, "weights": {{name: {{...}}}}}}: {error!r}'
        ) from error
    if version != VERSION:
        raise WeightFileError(
            f"{source}: layout version {version!r}; this version of piper-kernels reads {VERSION}"
        )
    return described


def field_names(name: str) -> dict[str, str]:
    """Return field to tensor name for the weight ``name``."""
    return {field: f"{name}.{field}" for field in FIELDS}
