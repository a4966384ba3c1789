"""Partitions of quantized weights for tensor parallelism.

Packed data and scales are copied; nothing is requantized.
"""

import torch
from torch import Tensor

from piper_kernels.weights._rebuild import rebuild_named
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor
from piper_kernels.weights.nvfp4._layout import (
    BLOCK_SIZE,
    QDATA_BLOCK_SIZE,
    swizzle_scale,
    unswizzle_scale,
)
from piper_kernels.weights.nvfp4._storage import require_decodable


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
    if not isinstance(weight, ConvRotInt8Tensor | PiperNVFP4Tensor):
        raise TypeError(
            "shard_quantized_weight requires a Piper quantized weight (ConvRotInt8Tensor, "
            f"PiperNVFP4Tensor or ConvRotNVFP4Tensor), got {type(weight).__name__}"
        )
    axis = _validate_interval(weight, dim, start, length)
    is_nvfp4 = isinstance(weight, PiperNVFP4Tensor)
    if axis == 1:
        group_size = getattr(weight, "group_size", 1)
        _require_alignment(weight, start, length, "rotation group size", group_size)
        _require_alignment(weight, start, length, "block size", BLOCK_SIZE if is_nvfp4 else 1)
    _require_contiguous(weight)
    if is_nvfp4:
        return _shard_nvfp4(weight, axis, start, length)
    return _shard_int8(weight, axis, start, length)


def _shard_int8[W: Tensor](weight: W, axis: int, start: int, length: int) -> W:
    def cut(name: str, inner: Tensor) -> Tensor:
        # A scale belongs to a row: input channels share it.
        if name == "qdata" or (name == "scale" and axis == 0):
            return inner.narrow(axis, start, length).clone()
        return inner.clone()

    return rebuild_named(weight, cut)


def _shard_nvfp4[W: PiperNVFP4Tensor](weight: W, axis: int, start: int, length: int) -> W:
    _require_standard_nvfp4(weight)
    rows, blocks = weight.shape[0], weight.shape[1] // BLOCK_SIZE
    step, bytes_per_step = (1, 1) if axis == 0 else (BLOCK_SIZE, QDATA_BLOCK_SIZE)
    first, count = start // step, length // step

    def cut(name: str, inner: Tensor) -> Tensor:
        if name == "qdata":
            return inner.narrow(axis, first * bytes_per_step, count * bytes_per_step).clone()
        if name != "scale":
            return inner.clone()
        # Bytes: float8 has few operators. A cut may fall inside a tile of 128 rows.
        scale = inner.view(torch.uint8)
        if weight.is_swizzled_scales:
            plain = unswizzle_scale(scale, rows, blocks).narrow(axis, first, count)
            return swizzle_scale(plain).view(inner.dtype)
        return scale.view(rows, blocks).narrow(axis, first, count).clone().view(inner.dtype)

    return rebuild_named(weight, cut)


def _require_standard_nvfp4(weight: PiperNVFP4Tensor) -> None:
    if weight.block_size != BLOCK_SIZE:
        raise NotImplementedError(
            f"NVFP4 shards need block size {BLOCK_SIZE}, got {weight.block_size}"
        )
    for name in ("per_tensor_scale", "act_per_tensor_scale"):
        scale = getattr(weight, name)
        if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
            raise NotImplementedError(
                f"NVFP4 shards need a scalar FP32 {name}, got {scale.dtype} of shape "
                f"{tuple(scale.shape)}"
            )
    require_decodable(weight)


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


def _require_alignment(weight: Tensor, start: int, length: int, name: str, size: int) -> None:
    if start % size or length % size:
        raise ValueError(
            f"input-channel shards of a {type(weight).__name__} must align to {name} {size}, "
            f"got start={start}, length={length}"
        )


def _require_contiguous(weight: Tensor) -> None:
    names, _ = weight.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    for name in names:
        if not getattr(weight, name).is_contiguous():
            raise NotImplementedError(
                f"shards need contiguous storage, got {name} with strides "
                f"{tuple(getattr(weight, name).stride())}"
            )
