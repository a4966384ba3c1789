"""A strict reader of safetensors headers, for messages that say what is wrong with a file."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piper_kernels.weights.io._errors import WeightFileError

MAX_HEADER_BYTES = 100_000_000  # of the safetensors format

_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_OTHER_FILES = {
    b"PK\x03\x04": "a zip archive such as torch.save writes",
    b"GGUF": "a GGUF file",
    b"version ": "a Git LFS pointer; fetch the real file",
}


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies in a file.

    Attributes:
        dtype: Name in the safetensors format, for example ``"F8_E4M3"``.
        shape: Stored shape.
        start: First byte, from the beginning of the file.
        end: Byte after the last one.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """What the header of a safetensors file declares."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def read_header(path: str | os.PathLike[str]) -> SafetensorsHeader:
    """Read and check the header of a safetensors file; tensor contents are not touched.

    Raises:
        FileNotFoundError: The file does not exist.
        WeightFileError: The path is a folder, or the file is truncated, has trailing bytes,
            duplicate names, a header above 100,000,000 bytes, or one that breaks the format.
    """
    file_path = Path(path)
    if file_path.is_dir():
        raise WeightFileError(f"{file_path}: a folder; name one of the safetensors files in it")
    size = file_path.stat().st_size
    with file_path.open("rb") as file:
        length = _header_length(file_path, file.read(8), size)
        raw = file.read(length)
    header = _parse(file_path, raw)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise WeightFileError(f"{file_path}: __metadata__ must map strings to strings")
    offset = 8 + length
    tensors = {name: _entry(file_path, name, entry, offset) for name, entry in header.items()}
    _require_cover(file_path, tensors, offset, size)
    return SafetensorsHeader(tensors, metadata)


def _header_length(path: Path, prefix: bytes, size: int) -> int:
    if len(prefix) < 8:
        raise WeightFileError(
            f"{path}: {size} bytes are no safetensors file, which starts with an 8-byte length; "
            "copy or download it again"
        )
    for magic, kind in _OTHER_FILES.items():
        if prefix.startswith(magic):
            raise WeightFileError(f"{path}: not a safetensors file but {kind}")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise WeightFileError(
            f"{path}: the header is said to take {length:,} bytes, above the "
            f"{MAX_HEADER_BYTES:,} that the safetensors format allows; store fewer tensors per "
            "file (shards), or the file is no safetensors file"
        )
    if 8 + length > size:
        raise WeightFileError(
            f"{path}: truncated within the header, which takes {length:,} bytes while the file "
            f"has {size:,}; copy or download it again"
        )
    return length


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise WeightFileError(
                f"{path}: duplicate key {twice!r} in the header; readers would disagree about "
                "which tensor it names, write the file again"
            )
        return result

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise WeightFileError(f"{path}: the header is no JSON object ({error})") from error
    if not isinstance(header, dict):
        raise WeightFileError(f"{path}: the header is no JSON object")
    return header


def _entry(path: Path, name: str, entry: Any, offset: int) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise WeightFileError(
            f"{path}: tensor {name!r} must have dtype, shape and data_offsets, got {entry!r}"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise WeightFileError(f"{path}: tensor {name!r} has the unknown dtype {dtype!r}")
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise WeightFileError(
            f"{path}: tensor {name!r} has shape {shape!r} and data_offsets {offsets!r}; "
            "they must be lists of non-negative integers, two of them for data_offsets"
        )
    start, end = offsets
    if (end - start) * 8 != math.prod(shape) * _BITS[dtype]:
        raise WeightFileError(
            f"{path}: tensor {name!r} of dtype {dtype} and shape {shape} needs "
            f"{math.prod(shape) * _BITS[dtype] / 8:g} bytes, data_offsets give {end - start}"
        )
    return StoredTensor(dtype, tuple(shape), offset + start, offset + end)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _require_cover(path: Path, tensors: dict[str, StoredTensor], offset: int, size: int) -> None:
    position = offset
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != position:
            problem = "overlaps another tensor" if tensor.start < position else "leaves a gap"
            raise WeightFileError(f"{path}: tensor {name!r} at byte {tensor.start} {problem}")
        position = tensor.end
    if size < position:
        raise WeightFileError(
            f"{path}: truncated, {position - size:,} of {position:,} bytes are missing; "
            "copy or download it again"
        )
    if size > position:
        raise WeightFileError(
            f"{path}: {size - position:,} trailing bytes after the last tensor; the file was "
            "not written completely by one program"
        )
