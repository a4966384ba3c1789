"""INT8 quantization of queries, keys and values in FP32. The contract of all attention here."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

from piper_kernels.attention._signed_hadamard import rotate

INT8_LEVELS = 127
SCALE_EPSILON = 1e-7


@dataclass(frozen=True)
class RowGroups:
    """Which rows of a block share a scale: row ``(a * groups + t) * width + b`` is in group ``t``.

    Attributes:
        repeats: Number of values of ``a``.
        groups: Number of groups of a block.
        width: Number of values of ``b``.
    """

    repeats: int
    groups: int
    width: int

    @property
    def block(self) -> int:
        """Rows of a block."""
        return self.repeats * self.groups * self.width


class Granularity(Enum):
    """Rows that share a scale: ``(query groups, key groups)``."""

    PER_THREAD = (RowGroups(4, 8, 1), RowGroups(8, 4, 2))
    PER_WARP = (RowGroups(32, 1, 1), RowGroups(64, 1, 1))

    @property
    def query(self) -> RowGroups:
        """Groups within 32 query rows."""
        return self.value[0]

    @property
    def key(self) -> RowGroups:
        """Groups within 64 key rows."""
        return self.value[1]


def int8_scale(amax: Tensor) -> Tensor:
    """Return the scale of values with the largest magnitude ``amax``; never zero."""
    return amax / INT8_LEVELS + SCALE_EPSILON


def int8_codes(x: Tensor, scale: Tensor) -> Tensor:
    """Return ``clamp(round(x / scale), -127, 127)`` as int8; ties go to the even code."""
    return (x / scale).round_().clamp_(-INT8_LEVELS, INT8_LEVELS).to(torch.int8)


def quantize_groups(x: Tensor, groups: RowGroups) -> tuple[Tensor, Tensor]:
    """Quantize FP32 rows by groups.

    Args:
        x: ``[..., S, D]``. Missing rows of the last block count as zeros.
        groups: Which rows share a scale.

    Returns:
        int8 codes ``[..., S, D]`` and one FP32 scale per row, ``[..., S]``.
    """
    rows = x.shape[-2]
    padded = functional.pad(x, (0, 0, 0, -rows % groups.block))
    shape = (padded.shape[-2] // groups.block, groups.repeats, groups.groups, groups.width)
    amax = padded.unflatten(-2, shape).abs().amax((-4, -2, -1), keepdim=True)
    scale = int8_scale(amax).squeeze(-1).expand(*x.shape[:-2], *shape).flatten(-4)[..., :rows]
    return int8_codes(x, scale.unsqueeze(-1)), scale.contiguous()


def quantize_query(query: Tensor, granularity: Granularity) -> tuple[Tensor, Tensor]:
    """Rotate and quantize queries ``[..., S, D]`` of any floating dtype.

    Returns:
        int8 codes ``[..., S, D]`` and one FP32 scale per row, ``[..., S]``.
    """
    return quantize_groups(rotate(query.float()), granularity.query)


def quantize_key(
    key: Tensor, granularity: Granularity, mean: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Center, rotate and quantize keys ``[..., S, D]`` of any floating dtype.

    Subtracting one vector from all keys shifts the logits of a query by a constant, which
    softmax ignores.

    Args:
        key: ``[..., S, D]``.
        granularity: Which rows share a scale.
        mean: FP32 ``[..., D]`` to subtract; by default the mean over ``S``.

    Returns:
        int8 codes ``[..., S, D]`` and one FP32 scale per row, ``[..., S]``.
    """
    key = key.float()
    mean = key.mean(-2) if mean is None else mean
    return quantize_groups(rotate(key - mean.unsqueeze(-2)), granularity.key)


def quantize_value_rows(value: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize FP32 values ``[..., S, D]`` with one scale per row.

    Returns:
        int8 codes ``[..., S, D]`` and FP32 scales ``[..., S]``.
    """
    scale = int8_scale(value.abs().amax(-1))
    return int8_codes(value, scale.unsqueeze(-1)), scale
