"""Weight files that describe their layers themselves: ComfyUI's ``comfy_quant`` markers."""

import math
import re
import warnings
from typing import Any

from phyai_quant.importers.base import ConfigSources, LayerMarker, StoredTensor, make_rule
from phyai_quant.plan import MatcherKind, QuantPlan, Rule
from phyai_quant.scheme import Granularity, QDType, QuantConfigError, QuantScheme, TensorQuant

DEFAULT_GROUP_SIZE = 256
"""Rotation group of a ConvRot marker that names none."""

_STORED = {
    "int8_tensorwise": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "nvfp4": "U8",
    "convrot_nvfp4": "U8",
}
"""Each format and the safetensors dtype of its weight."""

_KNOWN_KEYS = (
    "format",
    "convrot",
    "convrot_groupsize",
    "per_row",
    "high_first",
    "logical_dtype",
    "full_precision_matrix_mult",
)
_LEGACY_KEYS = ("convrot", "per_row")
_INT8_TOKEN = TensorQuant(QDType.INT8, Granularity.PER_CHANNEL, dynamic=True)


class ComfyImporter:
    """Reads one marker per quantized layer; layers without a marker are unquantized."""

    name = "comfy"

    def detect(self, sources: ConfigSources) -> bool:
        """Tells whether the weight files carry markers."""
        return bool(sources.markers)

    def build_plan(self, sources: ConfigSources) -> QuantPlan:
        """Returns one rule per marker.

        Raises:
            QuantConfigError: A config file stands beside the markers, or a marker has an unknown
                format or contradicts the tensors of its layer.
        """
        if sources.inline is not None or sources.standalone is not None:
            raise QuantConfigError(
                f"{' and '.join(sources.places())} both describe the quantization; keep the one "
                "that describes the tensors on disk"
            )
        files = dict.fromkeys(marker.section.file for marker in sources.markers)
        return QuantPlan(tuple(map(_rule, sources.markers)), source=", ".join(files))


def _rule(marker: LayerMarker) -> Rule:
    scheme = _scheme(marker)
    if "." in marker.module:
        return make_rule(marker.section, "", MatcherKind.NAME, marker.module, scheme)
    pattern = f"{re.escape(marker.module)}$"  # a bare name would match layers that end in it
    return make_rule(marker.section, "", MatcherKind.REGEX, pattern, scheme)


def _scheme(marker: LayerMarker) -> QuantScheme:
    section = marker.section
    section.require_known(_KNOWN_KEYS)
    section.string("logical_dtype")
    name = _format(marker)
    weight = _tensor(marker, "weight", name)
    if weight.dtype != _STORED[name] or len(weight.shape) != 2:
        section.fail(
            f"{name!r} stores a matrix of {_STORED[name]}, but the file holds {weight.dtype} of "
            f"shape {list(weight.shape)}",
            "format",
        )
    if name.endswith("nvfp4"):
        return _nvfp4_scheme(marker, name)
    if name == "int8_tensorwise":
        return _int8_scheme(marker, weight.shape[1])
    return _fp8_scheme(marker, QDType.FP8_E4M3 if name == "float8_e4m3fn" else QDType.FP8_E5M2)


def _format(marker: LayerMarker) -> str:
    section = marker.section
    name = section.string("format")
    if name is None and any(section.data.get(key) for key in _LEGACY_KEYS):
        warnings.warn(
            f"{section.where()}: the marker has no format; read as int8_tensorwise", stacklevel=5
        )
        return "int8_tensorwise"
    if name is None or name not in _STORED:
        section.fail(f"{name!r} is not supported; supported: {', '.join(_STORED)}", "format")
    return name


