"""Schedules of the generic INT8 matrix product on AMD GPUs."""

from piper_kernels.linear.convrot.int8._plan import MatmulPlan, ceil_div

ARCHITECTURES = ("gfx942", "gfx1100", "gfx1151", "gfx1200", "gfx1201")

SMALL = MatmulPlan(32, 64, 64, num_warps=4, num_stages=2, group_m=0)
LARGE = MatmulPlan(128, 128, 64, num_warps=8, num_stages=2, group_m=8)

PLANS = (SMALL, LARGE)

_SMALL_TILES = 128

MAX_FUSED_WIDTH = 16_384
"""Columns up to which a row is activated, rotated and quantized in registers."""


def select_plan(rows: int, columns: int) -> MatmulPlan:
    """Return the schedule of ``[rows, K] @ [columns, K].T``; compiled, never measured here."""
    if rows <= 32 or ceil_div(rows, 32) * ceil_div(columns, 64) <= _SMALL_TILES:
        return SMALL
    return LARGE
