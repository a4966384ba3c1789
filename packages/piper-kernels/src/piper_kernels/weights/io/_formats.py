"""Weights as named tensors plus a small JSON description, and back. No file is touched here."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.io._errors import WeightFileError
from piper_kernels.weights.io._rows import RowQuantizedWeight
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor
from piper_kernels.weights.nvfp4._storage import require_decodable

type StoredWeight = Tensor | RowQuantizedWeight

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
LOGICAL_DTYPE_NAMES = tuple(_DTYPES)
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_REQUIRED = ("qdata", "scale")


class WeightFormat(StrEnum):
    """Formats that files hold."""

    CONVROT_INT8 = "convrot_int8"
    NVFP4 = "nvfp4"
    CONVROT_NVFP4 = "convrot_nvfp4"
    INT8_ROWWISE = "int8_rowwise"
    FLOAT8_E4M3_ROWWISE = "float8_e4m3_rowwise"


@dataclass(frozen=True)
class PackedWeight:
    """A weight taken apart.

    Attributes:
        config: JSON description: ``format``, ``shape`` and ``logical_dtype`` of the
            untransposed weight, then what the format adds.
        tensors: Field name (``qdata``, ``scale``, ``per_tensor_scale``,
            ``act_per_tensor_scale``) to tensor; absent fields are left out.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]


def is_stored_weight(value: object) -> bool:
    """Whether ``value`` is one of the classes that ``pack`` takes apart."""
    return isinstance(value, ConvRotInt8Tensor | PiperNVFP4Tensor | RowQuantizedWeight)


def pack(weight: StoredWeight) -> PackedWeight:
    """Take a weight apart; tensors are shared, not copied.

    A transposed weight is stored untransposed, with ``"transposed": true``.

    Raises:
        TypeError: It has no format.
    """
    if isinstance(weight, RowQuantizedWeight):
        int8 = weight.qdata.dtype == torch.int8
        fmt = WeightFormat.INT8_ROWWISE if int8 else WeightFormat.FLOAT8_E4M3_ROWWISE
        return _packed(fmt, weight, weight.logical_dtype, ("act_per_tensor_scale",))
    if not isinstance(weight, ConvRotInt8Tensor | PiperNVFP4Tensor):
        raise TypeError(f"{type(weight).__name__} is no quantized weight")
    if weight.transposed:
        packed = pack(weight.transpose(-2, -1))
        packed.config["transposed"] = True
        return packed
    if isinstance(weight, PiperNVFP4Tensor):
        return _pack_nvfp4(weight)
    return _packed(
        WeightFormat.CONVROT_INT8,
        weight,
        weight.dtype,
        ("act_per_tensor_scale",),
        group_size=weight.group_size,
    )


def _pack_nvfp4(weight: PiperNVFP4Tensor) -> PackedWeight:
    extra: dict[str, Any] = {
        "block_size": weight.block_size,
        "scale_layout": "swizzled" if weight.is_swizzled_scales else "plain",
        "high_first": weight.high_first,
        "use_triton_kernel": weight.use_triton_kernel,
    }
    fmt = WeightFormat.NVFP4
    if isinstance(weight, ConvRotNVFP4Tensor):
        fmt = WeightFormat.CONVROT_NVFP4
        extra = {"group_size": weight.group_size} | extra
    if weight.act_quant_kwargs is not None:
        extra["activation"] = asdict(weight.act_quant_kwargs)
    optional = ("per_tensor_scale", "act_per_tensor_scale")
    return _packed(fmt, weight, weight.dtype, optional, **extra)


def _packed(
    fmt: WeightFormat,
    weight: Any,
    logical_dtype: torch.dtype,
    optional: tuple[str, ...],
    **extra: Any,
) -> PackedWeight:
    config = {
        "format": fmt.value,
        "shape": list(weight.shape),
        "logical_dtype": _DTYPE_NAMES[logical_dtype],
        **extra,
    }
    fields = {name: getattr(weight, name) for name in (*_REQUIRED, *optional)}
    return PackedWeight(config, {n: field for n, field in fields.items() if field is not None})


