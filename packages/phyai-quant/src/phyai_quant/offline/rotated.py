"""ConvRot weights: rotated along K, then quantized, with a marker that says so."""

import json
from typing import Any, cast

import torch

from phyai_quant.offline.shapes import Layout, ceil_div, check_divides
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor

METADATA_KEY = "_quantization_metadata"
"""Header entry that repeats the markers of a file."""

_ROW_TILE, _COLUMN_TILE = 128, 64


class _Marked:
    """What both formats share: the rotation and the marker tensor ``comfy_quant``."""

    format = ""

    def __init__(self, rotation_group: int, source: torch.dtype) -> None:
        self.rotation_group = rotation_group
        self.source = source

    @property
    def marker(self) -> dict[str, Any]:
        """The JSON object that tells readers how the weight is stored."""
        return {
            "format": self.format,
            "convrot": True,
            "convrot_groupsize": self.rotation_group,
            "logical_dtype": str(self.source).removeprefix("torch."),
        }

    @property
    def marker_bytes(self) -> torch.Tensor:
        """The marker as uint8 text."""
        return torch.tensor(list(json.dumps(self.marker).encode()), dtype=torch.uint8)


class ConvRotInt8Encoder(_Marked):
    """int8 codes of the rotated weight with one fp32 scale per row.

    Args:
        rotation_group: Length of the rotation: 16, 64 or 256.
        source: Dtype of the dense weight, which becomes the logical dtype.
    """

    row_multiple = 1
    two_passes = False
    format = "int8_tensorwise"

    @property
    def marker(self) -> dict[str, Any]:
        """The JSON object that tells readers how the weight is stored."""
        return {**super().marker, "per_row": True}

    def layout(self, rows: int, columns: int) -> Layout:
        """Returns codes, scales and marker; errors unless the rotation divides K."""
        check_divides("rotation group", self.rotation_group, columns)
        return {
            "weight": (torch.int8, (rows, columns)),
            "weight_scale": (torch.float32, (rows, 1)),
            "comfy_quant": (torch.uint8, (self.marker_bytes.numel(),)),
        }

    def measure(self, dense: torch.Tensor) -> torch.Tensor:
        """Returns zero: no scale is shared by the whole weight."""
        return dense.new_zeros(())

    def encode(self, dense: torch.Tensor, largest: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns codes and scales of these rows."""
        del largest
        quantized = ConvRotInt8Tensor.from_hp(dense, group_size=self.rotation_group)
        return {"weight": quantized.qdata, "weight_scale": quantized.scale}

    def constants(self, rows: int, columns: int, largest: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the marker."""
        del rows, columns, largest
        return {"comfy_quant": self.marker_bytes}


class ConvRotNvFp4Encoder(_Marked):
    """NVFP4 codes of the rotated weight with block scales in tiles of 128 x 4.

    Arguments as `ConvRotInt8Encoder`.
    """

    row_multiple = _ROW_TILE
    two_passes = True
    format = "convrot_nvfp4"

    @property
    def marker(self) -> dict[str, Any]:
        """The JSON object that tells readers how the weight is stored."""
        return {**super().marker, "high_first": False}

    def layout(self, rows: int, columns: int) -> Layout:
        """Returns codes, tiled scales, the global scale and the marker."""
        check_divides("rotation group", self.rotation_group, columns)
        tiles = (ceil_div(rows, _ROW_TILE) * 32, ceil_div(columns, _COLUMN_TILE) * 16)
        return {
            "weight": (torch.uint8, (rows, columns // 2)),
            "weight_scale": (torch.float8_e4m3fn, tiles),
            "weight_scale_2": (torch.float32, ()),
            "comfy_quant": (torch.uint8, (self.marker_bytes.numel(),)),
        }

    def measure(self, dense: torch.Tensor) -> torch.Tensor:
        """Returns the global scale of these rows; that of the whole weight is the largest."""
        quantized = ConvRotNVFP4Tensor.from_hp(
            dense, group_size=self.rotation_group, compute_per_tensor_scale=True
        )
        return cast("torch.Tensor", quantized.per_tensor_scale).reshape(())

    def encode(self, dense: torch.Tensor, largest: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns codes and tiles of scales of these rows."""
        quantized = ConvRotNVFP4Tensor.from_hp(
            dense,
            group_size=self.rotation_group,
            per_tensor_scale=largest,
            is_swizzled_scales=True,
        )
        return {"weight": quantized.qdata, "weight_scale": quantized.scale}

    def constants(self, rows: int, columns: int, largest: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the global scale and the marker."""
        del rows, columns
        return {"weight_scale_2": largest.reshape(()), "comfy_quant": self.marker_bytes}
