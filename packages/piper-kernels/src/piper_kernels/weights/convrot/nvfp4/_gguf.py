"""Conversion of packed GGUF rows to ConvRot NVFP4 storage."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piper_kernels._triton.runtime import support
from piper_kernels._triton.targets import accelerator_target
from piper_kernels.weights.convrot._gguf import (
    PackedRows,
    mark_written,
    packed_rows,
    require_output,
)
from piper_kernels.weights.nvfp4._encoding import encode, per_tensor_scale_of
from piper_kernels.weights.nvfp4._layout import BLOCK_SIZE, ceil_div, pack_codes, scale_shape
from piper_kernels.weights.nvfp4._storage import require_logical_dtype, validate_update_storage

MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Nvfp4Storage:
    """Storage of a ConvRot NVFP4 weight, as conversions write it.

    Attributes:
        qdata: uint8 ``[out, in / 2]``, contiguous.
        scale: E4M3 block scales, contiguous.
        per_tensor_scale: FP32 global scale with one element, or ``None``.
        group_size: Rotation group.
        swizzled: Whether the scales lie in 128 x 4 tiles.
        high_first: Whether the even feature is the high nibble of a byte.
    """

    qdata: Tensor
    scale: Tensor
    per_tensor_scale: Tensor | None
    group_size: int
    swizzled: bool
    high_first: bool

    def scale_bytes(self) -> Tensor:
        """Return the block scales as flat bytes over the same memory."""
        return self.scale.view(torch.uint8).view(-1)

    def fields(self) -> dict[str, Any]:
        """Return these values under the names of the weight's constructor."""
        return {
            "qdata": self.qdata,
            "scale": self.scale,
            "per_tensor_scale": self.per_tensor_scale,
            "group_size": self.group_size,
            "is_swizzled_scales": self.swizzled,
            "high_first": self.high_first,
        }