def _int8_scheme(marker: LayerMarker, columns: int) -> QuantScheme:
    granularity = _granularity(marker)
    group = _rotation_group(marker) if marker.section.boolean("convrot", default=False) else None
    if group is not None and columns % group:
        warnings.warn(
            f"{marker.section.where('convrot')}: rotation groups of {group} do not divide "
            f"{columns} features, so the codes cannot be rotated; read as plain int8",
            stacklevel=5,
        )
        group = None
    if group is None:
        return QuantScheme(TensorQuant(QDType.INT8, granularity), _input(marker, _INT8_TOKEN))
    if marker.section.boolean("full_precision_matrix_mult", default=False):
        marker.section.fail(
            "true is not supported with convrot; its inputs are int8", "full_precision_matrix_mult"
        )
    return QuantScheme(
        _quant(marker, QDType.INT8, Granularity.PER_CHANNEL, rotation_group=group), _INT8_TOKEN
    )


def _fp8_scheme(marker: LayerMarker, dtype: QDType) -> QuantScheme:
    _reject(marker, ("convrot", "high_first"))
    weight = TensorQuant(dtype, _granularity(marker))
    if "input_scale" in marker.tensors:
        act = TensorQuant(dtype, Granularity.PER_TENSOR)
    else:
        act = TensorQuant(dtype, Granularity.PER_CHANNEL, dynamic=True)
    return QuantScheme(weight, _input(marker, act))


def _nvfp4_scheme(marker: LayerMarker, name: str) -> QuantScheme:
    rotated = name == "convrot_nvfp4"
    _reject(marker, ("high_first", "per_row") if rotated else ("high_first", "per_row", "convrot"))
    for tensor in ("weight_scale", "weight_scale_2"):
        _tensor(marker, tensor, name)
    block: dict[str, Any] = {"micro_scaled": True, "block_shape": (1, 16)}
    weight = _quant(
        marker,
        QDType.NVFP4,
        Granularity.BLOCK,
        swizzled_scales=True,
        rotation_group=_rotation_group(marker) if rotated else None,
        **block,
    )
    act = TensorQuant(QDType.NVFP4, Granularity.BLOCK, dynamic=True, **block)
    return QuantScheme(weight, _input(marker, act))


def _quant(marker: LayerMarker, *args: Any, **kwargs: Any) -> TensorQuant:
    try:
        return TensorQuant(*args, **kwargs)
    except QuantConfigError as error:
        marker.section.fail(str(error), "convrot_groupsize")


def _input(marker: LayerMarker, act: TensorQuant) -> TensorQuant | None:
    return None if marker.section.boolean("full_precision_matrix_mult", default=False) else act


def _rotation_group(marker: LayerMarker) -> int:
    group = marker.section.integer("convrot_groupsize")
    if group is None:
        warnings.warn(
            f"{marker.section.where()}: the marker names no convrot_groupsize; "
            f"{DEFAULT_GROUP_SIZE} is assumed",
            stacklevel=5,
        )
        return DEFAULT_GROUP_SIZE
    if group < 1:
        marker.section.fail(f"{group} is not a positive size", "convrot_groupsize")
    return group


def _granularity(marker: LayerMarker) -> Granularity:
    """Returns what the stored scale shows; ``per_row`` must not contradict it."""
    weight, scale = marker.tensors["weight"], _tensor(marker, "weight_scale", "a quantized layer")
    count = math.prod(scale.shape)
    if count not in (1, weight.shape[0]):
        marker.section.fail(
            f"weight_scale of shape {list(scale.shape)} has neither one scale nor one for each of "
            f"{weight.shape[0]} rows"
        )
    if marker.section.boolean("per_row", default=False):
        return Granularity.PER_CHANNEL
    return Granularity.PER_TENSOR if count == 1 else Granularity.PER_CHANNEL


def _tensor(marker: LayerMarker, name: str, wanted_by: str) -> StoredTensor:
    if name not in marker.tensors:
        marker.section.fail(f"the file lacks {marker.module}.{name}, which {wanted_by} needs")
    return marker.tensors[name]


def _reject(marker: LayerMarker, keys: tuple[str, ...]) -> None:
    for key in keys:
        if marker.section.boolean(key, default=False):
            marker.section.fail("true is not supported with this format", key)
