"""Backends that execute ConvRot INT8 linear with Triton kernels. Importing needs Triton."""

import torch
from torch import Tensor

from piper_kernels._input_activations import resolve_activation, width_factor
from piper_kernels._triton.products import rows_side_by_side
from piper_kernels._triton.targets import accelerator_target, sm_count
from piper_kernels.linear.convrot.int8 import _launch, _selection
from piper_kernels.linear.convrot.int8._nvidia import hopper_plan
from piper_kernels.linear.convrot.int8._outputs import (
    Projection,
    allocate_or_check,
    check_prepared,
    output_columns,
)
from piper_kernels.linear.convrot.int8._portable import PortableBackend


class PreparationBackend(PortableBackend):
    """Prepares inputs with kernels and multiplies them portably."""

    def prepare_input(
        self,
        input: Tensor,  # noqa: A002  # the name of F.linear
        group_size: int,
        activation_fn: str | None = None,
        input_scale: Tensor | None = None,
        *,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the codes and row scales of a floating input."""
        lead = tuple(input.shape[:-1])
        features = input.shape[-1] // width_factor(activation_fn)
        if out is None:
            qdata = torch.empty((*lead, features), dtype=torch.int8, device=input.device)
            out = qdata, torch.empty(lead, dtype=torch.float32, device=input.device)
        else:
            check_prepared(out, (*lead, features), input.device)
        qdata, scale = out
        if qdata.numel():
            activation = resolve_activation(activation_fn)
            flat = input.ndim == 2  # a view of what is flat costs the host
            _launch.prepare_rows(
                input if flat else input.reshape(-1, input.shape[-1]),
                qdata if flat else qdata.view(-1, features),
                scale if flat else scale.view(-1),
                group_size,
                None if activation is None else activation.value,
                input_scale,
                _selection.max_fused_width(accelerator_target(input.device)),
            )
        return out


class TritonBackend(PreparationBackend):
    """Prepares inputs and multiplies them with kernels."""

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
        shape = (*input_qdata.shape[:-1], columns)
        out, rows = allocate_or_check(out, shape, logical_dtype, input_qdata.device)
        if out.numel():
            qdata, scale = input_qdata, input_scale
            if qdata.ndim != 2:  # a view of what is flat costs the host
                qdata, scale = qdata.reshape(-1, qdata.shape[-1]), scale.reshape(-1)
            first = _contiguous((weight_qdata, weight_scale, bias))
            second = None if second_projection is None else _contiguous(second_projection)
            multiply(rows_side_by_side(qdata), scale.contiguous(), first, second, rows)
        return out

    def dequantized_input_mean(
        self, input_qdata: Tensor, input_scale: Tensor, block_lengths: Tensor | None = None
    ) -> Tensor:
        """Return the mean over a sequence of what prepared inputs stand for."""
        if input_qdata.numel() == 0:
            return super().dequantized_input_mean(input_qdata, input_scale, block_lengths)
        return _launch.dequantized_mean(
            input_qdata.contiguous(), input_scale.contiguous(), block_lengths
        )


def multiply(
    input_qdata: Tensor,
    input_scale: Tensor,
    first: Projection,
    second: Projection | None,
    out: Tensor,
) -> None:
    """Multiply with the schedule of the device; see ``_launch.matmul``."""
    target = accelerator_target(out.device)
    rows, depth = input_qdata.shape
    columns = out.shape[1]
    if _selection.uses_hopper(target, input_qdata, first, second):
        processors = sm_count(out.device)
        plan = hopper_plan.select_plan(rows, columns, depth, processors)
        _selection.hopper_launcher().matmul(
            input_qdata, input_scale, first, second, out, plan, processors
        )
        return
    plan = _selection.select_matmul_plan(target, rows, columns)
    _launch.matmul(input_qdata, input_scale, first, second, out, plan)


def _contiguous(projection: Projection) -> Projection:
    qdata, scale, bias = projection
    return qdata.contiguous(), scale.contiguous(), bias
