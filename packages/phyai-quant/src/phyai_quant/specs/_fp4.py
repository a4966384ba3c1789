"""E2M1 weights in storage: packed codes, block scales in rows or in tiles of 128 x 4."""

from typing import cast

import torch
from torch import nn

from phyai_quant.scheme import QuantConfigError
from phyai_quant.specs import _scales, base, loading
from phyai_quant.specs._packing import E2M1_VALUES, unpack_nibbles
from phyai_quant.specs.slicing import check_slices, local_parts

CODE_NAMES = ("weight", "weight_packed")
"""Checkpoint names of the packed codes."""

_TILE_ROWS, _TILE_COLUMNS = 128, 4


def allocate(
    layer: nn.Module, request: base.AllocationRequest, block_k: int, scale_dtype: torch.dtype
) -> None:
    """Registers ``weight`` uint8 ``[N, K/2]`` and ``weight_scale`` ``[N, K/block_k]`` of NaN.

    Raises:
        QuantConfigError: K of the layer or of a leg is no multiple of the block, or a slice cuts
            a block.
    """
    rows, columns = request.weight_shape
    for size in (columns, *(part.full_shape[1] for part in request.slices)):
        if size % block_k:
            raise QuantConfigError(
                f"{loading.layer_name(layer)}: K = {size} is not divisible by the block of "
                f"{block_k} that shares a scale; use a degree of tensor parallelism that keeps "
                "blocks whole, or keep the layer unquantized"
            )
    check_slices(layer, "weight_scale", columns_per_entry=block_k)
    codes = torch.zeros((rows, columns // 2), dtype=torch.uint8, device=request.device)
    layer.register_parameter("weight", nn.Parameter(codes, requires_grad=False))
    shape = (rows, columns // block_k)
    _scales.register_nan(layer, "weight_scale", shape, request.device, scale_dtype)


def load_codes(layer: nn.Module, name: str, loaded: torch.Tensor, legs: range) -> None:
    """Copies this rank's part of packed codes uint8 ``[w, K/2]``, even k in the low nibble."""
    _scales.check_first(layer, name, "weight", legs, CODE_NAMES)
    if loaded.dtype != torch.uint8:
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: the quantization config says 4-bit codes but checkpoint "
            f"tensor {name!r} is {loaded.dtype}; allowed: torch.uint8 [N, K/2]; exclude the layer "
            "in the config if the checkpoint keeps it unquantized"
        )
    copy_parts(layer, "weight", name, loaded, legs, 2)


def load_block_scales(
    layer: nn.Module, name: str, loaded: torch.Tensor, legs: range, block_k: int
) -> None:
    """Copies this rank's part of block scales ``[w, K/block_k]``, also stored as uint8."""
    _scales.check_first(layer, name, "weight_scale", legs, ("weight_scale",))
    dtype = cast("nn.Parameter", layer.weight_scale).dtype
    _scales.check_dtype(layer, name, loaded, (dtype, torch.uint8))
    copy_parts(layer, "weight_scale", name, loaded.view(dtype), legs, block_k)


def copy_parts(
    layer: nn.Module, target: str, name: str, loaded: torch.Tensor, legs: range, per_entry: int
) -> None:
    """Copies this rank's part of ``loaded`` into ``target``; an entry is ``per_entry`` along K."""
    parameter = cast("nn.Parameter", getattr(layer, target))
    with torch.no_grad():
        for rows, part in local_parts(layer, name, loaded, legs, columns_per_entry=per_entry):
            parameter[rows].copy_(part)
    loading.load_state(layer).loaded.update((target, leg) for leg in legs)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, block_k: int) -> torch.Tensor:
    """Returns fp32 ``[N, K]`` of packed codes ``[N, K/2]`` and fp32 block scales."""
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
    values = table[unpack_nibbles(codes).int()].unflatten(-1, (-1, block_k))
    return (values * scale.unsqueeze(-1)).flatten(-2)


def swizzle(scale: torch.Tensor) -> torch.Tensor:
    """Reorders one-byte scales ``[N, B]`` into tiles of 128 x 4 that block-scaled GEMMs read.

    Tiles follow each other row by row; entry ``(r, c)`` of a tile is its byte
    ``16 * (r % 32) + 4 * (r // 32) + c``. Padding is zero.

    Returns:
        ``[roundup(N, 128), roundup(B, 4)]`` of the same dtype.
    """
    rows, columns = scale.shape
    padded = nn.functional.pad(
        scale.view(torch.uint8), (0, -columns % _TILE_COLUMNS, 0, -rows % _TILE_ROWS)
    )
    tiles = padded.unflatten(1, (-1, _TILE_COLUMNS)).unflatten(0, (-1, 4, 32))
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded.shape).view(scale.dtype)


def unswizzle(tiles: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Returns the scales ``[rows, columns]`` of `swizzle`'s bytes in any shape."""
    flat = tiles.contiguous().view(torch.uint8).reshape(-1, -(-columns // _TILE_COLUMNS), 32, 4, 4)
    padded = flat.permute(0, 3, 2, 1, 4).flatten(3).flatten(0, 2)
    return padded[:rows, :columns].contiguous().view(tiles.dtype)


def swizzled_shapes(rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes in which checkpoints store swizzled scales of ``[rows, columns]``."""
    row_tiles, column_tiles = -(-rows // _TILE_ROWS), -(-columns // _TILE_COLUMNS)
    return (
        (row_tiles * _TILE_ROWS, column_tiles * _TILE_COLUMNS),
        (row_tiles * 32, column_tiles * 16),
        (row_tiles * column_tiles * _TILE_ROWS * _TILE_COLUMNS,),
    )
