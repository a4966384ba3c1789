"""Matrix products with a quantized weight, all expressed through its linear operator."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchao.utils import TorchAOBaseTensor

aten = torch.ops.aten

type LinearFunction = Callable[[Tensor, Any, Tensor | None], Tensor]


def register_matmul(cls: Any, linear: LinearFunction) -> None:
    """Register ``mm``, ``matmul`` and ``addmm`` on a weight class.

    Args:
        cls: A weight class with ``transposed`` and ``_transpose()``.
        linear: ``(activation, untransposed weight, bias) -> output``.
    """

    @cls.implements_torch_function(
        [
            torch.matmul,
            torch.Tensor.matmul,
            torch.Tensor.__matmul__,
            torch.Tensor.__rmatmul__,
        ]
    )
    def _(func: Any, _types: Sequence[type], args: tuple[Any, ...], kwargs: Any) -> Tensor:
        _refuse_keywords(kwargs)
        left, right = args[::-1] if func is torch.Tensor.__rmatmul__ else args
        return _product(cls, linear, left, right)

    @cls.implements([aten.matmul.default, aten.mm.default])
    def _(func: Any, _types: Sequence[type], args: tuple[Any, ...], kwargs: Any) -> Tensor:
        _refuse_keywords(kwargs)
        left, right = args
        if func is aten.mm.default:
            _require_matrix(left)
        return _product(cls, linear, left, right)

    @cls.implements(aten.addmm.default)
    def _(_func: Any, _types: Sequence[type], args: tuple[Any, ...], kwargs: Any) -> Tensor:
        scalars = dict(kwargs)
        beta, alpha = scalars.pop("beta", 1), scalars.pop("alpha", 1)
        _refuse_keywords(scalars)
        bias, left, right = args
        _require_operands(cls, left, right)
        _require_matrix(left)
        if isinstance(alpha, complex) or isinstance(beta, complex) or alpha != 1 or beta != 1:
            raise NotImplementedError(
                f"quantized addmm requires alpha=1 and beta=1, got alpha={alpha}, beta={beta}"
            )
        if tuple(bias.shape) != (right.shape[1],):
            raise NotImplementedError(
                f"quantized addmm requires a bias of shape {(right.shape[1],)}, "
                f"got {tuple(bias.shape)}"
            )
        return linear(left, right._transpose(), bias)


def register_linear(cls: Any, linear: LinearFunction) -> None:
    """Register ``torch.nn.functional.linear`` with the weight as its second argument.

    Args:
        cls: A weight class.
        linear: ``(activation, weight, bias) -> output``.
    """

    @cls.implements_torch_function(torch.nn.functional.linear)
    @cls.implements(aten.linear.default)
    def _(_func: Any, _types: Sequence[type], args: tuple[Any, ...], kwargs: Any) -> Tensor:
        from piper_kernels.linear._dispatch import bind_linear_arguments

        activation, weight, bias = bind_linear_arguments(args, kwargs)
        if not isinstance(weight, cls) or isinstance(activation, TorchAOBaseTensor):
            raise NotImplementedError(
                f"F.linear takes a {cls.__name__} as its weight only, with a dense input"
            )
        return linear(activation, weight, bias)


def _product(cls: Any, linear: LinearFunction, left: Any, right: Any) -> Tensor:
    _require_operands(cls, left, right)
    return linear(left, right._transpose(), None)


def _require_operands(cls: Any, left: Any, right: Any) -> None:
    if isinstance(left, cls) or not isinstance(right, cls):
        raise NotImplementedError(
            f"{cls.__name__} must be the right operand of a product, transposed, with a dense "
            "left operand: x @ weight.t()"
        )
    if right.ndim != 2 or not right.transposed:
        raise NotImplementedError(
            f"matrix products need a transposed 2-D {cls.__name__} (x @ weight.t()), "
            f"got shape {tuple(right.shape)} with transposed={right.transposed}"
        )
    if isinstance(left, TorchAOBaseTensor):
        raise NotImplementedError(
            f"the left operand of a product with a transposed {cls.__name__} must be dense, "
            f"got {type(left).__name__}"
        )


def _require_matrix(activation: Tensor) -> None:
    if activation.ndim != 2:
        raise ValueError(f"mm and addmm need a 2-D activation, got shape {tuple(activation.shape)}")


def _refuse_keywords(kwargs: dict[str, Any]) -> None:
    if any(value is not None for value in kwargs.values()):
        raise NotImplementedError(
            f"quantized matrix products do not support {', '.join(sorted(kwargs))}"
        )
