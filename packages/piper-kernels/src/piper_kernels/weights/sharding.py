"""Partitions of quantized weights for tensor parallelism.

Packed data and scales are copied; nothing is requantized.
"""

from torch import Tensor

from piper_kernels.weights._rebuild import rebuild_named
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor


def shard_quantized_weight[W: Tensor](weight: W, *, dim: int, start: int, length: int) -> W:
    """Return rows or input channels ``start : start + length`` of a quantized weight.

    The shard represents exactly that slice of the represented weight. It owns all its
    tensors, global and activation scales included, and keeps class, rotation and every
    other attribute. Works on any device and on shards of shards.

    Args:
        weight: ``ConvRotInt8Tensor``, ``PiperNVFP4Tensor`` or ``ConvRotNVFP4Tensor`` of shape
            ``[out, in]``, not transposed.
        dim: 0 or -2 takes output rows, any interval; 1 or -1 takes input channels, aligned
            to rotation groups and to NVFP4's blocks of 16.
        start: First row or channel.
        length: Number of rows or channels, at least 1.

    Returns:
        A weight of the same class. NVFP4 block scales come back in their canonical 2-D shape,
        in the layout (plain or swizzled) of ``weight``, with fresh zero padding.

    Raises:
        TypeError: ``weight`` is no quantized weight of this package, or ``dim``, ``start`` or
            ``length`` is no ``int``.
        IndexError: ``dim`` is out of range.
        ValueError: The interval is empty, outside of the weight or not aligned.
        NotImplementedError: The weight is transposed, no matrix or not contiguous, or its
            NVFP4 storage has per-expert scales or other blocks than 16 values.
    """
    if isinstance(weight, ConvRotInt8Tensor):
        axis = _validate_interval(weight, dim, start, length)
        _require_alignment(weight, axis, start, length, weight.group_size)
        _require_contiguous(weight)
        return _shard_int8(weight, axis, start, length)
    raise TypeError(
        "shard_quantized_weight requires a Piper quantized weight (ConvRotInt8Tensor, "
        f"PiperNVFP4Tensor or ConvRotNVFP4Tensor), got {type(weight).__name__}"
    )


def _shard_int8[W: Tensor](weight: W, axis: int, start: int, length: int) -> W:
    def cut(name: str, inner: Tensor) -> Tensor:
        # A scale belongs to a row: input channels share it.
        if name == "qdata" or (name == "scale" and axis == 0):
            return inner.narrow(axis, start, length).clone()
        return inner.clone()

    return rebuild_named(weight, cut)


def _validate_interval(weight: Tensor, dim: int, start: int, length: int) -> int:
    for name, value in (("dim", dim), ("start", start), ("length", length)):
        if type(value) is not int:
            raise TypeError(
                f"dim, start and length must be integers, got {name}={value!r} "
                f"({type(value).__name__})"
            )
    kind = type(weight).__name__
    if weight.ndim != 2:
        raise NotImplementedError(
            f"only 2-D weights can be sharded, got a {kind} of shape {tuple(weight.shape)}"
        )
    if getattr(weight, "transposed", False):
        raise NotImplementedError(
            f"a transposed {kind} cannot be sharded; shard weight.t() along the other dimension"
        )
    if not -2 <= dim <= 1:
        raise IndexError(f"shard dimension must be -2, -1, 0 or 1, got {dim}")
    axis = dim % 2
    if start < 0 or length <= 0:
        raise ValueError(
            f"a shard must be a nonempty interval from 0 on, got start={start}, length={length}"
        )
    size = weight.shape[axis]
    if start + length > size:
        raise ValueError(
            f"a shard must lie within dimension {axis} of size {size}, "
            f"got start={start}, length={length}"
        )
    return axis


def _require_alignment(
    weight: Tensor, axis: int, start: int, length: int, group_size: int | None, block: int = 1
) -> None:
    if axis == 0:
        return
    for name, size in (("rotation group size", group_size), ("block size", block)):
        if size and (start % size or length % size):
            raise ValueError(
                f"input-channel shards of a {type(weight).__name__} must align to "
                f"{name} {size}, got start={start}, length={length}"
            )


def _require_contiguous(weight: Tensor) -> None:
    names, _ = weight.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    for name in names:
        if not getattr(weight, name).is_contiguous():
            raise NotImplementedError(
                f"shards need contiguous storage, got {name} with strides "
                f"{tuple(getattr(weight, name).stride())}"
            )
