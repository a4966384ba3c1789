"""Named schemes that compressed-tensors configs may use instead of spelling them out."""

from typing import Any

_TOKEN_INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_TOKEN_FP8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def preset_args(name: str) -> dict[str, Any] | None:
    """Returns the ``weights`` and ``input_activations`` of a preset in any case, or None.

    Presets that no kernel here computes are returned as well, so that reading their arguments names
    what is not supported.
    """
    return _PRESETS.get(name.upper())


def preset_names() -> tuple[str, ...]:
    """Returns the names of all presets."""
    return tuple(_PRESETS)


def _scheme(weights: dict[str, Any], act: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"weights": weights, "input_activations": act}


def _int_group(bits: int, *, symmetric: bool = True) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "strategy": "group",
        "group_size": 128,
        "symmetric": symmetric,
    }


def _float(bits: int, strategy: str, **extra: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": strategy, **extra}


def _int_channel(bits: int) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": "channel"}


_MX = {"group_size": 32, "scale_dtype": "torch.uint8"}
_NV = {"group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}

_PRESETS: dict[str, dict[str, Any]] = {
    "UNQUANTIZED": {"weights": None, "input_activations": None},
    **{f"W{bits}A16": _scheme(_int_group(bits)) for bits in (2, 3, 4, 5, 6, 7)},
    "W8A16": _scheme(_int_channel(8)),
    **{f"W{bits}A8": _scheme(_int_group(bits), _TOKEN_INT8) for bits in (2, 3, 4, 5, 6, 7)},
    **{
        f"W{bits}A4": _scheme(_int_group(bits), {**_TOKEN_INT8, "num_bits": 4})
        for bits in (2, 3, 4)
    },
    "W4A16_ASYM": _scheme(_int_group(4, symmetric=False)),
    "W8A8": _scheme(_int_channel(8), _TOKEN_INT8),
    "INT8": _scheme(_int_channel(8), _TOKEN_INT8),
    "W4AFP8": _scheme(_int_group(4), _TOKEN_FP8),
    "FP8": _scheme(_float(8, "tensor"), _float(8, "tensor")),
    "FP8_DYNAMIC": _scheme(_float(8, "channel"), _TOKEN_FP8),
    "FP8_BLOCK": _scheme(
        _float(8, "block", block_structure=[128, 128]),
        _float(8, "group", group_size=128, dynamic=True),
    ),
    "NVFP4A16": _scheme(_float(4, "tensor_group", **_NV)),
    "NVFP4": _scheme(
        _float(4, "tensor_group", **_NV), _float(4, "tensor_group", dynamic="local", **_NV)
    ),
    "MXFP4A16": _scheme(_float(4, "group", **_MX)),
    "MXFP4": _scheme(_float(4, "group", **_MX), _float(4, "group", dynamic=True, **_MX)),
    "MXFP8A16": _scheme(_float(8, "group", **_MX)),
    "MXFP8": _scheme(_float(8, "group", **_MX), _float(8, "group", dynamic=True, **_MX)),
}
