"""Operators of the ConvRot NVFP4 weight tensor."""

from typing import Any

from torch import Tensor

from piper_kernels.weights.nvfp4 import _handlers


def register_handlers(cls: Any) -> None:
    """Register the operators of NVFP4 weights with the linear of the rotated basis."""
    _handlers.register_handlers(cls, _linear)


def _linear(activation: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    # Weights load operators on first use only: checkpoint tools never need them.
    from piper_kernels.linear.convrot.nvfp4._functional import convrot_nvfp4_linear

    return convrot_nvfp4_linear(activation, weight, bias)
