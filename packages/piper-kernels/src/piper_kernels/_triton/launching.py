"""Launches of kernels that were launched with arguments of the same kind before."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

_ALIGNMENT = 16
_LIMIT = 4096


def are_aligned(*tensors: Tensor) -> bool:
    """Return whether all tensors start at a multiple of 16 bytes, for which kernels specialize."""
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    return addresses % _ALIGNMENT == 0


def launch_key(tensors: Sequence[Tensor | None], *rest: Hashable) -> tuple[Hashable, ...] | None:
    """Return the key of a launch, ``None`` where storage is not aligned; see ``Launcher``.

    Args:
        tensors: All tensors of the launch, at least one of them.
        rest: Numbers that are specialized, the types of others, constants and options.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    if not are_aligned(*present):
        return None
    dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
    return (present[0].device.index, dtypes, *rest)


class Launcher:
    """Launches a kernel without Triton's look-up where the caller knows what it compiled.

    Triton finds the compiled kernel of a launch by the types, alignments and constants of all
    arguments, which costs the host more than the launch. A caller that can tell launches apart
    by a small key finds it by that.

    Args:
        kernel: The function under ``triton.jit`` or ``gluon.jit``.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Hashable, Callable[..., Any]] = {}

    def __call__(
        self,
        programs: int,
        arguments: tuple[Any, ...],
        options: Mapping[str, object],
        key: Hashable | None,
    ) -> None:
        """Launch the kernel on the current device and stream.

        Args:
            programs: Size of the grid.
            arguments: Every argument, constants included, in the order of the kernel.
            options: Compiler options.
            key: Differs wherever the device, a type, an alignment, a constant, an option or an
                integer that is specialized differs. ``None`` looks the kernel up.
        """
        compiled = None if key is None else self._compiled.get(key)
        grid = (programs, 1, 1)
        if compiled is not None:
            compiled[grid](*arguments)  # pyright: ignore[reportIndexIssue]
            return
        compiled = self.kernel[grid](*arguments, **options)
        # The interpreter compiles nothing.
        if key is not None and compiled is not None:
            if len(self._compiled) >= _LIMIT:
                self._compiled.clear()
            self._compiled[key] = compiled
