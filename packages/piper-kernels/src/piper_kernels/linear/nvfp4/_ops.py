"""Custom operators of NVFP4 linear.

They keep eager calls, traced graphs and compiler rewrites on one set of graph nodes, on every
device. Operands are checked by their metadata, in fakes too; the backend is resolved when an
operator executes. Block scales are swizzled unless an operator says otherwise.
"""

import torch
from torch import Tensor

from piper_kernels.linear._operators import fake_of, operator
from piper_kernels.linear.nvfp4._backend import select_linear_backend
from piper_kernels.linear.nvfp4._contract import (
    prepared_shapes,
    require_device,
    validate_level,
    validate_packed,
    validate_product,
)
from piper_kernels.weights.nvfp4._layout import scale_shape
from piper_kernels.weights.nvfp4._storage import require_logical_dtype


def check_linear(
    input: Tensor,  # noqa: A002  # the name of F.linear
    weight_qdata: Tensor,
    weight_scale: Tensor,
    weight_per_tensor_scale: Tensor | None,
    activation_per_tensor_scale: Tensor | None,
    bias: Tensor | None,
    group_size: int = 0,
) -> int:
    """Check the operands of a linear and return the number of outputs."""
    _, features = prepared_shapes(input, None, group_size)
    validate_level("activation_per_tensor_scale", activation_per_tensor_scale, input.device)
    return validate_product(
        features, input.device, weight_qdata, weight_scale, weight_per_tensor_scale, bias
    )


