"""Schedules of the generic INT8 matrix product on NVIDIA GPUs."""

from piper_kernels.linear.convrot.int8._plan import MatmulPlan, ceil_div

BASE = MatmulPlan(128, 256, 128, num_warps=8, num_stages=3, group_m=16)

SMALL = MatmulPlan(32, 64, 128, num_warps=8, num_stages=4, group_m=0)
MEDIUM = MatmulPlan(64, 64, 128, num_warps=4, num_stages=3, group_m=0)
# Triton spills registers of the base tile on sm_100.
SM100_LARGE = MatmulPlan(128, 128, 128, num_warps=8, num_stages=3, group_m=16)

SM8X_SMALL = MatmulPlan(16, 64, 128, num_warps=4, num_stages=4, group_m=0)
SM8X_MEDIUM = MatmulPlan(64, 64, 128, num_warps=4, num_stages=4, group_m=0)
# Triton 3.8 spills registers from 64 accumulators of a thread on: more warps, not larger tiles.
SM8X_NARROW = MatmulPlan(128, 64, 128, num_warps=8, num_stages=3, group_m=16)
SM8X_LARGE = MatmulPlan(128, 128, 64, num_warps=8, num_stages=3, group_m=8)

PLANS = (BASE, SMALL, MEDIUM, SM100_LARGE, SM8X_SMALL, SM8X_MEDIUM, SM8X_NARROW, SM8X_LARGE)

_SMALL_TILES = 128
_MEDIUM_ROWS = 72
_SM8X_SMALL_TILES = 96
_SM8X_LARGE_ROWS = 256
_SM8X_LARGE_TILES = 48


def select_plan(capability: tuple[int, int], rows: int, columns: int) -> MatmulPlan:
    """Return the schedule of ``[rows, K] @ [columns, K].T``.

    Args:
        capability: Compute capability, at least 8.0.
        rows: ``M``.
        columns: ``N`` of all projections.

    Returns:
        The plan that the target's policy gives. None of these was measured here.
    """
    if capability < (9, 0):
        return _select_sm8x(rows, columns)
    if rows <= 32 or ceil_div(rows, 32) * ceil_div(columns, 64) <= _SMALL_TILES:
        return SMALL
    if columns <= 64 or rows * ceil_div(columns, 256) < _SMALL_TILES * _MEDIUM_ROWS:
        return MEDIUM
    return SM100_LARGE if (10, 0) <= capability < (12, 0) else BASE


def _select_sm8x(rows: int, columns: int) -> MatmulPlan:
    if rows <= 16 or ceil_div(rows, 16) * ceil_div(columns, 64) <= _SM8X_SMALL_TILES:
        return SM8X_SMALL
    if rows >= _SM8X_LARGE_ROWS:
        if columns <= 128:
            return SM8X_NARROW
        tiles = ceil_div(rows, SM8X_LARGE.block_m) * ceil_div(columns, SM8X_LARGE.block_n)
        if tiles >= _SM8X_LARGE_TILES:
            return SM8X_LARGE
    return SM8X_MEDIUM
