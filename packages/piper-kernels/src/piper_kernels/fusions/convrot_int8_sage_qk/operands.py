"""Operands of a projection and the checks of their host metadata."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from piper_kernels.linear._bias import validate_bias


@dataclass(frozen=True)
class PreparedInput:
    """The result of ``convrot_int8_prepare_input`` for ``[B, S, F]``.

    Attributes:
        qdata: int8 ``[B, S, F]``, rotated.
        scale: FP32 ``[B, S]``.
    """

    qdata: Tensor
    scale: Tensor

    def window(self, batches: slice, rows: slice) -> "PreparedInput":
        """Return a range of batches and rows, contiguous."""
        return PreparedInput(
            self.qdata[batches, rows].contiguous(), self.scale[batches, rows].contiguous()
        )


@dataclass(frozen=True)
class HeadProjection:
    """A ConvRot INT8 weight whose ``N`` outputs are ``H`` heads of width ``D``.

    Attributes:
        qdata: int8 ``[N, F]``.
        scale: FP32 ``[N, 1]``.
        bias: Floating ``[N]``, added in FP32, or ``None``.
        head_dim: ``D``, 64 or 128.
    """

    qdata: Tensor
    scale: Tensor
    bias: Tensor | None
    head_dim: int

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.qdata.shape[0] // self.head_dim


def check_projection(
    label: str, inputs: PreparedInput, projection: HeadProjection, least_rows: int = 1
) -> None:
    """Check the metadata of an input and of a projection of it.

    Raises:
        ValueError: A rank, shape, dtype, device or layout does not fit.
        TypeError: The bias is not a tensor.
    """
    qdata, device = inputs.qdata, inputs.qdata.device
    if qdata.ndim != 3 or qdata.dtype != torch.int8:
        raise ValueError(
            f"{label}: input_qdata must be int8 [batch, sequence, features], got {qdata.dtype} "
            f"{tuple(qdata.shape)}; make it with convrot_int8_prepare_input"
        )
    batch, rows, features = qdata.shape
    if rows < least_rows:
        raise ValueError(f"{label} requires at least {least_rows} sequence rows, got {rows}")
    weight = projection.qdata
    if weight.ndim != 2 or weight.dtype != torch.int8 or weight.shape[1] != features:
        raise ValueError(
            f"{label}: weight_qdata must be int8 [heads * head_dim, {features}], got "
            f"{weight.dtype} {tuple(weight.shape)}"
        )
    outputs = weight.shape[0]
    if outputs == 0 or outputs % projection.head_dim:
        raise ValueError(
            f"{label}: the {outputs} outputs of the weight must be whole heads of width "
            f"{projection.head_dim}"
        )
    _require(label, "input_qdata", qdata, tuple(qdata.shape), torch.int8, device)
    _require(label, "input_scale", inputs.scale, (batch, rows), torch.float32, device)
    _require(label, "weight_qdata", weight, (outputs, features), torch.int8, device)
    _require(label, "weight_scale", projection.scale, (outputs, 1), torch.float32, device)
    validate_bias(projection.bias, outputs, device)


def check_softmax_scale(label: str, scale: float) -> None:
    """Check the factor of the logits; ``ValueError`` unless it is finite and positive."""
    if not 0 < scale < math.inf:
        raise ValueError(f"{label}: softmax_scale must be finite and positive, got {scale}")


def check_input_mean(label: str, mean: Tensor, inputs: PreparedInput) -> None:
    """Check the mean of an input over its rows, FP32 ``[B, F]``.

    Raises:
        ValueError: The shape, dtype, device or layout does not fit.
    """
    batch, _, features = inputs.qdata.shape
    _require(label, "input_mean", mean, (batch, features), torch.float32, inputs.qdata.device)


def _require(
    label: str,
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    fits = tensor.shape == shape and tensor.dtype == dtype and tensor.device == device
    if not fits or not tensor.is_contiguous():
        raise ValueError(
            f"{label}: {name} must be contiguous {dtype} {shape} on {device}, got {tensor.dtype} "
            f"{tuple(tensor.shape)} with strides {tuple(tensor.stride())} on {tensor.device}"
        )
