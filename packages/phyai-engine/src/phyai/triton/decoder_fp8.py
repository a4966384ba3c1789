"""Launches the fused products of an adaptive decoder layer with FP8 weights; see `skinny_fp8`.

Launches are those of `phyai.triton.decoder`, in the same order and with the same residuals between
them.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from phyai.triton.decoder import Normed, Tiles
from phyai.triton.rows import wide_products
from phyai.triton.skinny import GEGLU, ROPE
from phyai.triton.skinny_fp8 import _consume_fp8_kernel, _produce_fp8_kernel

_BLOCK_M = 64

QKV = Tiles(32, 128, 4)
GATE_UP = Tiles(64, 128, 4)
OUT = Tiles(32, 128, 4, 4)
DOWN = Tiles(64, 128, 4, 8)


@dataclass(frozen=True)
class Codes:
    """A weight in FP8.

    Attributes:
        weight: float8 e4m3 [N, K], contiguous.
        scale: fp32 [N]; a row's values are its codes times its scale.
    """

    weight: Tensor
    scale: Tensor


def norm_qkv(
    normed: Normed,
    codes: Codes,
    constant: Tensor,
    *,
    heads: int,
    rotation: Tensor,
    keys: Tensor,
    values: Tensor,
    first_slot: int,
    eps: float,
    tiles: Tiles = QKV,
) -> Tensor:
    """Norm, projection and rotation; keys and values go to their slots.

    Args:
        normed: the residual, scaled.
        codes: [(heads + 2) * dim, width]: queries, one key head, one value head.
        constant: fp32, the norm's shift times the weight.
        heads: query heads.
        rotation: fp32 [T, dim], cosines and sines at each row's position.
        keys: [slots, 1, 1, dim], written.
        values: likewise.
        first_slot: where the first row's key goes; the others follow.
        eps: of the norm.
        tiles: how the product is cut; ``columns`` must divide ``dim``.

    Returns:
        Rotated queries [T, heads, dim].
    """
    dim = codes.weight.shape[0] // (heads + 2)
    out = normed.scaled.new_empty(normed.scaled.shape[0], heads, dim)
    _consume(
        normed, codes, constant, out, tiles, form=ROPE.value, half=dim // 2, heads=heads,
        keys=keys, values=values, rotation=rotation, first_slot=first_slot, eps=eps,
    )  # fmt: skip
    return out


def norm_gate_up(
    normed: Normed, codes: Codes, constant: Tensor, *, eps: float, tiles: Tiles = GATE_UP
) -> Tensor:
    """Returns ``gelu_tanh(gate) * up`` [T, mlp] of the norm; the weight is [2 * mlp, width]."""
    mlp = codes.weight.shape[0] // 2
    out = normed.scaled.new_empty(normed.scaled.shape[0], mlp)
    _consume(
        normed, codes, constant, out, tiles, form=GEGLU.value, half=mlp, heads=0,
        keys=out, values=out, rotation=constant, first_slot=0, eps=eps,
    )  # fmt: skip
    return out


def _consume(
    normed: Normed, codes: Codes, constant: Tensor, out: Tensor, tiles: Tiles, *, form: int,
    half: int, heads: int, keys: Tensor, values: Tensor, rotation: Tensor, first_slot: int,
    eps: float,
) -> None:  # fmt: skip
    rows, width = normed.scaled.shape
    parts = normed.squares.shape[0]
    grid = (codes.weight.shape[0] // tiles.columns, triton.cdiv(rows, _BLOCK_M))
    _consume_fp8_kernel[grid](
        normed.scaled, normed.squares, codes.weight, codes.scale, constant, out, keys, values,
        rotation, rows, width, half, parts, heads, first_slot, normed.scaled.stride(0),
        out.stride(0), eps, FORM=form, TILES=triton.next_power_of_2(parts), **_options(tiles),
    )  # fmt: skip


def add_product(
    x: Tensor, codes: Codes, residual: Tensor, gate: Tensor, scale: Tensor, counters: Tensor,
    tiles: Tiles,
) -> Normed:  # fmt: skip
    """Adds ``gate * (x Wᵀ)`` to the residual and scales the sum for the next norm.

    Args:
        x: [T, K].
        codes: [width, K].
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
    _produce_fp8_kernel[grid](
        x, codes.weight, codes.scale, residual, gate, scale, out, scaled, squares, partial,
        counters, rows, width, codes.weight.shape[1], x.stride(0), SPLITS=tiles.splits,
        **_options(tiles),
    )  # fmt: skip
    return Normed(out, scaled, squares)


def _options(tiles: Tiles) -> dict[str, Any]:
    return {
        "BLOCK_M": _BLOCK_M,
        "BLOCK_N": tiles.columns,
        "BLOCK_K": tiles.depth,
        "WIDE": wide_products(),
        "num_warps": 4,
        "num_stages": tiles.stages,
    }
