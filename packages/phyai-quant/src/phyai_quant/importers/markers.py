"""Descriptions of single layers inside safetensors files, read without loading a tensor library."""

import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phyai_quant.importers.base import LayerMarker, Section, StoredTensor, shown
from phyai_quant.scheme import QuantConfigError
from phyai_quant.strict_json import parse_json

MARKER = "comfy_quant"
"""Last name component of a uint8 tensor that holds a layer's description as JSON text."""

METADATA_KEY = "_quantization_metadata"
"""Header entry that holds the descriptions of all layers."""

_VERSION = "1.0"
_MAX_HEADER_BYTES = 100_000_000
_MAX_MARKER_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Header:
    file: Path
    data_start: int
    entries: Mapping[str, Mapping[str, Any]]
    metadata: Mapping[str, Any]


def read_markers(files: Iterable[Path]) -> tuple[LayerMarker, ...]:
    """Returns the descriptions in the files, by layer name.

    A file that is no readable safetensors file is skipped with a warning: whoever loads its tensors
    refuses it.

    Args:
        files: The safetensors files of one checkpoint; a layer's tensors may lie in several.

    Raises:
        QuantConfigError: A description is no JSON object, or two of one layer differ.
    """
    headers = [header for file in files if (header := _read_header(file)) is not None]
    found: dict[str, Section] = {}
    for header in headers:
        for section in (*_by_tensor(header), *_by_header(header)):
            first = found.setdefault(section.path, section)
            if first.data != section.data:
                raise QuantConfigError(
                    f"{first.where()} and {section.where()} contradict each other: "
                    f"{shown(dict(first.data))}, {shown(dict(section.data))}"
                )
    tensors = _tensors_by_layer(headers, found) if found else {}
    return tuple(
        LayerMarker(module, found[module], tensors.get(module, {})) for module in sorted(found)
    )


def _read_header(file: Path) -> _Header | None:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > min(_MAX_HEADER_BYTES, file.stat().st_size - 8):
                raise ValueError("the header is longer than the file")
            header = json.loads(stream.read(length).decode("utf-8"))
        metadata = header.pop("__metadata__", {})
        entries = {name: dict(entry) for name, entry in header.items()}
        return _Header(file, 8 + length, entries, dict(metadata))
    except (OSError, ValueError, RecursionError, AttributeError, TypeError) as error:
        warnings.warn(
            f"{file}: not looked into for quantized layers, because it is no safetensors file: "
            f"{error}",
            stacklevel=4,
        )
        return None


def _by_tensor(header: _Header) -> list[Section]:
    sections = []
    for name, entry in header.entries.items():
        module, _, last = name.rpartition(".")
        if last == MARKER:
            text = _marker_text(header, name, entry)
            sections.append(_section(parse_json(text, f"{header.file}: {name}"), header, module))
    return sections


def _marker_text(header: _Header, name: str, entry: Mapping[str, Any]) -> str:
    place = f"{header.file}: {name}"
    if entry.get("dtype") != "U8":
        raise QuantConfigError(f"{place}: the marker must be U8, not {shown(entry.get('dtype'))}")
    try:
        start, end = (int(offset) for offset in entry["data_offsets"])
        if not 0 <= end - start <= _MAX_MARKER_BYTES:
            raise ValueError(f"{end - start} bytes")
        with header.file.open("rb") as stream:
            stream.seek(header.data_start + start)
            raw = stream.read(end - start)
        if len(raw) != end - start:
            raise ValueError("the file ends before it")
        return raw.decode("utf-8")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise QuantConfigError(f"{place}: the marker cannot be read: {error}") from error


def _by_header(header: _Header) -> list[Section]:
    if METADATA_KEY not in header.metadata:
        return []
    place = f"{header.file}: {METADATA_KEY}"
    text = header.metadata[METADATA_KEY]
    content = parse_json(text, place) if isinstance(text, str) else None
    layers = content.get("layers") if isinstance(content, dict) else None
    if not isinstance(layers, dict):
        raise QuantConfigError(f'{place}: expected {{"layers": {{module: {{...}}}}}}')
    version = content.get("format_version") if isinstance(content, dict) else None
    if version is None:
        warnings.warn(f"{place}: no format_version; {_VERSION} is assumed", stacklevel=4)
    elif version != _VERSION:
        raise QuantConfigError(
            f"{place}: format_version {shown(version)} is not allowed; allowed: {_VERSION}"
        )
    return [_section(value, header, module) for module, value in layers.items()]


def _section(value: Any, header: _Header, module: str) -> Section:
    if not module:
        raise QuantConfigError(f"{header.file}: {MARKER} names no layer; save it under a module")
    if not isinstance(value, dict):
        raise QuantConfigError(f"{header.file}: {module}: expected an object, got {shown(value)}")
    return Section(value, str(header.file), module)


def _tensors_by_layer(
    headers: Iterable[_Header], layers: Iterable[str]
) -> dict[str, dict[str, StoredTensor]]:
    tensors: dict[str, dict[str, StoredTensor]] = {module: {} for module in layers}
    for header in headers:
        for name, entry in header.entries.items():
            module, _, last = name.rpartition(".")
            if module in tensors:
                tensors[module][last] = _stored(header, name, entry)
    return tensors


def _stored(header: _Header, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    dtype, shape = entry.get("dtype"), entry.get("shape")
    sizes_fit = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not isinstance(dtype, str) or not isinstance(shape, list) or not sizes_fit:
        raise QuantConfigError(f"{header.file}: {name}: no valid dtype and shape in the header")
    return StoredTensor(dtype, tuple(shape))
