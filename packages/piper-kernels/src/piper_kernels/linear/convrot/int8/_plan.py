"""Schedules of preparation and of the generic product. Needs neither Triton nor a device."""

from dataclasses import dataclass, replace
from functools import lru_cache

from piper_kernels._triton.row_chunks import RowChunks, plan_row_chunks

# A quarter of a chunk gives every thread eight values side by side, which one instruction loads.
_WARP_VALUES = 1_024
_MANY_VALUES = 4_096  # of a program, above which a thread takes twice as many
_MAX_WARPS = 16


@dataclass(frozen=True)
class MatmulPlan:
    """How the generic kernel cuts ``[M, K] @ [N, K].T``.

    Attributes:
        block_m: Rows of a tile.
        block_n: Columns of a tile.
        block_k: Step along ``K``.
        num_warps: Warps of a program.
        num_stages: Steps whose operands are in flight.
        group_m: Tiles of rows that are finished before the next column; 0 takes all.
        split_k: Parts of ``K`` that different programs sum.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int
    split_k: int = 1


def ceil_div(value: int, divisor: int) -> int:
    """Return ``value / divisor``, rounded up."""
    return -(-value // divisor)


@lru_cache(maxsize=1024)
def plan_input_rows(width: int) -> RowChunks | None:
    """Return how programs prepare rows of ``width`` columns, ``None`` for rows read twice."""
    chunks = plan_row_chunks(width)
    if chunks is None:
        return None
    rows = max(1, _WARP_VALUES // chunks.size)
    values = rows * chunks.size * chunks.count
    warps = values // _WARP_VALUES // (2 if values > _MANY_VALUES else 1)
    return replace(chunks, rows=rows, num_warps=min(_MAX_WARPS, 1 << (warps.bit_length() - 1)))
