"""Views of quantized weights: same-shape views and matrix transposes.

A weight class takes part by having ``transposed`` and the methods ``_alias()`` (a new
wrapper over aliases of the inner tensors) and ``_transpose()`` (the same for the matrix
transpose).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

aten = torch.ops.aten


def register_views(cls: Any) -> None:
    """Register view operators on a weight class."""

    @cls.implements(aten.view.default)
    def _(func: Any, _types: Sequence[type], args: tuple[Any, ...], kwargs: Any) -> Any:
        weight, sizes = args[0], args[1]
        if _infer_shape(sizes, weight.numel()) != tuple(weight.shape):
            raise NotImplementedError(
                f"{cls.__name__} only supports same-shape views: "
                f"shape is {tuple(weight.shape)}, requested {tuple(sizes)}"
            )
        return return_and_correct_aliasing(func, args, kwargs, weight._alias())

    @cls.implements([aten.alias.default, aten.detach.default])
    def _(func: Any, _types: Sequence[type], args: tuple[Any, ...], kwargs: Any) -> Any:
        return return_and_correct_aliasing(func, args, kwargs, args[0]._alias())

    @cls.implements(aten.as_strided.default)
    def _(func: Any, _types: Sequence[type], args: tuple[Any, ...], kwargs: Any) -> Any:
        weight = args[0]
        size, stride = tuple(args[1]), tuple(args[2])
        offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
        shape, strides = tuple(weight.shape), tuple(weight.stride())
        if offset in (None, weight.storage_offset()):
            if (size, stride) == (shape, strides):
                return return_and_correct_aliasing(func, args, kwargs, weight._alias())
            if weight.ndim == 2 and (size, stride) == (shape[::-1], strides[::-1]):
                return return_and_correct_aliasing(func, args, kwargs, weight._transpose())
        raise NotImplementedError(
            f"{cls.__name__}.as_strided supports the unchanged layout or a matrix transpose: "
            f"layout is {shape} with strides {strides}, requested {size} with strides "
            f"{stride} and offset {offset}"
        )

    _register_transposes(cls)


def _register_transposes(cls: Any) -> None:
    @cls.implements([aten.t.default, aten.transpose.int])
    def _(func: Any, _types: Sequence[type], args: tuple[Any, ...], kwargs: Any) -> Any:
        weight = args[0]
        _require_matrix(weight, func)
        dims = args[1:3] if func is aten.transpose.int else (0, 1)
        first, second = (_wrap_dim(dim) for dim in dims)
        view = weight._alias() if first == second else weight._transpose()
        return return_and_correct_aliasing(func, args, kwargs, view)

    @cls.implements(aten.permute.default)
    def _(func: Any, _types: Sequence[type], args: tuple[Any, ...], kwargs: Any) -> Any:
        weight = args[0]
        _require_matrix(weight, func)
        order = tuple(_wrap_dim(dim) for dim in args[1])
        if sorted(order) != [0, 1]:
            raise ValueError(f"permute of a matrix needs dims 0 and 1 once each, got {args[1]}")
        view = weight._alias() if order == (0, 1) else weight._transpose()
        return return_and_correct_aliasing(func, args, kwargs, view)


def _infer_shape(sizes: Sequence[int], numel: int) -> tuple[int, ...]:
    """Resolve one ``-1`` like ``torch.Tensor.view`` does.

    Raises:
        RuntimeError: The sizes are invalid or ambiguous for ``numel`` elements.
    """
    requested = list(sizes)
    unknown = [axis for axis, size in enumerate(requested) if size == -1]
    known = math.prod(size for size in requested if size != -1)
    if len(unknown) > 1:
        raise RuntimeError(f"only one dimension can be inferred, got {requested}")
    if any(size < -1 for size in requested):
        raise RuntimeError(f"invalid shape dimension in {requested}")
    if unknown and known == 0 and numel == 0:
        raise RuntimeError(
            f"cannot reshape tensor of 0 elements into shape {requested} because the "
            "unspecified dimension size -1 can be any value and is ambiguous"
        )
    if unknown and known != 0 and numel % known == 0:
        requested[unknown[0]] = numel // known
    elif unknown or known != numel:
        raise RuntimeError(f"shape {list(sizes)} is invalid for input of size {numel}")
    return tuple(requested)


def _require_matrix(weight: Any, func: Any) -> None:
    if weight.ndim != 2:
        raise NotImplementedError(
            f"{type(weight).__name__} supports {func} on matrices only, "
            f"got shape {tuple(weight.shape)}"
        )


def _wrap_dim(dim: int) -> int:
    if not -2 <= dim <= 1:
        raise IndexError(f"dimension out of range: expected -2 to 1, got {dim}")
    return dim % 2
