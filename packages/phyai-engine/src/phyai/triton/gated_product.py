"""Launches the product with a gated activation for Hopper; see `gated_product_kernel`.

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

from phyai.triton.gated_product_kernel import GELU_TANH, SILU, gated_product_kernel
from phyai.triton.rows import flat_rows

BLOCK_M, BLOCK_H, BLOCK_K = 128, 128, 64
STAGES = 4
NUM_WARPS = 8
COPY_REGISTERS = 24
KINDS = {"gelu_tanh": GELU_TANH.value, "silu": SILU.value}
MOST_GROUPED = 16
"""Row tiles whose rows stay in the second-level cache while column tiles pass."""
_ALIGNMENT = 16


def gated_product(x: Tensor, weight: Tensor, kind: str) -> Tensor:
    """Returns ``act(x Wgᵀ) * (x Wuᵀ)`` [..., H] in bf16, summed and activated in fp32.

    The first of ``2 H`` rows of the weight are the gate's. The host waits for nothing, so that a
    CUDA graph may hold the launch; it keeps the addresses of ``x`` and ``weight``.

    Args:
        x: bf16 [..., K] on a Hopper GPU, K a multiple of 64.
        weight: bf16 [2 H, K], contiguous, H a multiple of 128.
        kind: ``gelu_tanh`` or ``silu``.

    Raises:
        ValueError: for other dtypes, sizes, activations, or a weight that TMA cannot read.
    """
    _check(x, weight, kind)
    rows = _readable(flat_rows(x))
    hidden = weight.shape[0] // 2
    out = torch.empty((*x.shape[:-1], hidden), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    count, depth = rows.shape
    row_tiles = triton.cdiv(count, BLOCK_M)
    units = row_tiles * (hidden // BLOCK_H)
    with torch.cuda.device(x.device):
        gated_product_kernel[(min(units, _processors(x.device)),)](
            _descriptor(rows.data_ptr(), count, depth, rows.stride(0), BLOCK_M),
            _descriptor(weight.data_ptr(), 2 * hidden, depth, depth, BLOCK_H),
            out,
            count,
            hidden,
            depth,
            group_size(row_tiles),
            STAGES=STAGES,
            KIND=KINDS[kind],
            STORE=store_layout(),
            COPY_REGISTERS=COPY_REGISTERS,
            num_warps=NUM_WARPS,
        )
    return out


def group_size(row_tiles: int) -> int:
    """Returns how many row tiles share a column tile before the next: groups of about one size."""
    return triton.cdiv(row_tiles, triton.cdiv(row_tiles, MOST_GROUPED))


@cache
def operand_layout(rows: int) -> gl.NVMMASharedLayout:
    """Returns the shared-memory layout of a tile of ``rows`` rows."""
    return gl.NVMMASharedLayout.get_default_for([rows, BLOCK_K], gl.bfloat16)


@cache
def store_layout() -> gl.DistributedLinearLayout:
    """Returns a layout of a tile of outputs whose threads hold 8 columns side by side.

    A warp has the rows that it has in the layout of the accumulators.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[BLOCK_M, BLOCK_H],
    )


def _check(x: Tensor, weight: Tensor, kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"activation is {kind!r}; allowed: {', '.join(KINDS)}")
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype != torch.bfloat16:
            raise ValueError(f"{name} is {tensor.dtype}; the kernel takes torch.bfloat16")
    depth = x.shape[-1]
    if weight.ndim != 2 or weight.shape[1] != depth:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; x needs (2 * H, {depth})")
    if weight.shape[0] % (2 * BLOCK_H) or depth % BLOCK_K:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; its rows must be a multiple of "
            f"{2 * BLOCK_H}, its columns of {BLOCK_K}"
        )
    if not weight.is_contiguous() or weight.data_ptr() % _ALIGNMENT:
        raise ValueError(
            f"weight has strides {weight.stride()} and starts at {weight.data_ptr():#x}; TMA needs "
            f"contiguous rows at a multiple of {_ALIGNMENT} bytes: clone it"
        )


def _readable(rows: Tensor) -> Tensor:
    """Returns ``rows`` as TMA can read them: aligned, and no row inside another."""
    stride = rows.stride(0)
    step = stride * rows.element_size()
    if (rows.data_ptr() | step) % _ALIGNMENT == 0 and stride >= rows.shape[1]:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class _Address:
    """Memory of bf16 values, as far as a descriptor asks for it; it keeps nothing alive."""

    start: int
    dtype: torch.dtype = torch.bfloat16

    def data_ptr(self) -> int:
        """Returns where the memory starts."""
        return self.start


@lru_cache(maxsize=4096)
def _descriptor(start: int, rows: int, depth: int, stride: int, block: int) -> TensorDescriptor:
    """Returns the TMA description of bf16 ``[rows, depth]`` at an address, read in tiles."""
    tile = [block, BLOCK_K]
    return TensorDescriptor(
        _Address(start), [rows, depth], [stride, 1], tile, operand_layout(block)
    )
