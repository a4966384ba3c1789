"""Custom operators of ConvRot INT8 linear.

They keep eager calls, traced graphs and compiler rewrites on one set of graph nodes. The
backend is resolved when an operator executes; fakes compute shapes only.
"""

import torch
from torch import Tensor

from piper_kernels._input_activations import width_factor
from piper_kernels.linear.convrot.int8._backend import select_linear_backend


@torch.library.custom_op("piper_kernels::convrot_int8_linear", mutates_args=())
def linear(
    input: Tensor,  # noqa: A002  # the name of F.linear
    weight_qdata: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    activation_fn: str | None = None,
    input_scale: Tensor | None = None,
) -> Tensor:
    """Return the linear of a floating input in its dtype, ``[..., N]``."""
    backend = select_linear_backend(input.device)
    return backend.linear(
        input, weight_qdata, weight_scale, bias, group_size, activation_fn, input_scale
    )


@linear.register_fake
def _(input: Tensor, weight_qdata: Tensor, *_operands: object) -> Tensor:  # noqa: A002
    return input.new_empty((*input.shape[:-1], weight_qdata.shape[0]))


@torch.library.custom_op("piper_kernels::convrot_int8_prepare_input", mutates_args=())
def prepare_input(
    input: Tensor,  # noqa: A002
    group_size: int,
    activation_fn: str | None = None,
    input_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return int8 codes ``[..., K]`` and FP32 row scales ``[...]`` of an input."""
    backend = select_linear_backend(input.device)
    return backend.prepare_input(input, group_size, activation_fn, input_scale)


@prepare_input.register_fake
def _(
    input: Tensor,  # noqa: A002
    _group_size: int,
    activation_fn: str | None = None,
    _input_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    lead = input.shape[:-1]
    features = input.shape[-1] // width_factor(activation_fn)
    return (
        input.new_empty((*lead, features), dtype=torch.int8),
        input.new_empty(lead, dtype=torch.float32),
    )


@torch.library.custom_op("piper_kernels::convrot_int8_linear_prepared", mutates_args=())
def linear_prepared(
    input_qdata: Tensor,
    input_scale: Tensor,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    logical_dtype: torch.dtype,
) -> Tensor:
    """Return the linear of a prepared input in ``logical_dtype``, ``[..., N]``."""
    backend = select_linear_backend(input_qdata.device)
    return backend.linear_prepared(
        input_qdata, input_scale, weight_qdata, weight_scale, bias, logical_dtype
    )


@linear_prepared.register_fake
def _(
    input_qdata: Tensor,
    _input_scale: Tensor,
    weight_qdata: Tensor,
    _weight_scale: Tensor,
    _bias: Tensor | None,
    logical_dtype: torch.dtype,
) -> Tensor:
    return input_qdata.new_empty(
        (*input_qdata.shape[:-1], weight_qdata.shape[0]), dtype=logical_dtype
    )


@torch.library.custom_op("piper_kernels::convrot_int8_dequantized_input_mean", mutates_args=())
def dequantized_input_mean(
    input_qdata: Tensor, input_scale: Tensor, block_lengths: Tensor | None = None
) -> Tensor:
    """Return the mean over ``S`` of prepared inputs ``[B, S, K]``, FP32 ``[B, K]``, rotated."""
    backend = select_linear_backend(input_qdata.device)
    return backend.dequantized_input_mean(input_qdata, input_scale, block_lengths)


@dequantized_input_mean.register_fake
def _(input_qdata: Tensor, _input_scale: Tensor, _block_lengths: Tensor | None = None) -> Tensor:
    batch, _, features = input_qdata.shape
    return input_qdata.new_empty((batch, features), dtype=torch.float32)
