"""How NVFP4 products are cut into tiles. Needs neither Triton nor a device."""

from dataclasses import dataclass

from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.weights.nvfp4._layout import ceil_div

STREAMED_ROWS = 64
DECODED_ROWS = 320
ARRANGEMENT = 64


@dataclass(frozen=True)
class ProductPlan:
    """The schedule of one product.

    Attributes:
        rows: Input rows of a tile.
        outputs: Weight rows of a tile.
        depth: Features of a step.
        splits: Parts of the depth that are summed by a second kernel.
        group: Row tiles that are computed next to each other.
        num_warps: Warps of a program.
        num_stages: Steps that are in flight.
        arrangement: Features that are arranged together before the product, 0 for none.
        decoded: Whether the weight is decoded into memory and multiplied by the library instead.
    """

    rows: int
    outputs: int
    depth: int
    splits: int
    group: int
    num_warps: int
    num_stages: int
    arrangement: int
    decoded: bool = False


def plan_product(
    target: AcceleratorTarget | None,
    processors: int,
    rows: int,
    outputs: int,
    features: int,
    operand_bytes: int,
) -> ProductPlan:
    """Return the schedule of ``[rows, features] x [outputs, features]``.

    Few rows stream the weight: small tiles, deep steps and a split depth, so that every
    processor has several programs that wait for memory in turns. Many rows fill the matrix
    units: the programs that share a processor decode and multiply in turns, and the depth is
    split only while there are fewer tiles than programs. From ``DECODED_ROWS`` rows on, a tile's
    decoding is repeated so often that NVIDIA targets decode once and leave the product to the
    library (H200, 8192 x 8192, 1024 rows: decoding takes 64 us, the library 170, a tiled product
    342 to 505).

    Args:
        target: Where it runs; ``None`` in the interpreter.
        processors: Multiprocessors of the device.
        rows: Input rows, positive.
        outputs: Weight rows, positive.
        features: Depth, a positive multiple of 16.
        operand_bytes: Bytes of an element of the matrix units.
    """
    nvidia = target is not None and target.backend == "cuda"
    if nvidia and rows >= DECODED_ROWS and operand_bytes == 2:
        return ProductPlan(0, 0, 0, 1, 1, 0, 0, arrangement=0, decoded=True)
    if rows > STREAMED_ROWS:
        return _tile_plan(target, processors, rows, outputs, features, operand_bytes)
    return _stream_plan(target, processors, rows, outputs, features, operand_bytes)


def _tile_plan(
    target: AcceleratorTarget | None,
    processors: int,
    rows: int,
    outputs: int,
    features: int,
    operand_bytes: int,
) -> ProductPlan:
    if operand_bytes > 2:
        return ProductPlan(64, 64, 64, 1, 8, 4, 2, ARRANGEMENT)
    if target is not None and target.backend == "hip":
        return ProductPlan(64, 128, 64, 1, 8, 8, 2, ARRANGEMENT)
    if target is not None and target.capability[0] == 10:
        # Triton compiles 128 rows of 128 outputs to a trap on these targets.
        return ProductPlan(64, 128, 64, 1, 8, 8, 3, ARRANGEMENT)
    # Registers and shared memory of Hopper hold two programs with four stages; others have less.
    hopper = target is not None and target.architecture == "sm_90"
    tiles = ceil_div(rows, 128) * ceil_div(outputs, 128)
    splits = max(1, min(2 * processors // tiles, features // (8 * 64), 4))
    return ProductPlan(128, 128, 64, splits, 8, 8, 4 if hopper else 3, ARRANGEMENT)


def _stream_plan(
    target: AcceleratorTarget | None,
    processors: int,
    rows: int,
    outputs: int,
    features: int,
    operand_bytes: int,
) -> ProductPlan:
    tile_rows = 16
    while tile_rows < rows:
        tile_rows *= 2
    depth = 256 if tile_rows <= 32 and operand_bytes <= 2 else 128
    stages = 3 if target is None or target.backend == "cuda" else 2
    # Up to four programs of four warps on every processor, none with less than two steps.
    wanted = 4 * processors // ceil_div(outputs, 64)
    splits = max(1, min(wanted, features // (2 * depth), 16))
    return ProductPlan(tile_rows, 64, depth, splits, 1, 4, stages, 0)
