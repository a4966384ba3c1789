"""Operators of the ConvRot INT8 weight tensor."""

from typing import Any

from torch import Tensor

from piper_kernels.weights._casts import register_casts
from piper_kernels.weights._dispatch import register_copy, register_unsupported, register_updates
from piper_kernels.weights._matmul import register_linear, register_matmul
from piper_kernels.weights._views import register_views


def register_handlers(cls: Any) -> None:
    """Register every operator that ``ConvRotInt8Tensor`` supports or clearly refuses."""
    register_views(cls)
    register_casts(cls)
    register_copy(cls)
    register_unsupported(cls)
    register_matmul(cls, _linear)
    register_linear(cls, _linear)
    register_updates(cls)


def _linear(activation: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    # Weights load operators on first use only: checkpoint tools never need them.
    from piper_kernels.linear.convrot.int8.op import convrot_int8_linear

    return convrot_int8_linear(activation, weight, bias)
