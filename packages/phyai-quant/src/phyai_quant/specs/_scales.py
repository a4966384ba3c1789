"""Scales that float formats share: registration, checks, the scale of a static input."""

from typing import cast

import torch
from torch import nn

from phyai_quant.scheme import QuantConfigError
from phyai_quant.specs import base

E8M0_DTYPES = (torch.uint8, torch.float8_e8m0fnu)
"""Dtypes in which checkpoints store powers of two."""

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
            f"{base.layer_name(layer)}: checkpoint tensor {name!r} is {loaded.dtype}; "
            f"allowed: {', '.join(map(str, allowed))}"
        )


def check_scalar(layer: nn.Module, name: str, loaded: torch.Tensor) -> None:
    """Raises QuantConfigError when a checkpoint tensor is not ``[]``, ``[1]`` or ``[1, 1]``."""
    if tuple(loaded.shape) not in ((), (1,), (1, 1)):
        raise QuantConfigError(
            f"{base.layer_name(layer)}: checkpoint tensor {name!r} has shape "
            f"{list(loaded.shape)}, the layer expects [] or [1] or [1, 1]"
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
