"""Quantized operands of sparse Piper attention and the arithmetic that makes them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from piper_kernels.attention._online_softmax import PROBABILITY_LEVELS
from piper_kernels.attention._quantization import int8_codes, int8_scale
from piper_kernels.attention._signed_hadamard import rotate
from piper_kernels.attention.sparse_piper_attention._blocks import BLOCK

QUERY_GROUP, KEY_GROUP = 32, 64  # rows that share a scale
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class PreparedOperands:
    """Queries, keys and values in codes; ``R`` is the number of rows rounded up to 64.

    Attributes:
        query: int8 ``[B, Hq, R, D]``, rotated; rows that do not exist are zero in all codes.
        query_scale: FP32 ``[B, Hq, R / 32]``, times the softmax scale and log2 e.
        key: int8 ``[B, Hkv, R, D]``, centered and rotated.
        key_scale: FP32 ``[B, Hkv, R / 64]``.
        value: int8 ``[B, Hkv, D, R]``, centered and transposed.
        value_multiplier: FP32 ``[B, Hkv, R / 64, 1]``: 255 times the scale of the block.
        value_mean: FP32 ``[B, Hkv, D]``.
        value_sums: What ``value_sums`` of a backend made of the values; ``None``: it is made by
            every call that needs it.
    """

    query: Tensor
    query_scale: Tensor
    key: Tensor
    key_scale: Tensor
    value: Tensor
    value_multiplier: Tensor
    value_mean: Tensor
    value_sums: Tensor | None = None


def prepare(
    query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, rows: int, scale: float
) -> PreparedOperands:
    """Smooth, rotate and quantize.

    Keys and values are centered by their mean over the rows that exist: any constant is exact for
    keys, and this one makes values that do not vary exact. Rows that do not exist stay zero.

    Args:
        query: FP32 blocks ``[B, Hq, n, 64, D]``, zero where no row exists.
        key: The same of ``Hkv`` heads.
        value: The same of ``Hkv`` heads.
        valid: Which rows exist, bool ``[n, 64]``; ``None``: all.
        rows: Rows of the sequence; the number that exist unless ``valid`` says otherwise.
        scale: Scale of the softmax.
    """
    count = rows if valid is None else valid.sum(dtype=torch.float32)
    query_codes, query_scale = _quantize(rotate(query), QUERY_GROUP)
    centered_key, _ = _center(key, valid, count)
    key_codes, key_scale = _quantize(rotate(centered_key), KEY_GROUP)
    centered_value, value_mean = _center(value, valid, count)
    value_codes, value_scale = _quantize(centered_value, BLOCK)
    return PreparedOperands(
        query_codes,
        query_scale * (scale * LOG2_E),
        key_codes,
        key_scale,
        value_codes.transpose(-1, -2).contiguous(),
        value_scale[..., None] * PROBABILITY_LEVELS,
        value_mean,
    )


def _center(blocks: Tensor, valid: Tensor | None, count: Tensor | float) -> tuple[Tensor, Tensor]:
    mean = blocks.sum((2, 3)) / count
    centered = blocks - mean[:, :, None, None]
    if valid is not None:
        centered = torch.where(valid[:, :, None], centered, 0.0)
    return centered, mean


def _quantize(blocks: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return int8 ``[B, H, R, D]`` and FP32 ``[B, H, R / group]``, rounded half to even."""
    groups = blocks.flatten(2, 3).unflatten(2, (-1, group))
    scale = int8_scale(groups.abs().amax((-2, -1)))
    return int8_codes(groups, scale[..., None, None]).flatten(2, 3), scale
