"""Inputs of measurements: made from facts or offered by a running model, and copied in sets."""

import copy
import math
from collections.abc import Iterator, Mapping
from contextvars import ContextVar, Token
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNMENT = 256
_MOST_CLONES = 32


class BenchInputs:
    """Arguments of one call.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
    """

    __slots__ = ("args", "kwargs")

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
        self.args: tuple[Any, ...] = args
        self.kwargs: dict[str, Any] = dict(kwargs or {})


_LIVE: ContextVar[tuple[str, BenchInputs] | None] = ContextVar("phyai_live_inputs", default=None)


class live_inputs:  # noqa: N801  # used as a statement, like contextlib's
    """Offers the arguments of the call that is being selected for, so that it can be measured.

    Operations that read the state of a running model, such as attention with its cache and plan,
    cannot be measured on inputs made from facts. A layer selects inside this context:

        with live_inputs("attention_paged", query, keys, values, plan, scale=scale):
            selection = site.select(...)

    Measurements copy tensors; other arguments, such as plans, are used as they are.

    Args:
        op: operation name.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """

    __slots__ = ("_offer", "_token")

    def __init__(self, op: str, /, *args: Any, **kwargs: Any) -> None:
        self._offer = (op, BenchInputs(args, kwargs))
        self._token: Token[Any] | None = None

    def __enter__(self) -> None:
        self._token = _LIVE.set(self._offer)

    def __exit__(self, *error: object) -> None:
        if self._token is not None:
            _LIVE.reset(self._token)


def offered_inputs(op: str) -> BenchInputs | None:
    """Returns the arguments that the running model offers for an operation, or None."""
    offer = _LIVE.get()
    return offer[1] if offer is not None and offer[0] == op else None


class InputSets:
    """Copies of one call's arguments, handed out in turn.

    The originals are never handed out, so a row that works in place cannot damage a model. There
    are as many copies as exceed the cache, and they are restored before they are used again.
    Tensors keep their strides and alignment. Layers are copied with the tensors they hold.

    Args:
        inputs: the arguments.
        cache_bytes: size that all copies together must exceed.
    """

    def __init__(self, inputs: BenchInputs, cache_bytes: int) -> None:
        values = [*inputs.args, *inputs.kwargs.values()]
        self._names = tuple(inputs.kwargs)
        self._positional = len(inputs.args)
        self.bytes_per_set: int = sum(
            _span(t) * t.element_size() for v in values for t in _tensors(v)
        )
        self.count: int = 1
        if self.bytes_per_set:
            self.count = max(1, math.ceil(cache_bytes / self.bytes_per_set) + 1)
            if self.bytes_per_set > cache_bytes:
                self.count = 1
        self._makers = [_maker(value, self.count) for value in values]
        self._used = 0

    def next(self) -> BenchInputs:
        """Returns the set that was used longest ago."""
        index = self._used % self.count
        if index == 0 and self._used:
            for maker in self._makers:
                maker.restore()
        self._used += 1
        made = [maker.get(index) for maker in self._makers]
        keywords = dict(zip(self._names, made[self._positional :], strict=True))
        return BenchInputs(tuple(made[: self._positional]), keywords)


def _tensors(value: Any) -> Iterator["Tensor"]:
    """Yields the tensors of an argument: itself, or those that a layer holds."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
        return
    for held in _held(value):
        for tensor in held.values():
            if isinstance(tensor, torch.Tensor):
                yield tensor


def _held(value: Any) -> list[dict[str, Any]]:
    """Returns the dicts of a layer that may hold tensors; none for anything else."""
    import torch

    if isinstance(value, torch.nn.Module):
        return [vars(value), value._parameters, value._buffers]
    return [vars(value)] if isinstance(value, SimpleNamespace) else []


def _span(tensor: "Tensor") -> int:
    """Returns how many elements lie between the first and the last, both counted."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _maker(value: Any, count: int) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        plain = type(value.detach()) is torch.Tensor and value.layout is torch.strided
        return _Slab(value, count) if plain else _Clones(value, count)
    return _Layers(value, count) if any(True for _ in _tensors(value)) else _Constant(value)


class _Constant:
    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self, index: int) -> Any:  # noqa: ARG002
        return self._value

    def restore(self) -> None:
        """Does nothing."""


class _Slab:
    """Copies of a strided tensor in one buffer, each at an aligned address."""

    def __init__(self, tensor: "Tensor", count: int) -> None:
        import torch

        self._shape, self._stride = tensor.shape, tensor.stride()
        self._span = _span(tensor)
        self._source = tensor.detach().as_strided((self._span,), (1,))
        width = self._span * tensor.element_size()
        self._step = -(-width // _ALIGNMENT) * _ALIGNMENT // tensor.element_size()
        self._buffer = torch.empty(count, self._step, dtype=tensor.dtype, device=tensor.device)
        self.restore()

    def get(self, index: int) -> "Tensor":
        return self._buffer.as_strided(self._shape, self._stride, index * self._step)

    def restore(self) -> None:
        self._buffer[:, : self._span] = self._source


class _Clones:
    """Copies of a tensor of a class of its own."""

    def __init__(self, tensor: "Tensor", count: int) -> None:
        self._source = tensor.detach()
        self._count = min(count, _MOST_CLONES)
        self.restore()

    def get(self, index: int) -> "Tensor":
        return self._copies[index % self._count]

    def restore(self) -> None:
        self._copies = [self._source.clone() for _ in range(self._count)]


class _Layers:
    """Shallow copies of a layer with tensors of their own."""

    def __init__(self, layer: Any, count: int) -> None:
        import torch

        self._layer = layer
        self._makers = [
            {
                name: _maker(tensor, count)
                for name, tensor in held.items()
                if isinstance(tensor, torch.Tensor)
            }
            for held in _held(layer)
        ]

    def get(self, index: int) -> Any:
        made = copy.copy(self._layer)
        if len(self._makers) > 1:
            vars(made)["_parameters"] = dict(self._layer._parameters)
            vars(made)["_buffers"] = dict(self._layer._buffers)
        for held, makers in zip(_held(made), self._makers, strict=True):
            held.update({name: maker.get(index) for name, maker in makers.items()})
        return made

    def restore(self) -> None:
        for makers in self._makers:
            for maker in makers.values():
                maker.restore()
