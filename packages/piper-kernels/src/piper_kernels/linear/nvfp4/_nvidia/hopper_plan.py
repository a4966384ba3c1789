"""Schedules of the Hopper products of NVFP4 weights. Needs neither Triton nor a device."""

from dataclasses import dataclass
from functools import lru_cache

from piper_kernels.weights.nvfp4._layout import ceil_div

STEP = 256
# Up to so many rows a program keeps its part of the input, of so many steps, in shared memory.
HELD_ROWS = 16
HELD_STEPS = 16
# What a program has, and what the codes and block scales of a step of 128 outputs take.
SHARED_BYTES = 226 * 1024
STAGE_BYTES = 18 * 1024
MAX_SPLITS = 8
# Rows of a tile, and the stages that shared memory holds beside 128 outputs.
TILES = ((32, 8, 4), (64, 8, 4), (128, 6, 3), (256, 4, 3))


@dataclass(frozen=True)
class HopperPlan:
    """How a Gluon kernel cuts ``[rows, features] x [outputs, features]``.

    Attributes:
        rows: Input rows of a tile.
        outputs: Weight rows of a tile.
        splits: Parts of the depth that are summed by a second kernel; none is empty.
        num_warps: Warps that decode and multiply; one more copies.
        w_stages: Steps of codes and block scales that are in flight.
        x_stages: Quarters of a step of the input that are in flight, when it is streamed.
        held_steps: Steps of the input that a program arranges and keeps in shared memory; 0 when
            it is streamed, from an arranged operand.
        group: Output tiles that share an input tile in a row.
        chunk: Steps of a kept input that are arranged at a time.
        turns: How many times ``num_warps`` share the steps of a kept input.
    """

    rows: int
    outputs: int
    splits: int
    num_warps: int
    w_stages: int
    x_stages: int = 0
    held_steps: int = 0
    group: int = 8
    chunk: int = 4
    turns: int = 1

    @property
    def arrangement(self) -> int:
        """Features that are arranged together before the product, 0 for none."""
        return 0 if self.held_steps else STEP


@lru_cache(maxsize=1024)
def select_plan(rows: int, outputs: int, features: int, processors: int) -> HopperPlan:
    """Return the schedule of ``[rows, features] x [outputs, features]``.

    Args:
        rows: Input rows, positive.
        outputs: Weight rows, positive.
        features: Depth, a positive multiple of ``STEP``.
        processors: Multiprocessors of the device.
    """
    steps = features // STEP
    if rows <= HELD_ROWS:
        return _held_plan(rows, outputs, steps, processors)
    fitting = [tile for tile in TILES if rows <= tile[0]]
    tile_rows, x_stages, w_stages = fitting[0] if fitting else TILES[-1]
    tiles = ceil_div(rows, tile_rows) * ceil_div(outputs, 128)
    splits = _full_parts(steps, min(processors // tiles, steps, MAX_SPLITS))
    return HopperPlan(tile_rows, 128, splits, 8, w_stages, x_stages)


def _held_plan(rows: int, outputs: int, steps: int, processors: int) -> HopperPlan:
    """Return a plan whose programs fill the processors once, if the depth allows it."""
    tile_rows = 8 if rows <= 8 else 16
    splits = max(processors // ceil_div(outputs, 128), ceil_div(steps, HELD_STEPS), 1)
    splits = _full_parts(steps, min(splits, steps))
    held = 1
    while held < ceil_div(steps, splits):
        held *= 2
    stages = (SHARED_BYTES - held * tile_rows * STEP * 2) // STAGE_BYTES
    return HopperPlan(
        tile_rows,
        128,
        splits,
        8,
        w_stages=min(stages, 6),
        held_steps=held,
        chunk=32 // tile_rows,
        turns=2 if tile_rows == 8 else 1,
    )


def _full_parts(steps: int, splits: int) -> int:
    """Return the number of parts of which none is empty when each but the last is the same."""
    return ceil_div(steps, ceil_div(steps, max(splits, 1)))
