"""Files of quantized and dense tensors: atomic writes and memory-mapped reads."""

import importlib.util
import os
import secrets
import warnings
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piper_kernels.weights.convrot.int8._storage import require_logical_dtype
from piper_kernels.weights.io import _comfy, _markers, _piper
from piper_kernels.weights.io._errors import WeightFileError
from piper_kernels.weights.io._formats import PackedWeight, is_stored_weight, pack
from piper_kernels.weights.io._formats import unpack as unpack_weight
from piper_kernels.weights.io._header import SafetensorsHeader, read_header
from piper_kernels.weights.io._rows import RowQuantizedWeight

_RESERVED = (_piper.METADATA_KEY, _markers.METADATA_KEY)


class Layout(StrEnum):
    """How a file names the parts of a quantized weight."""

    PIPER = "piper"
    COMFY = "comfy"


def save_quantized(
    tensors: Mapping[str, Tensor | RowQuantizedWeight],
    path: str | os.PathLike[str],
    *,
    layout: Layout | str = Layout.PIPER,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write quantized and dense tensors to a safetensors file.

    The file appears under its name only when complete: it is written beside it and renamed.
    Views, conjugate and negative views too, are made contiguous; dense tensors keep their name.
    Tensors that share memory are written once each.

    Args:
        tensors: Name to quantized weight, ``RowQuantizedWeight`` or dense tensor, on any device.
        path: File to write.
        layout: ``"piper"`` holds every format completely; ``"comfy"`` follows ComfyUI's markers
            and needs quantized names that end in ``weight``.
        metadata: Further entries of the file header.

    Raises:
        TypeError: A value is no tensor or a tensor subclass without a format.
        ValueError: The layout is unknown or cannot hold a weight, two tensors get the same name,
            or a metadata key is reserved.
        OSError: The file cannot be written; nothing is left of it.
        ModuleNotFoundError: The safetensors package is not installed.
    """
    packed = {n: pack(value) for n, value in tensors.items() if is_stored_weight(value)}
    if layout not in tuple(Layout):
        raise ValueError(f"layout is {layout!r}; allowed: {', '.join(Layout)}")
    codec = _comfy if layout == Layout.COMFY else _piper
    stored, header = codec.encode(packed)
    for name, value in tensors.items():
        if name in packed:
            continue
        if name in stored:
            raise ValueError(f"dense tensor {name!r} has the name of a quantized weight's part")
        stored[name] = _dense(name, value)
    entries = dict(metadata or {})
    taken = sorted(set(entries) & set(_RESERVED))
    if taken:
        raise ValueError(f"metadata keys {taken} are reserved for the layouts")
    _write(_independent(stored), Path(path), entries | (header if packed else {}))


def load_quantized(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    logical_dtype: torch.dtype | None = None,
) -> dict[str, Tensor | RowQuantizedWeight]:
    """Read a file of ``save_quantized`` or of ComfyUI; the layout is recognised.

    On the CPU, tensors alias the memory-mapped file: nothing is read before it is used, and
    writing to a tensor does not change the file. Contents are not inspected; see
    ``piper_kernels.weights.validate``.

    Args:
        path: File to read.
        device: Where tensors end up.
        logical_dtype: For weights whose file names no logical dtype; ``None`` takes bfloat16
            and warns when there are any.

    Returns:
        Weights and dense tensors in the order of the file.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: ``logical_dtype`` is none that a weight can have.
        WeightFileError: The file is damaged, contradicts itself or uses an unknown format.
        ModuleNotFoundError: The safetensors package is not installed.
    """
    if logical_dtype is not None:
        require_logical_dtype(logical_dtype)
    header = read_header(path)
    tensors = map_tensors(path, header)
    weights = {
        name: unpack_weight(name, packed.config, packed.tensors)
        for name, packed in take_packed(header, tensors, str(path), logical_dtype).items()
    }
    result: dict[str, Any] = {**weights, **tensors}
    if torch.device(device).type != "cpu":
        return {name: value.to(device) for name, value in result.items()}
    return result


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the header entries of a file, those of the layouts left out."""
    metadata = read_header(path).metadata
    return {key: value for key, value in metadata.items() if key not in _RESERVED}


def take_packed(
    header: SafetensorsHeader,
    tensors: dict[str, Tensor],
    source: str,
    logical_dtype: torch.dtype | None,
) -> dict[str, PackedWeight]:
    """Remove the parts of quantized weights from ``tensors`` and return them by weight."""
    if _piper.METADATA_KEY in header.metadata:
        described = _piper.describe(header.metadata, source)
        return {
            name: PackedWeight(config, _take(tensors, _piper.field_names(name)))
            for name, config in described.items()
        }
    packed = {}
    markers = take_markers(header, tensors, source)
    unnamed = [name for name, marker in markers.items() if "logical_dtype" not in marker]
    if unnamed and logical_dtype is None:
        warnings.warn(
            f"{source}: {len(unnamed)} weights name no logical_dtype, {unnamed[0]} for one; "
            "bfloat16 is assumed, the argument logical_dtype replaces it",
            stacklevel=3,
        )
    dtype = str(logical_dtype or torch.bfloat16).removeprefix("torch.")
    for name, marker in markers.items():
        names = _comfy.field_names(name, marker.get("format"))
        packed[name] = PackedWeight(*_comfy.decode(name, marker, _take(tensors, names), dtype))
    return packed


def take_markers(
    header: SafetensorsHeader, tensors: dict[str, Tensor], source: str
) -> dict[str, dict[str, Any]]:
    """Remove ComfyUI's markers from ``tensors`` and return them by weight name."""
    by_tensor = {
        name.removesuffix(_markers.MARKER) + "weight": _markers.read_marker(name, tensors.pop(name))
        for name in _markers.marker_names(tensors)
    }
    return _markers.merge_markers(by_tensor, _markers.global_markers(header.metadata, source))


def _take(tensors: dict[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    return {field: tensors.pop(name) for field, name in names.items() if name in tensors}


def _dense(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    value = value.detach()
    if type(value) is not Tensor:
        raise TypeError(
            f"{name}: {type(value).__name__} has no file format; save a local or dequantized "
            "tensor instead"
        )
    return value


def _independent(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return plain contiguous CPU tensors, no two of which share memory."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        if plain.untyped_storage().data_ptr() in seen:
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        result[name] = plain
    return result


def _write(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    _require_safetensors()
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    target = path.resolve()
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"{target.name} cannot be written: there is no folder {target.parent}; make it first"
        )
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        save_file(tensors, temporary, metadata=metadata or None)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    except SafetensorError as error:
        raise OSError(f"{target} cannot be written ({error})") from error
    finally:
        temporary.unlink(missing_ok=True)


def _require_safetensors() -> None:
    if importlib.util.find_spec("safetensors") is None:
        raise ModuleNotFoundError(
            "weight files need the safetensors package: pip install safetensors",
            name="safetensors",
        )


def map_tensors(path: str | os.PathLike[str], header: SafetensorsHeader) -> dict[str, Tensor]:
    """Return every stored tensor in file order, aliasing the memory-mapped file."""
    _require_safetensors()
    from safetensors import SafetensorError, safe_open

    order = sorted(header.tensors, key=lambda name: header.tensors[name].start)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in order}
    except (SafetensorError, KeyError, AttributeError) as error:
        raise WeightFileError(f"{path}: cannot be read as tensors ({error})") from error
