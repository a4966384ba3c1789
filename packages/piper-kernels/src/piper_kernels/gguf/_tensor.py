"""Views of packed GGUF data as bytes."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from piper_kernels.gguf._types import logical_shape, packed_row_size, resolve_quant_type


def as_bytes(data: Tensor) -> Tensor:
    """Return packed data of any dtype as contiguous uint8 ``[..., row_bytes]``.

    Contiguous storage is reinterpreted without a copy.

    Raises:
        TypeError: ``data`` is not a tensor.
        ValueError: ``data`` is a scalar or its layout is not strided.
    """
    if not isinstance(data, Tensor):
        raise TypeError(f"packed GGUF data must be a tensor, got {type(data).__name__}")
    if data.layout != torch.strided:
        raise ValueError(f"packed GGUF data must use strided layout, got {data.layout}")
    if data.ndim == 0:
        raise ValueError("packed GGUF data must have at least one axis, got a scalar")
    # A view of a tensor subclass that carries quant_type would run its own dispatch.
    plain = data.detach().as_subclass(Tensor)
    return plain.contiguous().view(torch.uint8)


def reshape_packed(data: Tensor, quant_type: int | None, shape: Sequence[int]) -> Tensor:
    """Give packed data the rows of another logical shape, without decoding it.

    Files whose writer flattened or folded a tensor record its real shape beside it, for
    example under ``comfy.gguf.orig_shape.<name>``. The values are stored row after row, so
    the bytes only need to be cut into other rows.

    Args:
        data: Packed data ``[..., row_bytes]`` of any dtype.
        quant_type: Type of the data; ``None`` reads ``data.quant_type``.
        shape: Logical shape of the result.

    Returns:
        uint8 ``[..., row_bytes]`` with the leading axes of ``shape``; a view where ``data`` is
        contiguous.

    Raises:
        TypeError: The type is missing or not an integer.
        ValueError: The element counts differ, or the new rows would split a block; then
            ``dequantize`` with ``shape`` decodes the data anyway.
    """
    kind = resolve_quant_type(quant_type, data)
    raw = as_bytes(data)
    stored = logical_shape(raw.shape, kind)
    require_same_elements(stored, shape, kind.name)
    return raw.view(*shape[:-1], packed_row_size(shape[-1], kind))


def require_same_elements(stored: Sequence[int], shape: Sequence[int], type_name: str) -> None:
    """Raise ``ValueError`` unless two logical shapes hold equally many elements."""
    if not shape or min(shape) < 0 or math.prod(shape) != math.prod(stored):
        raise ValueError(
            f"original shape {tuple(shape)} holds {math.prod(shape)} elements, but the packed "
            f"{type_name} data holds {math.prod(stored)} with shape {tuple(stored)}"
        )
