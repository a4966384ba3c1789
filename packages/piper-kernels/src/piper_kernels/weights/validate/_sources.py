"""Validation of state dicts and files."""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from piper_kernels.weights.io import (
    RowQuantizedWeight,
    WeightFileError,
    _comfy,
    _markers,
    _piper,
    read_header,
)
from piper_kernels.weights.io._files import map_tensors
from piper_kernels.weights.io._formats import is_stored_weight, unpack
from piper_kernels.weights.validate._contents import check_dense, check_weight
from piper_kernels.weights.validate._findings import Check, Finding

_CODE_DTYPES = (
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
_PART_NAMES = ("weight_scale", "weight_scale_2", "input_scale", _markers.MARKER)


def validate_state_dict(
    tensors: Mapping[str, Tensor | RowQuantizedWeight],
    *,
    metadata: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Check every value of a state dict.

    Args:
        tensors: Name to quantized weight, ``RowQuantizedWeight`` or dense tensor. The stored
            parts of weights (``<name>.qdata`` with ``metadata``, or ``<module>.weight`` with a
            ``comfy_quant`` marker) are put together first.
        metadata: Header entries of the file that the tensors come from.

    Returns:
        The problems found, none for a sound state dict.
    """
    weights = {name: value for name, value in tensors.items() if is_stored_weight(value)}
    rest: dict[str, Any] = {name: t for name, t in tensors.items() if name not in weights}
    findings: list[Finding] = []
    built = _assemble(rest, metadata or {}, findings)
    for name, weight in {**weights, **built}.items():
        findings += check_weight(name, weight)
    for name, tensor in rest.items():
        findings += _check_rest(name, tensor, rest)
    return findings


def validate_file(path: str | os.PathLike[str]) -> list[Finding]:
    """Check a safetensors file in any layout, header and every value.

    Raises:
        OSError: The file does not exist or cannot be opened.
    """
    try:
        header = read_header(path)
        tensors = map_tensors(path, header)
    except WeightFileError as error:
        return [Finding(str(path), "", Check.FILE, str(error).removeprefix(f"{path}: "))]
    return validate_state_dict(tensors, metadata=header.metadata)


def _assemble(
    tensors: dict[str, Any], metadata: Mapping[str, str], findings: list[Finding]
) -> dict[str, Any]:
    """Take the parts of weights out of ``tensors`` and return the weights that they form."""
    described: dict[str, dict[str, Any]] = {}
    comfy = _piper.METADATA_KEY not in metadata
    if comfy:
        described = _read_markers(tensors, metadata, findings)
    else:
        with _reporting(_piper.METADATA_KEY, findings):
            described = _piper.describe(metadata, "header")
    weights: dict[str, Any] = {}
    for name, config in described.items():
        stored = (
            _comfy.field_names(name, config.get("format")) if comfy else _piper.field_names(name)
        )
        fields = {field: tensors.pop(part) for field, part in stored.items() if part in tensors}
        with _reporting(name, findings):
            if comfy:
                findings += _check_row_marker(name, config, fields)
                config, fields = _comfy.decode(name, config, fields, "bfloat16")  # noqa: PLW2901
            weights[name] = unpack(name, config, fields)
    return weights


@contextmanager
def _reporting(name: str, findings: list[Finding]) -> Iterator[None]:
    """Turn the error and the warnings of a block into findings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        except WeightFileError as error:
            findings.append(Finding(name, "", Check.STORAGE, str(error).removeprefix(f"{name}: ")))
    findings += [
        Finding(name, "", Check.MARKER, str(item.message).removeprefix(f"{name}: "))
        for item in caught
        if issubclass(item.category, UserWarning)
    ]


def _check_row_marker(
    name: str, marker: Mapping[str, Any], fields: Mapping[str, Tensor]
) -> list[Finding]:
    """Compare ``per_row`` of a marker with the number of scales."""
    if not {"qdata", "scale"} <= fields.keys() or fields["qdata"].ndim != 2:
        return []
    rows, scales = fields["qdata"].shape[0], fields["scale"].numel()
    per_row = marker.get("per_row")
    if rows == 1 or per_row not in (True, False) or per_row == (scales > 1):
        return []
    message = f"per_row is {per_row}, but there are {scales} scales for {rows} rows"
    return [Finding(name, "scale", Check.MARKER, message)]


def _read_markers(
    tensors: dict[str, Any], metadata: Mapping[str, str], findings: list[Finding]
) -> dict[str, dict[str, Any]]:
    by_header: dict[str, dict[str, Any]] = {}
    with _reporting(_markers.METADATA_KEY, findings):
        by_header = _markers.global_markers(metadata, "header")
    markers = dict(by_header)
    for marker_name in _markers.marker_names(tensors):
        name = marker_name.removesuffix(_markers.MARKER) + "weight"
        try:
            marker = _markers.read_marker(marker_name, tensors.pop(marker_name))
            markers[name] = marker
            _markers.merge_markers({name: marker}, by_header)
        except WeightFileError as error:
            message = str(error).removeprefix(f"{name}: ")
            findings.append(Finding(name, _markers.MARKER, Check.MARKER, message))
    return markers


def _check_rest(name: str, tensor: Any, rest: Mapping[str, Any]) -> list[Finding]:
    if not isinstance(tensor, Tensor):
        message = f"expected a tensor, got {type(tensor).__name__}"
        return [Finding(name, "", Check.STORAGE, message)]
    prefix, _, last = name.rpartition(".")
    if last in _PART_NAMES:
        message = "this part of a quantized weight belongs to no described weight"
        return [Finding(name, "", Check.UNMARKED, message)]
    scale_name = f"{prefix}.weight_scale" if prefix else "weight_scale"
    packed = tensor.dtype == torch.uint8 and last == "weight" and scale_name in rest
    if tensor.dtype in _CODE_DTYPES or packed:
        message = f"{tensor.dtype} codes without a description would be read as plain numbers"
        return [Finding(name, "", Check.UNMARKED, message)]
    return check_dense(name, tensor)
