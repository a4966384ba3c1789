"""The NVFP4 linear backend of Triton kernels. Importing needs Triton.

It has the contracts of ``_portable``. Besides the result a call takes: a copy of inputs without
unit column stride; the input as an operand, unless few rows of it are multiplied as they are;
FP32 sums of a product whose depth is split; for many rows a decoded part of the weight and its
FP32 sums; and 1 KiB for a dynamic scale. Nothing is
synchronized and nothing is read back, so every call can be captured.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from typing import Any

import torch
from torch import Tensor

from piper_kernels._input_activations import width_factor
from piper_kernels._triton.products import rows_side_by_side
from piper_kernels._triton.runtime import as_words, launch_guard
from piper_kernels._triton.targets import accelerator_target
from piper_kernels.linear.nvfp4 import _operand_kernels
from piper_kernels.linear.nvfp4._operands import COLUMNS, ROWS, dense_operand, operand_grid
from piper_kernels.linear.nvfp4._portable import Prepared
from piper_kernels.linear.nvfp4._product import multiply
from piper_kernels.linear.nvfp4._weight import (
    Plan,
    Weight,
    operand_dtype,
    operand_width,
    plan_of,
)
from piper_kernels.weights.nvfp4._layout import (
    SCALE_COLUMN_TILE,
    SCALE_ROW_TILE,
    ceil_div,
    scale_shape,
)
from piper_kernels.weights.nvfp4._tiles import AMAX_SLOTS


class TritonBackend:
    """Executes Triton kernels; see ``_backend.LinearBackend`` for shapes and maths."""

    def linear(
        self,
        input: Tensor,  # noqa: A002  # the name of F.linear
        weight_qdata: Tensor,
        weight_scale: Tensor,
        weight_per_tensor_scale: Tensor | None,
        activation_per_tensor_scale: Tensor | None,
        bias: Tensor | None,
        dynamic_activation_scale: bool,
        high_first: bool = False,
        *,
        group_size: int = 0,
    ) -> Tensor:
        """Return the linear of a floating input that is quantized first.

        The values of the codes go straight into the product; they are never packed.
        """
        matrix = _matrix(input)
        weight = Weight(weight_qdata, weight_scale, weight_per_tensor_scale, bias, True, high_first)
        out = matrix.new_empty((matrix.shape[0], weight.outputs))
        if out.numel():
            with launch_guard(input.device):
                plan = plan_of(weight, matrix.shape[0], operand_dtype(None, input.device))
                operand, level = _quantized_operand(
                    matrix, activation_per_tensor_scale, dynamic_activation_scale, group_size, plan
                )
                multiply(operand, level, weight, out, plan)
        return out.view(*input.shape[:-1], weight.outputs)

    def prepare_input(
        self,
        input: Tensor,  # noqa: A002
        activation_per_tensor_scale: Tensor | None,
        dynamic_activation_scale: bool,
        activation_fn: str | None = None,
        high_first: bool = False,
        *,
        group_size: int = 0,
        out: Prepared | None = None,
    ) -> Prepared:
        """Return codes, swizzled block scales and the second level of a floating input."""
        matrix = _matrix(input)
        rows, features = matrix.shape[0], matrix.shape[1] // width_factor(activation_fn)
        prepared = _empty_prepared(matrix, rows, features) if out is None else out
        qdata, scale, level = prepared
        with launch_guard(input.device):
            if rows % SCALE_ROW_TILE or features % SCALE_COLUMN_TILE:
                scale.view(torch.uint8).zero_()
            options: dict[str, Any] = {
                "GROUP": group_size,
                "GELU": activation_fn == "gelu_tanh",
                "SWIGLU": activation_fn == "swiglu",
            }
            given, amax_bits = _level_sources(
                matrix, activation_per_tensor_scale, dynamic_activation_scale, features, options
            )
            if rows == 0:
                level.zero_() if given is None else level.copy_(given)
                return prepared
            target = accelerator_target(input.device)
            with as_words(qdata) as qdata_words:
                _operand_kernels.encode_input_kernel[operand_grid(rows, features)](
                    matrix,
                    qdata_words,
                    scale.view(torch.uint8),
                    given,
                    amax_bits,
                    level,
                    rows,
                    features,
                    ceil_div(features, SCALE_COLUMN_TILE),
                    matrix.stride(0),
                    DYNAMIC=dynamic_activation_scale,
                    HIGH_FIRST=high_first,
                    NATIVE=target is not None and target.has_fp4_conversion,
                    ROWS=ROWS,
                    COLUMNS=COLUMNS,
                    **options,
                )
        return prepared

    def linear_prepared(
        self,
        input_qdata: Tensor,
        input_scale: Tensor,
        input_per_tensor_scale: Tensor,
        weight_qdata: Tensor,
        weight_scale: Tensor,
        weight_per_tensor_scale: Tensor | None,
        bias: Tensor | None,
        logical_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the linear of a prepared input."""
        rows, features = input_qdata.shape[0], 2 * input_qdata.shape[1]
        # Codes of both operands are in the same nibble order, so either order will do.
        weight = Weight(weight_qdata, weight_scale, weight_per_tensor_scale, bias, True, False)
        if out is None:
            out = input_qdata.new_empty((rows, weight.outputs), dtype=logical_dtype)
        if rows and weight.outputs:
            with launch_guard(input_qdata.device):
                dtype = operand_dtype(None, input_qdata.device)
                plan = plan_of(weight, rows, dtype)
                width = operand_width(features, plan)
                operand = input_qdata.new_empty((rows, width), dtype=dtype)
                _operand_kernels.packed_operand_kernel[operand_grid(rows, width)](
                    input_qdata,
                    input_scale.view(torch.uint8),
                    operand,
                    0,
                    rows,
                    features,
                    width,
                    ceil_div(features, SCALE_COLUMN_TILE),
                    SWIZZLED=True,
                    HIGH_FIRST=False,
                    ARRANGEMENT=plan.arrangement,
                    ROWS=ROWS,
                    COLUMNS=COLUMNS,
                )
                multiply(operand, input_per_tensor_scale, weight, out, plan)
        return out

    def weight_only_linear(
        self,
        input: Tensor,  # noqa: A002
        weight_qdata: Tensor,
        weight_scale: Tensor,
        weight_per_tensor_scale: Tensor | None,
        bias: Tensor | None,
        group_size: int,
        swizzled: bool,
        high_first: bool,
    ) -> Tensor:
        """Return the linear of an input that is not quantized."""
        matrix = _matrix(input)
        rows = matrix.shape[0]
        weight = Weight(
            weight_qdata, weight_scale, weight_per_tensor_scale, bias, swizzled, high_first
        )
        out = matrix.new_empty((rows, weight.outputs))
        if out.numel():
            with launch_guard(input.device):
                dtype = operand_dtype(input.dtype, input.device)
                plan = plan_of(weight, rows, dtype)
                operand, factor, leads = dense_operand(matrix, dtype, group_size, plan)
                multiply(operand, None, weight, out, plan, factor, follows=leads)
        return out.view(*input.shape[:-1], weight.outputs)


