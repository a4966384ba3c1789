"""The launch that quantizes queries, keys and values."""

# pyright: reportArgumentType=false, reportCallIssue=false

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from piper_kernels._triton.launching import Launcher, launch_key
from piper_kernels._triton.runtime import launch_guard
from piper_kernels._triton.targets import accelerator_target
from piper_kernels.attention._preparation._quantize_kernels import quantize_kernel
from piper_kernels.attention._preparation._statistics import (
    MOST_CHUNK_TILES,
    TILE,
    Statistics,
    tiles_of,
)
from piper_kernels.attention._quantization import Granularity, RowGroups

_quantize = Launcher(quantize_kernel)
_QUANTIZE_PROGRAMS = 2048  # fill a device a few times


class Values(IntEnum):
    """What becomes of values: INT8 with a scale per key or per tile of 64, or E4M3."""

    PER_KEY = 0
    CENTERED = 1
    PER_TILE = 2
    E4M3 = 3


@dataclass(frozen=True)
class QuantizedRows:
    """Codes of rotated queries or keys; tensors that are not wanted are empty.

    Attributes:
        codes: int8 ``[B, H, 64 * tiles, D]``.
        scale: FP32 ``[B, H, groups]`` where blocks are one group, else ``[B, H, 64 * tiles]``.
    """

    codes: Tensor
    scale: Tensor

    @classmethod
    def empty(cls, rows: Tensor, groups: RowGroups) -> "QuantizedRows":
        """Return storage for ``[B, H, S, D]``."""
        batch, heads, length, head_dim = rows.shape
        tiles = tiles_of(length)
        scales = tiles * (TILE // groups.block if groups.groups == 1 else TILE)
        return cls(
            rows.new_empty((batch, heads, tiles * TILE, head_dim), dtype=torch.int8),
            rows.new_empty((batch, heads, scales), dtype=torch.float32),
        )


@dataclass(frozen=True)
class QuantizedValues:
    """Codes of values, transposed; tensors that are not wanted are empty.

    Attributes:
        codes: int8 or float8_e4m3fn ``[B, H, D, 64 * tiles]``.
        multiplier: FP32, 255 times the scale, ``[B, H, 64 * tiles]`` or per tile
            ``[B, H, tiles]``.
        logs: FP32 ``[B, H, tiles]``, the base-2 logarithm of the largest scale of a tile.
        sums: int32 ``[B, H, ceil(tiles / 2), D]``, biased sums of the codes of 128 keys.
    """

    codes: Tensor
    multiplier: Tensor
    logs: Tensor
    sums: Tensor

    @classmethod
    def empty(cls, rows: Tensor, values: Values, sums: bool) -> "QuantizedValues":
        """Return storage for ``[B, H, S, D]``."""
        batch, heads, length, head_dim = rows.shape
        tiles = tiles_of(length)
        scales = {Values.PER_TILE: tiles, Values.E4M3: 0}.get(values, tiles * TILE)
        logs, pairs = (tiles, -(-tiles // 2)) if sums else (0, 0)
        dtype = torch.float8_e4m3fn if values is Values.E4M3 else torch.int8
        floats = {"dtype": torch.float32, "device": rows.device}
        return cls(
            rows.new_empty((batch, heads, head_dim, tiles * TILE), dtype=dtype),
            torch.empty((batch, heads, scales), **floats),
            torch.empty((batch, heads, logs), **floats),
            torch.empty((batch, heads, pairs, head_dim), dtype=torch.int32, device=rows.device),
        )


@dataclass(frozen=True)
class Quantized:
    """What one launch of :func:`quantize` wrote; nothing where an operand was left out."""

    query: QuantizedRows
    key: QuantizedRows
    value: QuantizedValues


def quantize(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor | None,
    known: Statistics | None,
    *,
    query_factor: float = 1.0,
    granularity: Granularity = Granularity.PER_WARP,
    values: Values = Values.CENTERED,
    permuted: bool = True,
    sums: bool = False,
    lengths: Tensor | None = None,
) -> Quantized:
    """Quantize ``[B, H, S, D]`` operands in one launch.

    Args:
        query: Floating, features contiguous; ``None`` leaves it out.
        key: The same.
        value: The same, with the shape of the keys; not without keys.
        known: Of the keys and, unless ``PER_KEY``, of the values.
        query_factor: Factor of the stored query scale.
        granularity: Which rows of queries and keys share a scale.
        values: What becomes of values.
        permuted: Whether every 32 keys of values are in the order of accumulator fragments.
        sums: Whether sums of value codes and logarithms of scales are stored.
        lengths: int32 ``[tiles]``, rows that exist at the front of tiles; ``None``: all.
    """
    some = next(x for x in (query, key, value) if x is not None)
    nothing = some.new_empty((0, 1, 0, some.shape[3]))
    query, key, value = (nothing if x is None else x for x in (query, key, value))
    known = known or Statistics(*[some.new_empty(0, dtype=torch.float32)] * 3)
    parts = Quantized(
        QuantizedRows.empty(query, granularity.query),
        QuantizedRows.empty(key, granularity.key),
        QuantizedValues.empty(value, values, sums),
    )
    q, k, v = parts.query, parts.key, parts.value
    chunk_tiles = _chunk_tiles(query, key, value)
    query_chunks, key_chunks = (-(-tiles_of(x.shape[2]) // chunk_tiles) for x in (query, key))
    heads = (x.shape[0] * x.shape[1] for x in (query, key, value))
    chunks = (query_chunks, key_chunks, key_chunks)
    programs = [count * each for count, each in zip(heads, chunks, strict=True)]
    tensors = (
        query, key, value, k.scale if lengths is None else lengths,
        q.codes, q.scale, k.codes, k.scale, known.rotated,
        v.codes.flatten().view(torch.int32), v.multiplier, v.logs, v.sums, known.value,
    )  # fmt: skip
    sizes = (
        query.shape[2], key.shape[2], query.shape[1], key.shape[1], *programs[:2], query_chunks,
        max(key_chunks, 1), chunk_tiles,
    )  # fmt: skip
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3])
    options = _options(some)
    constants = (
        some.shape[3], _groups(granularity.query), _groups(granularity.key), int(values), permuted,
        sums, lengths is not None, options.pop("WIDE"), *(n > 0 for n in programs),
        options.pop("STAGES"),
    )  # fmt: skip
    arguments = (*tensors, *sizes, query_factor, *strides, *constants)
    kind = launch_key(tensors, tuple(n >> 31 for n in sizes), strides, constants)
    with launch_guard(some.device):
        _quantize(sum(programs), arguments, options, kind)
    return parts


def _chunk_tiles(*operands: Tensor) -> int:
    """Return the tiles of one program, even, so that a device is filled a few times."""
    work = sum(x.shape[0] * x.shape[1] * tiles_of(x.shape[2]) for x in operands)
    return min(max(work // _QUANTIZE_PROGRAMS // 2 * 2, 2), MOST_CHUNK_TILES)


def _options(some: Tensor) -> dict[str, Any]:
    """Return how to compile for operands like ``some``.

    Tiles of 16 bits are loaded ahead, and four programs of a multiprocessor hide the rest.
    """
    target = accelerator_target(some.device)
    if target is None:
        return {"WIDE": True, "STAGES": 1}
    if some.dtype == torch.float32:
        return {"WIDE": False, "STAGES": 1, "num_warps": 8}
    if target.backend != "cuda":
        return {"WIDE": False, "STAGES": 1}
    return {"WIDE": False, "STAGES": 2 if some.shape[3] == 128 else 3, "maxnreg": 128}


def _groups(groups: RowGroups) -> tuple[int, int, int]:
    return groups.repeats, groups.groups, groups.width
