"""ComfyUI's layout: ``<module>.weight``, ``.weight_scale`` and a ``.comfy_quant`` JSON marker."""

import json
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from piper_kernels.weights.convrot import SUPPORTED_GROUP_SIZES
from piper_kernels.weights.io._errors import WeightFileError
from piper_kernels.weights.io._formats import PackedWeight, WeightFormat

MARKER = "comfy_quant"
METADATA_KEY = "_quantization_metadata"
DEFAULT_GROUP_SIZE = 256

_FORMATS = {
    WeightFormat.CONVROT_INT8: "int8_tensorwise",
    WeightFormat.INT8_ROWWISE: "int8_tensorwise",
    WeightFormat.FLOAT8_E4M3_ROWWISE: "float8_e4m3fn",
    WeightFormat.NVFP4: "nvfp4",
    WeightFormat.CONVROT_NVFP4: "convrot_nvfp4",
}
READABLE = tuple(dict.fromkeys(_FORMATS.values()))


def encode(weights: Mapping[str, PackedWeight]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and header entries of packed weights.

    Raises:
        ValueError: A name does not end in ``weight``, or the layout cannot hold the weight.
    """
    tensors: dict[str, Tensor] = {}
    layers: dict[str, dict[str, Any]] = {}
    for name, packed in weights.items():
        prefix = _prefix(name)
        marker = _marker(name, packed)
        fields = field_names(name, marker["format"])
        for field, tensor in packed.tensors.items():
            tensors[fields[field]] = tensor
        raw = json.dumps(marker).encode("utf-8")
        tensors[prefix + MARKER] = torch.tensor(list(raw), dtype=torch.uint8)
        layers[prefix.removesuffix(".")] = marker
    text = json.dumps({"format_version": "1.0", "layers": layers}, separators=(",", ":"))
    return tensors, {METADATA_KEY: text}


def _prefix(name: str) -> str:
    if name != "weight" and not name.endswith(".weight"):
        raise ValueError(
            f"layout comfy stores quantized tensors named <module>.weight only, got {name!r}; "
            "use layout piper"
        )
    return name.removesuffix("weight")


def _marker(name: str, packed: PackedWeight) -> dict[str, Any]:
    config = packed.config
    fmt = WeightFormat(config["format"])
    activation = config.get("activation")
    if len(config["shape"]) != 2 or config.get("transposed") or activation is not None:
        raise ValueError(
            f"{name}: layout comfy holds untransposed matrices without activation settings, got "
            f"shape {config['shape']}, transposed={config.get('transposed', False)}, "
            f"activation={activation}; use layout piper"
        )
    marker: dict[str, Any] = {"format": _FORMATS[fmt]}
    if fmt in (WeightFormat.NVFP4, WeightFormat.CONVROT_NVFP4):
        if config["scale_layout"] != "swizzled":
            raise ValueError(
                f"{name}: layout comfy needs swizzled NVFP4 scales; quantize with "
                "is_swizzled_scales=True or use layout piper"
            )
        marker["high_first"] = config["high_first"]
    else:
        marker["per_row"] = True
    if "group_size" in config:
        marker |= {"convrot": True, "convrot_groupsize": config["group_size"]}
    return marker | {"logical_dtype": config["logical_dtype"]}


def field_names(name: str, fmt: object) -> dict[str, str]:
    """Return field to tensor name for the weight ``<module>.weight``."""
    prefix = _prefix(name)
    names = {
        "qdata": name,
        "scale": f"{prefix}weight_scale",
        "act_per_tensor_scale": f"{prefix}input_scale",
    }
    if fmt in ("nvfp4", "convrot_nvfp4"):
        names["per_tensor_scale"] = f"{prefix}weight_scale_2"
    return names


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

    Raises:
        WeightFileError: The entry is no ``{"layers": {module: {...}}}``.
    """
    if METADATA_KEY not in metadata:
        return {}
    try:
        layers = json.loads(metadata[METADATA_KEY])["layers"]
        return {f"{module}.weight" if module else "weight": dict(m) for module, m in layers.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightFileError(
            f'{source}: header entry {METADATA_KEY} is not {{"layers": {{module: {{...}}}}}}: '
            f"{error!r}"
        ) from error


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


def require_format(name: str, marker: Mapping[str, Any]) -> str:
    """Return the format of a marker; one without format is read as INT8 with a warning.

    Raises:
        WeightFileError: The format is unknown.
    """
    fmt = marker.get("format")
    if fmt is None and (marker.get("convrot") or marker.get("per_row")):
        warnings.warn(
            f"{name}: legacy marker {dict(marker)} has no format; read as int8_tensorwise",
            stacklevel=2,
        )
        return "int8_tensorwise"
    if fmt not in READABLE:
        raise WeightFileError(
            f"{name}: unknown {MARKER} format {fmt!r}; this version reads {', '.join(READABLE)}"
        )
    return str(fmt)


def decode(
    name: str,
    marker: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    logical_dtype: str,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Translate a marker and its tensors to what ``unpack`` takes.

    Args:
        name: Name of the weight.
        marker: Its marker.
        tensors: Field name to stored tensor.
        logical_dtype: Used when the marker names none.

    Raises:
        WeightFileError: The format is unknown.
    """
    fmt = require_format(name, marker)
    fields = dict(tensors)
    config: dict[str, Any] = {"logical_dtype": marker.get("logical_dtype", logical_dtype)}
    for scalar in ("act_per_tensor_scale", "per_tensor_scale"):
        if scalar in fields and fields[scalar].numel() == 1:
            fields[scalar] = fields[scalar].to(torch.float32).view(())
    if fmt in ("nvfp4", "convrot_nvfp4"):
        config |= {"format": fmt, "block_size": 16, "scale_layout": "swizzled"}
        config["high_first"] = marker.get("high_first", False)
        if fmt == "convrot_nvfp4":
            config["group_size"] = _group_size(name, marker)
        if "scale" in fields and fields["scale"].dtype == torch.uint8:
            fields["scale"] = fields["scale"].view(torch.float8_e4m3fn)
        return config, fields
    if {"qdata", "scale"} <= fields.keys() and fields["qdata"].ndim == 2:
        fields["scale"] = _row_scales(fields["scale"], fields["qdata"].shape[0])
    if fmt == "float8_e4m3fn":
        return config | {"format": WeightFormat.FLOAT8_E4M3_ROWWISE.value}, fields
    group_size = _group_size(name, marker) if marker.get("convrot") else None
    width = fields["qdata"].shape[-1] if "qdata" in fields and fields["qdata"].ndim else 0
    if group_size in SUPPORTED_GROUP_SIZES and width % group_size:
        warnings.warn(
            f"{name}: rotation groups of {group_size} do not divide {width} features, so the "
            "codes cannot be rotated; read as plain row INT8",
            stacklevel=2,
        )
        group_size = None
    if group_size is None:
        return config | {"format": WeightFormat.INT8_ROWWISE.value}, fields
    return config | {"format": WeightFormat.CONVROT_INT8.value, "group_size": group_size}, fields


def _group_size(name: str, marker: Mapping[str, Any]) -> Any:
    if "convrot_groupsize" not in marker:
        warnings.warn(
            f"{name}: the marker names no convrot_groupsize; {DEFAULT_GROUP_SIZE} is assumed",
            stacklevel=2,
        )
    return marker.get("convrot_groupsize", DEFAULT_GROUP_SIZE)


def _row_scales(scale: Tensor, rows: int) -> Tensor:
    """Return FP32 ``[rows, 1]``; a single scale is repeated, FP32 rows are not copied."""
    scale = scale.to(torch.float32)
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(rows, 1).contiguous()
    return scale.view(-1, 1) if scale.ndim == 1 else scale