def unpack(name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> StoredWeight:
    """Build a weight over stored tensors without copying them.

    Args:
        name: Name for messages.
        config: Description as ``pack`` makes it.
        tensors: Field name to tensor.

    Raises:
        WeightFileError: The format or a key is unknown, a field is missing, or description
            and tensors contradict each other.
    """
    settings = dict(config)
    fmt = _format(name, settings.pop("format", None))
    absent = [field for field in _REQUIRED if field not in tensors]
    if absent:
        raise WeightFileError(f"{name}: the file lacks {', '.join(absent)} of this {fmt} weight")
    shape = settings.pop("shape", None)
    transposed = settings.pop("transposed", False)
    try:
        _require_kinds(settings | {"transposed": transposed})
        settings["logical_dtype"] = _logical_dtype(settings.pop("logical_dtype"))
        weight = _BUILDERS[fmt](dict(tensors), settings)
    except (KeyError, TypeError, ValueError, NotImplementedError) as error:
        detail = f"missing {error}" if isinstance(error, KeyError) else str(error)
        raise WeightFileError(f"{name}: no valid {fmt} weight: {detail}") from error
    if shape is not None and list(weight.shape) != shape:
        raise WeightFileError(
            f"{name}: the description says shape {shape}, the stored tensors have "
            f"{list(weight.shape)}"
        )
    if settings:
        raise WeightFileError(
            f"{name}: unknown keys {sorted(settings)} in the description of this {fmt} weight; "
            "the file may come from a newer version"
        )
    if transposed and not isinstance(weight, RowQuantizedWeight):
        return weight.transpose(-2, -1)
    return weight


def _require_kinds(settings: Mapping[str, Any]) -> None:
    """Refuse JSON values that Python would take for others, such as 16.0 or "no"."""
    for keys, kind in ((("group_size", "block_size"), int), (("transposed", "high_first"), bool)):
        for key in keys:
            if key in settings and type(settings[key]) is not kind:
                raise TypeError(f"{key} must be {kind.__name__}, got {settings[key]!r}")


def _logical_dtype(value: object) -> torch.dtype:
    if not isinstance(value, str) or value not in _DTYPES:
        raise ValueError(
            f"logical_dtype must be one of {', '.join(LOGICAL_DTYPE_NAMES)}, got {value!r}"
        )
    return _DTYPES[value]


def _format(name: str, value: object) -> WeightFormat:
    try:
        return WeightFormat(str(value))
    except ValueError:
        known = ", ".join(WeightFormat)
        raise WeightFileError(
            f"{name}: unknown weight format {value!r}; this version reads {known}"
        ) from None


def _convrot_int8(tensors: dict[str, Tensor], settings: dict[str, Any]) -> ConvRotInt8Tensor:
    return ConvRotInt8Tensor.from_quantized(
        **tensors,
        group_size=settings.pop("group_size"),
        logical_dtype=settings.pop("logical_dtype"),
    )


def _row_wise(storage_dtype: torch.dtype) -> Callable[..., RowQuantizedWeight]:
    def build(tensors: dict[str, Tensor], settings: dict[str, Any]) -> RowQuantizedWeight:
        if tensors["qdata"].dtype != storage_dtype:
            raise ValueError(f"qdata must be {storage_dtype}, got {tensors['qdata'].dtype}")
        return RowQuantizedWeight(**tensors, logical_dtype=settings.pop("logical_dtype"))

    return build


def _nvfp4(tensors: dict[str, Tensor], settings: dict[str, Any]) -> PiperNVFP4Tensor:
    return _checked_nvfp4(PiperNVFP4Tensor(**_nvfp4_fields(tensors, settings)))


def _convrot_nvfp4(tensors: dict[str, Tensor], settings: dict[str, Any]) -> ConvRotNVFP4Tensor:
    group_size = settings.pop("group_size")
    fields = _nvfp4_fields(tensors, settings)
    return _checked_nvfp4(ConvRotNVFP4Tensor(group_size=group_size, **fields))


def _checked_nvfp4[W: PiperNVFP4Tensor](weight: W) -> W:
    """Refuse storage that the lenient constructor wraps but nothing can decode."""
    require_decodable(weight)
    for name in ("per_tensor_scale", "act_per_tensor_scale"):
        scale = getattr(weight, name)
        if scale is not None and (scale.dtype != torch.float32 or scale.ndim not in (0, 3)):
            raise ValueError(
                f"{name} must be an FP32 scalar, got {scale.dtype} of shape {tuple(scale.shape)}"
            )
    return weight


def _nvfp4_fields(tensors: dict[str, Tensor], settings: dict[str, Any]) -> dict[str, Any]:
    from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs

    layout = settings.pop("scale_layout")
    if layout not in ("plain", "swizzled"):
        raise ValueError(f"scale_layout must be 'plain' or 'swizzled', got {layout!r}")
    if settings["block_size"] != 16:
        raise ValueError(f"block_size must be 16, got {settings['block_size']!r}")
    activation = settings.pop("activation", None)
    return {
        **tensors,
        "block_size": settings.pop("block_size"),
        "orig_dtype": settings.pop("logical_dtype"),
        "is_swizzled_scales": layout == "swizzled",
        "use_triton_kernel": settings.pop("use_triton_kernel", False),
        "high_first": settings.pop("high_first", False),
        "act_quant_kwargs": None
        if activation is None
        else QuantizeTensorToNVFP4Kwargs(**activation),
    }


_BUILDERS: dict[WeightFormat, Callable[[dict[str, Tensor], dict[str, Any]], StoredWeight]] = {
    WeightFormat.CONVROT_INT8: _convrot_int8,
    WeightFormat.NVFP4: _nvfp4,
    WeightFormat.CONVROT_NVFP4: _convrot_nvfp4,
    WeightFormat.INT8_ROWWISE: _row_wise(torch.int8),
    WeightFormat.FLOAT8_E4M3_ROWWISE: _row_wise(torch.float8_e4m3fn),
}
