"""Weight files that describe their layers themselves: ComfyUI's ``comfy_quant`` markers.

Keys, values and defaults are those of layout ``comfy`` in ``docs/formats.md``.
"""

import math
import re
import warnings

from phyai_quant.importers.base import ConfigSources, LayerMarker, StoredTensor, make_rule
from phyai_quant.plan import QuantPlan
from phyai_quant.rules import MatcherKind, Rule
from phyai_quant.scheme import (
    ROTATION_GROUPS,
    Granularity,
    QDType,
    QuantConfigError,
    QuantScheme,
    TensorQuant,
)

DEFAULT_GROUP_SIZE = 256
"""Rotation group of a ConvRot marker that names none."""

_INT8 = "int8_tensorwise"
_FP8 = "float8_e4m3fn"
_NVFP4 = "nvfp4"
_CONVROT_NVFP4 = "convrot_nvfp4"
_STORED = {_INT8: "I8", _FP8: "F8_E4M3", _NVFP4: "U8", _CONVROT_NVFP4: "U8"}
"""Each format and the safetensors dtype of its weight."""

_KNOWN_KEYS = (
    "format",
    "convrot",
    "convrot_groupsize",
    "per_row",
    "high_first",
    "logical_dtype",
)
_LEGACY_KEYS = ("convrot", "per_row")
_LOGICAL_DTYPES = ("float16", "bfloat16", "float32")


class ComfyImporter:
    """Reads one marker per quantized layer; layers without a marker are unquantized.

    The layout says nothing of activations. They stay unquantized, but for layers with an
    ``input_scale`` and for rotated int8 layers, whose inputs are int8 per token without one.
    """

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
    section.warn_unknown(_KNOWN_KEYS)
    section.string("logical_dtype", _LOGICAL_DTYPES)
    name = _format(marker)
    weight = _tensor(marker, "weight", name)
    if weight.dtype != _STORED[name] or len(weight.shape) != 2:
        section.fail(
            f"{name!r} stores a matrix of {_STORED[name]}, but the file holds {weight.dtype} of "
            f"shape {list(weight.shape)}",
            "format",
        )
    rotated = _rotated(marker, name)
    group = _rotation_group(marker, rotated=rotated)
    if name in (_NVFP4, _CONVROT_NVFP4):
        return _nvfp4_scheme(marker, name, group)
    granularity = _granularity(marker, weight)
    if name == _FP8:
        return QuantScheme(TensorQuant(QDType.FP8_E4M3, granularity), _static(marker, name))
    if group is not None and weight.shape[1] % group:
        _warn(
            marker,
            f"rotation groups of {group} do not divide {weight.shape[1]} features, so the codes "
            "cannot be rotated; read as plain int8",
        )
        group = None
    if group is None:
        return QuantScheme(TensorQuant(QDType.INT8, granularity), _static(marker, name))
    return QuantScheme(
        TensorQuant(QDType.INT8, Granularity.PER_CHANNEL, rotation_group=group),
        _static(marker, name) or TensorQuant(QDType.INT8, Granularity.PER_CHANNEL, dynamic=True),
    )


def _format(marker: LayerMarker) -> str:
    section = marker.section
    name = section.string("format")
    if name is None and any(section.data.get(key) for key in _LEGACY_KEYS):
        _warn(marker, f"the marker has no format; {_INT8} is assumed")
        return _INT8
    if name is None or name not in _STORED:
        section.fail(f"{name!r} is not supported; supported: {', '.join(_STORED)}", "format")
    return name


def _rotated(marker: LayerMarker, name: str) -> bool:
    section = marker.section
    rotated = section.boolean("convrot", default=name == _CONVROT_NVFP4)
    if rotated is not (name == _CONVROT_NVFP4) and name != _INT8:
        section.fail(f"{str(rotated).lower()} and format {name!r} contradict", "convrot")
    if section.has("convrot_groupsize") and not section.has("convrot"):
        section.fail(
            "stands without convrot, so the codes may be rotated or not", "convrot_groupsize"
        )
    return rotated


def _rotation_group(marker: LayerMarker, *, rotated: bool) -> int | None:
    group = marker.section.integer("convrot_groupsize")
    if not rotated:
        return None
    if group is not None:
        if group not in ROTATION_GROUPS:
            allowed = ", ".join(map(str, ROTATION_GROUPS))
            marker.section.fail(f"{group} is not allowed; allowed: {allowed}", "convrot_groupsize")
        return group
    weight = marker.tensors["weight"]
    columns = weight.shape[1] * (2 if weight.dtype == "U8" else 1)
    if columns % DEFAULT_GROUP_SIZE:
        marker.section.fail(
            f"is missing, and {DEFAULT_GROUP_SIZE} does not divide {columns} features",
            "convrot_groupsize",
        )
    _warn(marker, f"the marker names no convrot_groupsize; {DEFAULT_GROUP_SIZE} is assumed")
    return DEFAULT_GROUP_SIZE


def _nvfp4_scheme(marker: LayerMarker, name: str, group: int | None) -> QuantScheme:
    for tensor in ("weight_scale", "weight_scale_2"):
        _tensor(marker, tensor, name)
    if marker.section.boolean("high_first", default=False):
        marker.section.fail(
            "true is not supported; store even features in low nibbles", "high_first"
        )
    if not marker.section.has("high_first"):
        _warn(marker, "the marker names no high_first; false is assumed")
    weight = TensorQuant(
        QDType.NVFP4,
        Granularity.BLOCK,
        micro_scaled=True,
        block_shape=(1, 16),
        swizzled_scales=True,
        rotation_group=group,
    )
    return QuantScheme(weight, _static(marker, name))


def _static(marker: LayerMarker, name: str) -> TensorQuant | None:
    """Returns the input that a stored ``input_scale`` means, or None."""
    if "input_scale" not in marker.tensors:
        return None
    if name in (_NVFP4, _CONVROT_NVFP4):
        return TensorQuant(
            QDType.NVFP4, Granularity.BLOCK, dynamic=True, micro_scaled=True, block_shape=(1, 16)
        )
    dtype = QDType.INT8 if name == _INT8 else QDType.FP8_E4M3
    return TensorQuant(dtype, Granularity.PER_TENSOR)


def _granularity(marker: LayerMarker, weight: StoredTensor) -> Granularity:
    """Returns what the stored scale shows; one scale with ``per_row`` stands for every row."""
    scale = _tensor(marker, "weight_scale", "a quantized layer")
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


def _warn(marker: LayerMarker, message: str) -> None:
    warnings.warn(f"{marker.section.where()}: {message}", stacklevel=6)
