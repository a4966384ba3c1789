"""Schedules of convolutions. Needs neither Triton nor a device."""

from dataclasses import dataclass

from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.conv3d.convrot.int8._amd import plan as amd
from piper_kernels.conv3d.convrot.int8._nvidia import plan as nvidia
from piper_kernels.conv3d.convrot.int8._tiles import ConvolutionPlan

MIN_CAPABILITY = (8, 0)

_VALUES = 8_192  # of a program that prepares voxels
_MIN_COLUMNS = 64
_STATISTICS_VALUES = 4_096
_STATISTICS_TILES = 8  # of a program, at least where there are as many


@dataclass(frozen=True)
class VoxelTile:
    """What a program prepares.

    Attributes:
        voxels: Voxels of a frame.
        columns: Channels, whole rotation groups.
        num_warps: Warps of a program.
    """

    voxels: int
    columns: int
    num_warps: int = 4


def supports(target: AcceleratorTarget) -> tuple[bool, str]:
    """Return whether a target has a schedule for convolutions, or why not."""
    if target.backend == "cuda":
        if target.capability >= MIN_CAPABILITY:
            return True, ""
        needed = "sm_80 or newer"
    else:
        if target.architecture in amd.ARCHITECTURES:
            return True, ""
        needed = f"one of {', '.join(amd.ARCHITECTURES)}"
    return False, f"kernels of INT8 convolutions need {needed}, got {target.architecture}"


def select_plan(target: AcceleratorTarget, outputs: int, channels: int) -> ConvolutionPlan:
    """Return the schedule of the generic kernel.

    Args:
        target: The device.
        outputs: ``O``.
        channels: ``C``, which the step along the channels divides.
    """
    if target.backend == "hip":
        return amd.select_plan(outputs, channels)
    return nvidia.select_plan(target.capability, outputs, channels)


def plan_voxels(group_size: int) -> VoxelTile:
    """Return what a program prepares; 2048 values of a warp, as measured for linear inputs."""
    columns = max(group_size, _MIN_COLUMNS)
    return VoxelTile(_VALUES // columns, columns)


def plan_statistics(positions: int, channels: int, units: int, processors: int) -> tuple[int, int]:
    """Return the pixels of a tile and the tiles of a program that sums a channel group.

    Args:
        positions: Pixels of a frame.
        channels: Channels of a group.
        units: Frames times groups.
        processors: Multiprocessors of the device.
    """
    pixels = max(1, _STATISTICS_VALUES // channels)
    tiles = -(-positions // pixels)
    wanted = -(-8 * processors // units)  # programs of a unit that fill the device
    return pixels, max(min(tiles, _STATISTICS_TILES), -(-tiles // wanted))
