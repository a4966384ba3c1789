"""Arguments of ``torch.nn.functional.linear`` and their casts under autocast."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from piper_kernels._autocast import autocast_dtype

_NAMES = ("input", "weight", "bias")


def bind_linear_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return ``(input, weight, bias)`` from a call of ``F.linear``.

    Raises:
        TypeError: Arguments are missing, unknown, repeated or too many.
    """
    if len(args) > len(_NAMES):
        raise TypeError(f"linear() takes at most 3 positional arguments but {len(args)} were given")
    bound = dict(zip(_NAMES, args, strict=False))
    for name, value in kwargs.items():
        if name not in _NAMES:
            raise TypeError(f"linear() got an unexpected keyword argument '{name}'")
        if name in bound:
            raise TypeError(f"linear() got multiple values for argument '{name}'")
        bound[name] = value
    for name in _NAMES[:2]:
        if name not in bound:
            raise TypeError(f"linear() missing required argument: '{name}'")
    return bound["input"], bound["weight"], bound.get("bias")


def autocast_operands(
    input: Tensor,  # noqa: A002  # the name of F.linear
    bias: Any,
    dtype: torch.dtype,
) -> tuple[Tensor, Any, torch.dtype]:
    """Return input, bias and the logical dtype of the weight as an autocast region makes them.

    Outside such a region they stay as they are, and so does a bias that is no tensor.
    """
    target = autocast_dtype(input.device)
    if target is None:
        return input, bias, dtype
    device = input.device
    if isinstance(bias, Tensor):
        bias = _cast(bias, device, target)
    return _cast(input, device, target), bias, target


def _cast(operand: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Cast a floating operand on the autocast device, float64 excepted."""
    if (
        operand.device.type == device.type
        and operand.is_floating_point()
        and operand.dtype != torch.float64
    ):
        return operand.to(dtype)
    return operand