def from_gguf(
    data: Tensor,
    quant_type: int | None,
    *,
    logical_dtype: torch.dtype,
    group_size: int,
    block_size: int,
    per_tensor_scale: Tensor | None,
    compute_per_tensor_scale: bool,
    swizzled: bool,
    high_first: bool,
    allow_cpu: bool,
) -> dict[str, Any]:
    """Return the constructor arguments of a weight that holds converted rows.

    Raises:
        TypeError: The data or its type is of the wrong type.
        ValueError: The device, type, shape or scaling is not supported.
    """
    require_logical_dtype(logical_dtype)
    packed = packed_rows(data, quant_type, group_size)
    native = _select_native(packed.data.device, allow_cpu=allow_cpu)
    if block_size != BLOCK_SIZE:
        raise ValueError(f"NVFP4 block_size must be {BLOCK_SIZE}, got {block_size}")
    device = packed.data.device
    if compute_per_tensor_scale:
        if per_tensor_scale is not None:
            raise ValueError(
                "cannot both compute and receive per_tensor_scale; pass one of "
                "compute_per_tensor_scale=True and per_tensor_scale"
            )
        per_tensor_scale = per_tensor_scale_of(torch.zeros((), device=device))
    shape = scale_shape(packed.rows, packed.features, swizzled=swizzled)
    storage = Nvfp4Storage(
        torch.empty((packed.rows, packed.features // 2), dtype=torch.uint8, device=device),
        torch.empty(shape, dtype=torch.float8_e4m3fn, device=device),
        per_tensor_scale,
        group_size,
        swizzled,
        high_first,
    )
    _require_global_scale(storage)
    _convert(packed, storage, compute_per_tensor_scale, native)
    return storage.fields() | {"block_size": block_size, "orig_dtype": logical_dtype}


def copy_from_gguf_(
    storage: Nvfp4Storage,
    data: Tensor,
    quant_type: int | None,
    *,
    shape: torch.Size,
    block_size: int,
    compute_per_tensor_scale: bool,
    allow_cpu: bool,
) -> None:
    """Overwrite the storage of a weight with converted rows; tensor identities are kept.

    Raises:
        TypeError: The data or its type is of the wrong type.
        ValueError: The device, type, shape, storage or scaling is not supported.
    """
    packed = packed_rows(data, quant_type, storage.group_size)
    native = _select_native(packed.data.device, allow_cpu=allow_cpu)
    require_output(packed, shape, storage.qdata.device)
    if compute_per_tensor_scale and storage.per_tensor_scale is None:
        raise ValueError(
            "compute_per_tensor_scale=True needs a weight with per_tensor_scale storage: "
            "build it with compute_per_tensor_scale=True too"
        )
    if storage.qdata.numel():
        validate_update_storage(
            "ConvRot NVFP4 copy_from_gguf_: output storage is incompatible, it",
            storage.qdata,
            storage.scale,
            storage.per_tensor_scale,
            block_size,
            swizzled=storage.swizzled,
        )
    _convert(packed, storage, compute_per_tensor_scale, native)


def _select_native(device: torch.device, *, allow_cpu: bool) -> bool | None:
    """Return whether the kernels use the FP4 instruction; ``None`` converts on the CPU.

    Raises:
        ValueError: No kernel runs on the device and the caller did not ask for the CPU.
    """
    supported, reason = support(device)
    target = accelerator_target(device)
    if supported and target is not None:
        if target.backend == "cuda" and target.capability >= MIN_CAPABILITY:
            return target.has_fp4_conversion
        reason = f"{device} is {target.architecture}"
    if allow_cpu:
        return None
    raise ValueError(
        "ConvRot NVFP4 GGUF conversion requires a supported Triton accelerator, a CUDA device "
        f"from sm_80: {reason}. Move the packed data to one, or pass allow_cpu=True to convert "
        "on the CPU"
    )


def _require_global_scale(storage: Nvfp4Storage) -> None:
    level = storage.per_tensor_scale
    if level is not None and (
        level.dtype != torch.float32 or level.ndim != 0 or level.device != storage.qdata.device
    ):
        raise ValueError(
            "per_tensor_scale must be an FP32 scalar (shape []) on "
            f"{storage.qdata.device}, got {level.dtype} with shape {tuple(level.shape)} on "
            f"{level.device}"
        )


@torch.no_grad()
def _convert(packed: PackedRows, storage: Nvfp4Storage, compute: bool, native: bool | None) -> None:
    blocks = packed.features // BLOCK_SIZE
    scales = storage.scale_bytes()
    if scales.numel() != packed.rows * blocks:
        scales.zero_()  # the padding; the scales themselves follow
    if storage.qdata.numel() == 0:
        if compute and storage.per_tensor_scale is not None:
            storage.per_tensor_scale.copy_(per_tensor_scale_of(torch.zeros(())))
        return
    if native is None:
        _convert_on_cpu(packed, storage, compute)
        return
    from piper_kernels.weights.convrot.nvfp4 import gguf_triton

    gguf_triton.convert(
        packed.aligned_data(),
        storage.qdata,
        scales,
        storage.per_tensor_scale,
        quant_type=packed.kind,
        group_size=storage.group_size,
        compute_per_tensor_scale=compute,
        swizzled=storage.swizzled,
        high_first=storage.high_first,
        native=native,
    )
    mark_written(storage.qdata, storage.scale)
    if compute and storage.per_tensor_scale is not None:
        mark_written(storage.per_tensor_scale)


def _convert_on_cpu(packed: PackedRows, storage: Nvfp4Storage, compute: bool) -> None:
    level = storage.per_tensor_scale
    if compute and level is not None:
        amax = torch.zeros(())
        for _, rotated in packed.rotated_blocks(storage.group_size):
            amax = torch.maximum(amax, rotated.abs().amax())
        level.copy_(per_tensor_scale_of(amax))
    if level is not None:
        level = level.cpu()
    scales = storage.scale_bytes()
    for rows, rotated in packed.rotated_blocks(storage.group_size):
        codes, block_scale = encode(rotated, level)
        storage.qdata[rows].copy_(pack_codes(codes, high_first=storage.high_first))
        offsets = _scale_offsets(rows, block_scale.shape[1], swizzled=storage.swizzled)
        values = block_scale.view(torch.uint8).flatten()
        scales[offsets.flatten().to(scales.device)] = values.to(scales.device)


def _scale_offsets(rows: slice, blocks: int, *, swizzled: bool) -> Tensor:
    """Return the byte offsets ``[rows, blocks]`` of the block scales of some rows."""
    row = torch.arange(rows.start, rows.stop).view(-1, 1)
    block = torch.arange(blocks)
    if not swizzled:
        return row * blocks + block
    tile = row // 128 * ceil_div(blocks, 4) + block // 4
    return (tile * 32 + row % 32) * 16 + row % 128 // 32 * 4 + block % 4
