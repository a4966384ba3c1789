"""Portable SageAttention2++ 8+8: the maths in FP32 and the numeric contract.

``attend(prepare(...))`` is the operator. Both are pure functions of tensors and run on any
device; nothing is read back.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from piper_kernels import _autocast
from piper_kernels.attention._online_softmax import MIN_DENOMINATOR
from piper_kernels.attention._quantization import (
    SCALE_EPSILON,
    Granularity,
    quantize_key,
    quantize_query,
)
from piper_kernels.attention._tiles import query_windows, score_tiles

# With codes of values within 2.25 and probabilities within 448, a sum over 64 keys is at most
# 64512, which FP16 holds.
VALUE_RANGE = 2.25
PROBABILITY_RANGE = 448.0
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class QuantizedOperands:
    """Quantized operands of SageAttention2++.

    Attributes:
        query_codes: int8 ``[B, H, Sq, D]``, rotated.
        query_scale: FP32 ``[B, H, Sq]``.
        key_codes: int8 ``[B, H, Sk, D]``, centered and rotated.
        key_scale: FP32 ``[B, H, Sk]``.
        value_codes: float8_e4m3fn ``[B, H, Sk, D]``.
        value_scale: FP32 ``[B, H, D]``, one per feature.
    """

    query_codes: Tensor
    query_scale: Tensor
    key_codes: Tensor
    key_scale: Tensor
    value_codes: Tensor
    value_scale: Tensor


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    granularity: Granularity = Granularity.PER_THREAD,
) -> QuantizedOperands:
    """Quantize queries and keys to INT8 and values to E4M3.

    Args:
        query: ``[B, H, Sq, D]``, floating, any strides.
        key: ``[B, H, Sk, D]``.
        value: ``[B, H, Sk, D]``.
        granularity: Which rows of queries and keys share a scale.
    """
    value = value.float()
    value_scale = value.abs().amax(-2) / VALUE_RANGE + SCALE_EPSILON
    return QuantizedOperands(
        *quantize_query(query, granularity),
        *quantize_key(key, granularity),
        (value / value_scale.unsqueeze(-2)).to(FP8),
        value_scale,
    )


def attend(operands: QuantizedOperands, *, scale: float, is_causal: bool = False) -> Tensor:
    """Return the attention of prepared operands, FP32 ``[B, H, Sq, D]``.

    Keys are visited in tiles of 64, whose product is rounded to FP16: the numerics of matrix
    instructions that accumulate in FP16 and are buffered in FP32.

    Args:
        operands: Result of :func:`prepare`.
        scale: Factor of the logits.
        is_causal: Whether query ``i`` sees keys ``j <= i`` only.
    """
    o = operands
    batch, heads, rows, head_dim = o.query_codes.shape
    value_scale = o.value_scale.unsqueeze(-2)
    output = o.query_scale.new_empty((batch, heads, rows, head_dim))
    for window in query_windows(batch * heads, rows, output.device):
        numerator = torch.zeros_like(output[:, :, window])
        denominator = torch.zeros_like(numerator[..., :1])
        maximum = torch.full_like(denominator, float("-inf"))
        for tile, scores in score_tiles(
            o.query_codes[:, :, window],
            o.query_scale[:, :, window],
            o.key_codes,
            o.key_scale,
            positions=range(window.start, window.stop),
            scale=scale,
            is_causal=is_causal,
        ):
            previous = maximum
            maximum = torch.maximum(previous, scores.amax(-1, keepdim=True))
            old_weight = torch.exp(previous - maximum)
            # Huge scores would swallow the logarithm before the difference.
            p = scores.sub_(maximum).add_(math.log(PROBABILITY_RANGE)).exp_().nan_to_num_(nan=0.0)
            denominator = denominator * old_weight + p.sum(-1, keepdim=True)
            values = o.value_codes[:, :, tile].float()
            product = _autocast.product(p.to(FP8).float(), values)
            numerator.mul_(old_weight).add_(product.half().float().mul_(value_scale))
        output[:, :, window] = numerator / denominator.clamp(min=MIN_DENOMINATOR)
    return output


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    is_causal: bool,
    *,
    granularity: Granularity = Granularity.PER_THREAD,
) -> Tensor:
    """Return the attention in the dtype of ``query``, contiguous ``[B, H, Sq, D]``."""
    operands = prepare(query, key, value, granularity=granularity)
    return attend(operands, scale=scale, is_causal=is_causal).to(query.dtype)
