"""Schedules of the generic INT8 matrix product. Needs neither Triton nor a device."""

from dataclasses import dataclass


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
