"""Schedules of the INT8 convolution on Hopper. Needs neither Triton nor a device."""

from dataclasses import dataclass
from functools import lru_cache

from piper_kernels.conv3d.convrot.int8._geometry import TAPS

MAX_DEPTH = 128


@dataclass(frozen=True)
class HopperPlan:
    """How the Gluon kernel cuts ``[O, 27 * C] @ [voxels, 27 * C].T``.

    A tile has the voxels of one box of one output frame, so that the codes under it are a box too
    for every position of the filter, which one TMA copy reads.

    Attributes:
        outputs: Output channels of a tile.
        box_height: Output rows of a tile.
        box_width: Output columns of a tile.
        depth: Channels of a step, dividing ``C``.
        stages: Steps whose operands fit into shared memory.
        num_warps: Warps that multiply; one more copies.
        programs_per_sm: Programs that share a multiprocessor: one stores while one multiplies.
        buffers: Parts of 64 voxels of a tile that wait in shared memory for being stored.
    """

    outputs: int
    box_height: int
    box_width: int
    depth: int
    stages: int
    num_warps: int
    programs_per_sm: int = 1
    buffers: int = 1

    @property
    def voxels(self) -> int:
        """Output voxels of a tile."""
        return self.box_height * self.box_width


@dataclass(frozen=True)
class Tile:
    """A tile without the shape of its box; see ``HopperPlan``."""

    outputs: int
    voxels: int
    stages: int
    num_warps: int
    programs_per_sm: int = 1
    buffers: int = 1


LARGE = Tile(128, 256, stages=4, num_warps=8, buffers=2)
PAIR = Tile(128, 128, stages=3, num_warps=4, programs_per_sm=2)
NARROW = Tile(64, 256, stages=5, num_warps=4, buffers=2)
THIN = Tile(64, 64, stages=6, num_warps=4, programs_per_sm=2)

TILES = (LARGE, PAIR, NARROW, THIN)
BOX_WIDTHS = (32, 16, 64, 8, 128)
"""In the order of preference among boxes that waste the same: stores take 32 voxels at once."""

# What a multiprocessor of an H200 does in a microsecond, fitted to measured convolutions.
_PRODUCTS = 7.0e6
_OPERAND_BYTES = 78e3
_EPILOGUE_ELEMENTS = 8e3


def box_tiles(plan: HopperPlan, out_height: int, out_width: int) -> int:
    """Return the boxes that cover one output frame."""
    return -(-out_height // plan.box_height) * -(-out_width // plan.box_width)


def estimate(
    plan: HopperPlan, outputs: int, channels: int, out_height: int, out_width: int, frames: int,
    processors: int,
) -> float:  # fmt: skip
    """Return a model of the time in microseconds, without the launch.

    A step takes as long as its products or as the copy of its operands into shared memory. Two
    programs on one multiprocessor hide their epilogues behind one another's products.
    """
    tiles = box_tiles(plan, out_height, out_width) * frames * -(-outputs // plan.outputs)
    waves = -(-tiles // processors)
    steps = TAPS**3 * channels // plan.depth
    products = plan.outputs * plan.voxels * plan.depth / _PRODUCTS
    operands = (plan.outputs + plan.voxels) * plan.depth / _OPERAND_BYTES
    epilogue = plan.outputs * plan.voxels / _EPILOGUE_ELEMENTS
    hidden = 1 if plan.programs_per_sm > 1 else waves
    return waves * steps * max(products, operands) + hidden * epilogue


@lru_cache(maxsize=1024)
def select_plan(
    outputs: int, channels: int, out_height: int, out_width: int, frames: int, processors: int
) -> HopperPlan:
    """Return the schedule with the least estimate.

    Args:
        outputs: ``O``.
        channels: ``C``.
        out_height: ``H'``.
        out_width: ``W'``.
        frames: ``N * T'``.
        processors: Multiprocessors of the device.
    """
    depth = min(MAX_DEPTH, channels)
    candidates = [
        HopperPlan(
            tile.outputs,
            tile.voxels // width,
            width,
            depth,
            tile.stages,
            tile.num_warps,
            tile.programs_per_sm,
            tile.buffers,
        )
        for tile in TILES
        for width in BOX_WIDTHS
        if width <= tile.voxels
    ]
    return min(
        candidates,
        key=lambda plan: estimate(
            plan, outputs, channels, out_height, out_width, frames, processors
        ),
    )
