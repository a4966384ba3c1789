"""Operators of the ConvRot INT8 weight tensor."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from piper_kernels.weights._casts import register_casts
from piper_kernels.weights._dispatch import register_copy, register_unsupported
from piper_kernels.weights._matmul import register_linear, register_matmul
from piper_kernels.weights._views import register_views

aten = torch.ops.aten


def register_handlers(cls: Any) -> None:
    """Register every operator that ``ConvRotInt8Tensor`` supports or clearly refuses."""
    register_views(cls)
    register_casts(cls)
    register_copy(cls)
    register_unsupported(cls)
    register_matmul(cls, _linear)
    register_linear(cls, _linear)

    @cls.implements(aten.add_.Tensor)
    def _(_func: Any, _types: Sequence[type], args: tuple[Any, ...], kwargs: Any) -> Any:
        return args[0].add_(*args[1:], **kwargs)

    @cls.implements(aten.addmm_.default)
    def _(_func: Any, _types: Sequence[type], args: tuple[Any, ...], kwargs: Any) -> Any:
        return args[0].addmm_(*args[1:], **kwargs)


def _linear(activation: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    # Weights load operators on first use only: checkpoint tools never need them.
    from piper_kernels.linear.convrot.int8.op import convrot_int8_linear

    return convrot_int8_linear(activation, weight, bias)
