"""Row-scaled weights without rotation: INT8 and FP8 storage that travels through files."""

from dataclasses import dataclass

import torch
from torch import Tensor

from piper_kernels.weights.convrot._rotation import require_group_size
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.int8._quantization import MIN_SCALE, dynamic_quantize_rows
from piper_kernels.weights.convrot.int8._storage import (
    require_logical_dtype,
    validate_activation_scale,
)

FP8_MAX = 448.0
STORAGE_DTYPES = (torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True, eq=False)
class RowQuantizedWeight:
    """A matrix stored as INT8 or FP8 codes with one FP32 scale per row; no rotation.

    A container for files and conversion, not a tensor: ``W = float(qdata) * scale``.

    Attributes:
        qdata: int8 or float8_e4m3fn ``[out, in]``, contiguous.
        scale: FP32 ``[out, 1]``, contiguous.
        logical_dtype: float16, bfloat16 or float32.
        act_per_tensor_scale: FP32 scalar that scales the layer's input, or ``None``.

    Raises:
        ValueError: A shape, dtype, device or layout breaks the format.
    """

    qdata: Tensor
    scale: Tensor
    logical_dtype: torch.dtype = torch.bfloat16
    act_per_tensor_scale: Tensor | None = None

    def __post_init__(self) -> None:
        if self.qdata.dtype not in STORAGE_DTYPES or self.qdata.ndim != 2:
            raise ValueError(
                "qdata must be int8 or float8_e4m3fn with shape [out, in], "
                f"got {self.qdata.dtype} with shape {tuple(self.qdata.shape)}"
            )
        rows = self.qdata.shape[0]
        if self.scale.dtype != torch.float32 or tuple(self.scale.shape) != (rows, 1):
            raise ValueError(
                f"scale must be float32 with shape {(rows, 1)}, "
                f"got {self.scale.dtype} with shape {tuple(self.scale.shape)}"
            )
        if not (self.qdata.is_contiguous() and self.scale.is_contiguous()):
            raise ValueError("qdata and scale must be contiguous")
        if self.qdata.device != self.scale.device:
            raise ValueError(
                "qdata and scale must share a device, "
                f"got {self.qdata.device} and {self.scale.device}"
            )
        require_logical_dtype(self.logical_dtype)
        validate_activation_scale(self.act_per_tensor_scale, self.qdata.device)

    @classmethod
    def from_hp(
        cls,
        hp_tensor: Tensor,
        *,
        storage_dtype: torch.dtype = torch.int8,
        act_per_tensor_scale: Tensor | None = None,
    ) -> "RowQuantizedWeight":
        """Quantize a dense ``[out, in]`` weight by rows, in FP32.

        The scale of a row is its absolute maximum divided by 127 (INT8) or 448 (FP8), at least
        1e-30. Codes are rounded to nearest, ties to even.
        """
        if storage_dtype not in STORAGE_DTYPES:
            raise ValueError(f"storage_dtype must be one of {STORAGE_DTYPES}, got {storage_dtype}")
        if hp_tensor.ndim != 2:
            raise ValueError(f"hp_tensor must be 2-D, got shape {tuple(hp_tensor.shape)}")
        require_logical_dtype(hp_tensor.dtype)
        dense = hp_tensor.detach().to(torch.float32)
        if storage_dtype == torch.int8:
            codes, scale = dynamic_quantize_rows(dense)
        else:
            maxima = dense.new_zeros(()).expand(dense.shape[0], 1)
            if dense.shape[1]:
                maxima = dense.abs().amax(-1, keepdim=True)
            scale = (maxima / FP8_MAX).clamp(min=MIN_SCALE)
            codes = (dense / scale).clamp(-FP8_MAX, FP8_MAX).to(storage_dtype)
        return cls(codes, scale, hp_tensor.dtype, act_per_tensor_scale)

    @property
    def shape(self) -> torch.Size:
        """Logical shape ``[out, in]``."""
        return self.qdata.shape

    def dequantize(self, output_dtype: torch.dtype | None = None) -> Tensor:
        """Return the dense weight, reconstructed in FP32 and rounded once."""
        dtype = self.logical_dtype if output_dtype is None else output_dtype
        require_logical_dtype(dtype)
        return (self.qdata.to(torch.float32) * self.scale).to(dtype)

    def to(self, device: torch.device | str) -> "RowQuantizedWeight":
        """Return the weight with its tensors on ``device``."""
        act = self.act_per_tensor_scale
        return RowQuantizedWeight(
            self.qdata.to(device),
            self.scale.to(device),
            self.logical_dtype,
            None if act is None else act.to(device),
        )


def quantize_int8(hp_tensor: Tensor, *, group_size: int) -> ConvRotInt8Tensor | RowQuantizedWeight:
    """Quantize a layer to ConvRot INT8, or to plain row INT8 where the group does not divide.

    Args:
        hp_tensor: Dense ``[out, in]`` in float16, bfloat16 or float32.
        group_size: Rotation group, 16, 64 or 256.
    """
    require_group_size(group_size)
    if hp_tensor.ndim == 2 and hp_tensor.shape[1] % group_size:
        return RowQuantizedWeight.from_hp(hp_tensor)
    return ConvRotInt8Tensor.from_hp(hp_tensor, group_size=group_size)