def fake_prepared(
    input: Tensor,  # noqa: A002
    activation_per_tensor_scale: Tensor | None,
    activation_fn: str | None,
    group_size: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Check an input and return its prepared form without contents."""
    rows, features = prepared_shapes(input, activation_fn, group_size)
    validate_level("activation_per_tensor_scale", activation_per_tensor_scale, input.device)
    return (
        input.new_empty((rows, features // 2), dtype=torch.uint8),
        input.new_empty(scale_shape(rows, features, swizzled=True), dtype=torch.float8_e4m3fn),
        input.new_empty((), dtype=torch.float32),
    )


@operator("nvfp4_linear")
def linear(
    input: Tensor,  # noqa: A002
    weight_qdata: Tensor,
    weight_scale: Tensor,
    weight_per_tensor_scale: Tensor | None,
    activation_per_tensor_scale: Tensor | None,
    bias: Tensor | None,
    dynamic_activation_scale: bool,
    high_first: bool = False,
) -> Tensor:
    """Return the linear of an input that is quantized first, in its dtype, ``[..., N]``."""
    operands = (weight_qdata, weight_scale, weight_per_tensor_scale, activation_per_tensor_scale)
    check_linear(input, *operands, bias)
    backend = select_linear_backend(input.device)
    return backend.linear(input, *operands, bias, dynamic_activation_scale, high_first)


@fake_of("nvfp4_linear")
def _(
    input: Tensor,  # noqa: A002
    weight_qdata: Tensor,
    weight_scale: Tensor,
    weight_per_tensor_scale: Tensor | None,
    activation_per_tensor_scale: Tensor | None,
    bias: Tensor | None,
    dynamic_activation_scale: bool,  # noqa: ARG001
    high_first: bool = False,  # noqa: ARG001
) -> Tensor:
    operands = (weight_qdata, weight_scale, weight_per_tensor_scale, activation_per_tensor_scale)
    return input.new_empty((*input.shape[:-1], check_linear(input, *operands, bias)))


@operator("nvfp4_prepare_input")
def prepare_input(
    input: Tensor,  # noqa: A002
    activation_per_tensor_scale: Tensor | None,
    dynamic_activation_scale: bool,
    activation_fn: str | None = None,
    high_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return uint8 codes ``[rows, K / 2]``, swizzled block scales and the FP32 second level."""
    prepared_shapes(input, activation_fn, 0)
    validate_level("activation_per_tensor_scale", activation_per_tensor_scale, input.device)
    return select_linear_backend(input.device).prepare_input(
        input, activation_per_tensor_scale, dynamic_activation_scale, activation_fn, high_first
    )


@fake_of("nvfp4_prepare_input")
def _(
    input: Tensor,  # noqa: A002
    activation_per_tensor_scale: Tensor | None,
    dynamic_activation_scale: bool,  # noqa: ARG001
    activation_fn: str | None = None,
    high_first: bool = False,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_prepared(input, activation_per_tensor_scale, activation_fn)


def _check_prepared(
    input_qdata: Tensor,
    input_scale: Tensor,
    input_per_tensor_scale: Tensor,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    weight_per_tensor_scale: Tensor | None,
    bias: Tensor | None,
    logical_dtype: torch.dtype,
) -> tuple[int, int]:
    require_logical_dtype(logical_dtype)
    rows, features = validate_packed("input", input_qdata, input_scale)
    device = input_qdata.device
    validate_level("input_per_tensor_scale", input_per_tensor_scale, device)
    return rows, validate_product(
        features, device, weight_qdata, weight_scale, weight_per_tensor_scale, bias
    )


@operator("nvfp4_linear_prepared")
def linear_prepared(
    input_qdata: Tensor,
    input_scale: Tensor,
    input_per_tensor_scale: Tensor,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    weight_per_tensor_scale: Tensor | None,
    bias: Tensor | None,
    logical_dtype: torch.dtype,
) -> Tensor:
    """Return the linear of a prepared input in ``logical_dtype``, ``[rows, N]``.

    Inputs and weights in a rotated basis are multiplied by this operator too.
    """
    prepared = (input_qdata, input_scale, input_per_tensor_scale)
    weight = (weight_qdata, weight_scale, weight_per_tensor_scale)
    _check_prepared(*prepared, *weight, bias, logical_dtype)
    backend = select_linear_backend(input_qdata.device)
    return backend.linear_prepared(*prepared, *weight, bias, logical_dtype)


@fake_of("nvfp4_linear_prepared")
def _(
    input_qdata: Tensor,
    input_scale: Tensor,
    input_per_tensor_scale: Tensor,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    weight_per_tensor_scale: Tensor | None,
    bias: Tensor | None,
    logical_dtype: torch.dtype,
) -> Tensor:
    prepared = (input_qdata, input_scale, input_per_tensor_scale)
    weight = (weight_qdata, weight_scale, weight_per_tensor_scale)
    shape = _check_prepared(*prepared, *weight, bias, logical_dtype)
    return input_qdata.new_empty(shape, dtype=logical_dtype)


def _check_weight_only(
    input: Tensor,  # noqa: A002
    weight_qdata: Tensor,
    weight_scale: Tensor,
    weight_per_tensor_scale: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    swizzled: bool,
) -> int:
    _, features = prepared_shapes(input, None, group_size)
    require_device("weight", weight_qdata, input.device)
    return validate_product(
        features,
        input.device,
        weight_qdata,
        weight_scale,
        weight_per_tensor_scale,
        bias,
        swizzled=swizzled,
    )


@operator("nvfp4_weight_only_linear")
def weight_only_linear(
    input: Tensor,  # noqa: A002
    weight_qdata: Tensor,
    weight_scale: Tensor,
    weight_per_tensor_scale: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    swizzled: bool,
    high_first: bool = False,
) -> Tensor:
    """Return the linear of an input that is not quantized, in its dtype, ``[..., N]``.

    Block scales are ``[N, K / 16]`` unless ``swizzled``; a ``group_size`` of 0 stands for a
    weight that is not rotated.
    """
    weight = (weight_qdata, weight_scale, weight_per_tensor_scale)
    _check_weight_only(input, *weight, bias, group_size, swizzled)
    backend = select_linear_backend(input.device)
    return backend.weight_only_linear(input, *weight, bias, group_size, swizzled, high_first)


@fake_of("nvfp4_weight_only_linear")
def _(
    input: Tensor,  # noqa: A002
    weight_qdata: Tensor,
    weight_scale: Tensor,
    weight_per_tensor_scale: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    swizzled: bool,
    high_first: bool = False,  # noqa: ARG001
) -> Tensor:
    weight = (weight_qdata, weight_scale, weight_per_tensor_scale)
    outputs = _check_weight_only(input, *weight, bias, group_size, swizzled)
    return input.new_empty((*input.shape[:-1], outputs))
