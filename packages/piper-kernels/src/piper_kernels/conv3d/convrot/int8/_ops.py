"""Custom operators of ConvRot INT8 convolution.

Implementations and fakes check the same metadata; fakes compute shapes only. The backend is
resolved when an operator executes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from piper_kernels.conv3d.convrot.int8._backend import select_backend
from piper_kernels.conv3d.convrot.int8._operands import Filter, Normalization, check


def _filter(
    qdata: Tensor, scale: Tensor, bias: Tensor | None, group_size: int, input_scale: Tensor
) -> Filter:
    column = scale.view(-1, 1) if scale.ndim == 1 else scale
    return Filter(qdata, column, bias, group_size, input_scale)


@torch.library.custom_op("piper_kernels::convrot_int8_conv3d", mutates_args=())
def conv3d(
    input: Tensor,  # noqa: A002  # the name in torch
    qdata: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    input_scale: Tensor,
    stride: Sequence[int],
    symmetric: bool,
    right: bool,
    residual: Tensor | None,
) -> Tensor:
    """Return the convolution, float16 ``[N, O, T', H', W']``; see ``reference.conv3d``."""
    weight = _filter(qdata, scale, bias, group_size, input_scale)
    geometry = check(input, weight, stride, (symmetric, right), residual)
    return select_backend(input.device).conv3d(input, weight, geometry, residual)


@conv3d.register_fake
def _(
    input: Tensor,  # noqa: A002
    qdata: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    input_scale: Tensor,
    stride: Sequence[int],
    symmetric: bool,
    right: bool,
    residual: Tensor | None,
) -> Tensor:
    weight = _filter(qdata, scale, bias, group_size, input_scale)
    geometry = check(input, weight, stride, (symmetric, right), residual)
    return input.new_empty(geometry.out_shape, dtype=torch.float16)


@torch.library.custom_op("piper_kernels::convrot_int8_group_norm_silu_conv3d", mutates_args=())
def group_norm_silu_conv3d(
    input: Tensor,  # noqa: A002
    norm_weight: Tensor,
    norm_bias: Tensor,
    norm_groups: int,
    norm_epsilon: float,
    qdata: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    input_scale: Tensor,
    stride: Sequence[int],
    symmetric: bool,
    right: bool,
    residual: Tensor | None,
) -> Tensor:
    """Return the convolution of the normalized and activated input; see ``reference.conv3d``."""
    weight = _filter(qdata, scale, bias, group_size, input_scale)
    norm = Normalization(norm_weight, norm_bias, norm_groups, norm_epsilon)
    geometry = check(input, weight, stride, (symmetric, right), residual, norm)
    return select_backend(input.device).conv3d(input, weight, geometry, residual, norm)


@group_norm_silu_conv3d.register_fake
def _(
    input: Tensor,  # noqa: A002
    norm_weight: Tensor,
    norm_bias: Tensor,
    norm_groups: int,
    norm_epsilon: float,
    qdata: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    input_scale: Tensor,
    stride: Sequence[int],
    symmetric: bool,
    right: bool,
    residual: Tensor | None,
) -> Tensor:
    weight = _filter(qdata, scale, bias, group_size, input_scale)
    norm = Normalization(norm_weight, norm_bias, norm_groups, norm_epsilon)
    geometry = check(input, weight, stride, (symmetric, right), residual, norm)
    return input.new_empty(geometry.out_shape, dtype=torch.float16)
