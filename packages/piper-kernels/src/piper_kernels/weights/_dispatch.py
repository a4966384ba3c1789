"""Dispatch of aten operators on quantized weights, in and out of inference mode."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

type Handler = Callable[[Any, Sequence[type], tuple[Any, ...], dict[str, Any]], Any]

VIEW_OPS = frozenset(
    (
        aten.alias.default,
        aten.as_strided.default,
        aten.detach.default,
        aten.permute.default,
        aten.t.default,
        aten.transpose.int,
        aten.view.default,
    )
)


def dispatch_weight_op(
    handlers: Mapping[Any, Handler],
    func: Any,
    types: Sequence[type],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run an aten operator that has a quantized weight among its arguments.

    Inference mode skips the autograd layer that decomposes composite operators, so those
    arrive here whole and are decomposed first. A view of a normal tensor is taken with
    inference mode disabled and stays a normal tensor.

    Raises:
        NotImplementedError: No handler exists and the operator does not decompose.
    """
    handler = handlers.get(func)
    if handler is None:
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        raise NotImplementedError(
            f"{func} is not implemented for {_weight_name(types)}; "
            "call dequantize() to compute with a dense tensor"
        )
    if func in VIEW_OPS and torch.is_inference_mode_enabled() and not args[0].is_inference():
        with torch.inference_mode(mode=False):
            return handler(func, types, args, kwargs)
    return handler(func, types, args, kwargs)


def _weight_name(types: Sequence[type]) -> str:
    return next((kind.__name__ for kind in types if kind is not Tensor), "this weight")


def register_unsupported(cls: Any) -> None:
    """Register clear refusals for operators that would need the packed layout to change."""

    @cls.implements([aten.slice.Tensor, aten.select.int])
    def _(func: Any, _types: Sequence[type], _args: tuple[Any, ...], _kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{cls.__name__} cannot be indexed or sliced ({func}); "
            "slice the dense weight before quantizing it"
        )

    @cls.implements([aten.bmm.default, aten._grouped_mm.default])
    def _(func: Any, _types: Sequence[type], _args: tuple[Any, ...], _kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{cls.__name__} does not support {func}; use F.linear or x @ weight.t()"
        )


def register_updates(cls: Any) -> None:
    """Register the in-place updates, which are methods of the weight."""

    @cls.implements(aten.add_.Tensor)
    def _(_func: Any, _types: Sequence[type], args: tuple[Any, ...], kwargs: Any) -> Any:
        return args[0].add_(*args[1:], **kwargs)

    @cls.implements(aten.addmm_.default)
    def _(_func: Any, _types: Sequence[type], args: tuple[Any, ...], kwargs: Any) -> Any:
        return args[0].addmm_(*args[1:], **kwargs)


def register_copy(cls: Any) -> None:
    """Register ``copy_`` between weights of one format; other tensors are refused."""

    @cls.implements(aten.copy_.default)
    def _(_func: Any, _types: Sequence[type], args: tuple[Any, ...], kwargs: Any) -> Any:
        target, source = args[0], args[1]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        if not isinstance(target, cls):
            raise NotImplementedError(
                f"cannot copy a {cls.__name__} into a {type(target).__name__}; "
                "dequantize it first, as in dense.copy_(weight.dequantize())"
            )
        if not isinstance(source, cls):
            raise NotImplementedError(
                f"cannot copy a {type(source).__name__} into a {cls.__name__}; quantize it first, "
                f"as in weight.copy_({cls.__name__}.from_hp(dense, ...))"
            )
        _require_same_metadata(target, source)
        for name in target.__tensor_flatten__()[0]:
            getattr(target, name).copy_(getattr(source, name), non_blocking)
        return target


def _require_same_metadata(target: Any, source: Any) -> None:
    target_names, target_attributes = target.__tensor_flatten__()
    source_names, source_attributes = source.__tensor_flatten__()
    if target.shape == source.shape and target_names == source_names:
        same_shapes = all(
            getattr(target, name).shape == getattr(source, name).shape for name in target_names
        )
        if same_shapes and target_attributes == source_attributes:
            return
    raise ValueError(
        "copy_ between quantized weights needs equal metadata (metadata mismatch): target has "
        f"shape {tuple(target.shape)}, {target_names}, {target_attributes}; source has "
        f"shape {tuple(source.shape)}, {source_names}, {source_attributes}"
    )
