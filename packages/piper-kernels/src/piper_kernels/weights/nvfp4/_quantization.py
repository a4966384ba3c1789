"""Whole weights: quantization of dense tensors, reconstruction, TorchAO storage."""

import math
from typing import Any

import torch
from torch import Tensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

from piper_kernels.weights.nvfp4 import _backend, _quantize_reference
from piper_kernels.weights.nvfp4._encoding import decode
from piper_kernels.weights.nvfp4._layout import BLOCK_SIZE, unswizzle_scale
from piper_kernels.weights.nvfp4._storage import (
    matrix_shape,
    require_decodable,
    require_second_level,
    require_source,
)


def quantize(
    hp: Tensor,
    block_size: int,
    per_tensor_scale: Tensor | None,
    *,
    compute: bool,
    swizzled: bool,
    group_size: int = 0,
    use_triton_kernel: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize ``[..., out, in]``, by operator on accelerators and as plain code on the CPU.

    Args:
        hp: The source.
        block_size: 16.
        per_tensor_scale: Given global scale, returned itself.
        compute: Whether to take ``amax / 2688`` of the rotated source as the global scale.
        swizzled: Layout of the block scales.
        group_size: Rotation group, which divides ``in``; 0 for none.
        use_triton_kernel: Whether TorchAO quantizes with its own kernel.

    Returns:
        Packed codes, block scales in their canonical shape, and the global scale if any.

    Raises:
        ValueError: The source, the block size or the global scale is not supported, or
            ``amax`` is not finite.
    """
    require_source(hp, block_size, swizzled=swizzled)
    require_second_level(hp, per_tensor_scale, compute=compute)
    source = hp.detach()
    if use_triton_kernel:
        return _quantize_with_torchao(source, per_tensor_scale, compute, swizzled, group_size)
    backend = _quantizer(source.device)
    if compute:
        return backend.quantize_two_level(source, group_size, swizzled)
    given = None if per_tensor_scale is None else per_tensor_scale.detach()
    return *backend.quantize(source, given, group_size, swizzled), per_tensor_scale


def _quantizer(device: torch.device) -> Any:
    if not _backend.runs_in_operators(device):
        return _quantize_reference
    from piper_kernels.weights.nvfp4 import _ops

    return _ops


def _quantize_with_torchao(
    source: Tensor,
    per_tensor_scale: Tensor | None,
    compute: bool,
    swizzled: bool,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    if group_size:
        source = _quantize_reference.rotated(source, group_size)
    if compute:
        per_tensor_scale = _quantize_reference.computed_scale(source)
    foreign: Any = NVFP4Tensor.to_nvfp4(
        source.contiguous(),
        BLOCK_SIZE,
        per_tensor_scale,
        is_swizzled_scales=swizzled,
        use_triton_kernel=True,
    )
    return foreign.qdata, foreign.scale, per_tensor_scale


def block_scales(weight: Any) -> Tensor:
    """Return FP32 block scales ``[..., out, in / 16]`` with the second level multiplied in."""
    require_decodable(weight)
    *lead, rows, features = matrix_shape(weight)
    shape = (*lead, rows, features // BLOCK_SIZE)
    scale = weight.scale
    if weight.transposed and scale.ndim > 1:
        scale = scale.transpose(-2, -1)
    if weight.is_swizzled_scales:
        scale = unswizzle_scale(scale, math.prod(shape[:-1]), shape[-1])
    scale = scale.reshape(shape).to(torch.float32)
    level = weight.per_tensor_scale
    if level is None:
        return scale
    return (level if lead else level.view(())) * scale


def dequantize(weight: Any) -> Tensor:
    """Return the stored values ``[..., out, in]`` in FP32, any transpose undone."""
    scale = block_scales(weight)
    qdata = weight.qdata.transpose(-2, -1) if weight.transposed else weight.qdata
    return decode(qdata, scale, high_first=weight.high_first)


def torchao_fields(tensor: NVFP4Tensor) -> dict[str, Any]:
    """Return the constructor arguments of a weight over the storage of a TorchAO tensor.

    Raises:
        TypeError: It is no ``NVFP4Tensor``.
    """
    if not isinstance(tensor, NVFP4Tensor):
        raise TypeError(
            f"from_torchao needs an NVFP4Tensor, got {type(tensor).__name__}; "
            "quantize dense tensors with from_hp"
        )
    names = (
        "qdata",
        "scale",
        "block_size",
        "orig_dtype",
        "per_tensor_scale",
        "act_per_tensor_scale",
        "is_swizzled_scales",
        "use_triton_kernel",
        "act_quant_kwargs",
    )
    fields = {name: getattr(tensor, name) for name in names}
    return fields | {"high_first": getattr(tensor, "high_first", False)}
