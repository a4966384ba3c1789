"""The backend that executes the reference, on any device."""

import torch
from torch import Tensor

from piper_kernels.linear.convrot.int8 import reference
from piper_kernels.linear.convrot.int8._outputs import (
    Projection,
    allocate_or_check,
    check_prepared,
    output_columns,
)


class PortableBackend:
    """Executes the reference; see ``LinearBackend`` for the contracts."""

    def linear(
        self,
        input: Tensor,  # noqa: A002  # the name of F.linear
        weight_qdata: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        group_size: int,
        activation_fn: str | None = None,
        input_scale: Tensor | None = None,
    ) -> Tensor:
        """Return the linear of a floating input."""
        qdata, scale = self.prepare_input(input, group_size, activation_fn, input_scale)
        return self.linear_prepared(qdata, scale, weight_qdata, weight_scale, bias, input.dtype)

    def prepare_input(
        self,
        input: Tensor,  # noqa: A002
        group_size: int,
        activation_fn: str | None = None,
        input_scale: Tensor | None = None,
        *,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the codes and row scales of a floating input."""
        qdata, scale = reference.prepare_input(input, group_size, activation_fn, input_scale)
        if out is None:
            return qdata, scale
        check_prepared(out, tuple(qdata.shape), input.device)
        return out[0].copy_(qdata), out[1].copy_(scale)

    def linear_prepared(
        self,
        input_qdata: Tensor,
        input_scale: Tensor,
        weight_qdata: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        logical_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
        second_projection: Projection | None = None,
    ) -> Tensor:
        """Return the linear of a prepared input."""
        columns = output_columns(weight_qdata, second_projection)
        first = reference.linear_prepared(
            input_qdata, input_scale, weight_qdata, weight_scale, logical_dtype, bias
        )
        if out is None and second_projection is None:
            return first
        shape = (*input_qdata.shape[:-1], columns)
        out, _ = allocate_or_check(out, shape, logical_dtype, input_qdata.device)
        out[..., : first.shape[-1]].copy_(first)
        if second_projection is not None:
            qdata, scale, second_bias = second_projection
            out[..., first.shape[-1] :].copy_(
                reference.linear_prepared(
                    input_qdata, input_scale, qdata, scale, logical_dtype, second_bias
                )
            )
        return out

    def dequantized_input_mean(
        self, input_qdata: Tensor, input_scale: Tensor, block_lengths: Tensor | None = None
    ) -> Tensor:
        """Return the mean over a sequence of what prepared inputs stand for."""
        return reference.dequantized_input_mean(input_qdata, input_scale, block_lengths)
