"""How many key blocks each head keeps: exact integer arithmetic on the host."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

UNITS = 1_000_000
LABEL = "sparse Piper Attention"


def ratio_units(ratios: Sequence[float] | Tensor) -> tuple[int, ...]:
    """Return keep ratios in millionths, rounded half to even.

    Args:
        ratios: One number in (0, 1] per query head; a tensor is floating ``[heads]``.

    Raises:
        TypeError: The ratios are a string, not a sequence, or not floating.
        ValueError: There are none, or one is outside (0, 1] or rounds to zero millionths.
    """
    values = _numbers(ratios)
    if not values:
        raise ValueError(f"{LABEL} needs at least one head keep ratio")
    units = []
    for head, value in enumerate(values):
        if not math.isfinite(value) or not 0 < value <= 1:
            raise ValueError(f"{LABEL}: keep ratio of head {head} must be in (0, 1], got {value}")
        unit = round(value * UNITS)
        if unit == 0:
            raise ValueError(f"{LABEL}: keep ratio of head {head} rounds to 0 of {UNITS}: {value}")
        units.append(unit)
    return tuple(units)


def _numbers(ratios: Sequence[float] | Tensor) -> list[float]:
    if isinstance(ratios, Tensor):
        if not ratios.is_floating_point():
            raise TypeError(f"{LABEL}: keep ratios must be floating, got {ratios.dtype}")
        if ratios.ndim != 1:
            shape = tuple(ratios.shape)
            raise ValueError(f"{LABEL}: keep ratios must be one-dimensional, got shape {shape}")
        return ratios.tolist()
    if isinstance(ratios, str | bytes) or not isinstance(ratios, Sequence):
        name = type(ratios).__name__
        raise TypeError(f"{LABEL}: keep ratios must be a sequence of numbers, got {name}")
    for value in ratios:
        if isinstance(value, bool | str | bytes):
            raise TypeError(f"{LABEL}: keep ratios must be numbers, got {value!r}")
    return [float(value) for value in ratios]


def head_keep_blocks(units: Sequence[int], blocks: int) -> tuple[int, ...]:
    """Return how many of ``blocks`` key blocks each head keeps, at least one.

    The heads share the rounded sum of their budgets: every head gets the whole part of its own
    and the largest fractions get one block more, lower heads first.

    Args:
        units: Keep ratio of each head in millionths, in [1, 1_000_000].
        blocks: Routeable key blocks, at least one.

    Raises:
        RuntimeError: The budget cannot be distributed.
    """
    shares = [blocks * unit for unit in units]
    keep = [max(1, share // UNITS) for share in shares]
    target = (sum(shares) + UNITS // 2) // UNITS
    extra = min(max(target, sum(keep)), len(keep) * blocks) - sum(keep)
    order = sorted(range(len(keep)), key=lambda head: (-(shares[head] % UNITS), head))
    for head in [head for head in order if keep[head] < blocks][:extra]:
        keep[head] += 1
        extra -= 1
    if extra:
        raise RuntimeError(f"{LABEL}: {extra} blocks of the budget are left over")
    return tuple(keep)


@dataclass(frozen=True)
class RouteLayout:
    """Where the routes of each head lie in a packed row of routes.

    Attributes:
        keep: Kept key blocks of each query head.
        offsets: Prefix sums of ``keep``; head ``h`` owns columns ``offsets[h]:offsets[h + 1]``.
        blocks: Routeable key blocks.
    """

    keep: tuple[int, ...]
    offsets: tuple[int, ...]
    blocks: int

    @property
    def routes_per_query(self) -> int:
        """Columns of a packed row."""
        return self.offsets[-1]

    @property
    def keeps_all(self) -> bool:
        """Whether every head keeps every routeable block, so that nothing has to be scored."""
        return self.routes_per_query == len(self.keep) * self.blocks


def route_layout(units: Sequence[int], blocks: int) -> RouteLayout:
    """Return the packed layout of the routes over ``blocks`` key blocks.

    Raises:
        ValueError: A packed row would not fit into 32-bit offsets.
    """
    keep = head_keep_blocks(units, blocks)
    layout = RouteLayout(keep, (0, *accumulate(keep)), blocks)
    if layout.routes_per_query >= 2**31:
        raise ValueError(f"{LABEL}: {layout.routes_per_query} routes per query exceed 32 bits")
    return layout
