"""Sizes of a causal 3x3x3 convolution. Needs neither Triton nor a device."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

TAPS = 3
"""Positions of the filter along each axis."""

PAST_FRAMES = 2
"""Zero frames in front of the first one; none follow the last one."""

Padding = Literal["none", "reflect", "reflect_right"]
"""Spatial padding: nothing, one reflected pixel on every side, or one at bottom and right."""

PADDINGS: tuple[str, ...] = get_args(Padding)


def padding_flags(padding: str) -> tuple[bool, bool]:
    """Return the flags ``symmetric`` and ``right`` of the operators for a padding.

    Raises:
        ValueError: The name is none of ``PADDINGS``.
    """
    if padding not in PADDINGS:
        raise ValueError(f"padding must be one of {PADDINGS}, got {padding!r}")
    return padding == "reflect", padding == "reflect_right"


@dataclass(frozen=True)
class Geometry:
    """What a convolution reads and writes.

    Attributes:
        batch: ``N``.
        channels: ``C`` of the input.
        frames: ``T`` of the input.
        height: ``H`` of the input.
        width: ``W`` of the input.
        outputs: ``O``.
        stride: Steps along time, height and width.
        before: Reflected pixels above and on the left, 0 or 1.
        after: Reflected pixels below and on the right, 0 or 1.
    """

    batch: int
    channels: int
    frames: int
    height: int
    width: int
    outputs: int
    stride: tuple[int, int, int]
    before: int
    after: int

    @cached_property
    def out_frames(self) -> int:
        """``T'``."""
        return (self.frames - 1) // self.stride[0] + 1

    @cached_property
    def out_height(self) -> int:
        """``H'``; not positive where the filter does not fit."""
        return (self.height + self.before + self.after - TAPS) // self.stride[1] + 1

    @cached_property
    def out_width(self) -> int:
        """``W'``; not positive where the filter does not fit."""
        return (self.width + self.before + self.after - TAPS) // self.stride[2] + 1

    @property
    def out_shape(self) -> tuple[int, int, int, int, int]:
        """``(N, O, T', H', W')``."""
        return (self.batch, self.outputs, self.out_frames, self.out_height, self.out_width)

    @property
    def voxels(self) -> int:
        """Voxels of the output: ``N * T' * H' * W'``."""
        return self.batch * self.out_frames * self.out_height * self.out_width

    @cached_property
    def stored_height(self) -> int:
        """Rows of a padded frame of codes: whole steps, so that kernels see each phase of them."""
        return _whole(self.height + self.before + self.after, self.stride[1])

    @cached_property
    def stored_width(self) -> int:
        """Columns of a padded frame of codes, as ``stored_height``."""
        return _whole(self.width + self.before + self.after, self.stride[2])


def _whole(size: int, step: int) -> int:
    return -(-size // step) * step
