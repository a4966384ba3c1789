"""Custom operators of ConvRot INT8 linear.

They keep eager calls, traced graphs and compiler rewrites on one set of graph nodes. The
backend is resolved when an operator executes; fakes compute shapes only.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from piper_kernels._input_activations import width_factor
from piper_kernels.linear._operators import fake_of, operator
from piper_kernels.linear.convrot.int8._backend import select_linear_backend


def _linear(
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


def _fake_linear(input: Tensor, weight_qdata: Tensor, *_operands: object) -> Tensor:  # noqa: A002
    return input.new_empty((*input.shape[:-1], weight_qdata.shape[0]))


def _prepare_input(
    input: Tensor,  # noqa: A002
    group_size: int,
    activation_fn: str | None = None,
    input_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return int8 codes ``[..., K]`` and FP32 row scales ``[...]`` of an input."""
    backend = select_linear_backend(input.device)
    return backend.prepare_input(input, group_size, activation_fn, input_scale)


def _fake_prepare_input(
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


def _linear_prepared(
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


def _fake_linear_prepared(
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


def _dequantized_input_mean(
    input_qdata: Tensor, input_scale: Tensor, block_lengths: Tensor | None = None
) -> Tensor:
    """Return the mean over ``S`` of prepared inputs ``[B, S, K]``, FP32 ``[B, K]``, rotated."""
    backend = select_linear_backend(input_qdata.device)
    return backend.dequantized_input_mean(input_qdata, input_scale, block_lengths)


def _fake_dequantized_input_mean(
    input_qdata: Tensor, _input_scale: Tensor, _block_lengths: Tensor | None = None
) -> Tensor:
    batch, _, features = input_qdata.shape
    return input_qdata.new_empty((batch, features), dtype=torch.float32)


def _define(function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register an operator on all devices and return what calls it."""
    name = f"convrot_int8{function.__name__}"
    call = operator(name)(function)
    fake_of(name)(fake)
    return call


linear = _define(_linear, _fake_linear)
prepare_input = _define(_prepare_input, _fake_prepare_input)
linear_prepared = _define(_linear_prepared, _fake_linear_prepared)
dequantized_input_mean = _define(_dequantized_input_mean, _fake_dequantized_input_mean)
