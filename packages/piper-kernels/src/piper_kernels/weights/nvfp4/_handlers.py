"""Operators of the NVFP4 weight tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from piper_kernels.weights._casts import register_casts
from piper_kernels.weights._dispatch import register_copy, register_unsupported, register_updates
from piper_kernels.weights._matmul import register_linear, register_matmul
from piper_kernels.weights._rebuild import rebuild
from piper_kernels.weights._views import register_views

aten = torch.ops.aten


def register_handlers(
    cls: Any, linear: Callable[[Tensor, Any, Tensor | None], Tensor] | None = None
) -> None:
    """Register every operator that an NVFP4 weight supports or clearly refuses.

    Args:
        cls: A weight class.
        linear: ``(activation, weight, bias) -> output``; the plain NVFP4 linear if omitted.
    """
    # Handlers inherited from a parent class would build that class.
    cls._ATEN_OP_TABLE[cls].clear()
    register_views(cls)
    register_casts(cls, dtype_attribute="orig_dtype")
    register_copy(cls)
    register_unsupported(cls)
    register_matmul(cls, linear or _linear)
    register_linear(cls, linear or _linear)
    register_updates(cls)

    @cls.implements(aten.is_pinned.default)
    def _(_func: Any, _types: Sequence[type], args: tuple[Any, ...], _kwargs: Any) -> bool:
        weight = args[0]
        return all(getattr(weight, name).is_pinned() for name in weight.__tensor_flatten__()[0])

    @cls.implements(aten._pin_memory.default)
    def _(_func: Any, _types: Sequence[type], args: tuple[Any, ...], _kwargs: Any) -> Any:
        return rebuild(args[0], lambda inner: inner.pin_memory())


def _linear(activation: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    # Weights load operators on first use only: checkpoint tools never need them.
    from piper_kernels.linear.nvfp4._functional import nvfp4_linear

    return nvfp4_linear(activation, weight, bias)
