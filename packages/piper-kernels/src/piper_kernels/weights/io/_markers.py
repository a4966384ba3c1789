"""The markers of ComfyUI's layout: JSON objects that describe quantized weights.

``docs/formats.md`` says which of their names and defaults are known and which are defined here.
"""

import json
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from piper_kernels.weights.convrot import SUPPORTED_GROUP_SIZES
from piper_kernels.weights.io._errors import WeightFileError
from piper_kernels.weights.io._formats import LOGICAL_DTYPE_NAMES

MARKER = "comfy_quant"
METADATA_KEY = "_quantization_metadata"
METADATA_VERSION = "1.0"
DEFAULT_GROUP_SIZE = 256

INT8 = "int8_tensorwise"
FLOAT8 = "float8_e4m3fn"
CONVROT_NVFP4 = "convrot_nvfp4"
NVFP4_FORMATS = ("nvfp4", CONVROT_NVFP4)
READABLE = (INT8, FLOAT8, *NVFP4_FORMATS)
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "format": READABLE,
    "per_row": (True, False),
    "convrot": (True, False),
    "convrot_groupsize": SUPPORTED_GROUP_SIZES,
    "high_first": (True, False),
    "logical_dtype": LOGICAL_DTYPE_NAMES,
}
_NEXT_STEP = "correct the marker, or write the file again with save_quantized"


def marker_names(tensors: Mapping[str, object]) -> list[str]:
    """Return the names of the markers among tensors."""
    return [name for name in tensors if name == MARKER or name.endswith(f".{MARKER}")]


def read_marker(name: str, tensor: Tensor) -> dict[str, Any]:
    """Parse one marker: a uint8 tensor of JSON text.

    Raises:
        WeightFileError: It is no JSON object.
    """
    if tensor.dtype != torch.uint8:
        raise WeightFileError(f"{name}: the marker must be uint8, got {tensor.dtype}")
    try:
        marker = json.loads(bytes(tensor.flatten().tolist()).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightFileError(f"{name}: the marker is no JSON ({error})") from error
    if not isinstance(marker, dict):
        raise WeightFileError(f"{name}: the marker must be a JSON object, got {marker!r}")
    return marker


def global_markers(metadata: Mapping[str, str], source: str) -> dict[str, dict[str, Any]]:
    """Return weight name to marker of the header entry ``_quantization_metadata``, if any.

    An entry without ``format_version`` is read with a warning.

    Raises:
        WeightFileError: The entry is no ``{"layers": {module: {...}}}`` or of another version.
    """
    if METADATA_KEY not in metadata:
        return {}
    try:
        entry = json.loads(metadata[METADATA_KEY])
        markers = {
            f"{module}.weight" if module else "weight": dict(marker)
            for module, marker in entry["layers"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightFileError(
            f'{source}: header entry {METADATA_KEY} is not {{"layers": {{module: {{...}}}}}}: '
            f"{error!r}; {_NEXT_STEP}"
        ) from error
    if "format_version" not in entry:
        _warn_of_default(f"{source}: {METADATA_KEY}", "format_version", METADATA_VERSION)
    elif entry["format_version"] != METADATA_VERSION:
        raise WeightFileError(
            f"{source}: header entry {METADATA_KEY} has format_version "
            f"{entry['format_version']!r}, allowed is {METADATA_VERSION!r}; read the file with a "
            "newer version of piper-kernels, or write it again with save_quantized"
        )
    return markers


def merge_markers(
    by_tensor: Mapping[str, dict[str, Any]], by_header: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Join the markers of tensors and of the header.

    Raises:
        WeightFileError: They disagree about a weight.
    """
    for name, marker in by_tensor.items():
        if by_header.get(name, marker) != marker:
            raise WeightFileError(
                f"{name}: {MARKER} says {marker}, {METADATA_KEY} says {by_header[name]}; "
                "the file contradicts itself"
            )
    return {**by_header, **by_tensor}


def require_marker(name: str, marker: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known keys of a marker, checked and with defaults, which are warned of.

    Raises:
        WeightFileError: A key has a value that is not allowed, or two keys contradict.
    """
    checked = {key: value for key, value in marker.items() if key in _ALLOWED}
    for key, value in checked.items():
        allowed = _ALLOWED[key]
        # 1 == True and 16.0 == 16, but JSON tells them apart.
        if type(value) is not type(allowed[0]) or value not in allowed:
            choices = ", ".join(json.dumps(choice) for choice in allowed)
            raise WeightFileError(
                f"{name}: {MARKER} has {key} {value!r}, allowed are {choices}; {_NEXT_STEP}"
            )
    if len(checked) < len(marker):
        unknown = sorted(set(marker) - set(checked))
        warnings.warn(f"{name}: {MARKER} keys {unknown} are unknown and ignored", stacklevel=2)
    if "format" not in checked:
        if not (checked.get("convrot") or checked.get("per_row")):
            choices = ", ".join(READABLE)
            raise WeightFileError(
                f"{name}: {MARKER} has no format, allowed are {choices}; {_NEXT_STEP}"
            )
        _warn_of_default(f"{name}: legacy {MARKER}", "format", INT8)
        checked["format"] = INT8
    if checked["format"] in NVFP4_FORMATS and "high_first" not in checked:
        _warn_of_default(f"{name}: {MARKER}", "high_first", "false")
        checked["high_first"] = False
    _require_rotation(name, checked)
    return checked


def _require_rotation(name: str, marker: dict[str, Any]) -> None:
    """Check ``convrot`` and ``convrot_groupsize`` of a marker; the default of the former is set."""
    fmt = marker["format"]
    if fmt == CONVROT_NVFP4 and "convrot" not in marker:
        _warn_of_default(f"{name}: {MARKER}", "convrot", "true")
        marker["convrot"] = True
    rotated = marker.get("convrot", False)
    if rotated != (fmt == CONVROT_NVFP4) and fmt != INT8:
        raise WeightFileError(
            f"{name}: {MARKER} has format {fmt!r} with convrot {json.dumps(rotated)}; allowed are "
            "int8_tensorwise with true or false, convrot_nvfp4 with true, nvfp4 and float8_e4m3fn "
            f"with false; {_NEXT_STEP}"
        )
    if "convrot_groupsize" in marker and "convrot" not in marker:
        raise WeightFileError(
            f"{name}: {MARKER} has convrot_groupsize {marker['convrot_groupsize']} without "
            f"convrot, so the codes may be rotated or not; allowed are true, false; {_NEXT_STEP}"
        )
    if rotated and "convrot_groupsize" not in marker:
        _warn_of_default(f"{name}: {MARKER}", "convrot_groupsize", str(DEFAULT_GROUP_SIZE))


def _warn_of_default(subject: str, key: str, default: str) -> None:
    warnings.warn(f"{subject} has no {key}; {default} is assumed", stacklevel=3)
