"""Schedules of the generic INT8 convolution on RDNA4. Compiled, not measured here."""

from dataclasses import replace

from piper_kernels.conv3d.convrot.int8._tiles import ConvolutionPlan

ARCHITECTURES = ("gfx1200", "gfx1201")

NARROW = ConvolutionPlan(64, 64, 64, num_warps=4, num_stages=2)
WIDE = ConvolutionPlan(128, 128, 64, num_warps=8, num_stages=2)

_NARROW_OUTPUTS = 64


def select_plan(outputs: int, channels: int) -> ConvolutionPlan:
    """Return the schedule for ``O`` and ``C``."""
    chosen = NARROW if outputs <= _NARROW_OUTPUTS else WIDE
    return replace(chosen, depth=min(chosen.depth, channels))
