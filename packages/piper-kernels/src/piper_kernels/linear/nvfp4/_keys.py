"""Keys of launches; see ``_triton.launching``."""

from collections.abc import Hashable, Sequence

from torch import Tensor

from piper_kernels._triton.launching import are_aligned


def launch_key(tensors: Sequence[Tensor | None], *rest: Hashable) -> tuple[Hashable, ...] | None:
    """Return what tells compiled kernels apart, ``None`` where storage is not aligned.

    Args:
        tensors: All tensors of the launch, at least one of them.
        rest: Numbers that are specialized, constants and options.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    if not are_aligned(*present):
        return None
    dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
    return (present[0].device.index, dtypes, *rest)
