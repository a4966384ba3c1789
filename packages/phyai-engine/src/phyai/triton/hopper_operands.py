"""Operands, tiles and layouts of the bf16 products for Hopper, on the host.

Importing needs a Triton with Gluon's Hopper API.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCK_M, BLOCK_K = 128, 64
NUM_WARPS = 8
COPY_REGISTERS = 24
"""Registers of a thread of the warp that copies; the others share the rest."""
MOST_GROUPED = 16
"""Row tiles whose rows stay in the second-level cache while column tiles pass."""
_ALIGNMENT = 16


def check_operands(x: Tensor, weight: Tensor) -> None:
    """Refuses operands that the products cannot take, by metadata only.

    Args:
        x: [..., K].
        weight: [N, K].

    Raises:
        ValueError: unless both are bf16, K is theirs, and TMA can read the weight.
    """
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype != torch.bfloat16:
            raise ValueError(f"{name} is {tensor.dtype}; the kernel takes torch.bfloat16")
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; x needs (N, {x.shape[-1]})")
    if not weight.is_contiguous() or (weight.data_ptr() | 2 * weight.shape[1]) % _ALIGNMENT:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, strides {weight.stride()} and starts at "
            f"{weight.data_ptr():#x}; TMA needs contiguous rows at multiples of {_ALIGNMENT} "
            "bytes: clone it, or choose another row"
        )


def readable(rows: Tensor) -> Tensor:
    """Returns ``rows`` [M, K] as TMA can read them: aligned, and no row inside another."""
    stride = rows.stride(0)
    if (rows.data_ptr() | 2 * stride) % _ALIGNMENT == 0 and stride >= rows.shape[1]:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def group_size(row_tiles: int) -> int:
    """Returns how many row tiles share a column tile before the next: groups of about one size."""
    return triton.cdiv(row_tiles, triton.cdiv(row_tiles, MOST_GROUPED))


@cache
def processors(device: torch.device) -> int:
    """Returns the number of multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def operand_layout(rows: int) -> gl.NVMMASharedLayout:
    """Returns the shared-memory layout of a tile of ``rows`` rows."""
    return gl.NVMMASharedLayout.get_default_for([rows, BLOCK_K], gl.bfloat16)


@cache
def store_layout(columns: int) -> gl.DistributedLinearLayout:
    """Returns a layout of ``[BLOCK_M, columns]`` whose threads hold 8 columns side by side.

    A warp has the rows that it has in the layout of the accumulators.
    """
    further = [[0, 1 << bit] for bit in range(5, columns.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *further],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[BLOCK_M, columns],
    )


@dataclass(frozen=True)
class Address:
    """Memory of bf16 values, as far as a descriptor asks for it; it keeps nothing alive."""

    start: int
    dtype: torch.dtype = torch.bfloat16

    def data_ptr(self) -> int:
        """Returns where the memory starts."""
        return self.start


def descriptor(rows: Tensor, block: int) -> TensorDescriptor:
    """Returns the TMA description of bf16 ``rows`` [M, K], read in tiles of ``block`` rows."""
    return _descriptor(rows.data_ptr(), *rows.shape, rows.stride(0), block)


@lru_cache(maxsize=4096)
def _descriptor(start: int, rows: int, depth: int, stride: int, block: int) -> TensorDescriptor:
    tile = [block, BLOCK_K]
    return TensorDescriptor(Address(start), [rows, depth], [stride, 1], tile, operand_layout(block))
