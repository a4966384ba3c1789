"""Launches all layers of an adaptive decoder as one kernel; see `phyai.triton.persistent_kernel`.

Importing needs a Triton with Gluon's Hopper API.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from phyai.triton.hopper_operands import processors
from phyai.triton.persistent_attention import CHUNK
from phyai.triton.persistent_entry import enter_kernel
from phyai.triton.persistent_kernel import decoder_kernel
from phyai.triton.persistent_stream import NARROW, PHASES
from phyai.triton.persistent_tiles import BLOCK_M

if TYPE_CHECKING:
    from phyai.runtime.segments import SegmentPlan

MOST_SPLITS, LEAST_PART = 4, 512
"""Parts of the output and the down product, and the columns of one: every multiprocessor has one.

Triton 3.6 does not compile parts of a single step.
"""
PRODUCER_REGISTERS = 64


@dataclass(frozen=True)
class Layers:
    """What the layers of a body are, for one time.

    Attributes:
        addresses: int64 [layers, 4] on the device, of the weights of qkv [(heads + 2) * dim,
            width], out [width, heads * dim], gate/up [2 * mlp, width] and down [width, mlp],
            contiguous bf16; whoever holds this keeps them.
        constants: fp32 [layers, ...], see `decoder_kernel`.
        first_scale: fp32 [width] of the first norm.
        width: of the residual.
        mlp: of the hidden rows.
        heads: query heads; there is one key head.
        dim: of a head.
        eps: of the norms.
        scale: of the scores.
    """

    addresses: Tensor
    constants: Tensor
    first_scale: Tensor
    width: int
    mlp: int
    heads: int
    dim: int
    eps: float
    scale: float


def layer_constants(
    shifted: tuple[Tensor, Tensor], attention: Tensor, mlp: Tensor, following: Tensor
) -> Tensor:
    """Returns what a layer reads beside its weights, in fp32.

    Args:
        shifted: the shifts of both norms times the weights behind them.
        attention: scale, shift and gate [3 * width] of the first norm.
        mlp: likewise of the second.
        following: scale [width] of the next layer's first norm, or of the final norm.
    """
    width = following.shape[0]
    parts = (*shifted, attention[2 * width :], mlp[:width], mlp[2 * width :], following)
    return torch.cat([part.float() for part in parts])


def splits_of(depth: int) -> int:
    """Returns how many programs share a product of ``depth`` columns."""
    return min(MOST_SPLITS, depth // LEAST_PART)


def _enter(first_scale: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns what the first phase reads, of contiguous ``x``, and the counters at zero.

    Returns:
        The residual, the residual times one plus scale, the sums of squares and the counters; see
        `decoder_kernel`.
    """
    rows, width = x.shape
    columns = width // NARROW.value
    count = triton.next_power_of_2(1 + columns)
    residual, scaled = torch.empty_like(x), torch.empty_like(x)
    squares = torch.empty((rows, columns), dtype=torch.float32, device=x.device)
    counters = torch.empty(count, dtype=torch.int32, device=x.device)
    enter_kernel[(rows,)](
        x, first_scale, residual, scaled, squares, counters, width,
        BLOCK=triton.next_power_of_2(width), PARTS=columns, COUNTERS=count, num_warps=4,
    )  # fmt: skip
    return residual, scaled, squares, counters


def run_layers(
    layers: Layers,
    x: Tensor,
    plan: "SegmentPlan",
    keys: Tensor,
    values: Tensor,
    *,
    rotation: Tensor,
    first_slot: int,
    phases: Iterable[int] | None = None,
) -> Tensor:
    """Returns the residual [T, width] behind all layers.

    Every multiprocessor has one program, and the launch is cooperative: the driver starts it only
    where all its programs fit at once, which their barriers need.

    Args:
        layers: of the body.
        x: bf16 [T, width], T at most 64.
        plan: which rows see which slots.
        keys: [layers, slots, 1, 1, dim], contiguous; the rows' keys are stored.
        values: likewise.
        rotation: fp32 [T, dim], cosines and sines at each row's position.
        first_slot: where the first row's key goes; the others follow.
        phases: numbers of phases, each of which is then a launch of its own; all of them in one
            launch if None.
    """
    rows, width = x.shape
    heads, dim, device = layers.heads, layers.dim, x.device
    tiles = triton.cdiv(plan.most_rows * heads, BLOCK_M.value)
    splits = triton.cdiv(plan.most_keys, CHUNK.value)

    def rows_of(*shape: int, dtype: torch.dtype = x.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    residual, scaled, squares, counters = _enter(layers.first_scale, x.contiguous())
    arguments = (
        layers.addresses, layers.constants, rotation, plan.table, residual, scaled, squares,
        rows_of(rows, heads, dim), keys, values, rows_of(splits, rows, heads, dim),
        rows_of(splits, rows, heads, dtype=torch.float32), rows_of(rows, heads, dim),
        rows_of(rows, layers.mlp),
        rows_of(MOST_SPLITS, rows, width, dtype=torch.float32),
        counters, rows, keys.stride(0), first_slot, tiles, splits,
        tiles * splits * plan.table.shape[0],
    )  # fmt: skip
    count = layers.addresses.shape[0] * PHASES.value
    spans = [(0, count)] if phases is None else [(n, n + 1) for n in phases]
    for begin, end in spans:
        decoder_kernel[(processors(device),)](
            *arguments, begin, end, layers.eps, layers.scale,
            WIDTH=width, MLP=layers.mlp, HEADS=heads, DIM=dim,
            OUT_SPLITS=splits_of(heads * dim), DOWN_SPLITS=splits_of(layers.mlp),
            PRODUCER_REGISTERS=PRODUCER_REGISTERS,
            num_warps=4, launch_cooperative_grid=True,
        )  # fmt: skip
    return residual
