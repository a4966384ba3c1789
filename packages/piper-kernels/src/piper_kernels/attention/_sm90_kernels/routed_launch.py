"""Launcher of routed attention on Hopper. Importing needs a Triton with Gluon."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from piper_kernels._triton.launching import Launcher, launch_key
from piper_kernels._triton.runtime import launch_guard
from piper_kernels.attention._sm90_kernels.launch import descriptor
from piper_kernels.attention._sm90_kernels.routed import routed_attention_kernel
from piper_kernels.attention._sm90_kernels.sum_kernels import tile_sum_kernel
from piper_kernels.attention.sparse_piper_attention._preparation import PreparedOperands

_attend = Launcher(routed_attention_kernel)

TILE = 64
WARPS = 4
STAGES = {64: 6, 128: 3}
COPY_REGISTERS = 24
# Two programs of eight warps, the copying one counted as four, share 65,536 registers.
MAX_REGISTERS = 128


@dataclass(frozen=True)
class Routes:
    """The key tiles of query blocks.

    Attributes:
        routes: uint16 ``[B, blocks, R]``, ascending for every head; ``None`` where no query block
            has a route and all attend to every tile.
        table: int32 ``[2 * Hq + 1]``: kept tiles of heads, then the offsets of their routes.
        tiles: Leading tiles that routes select from.
    """

    routes: Tensor | None
    table: Tensor | None
    tiles: int


@dataclass(frozen=True)
class CoarseBranch:
    """What is added to the attention in FP32.

    Attributes:
        output: FP32 ``[B, Hq, tiles, D]``, contiguous.
        gate: Floating ``[B, rows, Hq, D]``.
    """

    output: Tensor
    gate: Tensor


def tile_sums(codes: Tensor) -> Tensor:
    """Return 128 times the sums of value codes ``[B, H, D, R]``, int32 ``[B, H, R / 64, D]``."""
    batch, heads, head_dim, rows = codes.shape
    tiles = rows // TILE
    sums = torch.empty((batch, heads, tiles, head_dim), dtype=torch.int32, device=codes.device)
    with launch_guard(codes.device):
        tile_sum_kernel[(tiles, batch * heads)](codes, sums, tiles, D=head_dim)
    return sums


@cache
def permuted_layout(head_dim: int) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a tile of keys with the dimensions of its permutation."""
    return gl.NVMMASharedLayout.get_default_for([4, 2, 4, 2, head_dim], gl.int8)


@cache
def store_layout(head_dim: int) -> gl.DistributedLinearLayout:
    """Return a layout of 64 rows whose threads hold 8 features side by side.

    A warp has the rows that it has in the layout of the accumulators, so a conversion between
    the two exchanges values within groups of four threads only.
    """
    columns = [[0, size] for size in (32, 64) if size < head_dim]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *columns],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[TILE, head_dim],
    )


def _permuted_keys(key: Tensor) -> TensorDescriptor:
    """Return the descriptor of tiles of keys in the order that fits values in natural order.

    Column ``16 h + 8 a + 2 t + b`` of the scores belongs to the probability at slot
    ``16 h + 4 t + 2 a + b`` of the operand of the next product.
    """
    head_dim = key.shape[3]
    block = [4, 2, 4, 2, head_dim]
    shape = [key.numel() // (16 * head_dim), 2, 4, 2, head_dim]
    strides = [16 * head_dim, 2 * head_dim, 4 * head_dim, head_dim, 1]
    return TensorDescriptor(key, shape, strides, block, permuted_layout(head_dim))


def _tensors(
    o: PreparedOperands,
    value_sums: Tensor,
    routes: Routes,
    block_lengths: Tensor | None,
    coarse: CoarseBranch | None,
    out: Tensor,
) -> tuple[Tensor, ...]:
    """Return the tensors of the kernel in its order.

    Stand-ins of what there is not are not read, except the counts of routes that are not used.
    """
    floats, words = o.query_scale, value_sums
    return (
        o.query_scale, o.key_scale, o.value_multiplier, value_sums, o.value_mean,
        words if block_lengths is None else block_lengths,
        floats if coarse is None else coarse.output,
        floats if coarse is None else coarse.gate, out,
        words if routes.routes is None else routes.routes,
        words if routes.table is None else routes.table,
    )  # fmt: skip


def attend(
    operands: PreparedOperands,
    value_sums: Tensor,
    routes: Routes,
    rows: int,
    block_lengths: Tensor | None,
    dtype: torch.dtype,
    *,
    coarse: CoarseBranch | None = None,
    first_block: int = 0,
    blocks: int | None = None,
    query_rows: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return routed attention of a range of query blocks, contiguous ``[B, rows, Hq, D]``.

    Args:
        operands: Contiguous codes and scales; the queries may be others than the keys.
        value_sums: Result of :func:`tile_sums` for their values.
        routes: Of the leading query blocks.
        rows: Keys that exist, or all of them with ``block_lengths``.
        block_lengths: int32 ``[tiles]``, rows that exist at the front of tiles; ``None``: all.
        dtype: Of the result.
        coarse: What is added; ``None``: nothing.
        first_block: First query block of the range.
        blocks: Query blocks of the range; ``None``: all that follow.
        query_rows: Queries; ``None``: as many as ``rows``.
        out: Contiguous room for the result; ``None``: it is allocated.
    """
    o = operands
    batch, heads, stored_queries, head_dim = o.query.shape
    query_tiles, stored = stored_queries // TILE, o.key.shape[2]
    query_rows = rows if query_rows is None else query_rows
    blocks = query_tiles - first_block if blocks is None else blocks
    stored_rows = min(query_rows, (first_block + blocks) * TILE) - first_block * TILE
    if out is None:
        out = o.query_scale.new_empty((batch, stored_rows, heads, head_dim), dtype=dtype)
    if out.numel() == 0:
        return out
    descriptors = (
        descriptor(o.query.view(-1, head_dim), TILE, head_dim),
        _permuted_keys(o.key),
        descriptor(o.value.view(-1, stored), head_dim, TILE),
    )
    tensors = _tensors(o, value_sums, routes, block_lengths, coarse, out)
    gate = o.query_scale if coarse is None else coarse.gate
    routed, each = (0, 0) if routes.routes is None else routes.routes.shape[1:]
    numbers = (
        first_block, blocks, stored // TILE, heads, heads // o.key.shape[1], routed, routes.tiles,
        each, rows, query_tiles, query_rows, *gate.stride()[:3],
    )  # fmt: skip
    flags = (block_lengths is not None, coarse is not None)
    key = launch_key(tensors, head_dim, tuple(n >> 31 for n in numbers), flags)
    constants = (STAGES[head_dim], store_layout(head_dim), COPY_REGISTERS)
    with launch_guard(out.device):
        _attend(
            batch * heads * blocks,
            (*descriptors, *tensors, *numbers, *flags, *constants),
            {"num_warps": WARPS, "maxnreg": MAX_REGISTERS},
            key,
        )
    return out
