"""Launches the fused products of an adaptive decoder layer; see `phyai.triton.skinny`."""

# pyright: reportArgumentType=false, reportCallIssue=false

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from phyai.triton.rows import wide_products
from phyai.triton.skinny import GEGLU, ROPE, _consume_kernel, _enter_kernel, _produce_kernel

_BLOCK_M = 64


@dataclass(frozen=True)
class Tiles:
    """How a product is cut.

    Attributes:
        columns: weight rows of one program.
        depth: columns of x and weight in one step of its loop.
        stages: steps that are loaded ahead.
        splits: programs that share the columns of x.
    """

    columns: int
    depth: int
    stages: int
    splits: int = 1


QKV = Tiles(32, 128, 4)
GATE_UP = Tiles(64, 128, 4)
OUT = Tiles(32, 128, 4, 4)
DOWN = Tiles(32, 128, 4, 4)


@dataclass(frozen=True)
class Normed:
    """A residual and what the next norm needs of it.

    Attributes:
        residual: [T, width].
        scaled: [T, width], the residual times one plus the next norm's scale.
        squares: fp32 [tiles, T], sums of the residual's squares over columns.
    """

    residual: Tensor
    scaled: Tensor
    squares: Tensor


def enter(x: Tensor, scale: Tensor) -> Normed:
    """Prepares rows ``x`` [T, width] for a norm with ``scale`` [width] in fp32."""
    rows, width = x.shape
    scaled = torch.empty_like(x)
    squares = torch.empty(1, rows, dtype=torch.float32, device=x.device)
    _enter_kernel[(rows,)](
        x, scale, scaled, squares, width, BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )  # fmt: skip
    return Normed(x, scaled, squares)


def _consume(
    normed: Normed,
    weight: Tensor,
    constant: Tensor,
    out: Tensor,
    tiles: Tiles,
    *,
    form: int,
    half: int,
    eps: float,
    heads: int = 0,
    cache: tuple[Tensor, Tensor] | None = None,
    rotation: Tensor | None = None,
    first_slot: int = 0,
) -> None:
    rows, width = normed.scaled.shape
    parts = normed.squares.shape[0]
    keys, values = (out, out) if cache is None else cache
    grid = (weight.shape[0] // tiles.columns, triton.cdiv(rows, _BLOCK_M))
    _consume_kernel[grid](
        normed.scaled, normed.squares, weight, constant, out, keys, values,
        constant if rotation is None else rotation,
        rows, width, half, parts, heads, first_slot, normed.scaled.stride(0), out.stride(0), eps,
        FORM=form, BLOCK_M=_BLOCK_M, BLOCK_N=tiles.columns, BLOCK_K=tiles.depth,
        TILES=triton.next_power_of_2(parts), WIDE=wide_products(),
        num_warps=4, num_stages=tiles.stages,
    )  # fmt: skip


def norm_qkv(
    normed: Normed,
    weight: Tensor,
    constant: Tensor,
    *,
    heads: int,
    rotation: Tensor,
    keys: Tensor,
    values: Tensor,
    first_slot: int,
    eps: float,
) -> Tensor:
    """Norm, projection and rotation; keys and values go to their slots.

    Args:
        normed: the residual, scaled.
        weight: [(heads + 2) * dim, width]: queries, one key head, one value head.
        constant: fp32, the norm's shift times the weight.
        heads: query heads.
        rotation: fp32 [T, dim], cosines and sines at each row's position.
        keys: [slots, 1, 1, dim], written.
        values: likewise.
        first_slot: where the first row's key goes; the others follow.
        eps: of the norm.

    Returns:
        Rotated queries [T, heads, dim].
    """
    dim = weight.shape[0] // (heads + 2)
    rows = normed.scaled.shape[0]
    out = torch.empty(rows, heads, dim, dtype=weight.dtype, device=weight.device)
    _consume(
        normed, weight, constant, out, QKV, form=ROPE.value, half=dim // 2, eps=eps, heads=heads,
        cache=(keys, values), rotation=rotation, first_slot=first_slot,
    )  # fmt: skip
    return out


def norm_gate_up(normed: Normed, weight: Tensor, constant: Tensor, *, eps: float) -> Tensor:
    """Returns ``gelu_tanh(gate) * up`` [T, mlp] of the norm; weight is [2 * mlp, width]."""
    mlp = weight.shape[0] // 2
    out = torch.empty(normed.scaled.shape[0], mlp, dtype=weight.dtype, device=weight.device)
    _consume(normed, weight, constant, out, GATE_UP, form=GEGLU.value, half=mlp, eps=eps)
    return out


def add_product(
    x: Tensor, weight: Tensor, residual: Tensor, gate: Tensor, scale: Tensor, counters: Tensor,
    tiles: Tiles,
) -> Normed:  # fmt: skip
    """Adds ``gate * (x Wᵀ)`` to the residual and scales the sum for the next norm.

    Args:
        x: [T, K].
        weight: [width, K].
        residual: [T, width].
        gate: fp32 [width].
        scale: fp32 [width] of the next norm.
        counters: int32 zeros, at least one for each output tile; they are zero again afterwards.
        tiles: how the product is cut; ``splits * depth`` must divide K.
    """
    rows, width = residual.shape
    out, scaled = torch.empty_like(residual), torch.empty_like(residual)
    columns = width // tiles.columns
    squares = torch.empty(columns, rows, dtype=torch.float32, device=x.device)
    partial = squares
    if tiles.splits > 1:
        shape = (tiles.splits, rows, width)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    grid = (columns, tiles.splits, triton.cdiv(rows, _BLOCK_M))
    _produce_kernel[grid](
        x, weight, residual, gate, scale, out, scaled, squares, partial, counters,
        rows, width, weight.shape[1], x.stride(0),
        SPLITS=tiles.splits, BLOCK_M=_BLOCK_M, BLOCK_N=tiles.columns, BLOCK_K=tiles.depth,
        WIDE=wide_products(), num_warps=4, num_stages=tiles.stages,
    )  # fmt: skip
    return Normed(out, scaled, squares)


def counters_for(rows: int, width: int, device: torch.device) -> Tensor:
    """Returns zeroed counters for products of ``rows`` with any tiles of this module."""
    least = min(OUT.columns, DOWN.columns)
    count = triton.cdiv(rows, _BLOCK_M) * (width // least)
    return torch.zeros(count, dtype=torch.int32, device=device)
