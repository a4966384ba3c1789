"""Scales that float formats share: registration, checks, the scale of a static input."""

import math
from typing import cast

import torch
from torch import nn

from phyai_quant.scheme import QuantConfigError
from phyai_quant.specs import loading

E8M0_DTYPES = (torch.uint8, torch.float8_e8m0fnu)
"""Dtypes in which checkpoints store powers of two."""

INPUT_NAMES = ("input_scale", "input_global_scale")
"""Checkpoint names of the scale of a static input; the second holds a reciprocal."""

RECIPROCALS = ("weight_global_scale", "input_global_scale")
"""Checkpoint names of scales that are stored as ``1 / multiplier``."""

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


def register_nan(
    layer: nn.Module,
    name: str,
    shape: tuple[int, ...],
    device: torch.device | str | None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Registers a scale of NaN, so that one that is never loaded shows."""
    scale = torch.full(shape, torch.nan, dtype=torch.float32, device=device).to(dtype)
    layer.register_parameter(name, nn.Parameter(scale, requires_grad=False))


def check_dtype(
    layer: nn.Module, name: str, loaded: torch.Tensor, allowed: tuple[torch.dtype, ...]
) -> None:
    """Raises QuantConfigError when a checkpoint tensor has another dtype than ``allowed``."""
    if loaded.dtype not in allowed:
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: checkpoint tensor {name!r} is {loaded.dtype}; "
            f"allowed: {', '.join(map(str, allowed))}"
        )


def check_scalar(layer: nn.Module, name: str, loaded: torch.Tensor) -> None:
    """Raises QuantConfigError when a checkpoint tensor is not ``[]``, ``[1]`` or ``[1, 1]``."""
    if tuple(loaded.shape) not in ((), (1,), (1, 1)):
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: checkpoint tensor {name!r} has shape "
            f"{list(loaded.shape)}, the layer expects [] or [1] or [1, 1]"
        )


def check_first(
    layer: nn.Module, name: str, part: str, legs: range, names: tuple[str, ...]
) -> None:
    """Raises QuantConfigError when ``part`` of a leg has arrived already, under any name."""
    if any((part, leg) in loading.load_state(layer).loaded for leg in legs):
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: {part} is loaded twice, now as {name!r}; the checkpoint "
            f"must hold one of {' and '.join(names)} per layer"
        )


def float_scale(layer: nn.Module, name: str, loaded: torch.Tensor) -> torch.Tensor:
    """Returns a scale in fp32; QuantConfigError when it is no floating tensor."""
    check_dtype(layer, name, loaded, _FLOAT_DTYPES)
    return loaded.float()


def load_input_scale(layer: nn.Module, name: str, values: torch.Tensor) -> None:
    """Keeps the largest of the legs' input scales, which all saw the same input.

    Args:
        layer: The layer, with ``input_scale`` ``[1]``.
        name: Name of the checkpoint tensor, for messages.
        values: Multiplier in fp32.
    """
    check_scalar(layer, name, values)
    target = cast("nn.Parameter", layer.input_scale)
    with torch.no_grad():
        # fmax ignores the NaN of a scale that is not loaded yet
        target.copy_(torch.fmax(target, values.reshape(1).to(target.device)))


def load_input_part(layer: nn.Module, name: str, loaded: torch.Tensor, legs: range) -> None:
    """Keeps the largest of the legs' input scales as a multiplier and notes who has one.

    Raises:
        QuantConfigError: The scale is no scalar, not above 0, or given twice.
    """
    check_first(layer, name, "input_scale", legs, INPUT_NAMES)
    value = torch.tensor([scalar(layer, name, loaded)])
    load_input_scale(layer, name, 1.0 / value if name in RECIPROCALS else value)
    loading.load_state(layer).loaded.update(("input_scale", leg) for leg in legs)


def finish_input(layer: nn.Module) -> bool:
    """Returns whether the legs have an input scale; without one ``input_scale`` becomes None.

    Raises:
        QuantConfigError: Some legs have one and others have none.
    """
    state = loading.load_state(layer)
    ids = state.request.shard_ids
    absent = [ids[leg] for leg in range(len(ids)) if ("input_scale", leg) not in state.loaded]
    if len(absent) == len(ids):
        layer.register_parameter("input_scale", None)
    elif absent:
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: input_scale was loaded for some legs but never for "
            f"{', '.join(map(repr, absent))}; the checkpoint must hold all of them or none"
        )
    return not absent


def scalar(layer: nn.Module, name: str, loaded: torch.Tensor) -> float:
    """Returns a scalar scale.

    Raises:
        QuantConfigError: It is no floating scalar, no finite multiplier of at least 0, or no
            reciprocal above 0 (infinity is that of the scale 0).
    """
    values = float_scale(layer, name, loaded)
    check_scalar(layer, name, values)
    value = float(values.reshape(()))
    if name in RECIPROCALS:
        usable, allowed = value > 0, "a reciprocal above 0"
    else:
        usable, allowed = value >= 0 and math.isfinite(value), "a finite multiplier, 0 or more"
    if not usable:
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: checkpoint tensor {name!r} is {value}; allowed: "
            f"{allowed}; quantize the layer again"
        )
    return value
