"""Conversion of packed GGUF rows to ConvRot INT8 storage."""

from collections.abc import Callable

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
from piper_kernels.weights.convrot.int8._gguf_policy import select_conversion_plan
from piper_kernels.weights.convrot.int8._quantization import MIN_SCALE, dynamic_quantize_rows
from piper_kernels.weights.convrot.int8._storage import validate_storage

Converter = Callable[[PackedRows, Tensor, Tensor, int], None]


def from_gguf(
    data: Tensor, quant_type: int | None, group_size: int, *, allow_cpu: bool
) -> tuple[Tensor, Tensor]:
    """Return codes int8 ``[rows, features]`` and scales FP32 ``[rows, 1]`` of packed rows."""
    packed = packed_rows(data, quant_type, group_size)
    converter = select_gguf_converter(packed.data.device, allow_cpu=allow_cpu)
    shape = (packed.rows, packed.features)
    qdata = torch.empty(shape, dtype=torch.int8, device=packed.data.device)
    scale = torch.empty((packed.rows, 1), dtype=torch.float32, device=packed.data.device)
    _convert(converter, packed, qdata, scale, group_size)
    return qdata, scale


def copy_from_gguf_(
    qdata: Tensor,
    scale: Tensor,
    data: Tensor,
    quant_type: int | None,
    group_size: int,
    *,
    allow_cpu: bool,
) -> None:
    """Overwrite the storage of a weight with converted rows; tensor identities are kept."""
    packed = packed_rows(data, quant_type, group_size)
    converter = select_gguf_converter(packed.data.device, allow_cpu=allow_cpu)
    validate_storage(qdata, scale, group_size)
    require_output(packed, qdata.shape, qdata.device)
    _convert(converter, packed, qdata, scale, group_size)


def select_gguf_converter(device: torch.device, *, allow_cpu: bool) -> Converter:
    """Return what converts on a device.

    Raises:
        ValueError: No kernel runs there and the caller did not ask for the CPU.
    """
    supported, reason = support(device)
    if supported:
        return _convert_with_triton
    if allow_cpu:
        return _convert_on_cpu
    raise ValueError(
        f"ConvRot INT8 GGUF conversion requires a supported Triton accelerator: {reason}. "
        "Move the packed data to one, or pass allow_cpu=True to convert on the CPU"
    )


def _convert(
    converter: Converter, packed: PackedRows, qdata: Tensor, scale: Tensor, group_size: int
) -> None:
    if qdata.numel() == 0:
        scale.fill_(MIN_SCALE)
        return
    with torch.no_grad():
        converter(packed, qdata, scale, group_size)


def _convert_with_triton(packed: PackedRows, qdata: Tensor, scale: Tensor, group_size: int) -> None:
    from piper_kernels.weights.convrot.int8 import gguf_triton

    target = accelerator_target(qdata.device)
    assert target is not None  # the converter was selected for this device
    gguf_triton.convert(
        packed.aligned_data(),
        qdata,
        scale,
        quant_type=packed.kind,
        group_size=group_size,
        plan=select_conversion_plan(target, packed.features),
    )
    mark_written(qdata, scale)


def _convert_on_cpu(packed: PackedRows, qdata: Tensor, scale: Tensor, group_size: int) -> None:
    for block, rotated in packed.rotated_blocks(group_size):
        codes, block_scale = dynamic_quantize_rows(rotated)
        qdata[block].copy_(codes)
        scale[block].copy_(block_scale)
