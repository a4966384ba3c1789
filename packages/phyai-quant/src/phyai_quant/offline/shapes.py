"""Sizes of stored tensors."""

import torch

from phyai_quant.scheme import QuantConfigError

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Last component of each tensor's name, to its dtype and shape."""


def ceil_div(value: int, divisor: int) -> int:
    """Returns the quotient rounded up."""
    return -(-value // divisor)


def check_divides(what: str, size: int, columns: int) -> None:
    """Raises QuantConfigError when ``size`` does not divide K."""
    if columns % size:
        raise QuantConfigError(
            f"K = {columns} is not divisible by the {what} of {size}; choose a size that divides "
            "K or keep the layer unquantized with 'scheme: null'"
        )
