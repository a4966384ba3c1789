"""Prepared NVFP4 inputs and weights of heads, and the checks of their host metadata.

Inputs and weights in a rotated basis, as ConvRot NVFP4 has them, are multiplied in the same way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from piper_kernels.linear.nvfp4._contract import validate_level, validate_packed, validate_product
from piper_kernels.weights.nvfp4._layout import SCALE_ROW_TILE

LABEL = "NVFP4 sparse Piper projection"


@dataclass(frozen=True)
class PackedInput:
    """The result of ``nvfp4_prepare_input`` for ``[1, S, F]``.

    Attributes:
        qdata: uint8 ``[S, F / 2]``.
        scale: Swizzled float8_e4m3fn block scales.
        level: FP32 scalar.
    """

    qdata: Tensor
    scale: Tensor
    level: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """What it consists of."""
        return [self.qdata, self.scale, self.level]

    def window(self, rows: slice) -> "PackedInput":
        """Return rows that start at a multiple of 128, as views."""
        tiles = slice(rows.start // 4, -(-rows.stop // SCALE_ROW_TILE) * (SCALE_ROW_TILE // 4))
        return PackedInput(self.qdata[rows], self.scale[tiles], self.level)


@dataclass(frozen=True)
class PackedProjection:
    """An NVFP4 weight whose outputs are ``H`` heads of width ``D``.

    Attributes:
        qdata: uint8 ``[H * D, F / 2]``.
        scale: Swizzled float8_e4m3fn block scales.
        level: FP32 scalar, or ``None``.
        bias: Floating ``[H * D]``, added in FP32, or ``None``.
        head_dim: ``D``, 64 or 128.
    """

    qdata: Tensor
    scale: Tensor
    level: Tensor | None
    bias: Tensor | None
    head_dim: int

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.qdata.shape[0] // self.head_dim

    @property
    def tensors(self) -> list[Tensor]:
        """What it consists of."""
        named = (self.qdata, self.scale, self.level, self.bias)
        return [tensor for tensor in named if tensor is not None]


def check_packed(
    inputs: PackedInput, projection: PackedProjection, least_rows: int = 1
) -> tuple[int, int]:
    """Check an input and a projection of it; return rows and features.

    Raises:
        ValueError: A rank, shape, dtype, device or layout does not fit.
        TypeError: The bias is not a tensor.
    """
    rows, features = validate_packed("input", inputs.qdata, inputs.scale)
    device: torch.device = inputs.qdata.device
    validate_level("input_per_tensor_scale", inputs.level, device)
    outputs = validate_product(
        features, device, projection.qdata, projection.scale, projection.level, projection.bias
    )
    if outputs == 0 or outputs % projection.head_dim:
        raise ValueError(
            f"{LABEL}: the {outputs} outputs of the weight must be whole heads of width "
            f"{projection.head_dim}"
        )
    if rows < least_rows:
        raise ValueError(f"{LABEL} requires at least {least_rows} sequence rows, got {rows}")
    return rows, features
