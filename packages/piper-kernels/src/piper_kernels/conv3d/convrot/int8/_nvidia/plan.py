"""Schedules of the generic INT8 convolution on NVIDIA GPUs. Compiled, not measured here."""

from dataclasses import replace

from piper_kernels.conv3d.convrot.int8._tiles import ConvolutionPlan

NARROW = ConvolutionPlan(64, 128, 64, num_warps=4, num_stages=4)
SM8X = ConvolutionPlan(128, 128, 64, num_warps=8, num_stages=3)
SM90 = ConvolutionPlan(128, 128, 128, num_warps=8, num_stages=3)
SM120 = ConvolutionPlan(128, 128, 64, num_warps=8, num_stages=3)

_NARROW_OUTPUTS = 64


def select_plan(capability: tuple[int, int], outputs: int, channels: int) -> ConvolutionPlan:
    """Return the schedule for ``O`` and ``C``; the capability is at least 8.0."""
    if outputs <= _NARROW_OUTPUTS:
        chosen = NARROW
    elif capability < (9, 0):
        chosen = SM8X
    else:
        chosen = SM90 if capability < (12, 0) else SM120
    return replace(chosen, depth=min(chosen.depth, channels))
