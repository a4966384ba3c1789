"""The online softmax with unsigned 8-bit probabilities, one step for every tile of keys."""

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor

from piper_kernels import _autocast

PROBABILITY_LEVELS = 255
MIN_DENOMINATOR = 1e-30


class OnlineSoftmax:
    """State of query rows whose keys are visited tile by tile.

    Attributes:
        numerator: FP32 ``[..., R, D]``, in units of probability codes.
        denominator: FP32 ``[..., R, 1]``, the sum of unrounded probabilities.
        maximum: FP32 ``[..., R, 1]``, the largest score so far: the running coordinate without
            the value scales.
        offset: FP32 ``[..., R, 1]``, what the value scales add to the coordinate. Apart from the
            score it is not lost beside a score of millions.
    """

    def __init__(
        self, numerator: Tensor, denominator: Tensor, maximum: Tensor, offset: Tensor
    ) -> None:
        self.numerator = numerator
        self.denominator = denominator
        self.maximum = maximum
        self.offset = offset

    @classmethod
    def start(cls, rows: Sequence[int], head_dim: int, device: torch.device) -> Self:
        """Return the state of rows ``[..., R]`` that have seen no key."""
        denominator = torch.zeros(*rows, 1, dtype=torch.float32, device=device)
        maximum = torch.full_like(denominator, float("-inf"))
        numerator = torch.zeros(*rows, head_dim, dtype=torch.float32, device=device)
        return cls(numerator, denominator, maximum, torch.zeros_like(denominator))

    def add(
        self,
        scores: Tensor,
        value_codes: Tensor,
        log_value_scale: Tensor,
        code_factors: Sequence[Tensor | float],
        exponential: Callable[[Tensor], Tensor] = torch.exp,
    ) -> None:
        """Add the keys of one tile. ``scores`` is overwritten.

        A row without a visible key in the tile keeps its state; the first tile of a row must
        have one. The integer product is exact up to 518 keys in FP32.

        Args:
            scores: FP32 ``[..., R, N]``; negative infinity for invisible keys.
            value_codes: ``[..., N, D]``, whole numbers within 127.
            log_value_scale: FP32, broadcasts to ``[..., R, N]``: the logarithm of the value
                scales in the base of ``exponential``, or an upper bound of it.
            code_factors: What a probability is multiplied by in turn to become a code, together
                the value scale times 255.
            exponential: ``torch.exp``, or ``torch.exp2`` for scores in base 2.
        """
        tile_maximum = scores.amax(-1, keepdim=True)
        # A tile without a visible key has the maximum -inf, hence NaN in what follows.
        hidden = tile_maximum == float("-inf")
        scores.sub_(tile_maximum)
        tile_offset = (scores + log_value_scale).amax(-1, keepdim=True)
        rise = (tile_maximum - self.maximum) + (tile_offset - self.offset)
        higher = rise > 0
        old_weight = torch.where(higher, exponential(-rise), 1.0)
        tile_weight = torch.where(higher, 1.0, exponential(rise)).masked_fill_(hidden, 0.0)
        p = exponential(scores.sub_(tile_offset)).nan_to_num_(nan=0.0)
        tile_sum = p.sum(-1, keepdim=True)
        for factor in code_factors:
            p.mul_(factor)
        codes = p.round_().clamp_(0, PROBABILITY_LEVELS)
        product = _autocast.product(codes, value_codes.float())
        self.denominator = self.denominator * old_weight + tile_sum * tile_weight
        self.numerator.mul_(old_weight).add_(product.mul_(tile_weight))
        self.maximum = torch.where(higher, tile_maximum, self.maximum)
        self.offset = torch.where(higher, tile_offset, self.offset)

    def output(self, value_mean: Tensor | None = None) -> Tensor:
        """Return the attention output, FP32 ``[..., R, D]``.

        Args:
            value_mean: FP32 ``[..., D]``, what was subtracted from the values.
        """
        scale = self.denominator.clamp(min=MIN_DENOMINATOR) * PROBABILITY_LEVELS
        output = self.numerator / scale
        return output if value_mean is None else output + value_mean.unsqueeze(-2)
