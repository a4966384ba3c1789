"""Inputs that are rounded to 8 bits by the operation before a product instead of by the product.

A product whose row reads codes saves writing its input in 16 bits and reading it again. The norm or
activation before it asks `takes_fp8_rows` or `takes_int8_rows` and then rounds in its own kernel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RoundedRows:
    """Rows of 8-bit codes with one scale each.

    Attributes:
        codes: [M, K].
        scales: fp32 [M].
        dtype: of the values they were rounded from and of the product.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """[M, K]."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.codes.device

    def numel(self) -> int:
        """Returns the number of values."""
        return self.codes.numel()


class Fp8Rows(RoundedRows):
    """Rows in float8 e4m3: values are codes times scales."""


class Int8Rows(RoundedRows):
    """Rows in INT8 in the rotated basis of a ConvRot weight: codes times scales, rotated back."""
