"""What the conversions of packed GGUF rows to rotated formats share."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from piper_kernels.gguf import GGUFQuantizationType, dequantize, logical_shape
from piper_kernels.gguf._tensor import as_bytes
from piper_kernels.gguf._types import resolve_quant_type
from piper_kernels.weights.convrot._rotation import (
    require_divisible,
    require_group_size,
    rotate_groups,
)

CPU_BLOCK_BYTES = 64 << 20
CPU_BYTES_PER_VALUE = 32
"""Upper bound of what decoding, rotating and encoding hold at once for a value."""


@dataclass(frozen=True)
class PackedRows:
    """Packed data whose metadata was checked.

    Attributes:
        data: uint8 ``[rows, row_bytes]``, contiguous.
        kind: Type of the blocks.
        rows: Logical rows.
        features: Logical columns.
    """

    data: Tensor
    kind: GGUFQuantizationType
    rows: int
    features: int

    def aligned_data(self) -> Tensor:
        """Return the bytes as kernels read them; data cut at an odd address is copied."""
        word = 4 if self.kind == GGUFQuantizationType.F32 else 2
        return self.data.clone() if self.data.data_ptr() % word else self.data

    def rotated_blocks(self, group_size: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield row slices and their decoded, rotated FP32 values on the CPU.

        Blocks are sized so that the caller may hold ``CPU_BYTES_PER_VALUE`` bytes per value
        within ``CPU_BLOCK_BYTES``; a single row is never split.
        """
        step = max(1, CPU_BLOCK_BYTES // (CPU_BYTES_PER_VALUE * max(1, self.features)))
        for first in range(0, self.rows, step):
            block = slice(first, min(first + step, self.rows))
            values = dequantize(self.data[block].cpu(), self.kind)
            yield block, rotate_groups(values, group_size)


def packed_rows(data: Tensor, quant_type: int | None, group_size: int) -> PackedRows:
    """Check packed data and its type.

    Raises:
        TypeError: ``data`` is no tensor, or the type is missing or not an integer.
        ValueError: The data is not 2-D or on meta, the type is not supported, or blocks or
            rotation groups do not divide the rows.
    """
    require_group_size(group_size)
    kind = resolve_quant_type(quant_type, data)
    raw = as_bytes(data)
    if raw.ndim != 2:
        raise ValueError(
            f"packed GGUF weights must be 2-D [rows, row_bytes], got shape {tuple(raw.shape)}; "
            "reshape_packed folds other axes"
        )
    if raw.device.type == "meta":
        raise ValueError("cannot convert packed GGUF data on the meta device")
    rows, features = logical_shape(raw.shape, kind)
    require_divisible(features, group_size)
    return PackedRows(raw, kind, rows, features)


def require_output(packed: PackedRows, shape: torch.Size, device: torch.device) -> None:
    """Raise ``ValueError`` unless packed rows fit an existing weight."""
    if tuple(shape) != (packed.rows, packed.features) or device != packed.data.device:
        raise ValueError(
            f"output storage is incompatible: the packed {packed.kind.name} data holds "
            f"{[packed.rows, packed.features]} on {packed.data.device}, "
            f"the weight is {list(shape)} on {device}"
        )


def mark_written(*tensors: Tensor) -> None:
    """Count a write that a kernel made behind the back of autograd."""
    tracked = [tensor for tensor in tensors if not tensor.is_inference()]
    torch.autograd.graph.increment_version(tracked)
