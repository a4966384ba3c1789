"""Checks and views of operands that all feed-forward fusions share."""

import torch
from torch import Tensor

from piper_kernels._input_activations import width_factor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def validate_input(
    input: Tensor,  # noqa: A002  # the name of F.linear
    sources: int,
    activation_fn: str,
) -> None:
    """Check the input of a network and the number of projections that read it.

    Raises:
        ValueError: The input has no feature dimension, or another dtype or layout; or the
            activation takes another number of projections.
    """
    if input.ndim == 0:
        raise ValueError("the input of a network must have a feature dimension, got a scalar")
    if input.dtype not in _DTYPES:
        raise ValueError(
            f"the input of a network must be float16, bfloat16 or float32, got {input.dtype}"
        )
    if input.layout != torch.strided:
        raise ValueError(f"the input of a network must be strided, got {input.layout}")
    if sources != width_factor(activation_fn):
        raise ValueError(
            f"{activation_fn} takes {width_factor(activation_fn)} projections, got {sources}"
        )


def rows_of(input: Tensor) -> Tensor:  # noqa: A002
    """Return the input as ``[rows, features]``, a view where its strides allow one."""
    return input.reshape(input.shape[:-1].numel(), input.shape[-1])


def same_scalar(left: Tensor | None, right: Tensor | None) -> bool:
    """Return whether two static scales are one place in memory, or both dynamic.

    Only this is provable without reading them. It is asked at execution, so a compiled graph
    stays right for weights that share a scalar and for weights that do not.
    """
    if left is None or right is None:
        return left is right
    return left is right or (left.device == right.device and left.data_ptr() == right.data_ptr())
