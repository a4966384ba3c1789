"""The tile of a convolution as one program computes it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ConvolutionPlan:
    """How the generic kernel cuts ``[O, 27 * C] @ [voxels, 27 * C].T``.

    Attributes:
        outputs: Output channels of a tile.
        voxels: Output voxels of a tile.
        depth: Channels of a step, dividing ``C``.
        num_warps: Warps of a program.
        num_stages: Steps whose operands are in flight.
    """

    outputs: int
    voxels: int
    depth: int
    num_warps: int
    num_stages: int
