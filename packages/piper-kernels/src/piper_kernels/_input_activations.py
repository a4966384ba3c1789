"""Activations that a quantized linear operator can apply to its input, in FP32."""

from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional


class InputActivation(StrEnum):
    """Activation applied to the input before it is quantized."""

    GELU_TANH = "gelu_tanh"
    SWIGLU = "swiglu"


def resolve_activation(activation_fn: str | None) -> InputActivation | None:
    """Return the activation of a name.

    Raises:
        ValueError: The name is unknown.
    """
    if activation_fn is None:
        return None
    try:
        return InputActivation(activation_fn)
    except ValueError:
        allowed = ", ".join(repr(str(name)) for name in InputActivation)
        raise ValueError(f"activation_fn must be None, {allowed}, got {activation_fn!r}") from None


def width_factor(activation_fn: str | None) -> int:
    """Return how many input features the activation consumes for each of its outputs."""
    return 2 if resolve_activation(activation_fn) is InputActivation.SWIGLU else 1


def apply_activation(value: Tensor, activation_fn: str | None) -> Tensor:
    """Return the activated input in FP32.

    ``gelu_tanh`` is GELU with the tanh approximation; ``swiglu`` takes ``[up | gate]`` on
    the last axis and returns ``up * silu(gate)``. The result is not rounded to the dtype
    of the input.

    Args:
        value: Floating ``[..., factor * features]``.
        activation_fn: ``None``, ``"gelu_tanh"`` or ``"swiglu"``.

    Returns:
        FP32 ``[..., features]``; ``value`` itself if that is FP32 and no activation is
        applied.

    Raises:
        ValueError: The name is unknown.
    """
    activation = resolve_activation(activation_fn)
    source = value.to(torch.float32)
    if activation is InputActivation.GELU_TANH:
        return functional.gelu(source, approximate="tanh")
    if activation is InputActivation.SWIGLU:
        up, gate = source.chunk(2, dim=-1)
        return up * functional.silu(gate)
    return source