def decode_rows(qdata: Tensor, scale: Tensor) -> Tensor:
    """Return codes times block scales, which bfloat16 holds without rounding.

    Args:
        qdata: uint8 ``[rows, K / 2]``, contiguous; even features in low nibbles.
        scale: Swizzled float8_e4m3fn block scales.

    Returns:
        ``[rows, K]``; FP32 in the interpreter.
    """
    rows, features = qdata.shape[0], 2 * qdata.shape[1]
    operand = qdata.new_empty((rows, features), dtype=operand_dtype(None, qdata.device))
    if rows:
        with launch_guard(qdata.device):
            _operand_kernels.packed_operand_kernel[operand_grid(rows, features)](
                qdata,
                scale.view(torch.uint8),
                operand,
                0,
                rows,
                features,
                features,
                ceil_div(features, SCALE_COLUMN_TILE),
                SWIZZLED=True,
                HIGH_FIRST=False,
                ARRANGEMENT=0,
                ROWS=ROWS,
                COLUMNS=COLUMNS,
            )
    return operand


def _matrix(value: Tensor) -> Tensor:
    """Return ``[..., K]`` as a matrix with unit column stride; copies only what is not."""
    return rows_side_by_side(value.reshape(-1, value.shape[-1]))


def _empty_prepared(matrix: Tensor, rows: int, features: int) -> Prepared:
    return (
        matrix.new_empty((rows, features // 2), dtype=torch.uint8),
        matrix.new_empty(scale_shape(rows, features, swizzled=True), dtype=torch.float8_e4m3fn),
        matrix.new_empty((), dtype=torch.float32),
    )


def _level_sources(
    matrix: Tensor, given: Tensor | None, dynamic: bool, features: int, options: dict[str, Any]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the given second level, or the magnitudes that a dynamic one is made of."""
    if not dynamic:
        if given is None:
            given = torch.ones((), dtype=torch.float32, device=matrix.device)
        return given, None
    amax_bits = torch.zeros(AMAX_SLOTS.value, dtype=torch.int32, device=matrix.device)
    rows = matrix.shape[0]
    if rows:
        _operand_kernels.input_amax_kernel[operand_grid(rows, features)](
            matrix,
            amax_bits,
            rows,
            features,
            matrix.stride(0),
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            **options,
        )
    return None, amax_bits


def _quantized_operand(
    matrix: Tensor, given: Tensor | None, dynamic: bool, group_size: int, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Return the operand of a quantized input and its second level."""
    rows, features = matrix.shape
    options = {"GROUP": group_size, "GELU": False, "SWIGLU": False}
    given, amax_bits = _level_sources(matrix, given, dynamic, features, options)
    width = operand_width(features, plan)
    operand = matrix.new_empty((rows, width), dtype=operand_dtype(None, matrix.device))
    level = matrix.new_empty((), dtype=torch.float32)
    _operand_kernels.quantized_operand_kernel[operand_grid(rows, width)](
        matrix,
        operand,
        given,
        amax_bits,
        level,
        rows,
        features,
        width,
        matrix.stride(0),
        GROUP=group_size,
        DYNAMIC=dynamic,
        ARRANGEMENT=plan.arrangement,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )
    return operand, level
