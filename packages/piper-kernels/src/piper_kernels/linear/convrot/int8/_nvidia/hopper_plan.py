"""Schedules of the INT8 matrix product on Hopper. Needs neither Triton nor a device."""

from dataclasses import dataclass, replace
from functools import lru_cache

from piper_kernels.linear.convrot.int8._plan import ceil_div


@dataclass(frozen=True)
class HopperPlan:
    """How the Gluon kernel cuts ``[M, K] @ [N, K].T``.

    Attributes:
        block_m: Rows of a tile.
        block_n: Columns of a tile.
        block_k: Step along ``K``.
        stages: Steps whose operands fit into shared memory.
        num_warps: Warps that multiply; one more copies.
        group_m: Row tiles that are finished before the next column tile.
        programs_per_sm: Programs that share a multiprocessor: one stores while one multiplies.
        split_k: Parts of ``K`` that different programs sum; none is empty.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    num_warps: int
    group_m: int
    programs_per_sm: int = 1
    split_k: int = 1


LARGE = HopperPlan(128, 256, 128, stages=4, num_warps=8, group_m=8)
SQUARE = HopperPlan(128, 128, 128, stages=5, num_warps=4, group_m=8)
PAIR = HopperPlan(128, 128, 128, stages=3, num_warps=4, group_m=8, programs_per_sm=2)
NARROW = HopperPlan(64, 128, 128, stages=8, num_warps=4, group_m=1)
THIN = HopperPlan(64, 64, 128, stages=12, num_warps=4, group_m=1)

PLANS = (LARGE, SQUARE, PAIR, NARROW, THIN)
SPLITS = (1, 2, 3, 4, 6, 8, 16)

# What a multiprocessor does in a microsecond, fitted to times of an H200.
_PRODUCTS = 7.5e6
_OPERAND_BYTES = 90e3
_MEMORY_BYTES = 4.0e6  # of all multiprocessors together
_EPILOGUE_ELEMENTS = 6.5e3
_OVERLAP_LOSS = 0.2  # of the shorter of memory and multiprocessors
_SUM_LAUNCH = 3.0


def estimate(plan: HopperPlan, rows: int, columns: int, depth: int, sm_count: int) -> float:
    """Return a model of the time in microseconds, without the launch.

    A step takes as long as its products or as the copy of its operands into shared memory; all
    programs together cannot read the weight faster than memory delivers it, and the two overlap
    imperfectly. Two programs on one
    multiprocessor hide their epilogues behind one another's products.
    """
    tiles = ceil_div(rows, plan.block_m) * ceil_div(columns, plan.block_n)
    waves = ceil_div(tiles * plan.split_k, sm_count)
    steps = ceil_div(ceil_div(depth, plan.block_k), plan.split_k)
    products = plan.block_m * plan.block_n * plan.block_k / _PRODUCTS
    operands = (min(plan.block_m, rows) + plan.block_n) * plan.block_k / _OPERAND_BYTES
    epilogue = plan.block_m * plan.block_n / _EPILOGUE_ELEMENTS
    hidden = 1 if plan.programs_per_sm > 1 else waves
    busy = waves * steps * max(products, operands) + hidden * epilogue
    memory = columns * depth / _MEMORY_BYTES
    time = max(busy, memory) + _OVERLAP_LOSS * min(busy, memory)
    if plan.split_k > 1:
        time += _SUM_LAUNCH + (plan.split_k + 1) * rows * columns * 4 / _MEMORY_BYTES
    return time


@lru_cache(maxsize=1024)
def select_plan(rows: int, columns: int, depth: int, sm_count: int) -> HopperPlan:
    """Return the schedule of ``[rows, depth] @ [columns, depth].T`` with the least estimate.

    Args:
        rows: ``M``.
        columns: ``N`` of all projections.
        depth: ``K``.
        sm_count: Multiprocessors of the device.
    """
    steps = ceil_div(depth, PLANS[0].block_k)
    candidates = [
        replace(plan, split_k=split)
        for plan in PLANS
        for split in SPLITS
        if (split - 1) * ceil_div(steps, split) < steps
        and (split == 1 or plan.programs_per_sm == 1)
    ]
    return min(candidates, key=lambda plan: estimate(plan, rows, columns, depth, sm_count))
