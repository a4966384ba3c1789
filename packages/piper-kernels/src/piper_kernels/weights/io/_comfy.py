"""ComfyUI's layout: ``<module>.weight``, ``.weight_scale`` and a ``.comfy_quant`` JSON marker.

``docs/formats.md`` says which of the names and defaults are known and which are defined here.
"""

import json
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from piper_kernels.weights.convrot import SUPPORTED_GROUP_SIZES
from piper_kernels.weights.io._errors import WeightFileError
from piper_kernels.weights.io._formats import PackedWeight, WeightFormat
from piper_kernels.weights.io._markers import (
    CONVROT_NVFP4,
    DEFAULT_GROUP_SIZE,
    FLOAT8,
    INT8,
    MARKER,
    METADATA_KEY,
    METADATA_VERSION,
    NVFP4_FORMATS,
    require_marker,
)
from piper_kernels.weights.nvfp4._layout import scale_shape

_FORMATS = {
    WeightFormat.CONVROT_INT8: INT8,
    WeightFormat.INT8_ROWWISE: INT8,
    WeightFormat.FLOAT8_E4M3_ROWWISE: FLOAT8,
    WeightFormat.NVFP4: "nvfp4",
    WeightFormat.CONVROT_NVFP4: CONVROT_NVFP4,
}


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
    text = json.dumps({"format_version": METADATA_VERSION, "layers": layers}, separators=(",", ":"))
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
    if fmt in NVFP4_FORMATS:
        names["per_tensor_scale"] = f"{prefix}weight_scale_2"
    return names


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
        WeightFileError: The marker is not one that this version reads, or its tensors
            contradict it.
    """
    marker = require_marker(name, marker)
    fmt = marker["format"]
    fields = dict(tensors)
    config: dict[str, Any] = {"logical_dtype": marker.get("logical_dtype", logical_dtype)}
    for scalar in ("act_per_tensor_scale", "per_tensor_scale"):
        if scalar in fields and fields[scalar].numel() == 1:
            fields[scalar] = fields[scalar].to(torch.float32).view(())
    if fmt in NVFP4_FORMATS:
        config |= {"format": fmt, "block_size": 16, "scale_layout": "swizzled"}
        config["high_first"] = marker["high_first"]
        if fmt == CONVROT_NVFP4:
            config["group_size"] = marker.get("convrot_groupsize", DEFAULT_GROUP_SIZE)
        if "scale" in fields:
            fields["scale"] = _block_scales(name, fields["scale"], fields.get("qdata"))
        return config, fields
    if {"qdata", "scale"} <= fields.keys() and fields["qdata"].ndim == 2:
        fields["scale"] = _row_scales(name, fields["scale"], fields["qdata"].shape[0])
    if fmt == FLOAT8:
        return config | {"format": WeightFormat.FLOAT8_E4M3_ROWWISE.value}, fields
    group_size = _dividing_group(name, marker, fields) if marker.get("convrot") else None
    if group_size is None:
        return config | {"format": WeightFormat.INT8_ROWWISE.value}, fields
    return config | {"format": WeightFormat.CONVROT_INT8.value, "group_size": group_size}, fields


def _dividing_group(
    name: str, marker: Mapping[str, Any], fields: Mapping[str, Tensor]
) -> int | None:
    """Return the rotation group of INT8 codes; ``None`` where they cannot be rotated."""
    group_size = marker.get("convrot_groupsize", DEFAULT_GROUP_SIZE)
    width = fields["qdata"].shape[-1] if "qdata" in fields and fields["qdata"].ndim else 0
    if width % group_size == 0:
        return group_size
    if "convrot_groupsize" not in marker:
        raise WeightFileError(
            f"{name}: {MARKER} has no convrot_groupsize, and {DEFAULT_GROUP_SIZE} does not divide "
            f"{width} features; name the group, one of {SUPPORTED_GROUP_SIZES}"
        )
    warnings.warn(
        f"{name}: rotation groups of {group_size} do not divide {width} features, so the codes "
        "cannot be rotated; read as plain row INT8",
        stacklevel=2,
    )
    return None


def _row_scales(name: str, scale: Tensor, rows: int) -> Tensor:
    """Return FP32 ``[rows, 1]``; a single scale is repeated, FP32 rows are not copied."""
    if not scale.is_floating_point():
        raise WeightFileError(
            f"{name}: weight_scale is {scale.dtype}, allowed are floating-point dtypes; write the "
            "scales as float32"
        )
    scale = scale.to(torch.float32)
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(rows, 1).contiguous()
    return scale.view(-1, 1) if scale.ndim == 1 else scale


def _block_scales(name: str, scale: Tensor, qdata: Tensor | None) -> Tensor:
    """Return E4M3 block scales; another shape of the size of swizzled scales is warned of."""
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e4m3fn)
    if qdata is not None and qdata.ndim == 2 and scale.ndim > 1:
        expected = scale_shape(qdata.shape[0], 2 * qdata.shape[1], swizzled=True)
        if tuple(scale.shape) != expected and scale.numel() == expected[0] * expected[1]:
            warnings.warn(
                f"{name}: weight_scale has shape {list(scale.shape)} instead of {list(expected)}, "
                "which plain scales may have too; swizzled is assumed",
                stacklevel=2,
            )
    return scale
