"""Launches of the kernels that reduce keys and values and summarize blocks for routing."""

# pyright: reportArgumentType=false, reportCallIssue=false

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from piper_kernels._triton.runtime import launch_guard
from piper_kernels.attention._preparation._mean_kernels import finish_kernel, partial_kernel
from piper_kernels.attention._preparation._summary_kernels import summary_kernel
from piper_kernels.attention.sparse_piper_attention._routing import RoutingSummaries

TILE = 64
MOST_CHUNK_TILES = 8
# Programs that fill a device a few times; longer loops make fewer partial results.
_PARTIAL_PROGRAMS = 512
_SUMMARY_PROGRAMS, _SUMMARY_ELEMENTS = 8192, 512
_FINISH_CHUNKS = 16


def tiles_of(rows: int) -> int:
    """Return the tiles of 64 that ``rows`` rows occupy."""
    return -(-rows // TILE)


class Summary(IntEnum):
    """How blocks of raw queries and keys are summarized for routing."""

    MINMAX = 1
    MEAN = 2


@dataclass(frozen=True)
class Statistics:
    """Results of the pass over keys and values before they are quantized.

    Attributes:
        key: FP32 ``[B, Hkv, D]``, means of keys.
        value: FP32 ``[B, Hkv, D]``: means of values or, for E4M3, their scales; empty if they
            were left out.
        rotated: FP32 ``[B, Hkv, D]``, the rotated means of keys times ``sqrt(D)``.
    """

    key: Tensor
    value: Tensor
    rotated: Tensor


def statistics(
    key: Tensor, value: Tensor | None, lengths: Tensor | None, *, value_scales: bool = False
) -> Statistics:
    """Reduce keys and values ``[B, H, S, D]`` over the rows that exist.

    Args:
        key: Floating, features contiguous.
        value: The same; ``None`` leaves values out.
        lengths: int32 ``[tiles]``, rows that exist at the front of tiles; ``None``: all.
        value_scales: Whether E4M3 scales of values are needed instead of means.
    """
    operands = [key] if value is None else [key, value]
    partials, chunk_tiles = _partials(key, len(operands), _PARTIAL_PROGRAMS)
    _sum(operands, partials, lengths, chunk_tiles, value_scales)
    return finish(key, partials, lengths, value_scales)


def summarized_statistics(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, summary: Summary
) -> tuple[Statistics, RoutingSummaries]:
    """Do what :func:`statistics` does and summarize queries and keys ``[B, H, S, D]``."""
    partials, chunk_tiles = _partials(key, 2, _SUMMARY_PROGRAMS)
    floats = {"dtype": torch.float32, "device": key.device}
    shapes = [(*x.shape[:2], tiles_of(x.shape[2]), x.shape[3]) for x in (query, key)]
    parts = RoutingSummaries(
        torch.empty(shapes[0], **floats),
        torch.empty(shapes[1], **floats),
        torch.empty(
            shapes[1] if summary is Summary.MINMAX else (*shapes[1][:2], 0, shapes[1][3]), **floats
        ),
    )
    counts = partials if lengths is None else lengths
    for source, first in ((key, parts.key), (query, parts.query)):
        batch, heads, rows, head_dim = source.shape
        grid = (-(-tiles_of(rows) // chunk_tiles), batch * heads)
        with launch_guard(key.device):
            summary_kernel[grid](
                source, counts, first, parts.key_aux, partials, rows, heads, chunk_tiles,
                *source.stride()[:3], D=head_dim, IS_QUERY=source is query, SUMMARY=int(summary),
                MASKED=lengths is not None, ROWS=_SUMMARY_ELEMENTS // head_dim, num_warps=1,
            )  # fmt: skip
    _sum([value], partials[1:], lengths, chunk_tiles, False)
    return finish(key, partials, lengths, False), parts


def _partials(key: Tensor, operands: int, programs: int) -> tuple[Tensor, int]:
    """Return partial results, empty ``[operands, B * H, chunks, D]``, and tiles of a chunk."""
    batch, heads, rows, head_dim = key.shape
    tiles = tiles_of(rows)
    chunk_tiles = max(1, batch * heads * operands * tiles // programs)
    chunk_tiles = min(chunk_tiles, MOST_CHUNK_TILES)
    shape = (operands, batch * heads, -(-tiles // chunk_tiles), head_dim)
    return key.new_empty(shape, dtype=torch.float32), chunk_tiles


def _sum(
    operands: list[Tensor],
    partials: Tensor,
    lengths: Tensor | None,
    chunk_tiles: int,
    value_scales: bool,
) -> None:
    first, last = operands[0], operands[-1]
    with launch_guard(first.device):
        partial_kernel[(partials.shape[2], partials.shape[1], len(operands))](
            first, last, partials if lengths is None else lengths, partials,
            first.shape[2], chunk_tiles * TILE, first.shape[1],
            *first.stride()[:3], *last.stride()[:3],
            D=first.shape[3], MASKED=lengths is not None, VALUE_SCALES=value_scales,
        )  # fmt: skip


def finish(
    key: Tensor,
    partials: Tensor,
    lengths: Tensor | None,
    value_scales: bool,
    step: int = _FINISH_CHUNKS,
) -> Statistics:
    """Turn partial sums into means.

    Args:
        key: ``[B, H, S, D]``; its sizes are read.
        partials: FP32 ``[operands, B * H, chunks, D]``: sums of keys and, if there are two
            operands, of values.
        lengths: int32 ``[tiles]``, rows that exist at the front of tiles; ``None``: all.
        value_scales: Whether those of values are maxima that become E4M3 scales.
        step: Partial results that are read at a time, a power of two.
    """
    batch, heads, rows, head_dim = key.shape
    operands, leads, chunks, _ = partials.shape
    numbers = partials.new_empty((operands, batch, heads, head_dim))
    rotated = partials.new_empty((batch, heads, head_dim))
    with launch_guard(key.device):
        finish_kernel[(leads, operands)](
            partials, partials if lengths is None else lengths, numbers, rotated,
            rows, chunks, tiles_of(rows), D=head_dim, MASKED=lengths is not None,
            VALUE_SCALES=value_scales, CHUNKS=step,
        )  # fmt: skip
    return Statistics(numbers[0], numbers[1] if operands == 2 else numbers[:0], rotated)
