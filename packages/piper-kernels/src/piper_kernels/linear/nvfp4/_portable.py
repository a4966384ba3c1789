"""The NVFP4 linear backend that executes the reference, on any device."""

import torch
from torch import Tensor
from torch.nn import functional

from piper_kernels._autocast import full_precision
from piper_kernels.linear.nvfp4 import reference
from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.nvfp4._encoding import decode
from piper_kernels.weights.nvfp4._layout import BLOCK_SIZE, unswizzle_scale

Prepared = tuple[Tensor, Tensor, Tensor]


class PortableBackend:
    """Executes the reference; see ``_backend.LinearBackend`` for shapes and maths."""

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
        """Return the linear of a floating input that is quantized first."""
        return reference.linear(
            input,
            weight_qdata,
            weight_scale,
            weight_per_tensor_scale,
            activation_per_tensor_scale,
            bias,
            dynamic_activation_scale,
            high_first,
            group_size=group_size,
        )

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
        qdata, scale, level = reference.prepare_input(
            input,
            activation_per_tensor_scale,
            dynamic_activation_scale,
            activation_fn,
            high_first,
            group_size=group_size,
        )
        if out is not None:
            for target, value in zip(out, (qdata, scale, level), strict=True):
                target.copy_(value)
            return out
        # A static scale belongs to the weight; an operator may not return its own input.
        return qdata, scale, level.clone() if level is activation_per_tensor_scale else level

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
        result = reference.linear_prepared(
            input_qdata,
            input_scale,
            input_per_tensor_scale,
            weight_qdata,
            weight_scale,
            weight_per_tensor_scale,
            bias,
            logical_dtype,
        )
        return result if out is None else out.copy_(result)

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
        rows, blocks = weight_qdata.shape[0], 2 * weight_qdata.shape[1] // BLOCK_SIZE
        plain = unswizzle_scale(weight_scale, rows, blocks) if swizzled else weight_scale
        scale = plain.to(torch.float32)
        if weight_per_tensor_scale is not None:
            scale = scale * weight_per_tensor_scale
        dense = decode(weight_qdata, scale, high_first=high_first)
        return dense_linear(input, rotate_groups(dense, group_size) if group_size else dense, bias)


def dense_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002
    """Multiply by a dense FP32 weight in the dtype of the input.

    A bias of another dtype makes the product FP32, rounded once.
    """
    if bias is None or bias.dtype == input.dtype:
        return functional.linear(input, weight.to(input.dtype), bias)
    with full_precision(input.device):
        return functional.linear(input.to(torch.float32), weight, bias.to(torch.float32)).to(
            input.dtype
        )
