"""Shapes, loading and expansion of the scales of FP8 weights."""

from typing import cast

import torch
from torch import nn

from phyai_quant.scheme import Granularity, TensorQuant
from phyai_quant.specs import loading
from phyai_quant.specs._scales import (
    E8M0_DTYPES,
    check_dtype,
    check_first,
    check_scalar,
    float_scale,
)
from phyai_quant.specs.slicing import check_slices, local_parts

WEIGHT_SCALE_NAMES = ("weight_scale", "weight_scale_inv")
"""Checkpoint names of the weight scale; both hold the multiplier that dequantizes."""


def scale_dtype(weight: TensorQuant) -> torch.dtype:
    """Returns the dtype of ``weight_scale``: e8m0 for micro-scaled weights, else fp32."""
    return torch.float8_e8m0fnu if weight.micro_scaled else torch.float32


def allocated_shape(layer: nn.Module, weight: TensorQuant) -> tuple[int, ...]:
    """Returns the shape of ``weight_scale`` while loading.

    Raises:
        QuantConfigError: A leg or a slice begins or ends inside a block.
    """
    request = loading.load_state(layer).request
    rows, columns = request.weight_shape
    if weight.granularity is Granularity.PER_TENSOR:
        return (len(request.logical_widths),)
    if weight.block_shape is None:
        return (rows,)
    block_n, block_k = weight.block_shape
    check_slices(layer, "weight_scale", rows_per_entry=block_n, columns_per_entry=block_k)
    return (-(-rows // block_n), -(-columns // block_k))


def load_weight_scale(
    layer: nn.Module, name: str, loaded: torch.Tensor, legs: range, weight: TensorQuant
) -> None:
    """Copies this rank's part of the weight scale of consecutive legs to its place.

    A per_tensor scalar goes to the slot of each leg. A per_channel scale is ``[w]``, ``[w, 1]`` or
    a scalar for all rows of the leg. A block scale is ``[ceil(w/bn), ceil(K/bk)]``; e8m0 scales of
    a micro-scaled weight may be stored as uint8. ModelOpt writes fp32 block scales as
    ``[ceil(w/bn), 1, ceil(K/bk), 1]``, and a scalar for a single block. w and K are those of the
    whole legs.
    """
    check_first(layer, name, "weight_scale", legs, WEIGHT_SCALE_NAMES)
    target = cast("nn.Parameter", layer.weight_scale)
    values = _scale_values(layer, name, loaded, weight)
    is_scalar = values.numel() == 1 and values.ndim <= 2
    with torch.no_grad():
        if weight.granularity is Granularity.PER_TENSOR:
            check_scalar(layer, name, values)
            target[legs.start : legs.stop].copy_(values.reshape(-1))
        elif weight.block_shape is None and is_scalar:
            target[loading.row_span(layer, legs)].copy_(values.reshape(-1))
        else:
            block_n, block_k = weight.block_shape or (1, None)
            if weight.block_shape is not None and not weight.micro_scaled:
                values = _two_dimensional(values)
            for rows, part in local_parts(
                layer, name, values, legs, rows_per_entry=block_n, columns_per_entry=block_k
            ):
                target[rows].copy_(part)


def expand_blocks(
    scale: torch.Tensor, block_shape: tuple[int, int], shape: torch.Size
) -> torch.Tensor:
    """Repeats block scales ``[ceil(N/bn), ceil(K/bk)]`` to ``[N, K]``."""
    wide = scale.repeat_interleave(block_shape[0], 0).repeat_interleave(block_shape[1], 1)
    return wide[: shape[0], : shape[1]]


def _scale_values(
    layer: nn.Module, name: str, loaded: torch.Tensor, weight: TensorQuant
) -> torch.Tensor:
    if not weight.micro_scaled:
        return float_scale(layer, name, loaded)
    check_dtype(layer, name, loaded, E8M0_DTYPES)
    return loaded.view(torch.float8_e8m0fnu)


def _two_dimensional(values: torch.Tensor) -> torch.Tensor:
    if values.ndim == 4 and values.shape[1] == values.shape[3] == 1:
        return values[:, 0, :, 0]
    return values.reshape(1, 1) if values.ndim == 0 else values
