"""Copies, device moves and logical dtype changes of quantized weights."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from piper_kernels.weights._rebuild import rebuild

aten = torch.ops.aten

_TO_COPY_KEYWORDS = frozenset(
    ("dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format")
)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def register_casts(cls: Any, *, dtype_attribute: str = "dtype") -> None:
    """Register ``to``, ``clone`` and ``contiguous`` on a weight class.

    A dtype change rewrites the logical dtype only and reuses the inner tensors; a device
    move moves them all; ``copy=True`` duplicates them.

    Args:
        cls: A weight class.
        dtype_attribute: The constructor argument that takes the logical dtype.
    """
    # TorchAO's handler refuses dtype changes; without one the operator is decomposed.
    cls._ATEN_OP_TABLE[cls].pop(aten.to.dtype_layout, None)

    @cls.implements_torch_function(torch.Tensor.to)
    def _(func: Any, _types: Sequence[type], args: tuple[Any, ...], kwargs: Any) -> Any:
        if isinstance(args[0], cls):
            copy, args, kwargs = _split_copy(args, kwargs)
            # A dtype change shares the inner tensors, so an asked-for copy is made here.
            args = (args[0].clone() if copy else args[0], *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @cls.implements(aten._to_copy.default)
    def _(func: Any, _types: Sequence[type], args: tuple[Any, ...], kwargs: Any) -> Any:
        moved = _move(args[0], kwargs, dtype_attribute)
        return return_and_correct_aliasing(func, args, kwargs, moved)

    @cls.implements(aten.clone.default)
    def _(func: Any, _types: Sequence[type], args: tuple[Any, ...], kwargs: Any) -> Any:
        memory_format = kwargs.get("memory_format")
        _require_memory_format(args[0], memory_format)
        copy = rebuild(args[0], lambda inner: inner.clone(memory_format=_inner(memory_format)))
        return return_and_correct_aliasing(func, args, kwargs, copy)

    @cls.implements_torch_function(torch.Tensor.contiguous)
    def _(_func: Any, _types: Sequence[type], args: tuple[Any, ...], kwargs: Any) -> Any:
        weight, *rest = args
        return _contiguous(weight, rest[0] if rest else kwargs.get("memory_format"))

    @cls.implements(aten.contiguous.default)
    def _(_func: Any, _types: Sequence[type], args: tuple[Any, ...], kwargs: Any) -> Any:
        return _contiguous(args[0], kwargs.get("memory_format"))


def _split_copy(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, tuple[Any, ...], dict[str, Any]]:
    """Take ``copy`` out of the arguments of ``Tensor.to``, keyword or positional.

    The positional flags are ``non_blocking, copy``, after a dtype, device or tensor.
    """
    kwargs = dict(kwargs)
    copy = bool(kwargs.pop("copy", False))
    flags = [index for index, value in enumerate(args) if isinstance(value, bool)]
    if len(flags) == 2:
        copy = args[flags[1]]
        args = args[: flags[1]]
    return copy, args, kwargs


def _move(weight: Any, kwargs: dict[str, Any], dtype_attribute: str) -> Any:
    unknown = sorted(set(kwargs) - _TO_COPY_KEYWORDS)
    if unknown or kwargs.get("pin_memory"):
        raise NotImplementedError(
            f"{type(weight).__name__}.to does not support {unknown or ['pin_memory']}"
        )
    dtype = kwargs.get("dtype") or weight.dtype
    if dtype not in _DTYPES:
        raise TypeError(
            f"logical dtype of {type(weight).__name__} must be float16, bfloat16 or float32, "
            f"got {dtype}; use dequantize() for other dtypes"
        )
    if kwargs.get("layout") not in (None, torch.strided):
        raise NotImplementedError(
            f"{type(weight).__name__} supports strided layout only, got {kwargs['layout']}"
        )
    _require_memory_format(weight, kwargs.get("memory_format"))
    device = kwargs.get("device")
    non_blocking = kwargs.get("non_blocking") or False

    def move(inner: Tensor) -> Tensor:
        return inner if device is None else inner.to(device, non_blocking=non_blocking)

    return rebuild(weight, move, **{dtype_attribute: dtype})


def _contiguous(weight: Any, memory_format: torch.memory_format | None) -> Any:
    _require_memory_format(weight, memory_format or torch.contiguous_format)
    return rebuild(weight, lambda inner: inner.contiguous())


def _require_memory_format(weight: Any, memory_format: torch.memory_format | None) -> None:
    if memory_format in (None, torch.preserve_format):
        return
    if weight.transposed:
        raise NotImplementedError(
            f"a transposed {type(weight).__name__} keeps its layout; {memory_format} is not "
            "supported, transpose it back with .t() first"
        )
    if memory_format != torch.contiguous_format:
        raise NotImplementedError(
            f"{type(weight).__name__} supports contiguous_format only, got {memory_format}"
        )


def _inner(memory_format: torch.memory_format | None) -> torch.memory_format:
    return torch.preserve_format if memory_format is None else memory_format
