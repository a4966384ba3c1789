"""Whole weights: quantization of dense tensors, reconstruction, TorchAO storage."""

import math
from typing import Any

import torch
from torch import Tensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

from piper_kernels.weights.nvfp4._encoding import decode, encode, per_tensor_scale_of
from piper_kernels.weights.nvfp4._layout import (
    BLOCK_SIZE,
    pack_codes,
    scale_shape,
    swizzle_scale,
    unswizzle_scale,
)
from piper_kernels.weights.nvfp4._storage import (
    matrix_shape,
    require_decodable,
    require_source,
)


def second_level(values: Tensor, given: Tensor | None, *, compute: bool) -> Tensor | None:
    """Return the global scale to quantize with: the given one, a computed one or none.

    Raises:
        ValueError: Both are asked for, the given one is not FP32, or ``amax`` of the values
            is not finite.
    """
    if not compute:
        if given is not None and given.dtype != torch.float32:
            raise ValueError(f"per_tensor_scale must be float32, got {given.dtype}")
        return given
    if given is not None:
        raise ValueError(
            "cannot both compute and receive per_tensor_scale; pass one of "
            "compute_per_tensor_scale=True and per_tensor_scale"
        )
    if values.device.type == "meta":
        raise ValueError("cannot quantize a meta tensor; construct the weight on meta storage")
    amax = values.detach().abs().amax() if values.numel() else values.new_zeros(())
    if not torch.isfinite(amax):
        raise ValueError(
            f"cannot compute per_tensor_scale of a weight with a non-finite amax ({amax.item()})"
        )
    return per_tensor_scale_of(amax)


def quantize(
    hp: Tensor,
    block_size: int,
    per_tensor_scale: Tensor | None,
    *,
    swizzled: bool,
    use_triton_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantize ``[..., out, in]`` and return packed codes and canonical block scales.

    Raises:
        ValueError: The source or the block size is not supported.
    """
    require_source(hp, block_size, swizzled=swizzled)
    if use_triton_kernel:
        foreign: Any = NVFP4Tensor.to_nvfp4(
            hp.detach().contiguous(),
            block_size,
            per_tensor_scale,
            is_swizzled_scales=swizzled,
            use_triton_kernel=True,
        )
        return foreign.qdata, foreign.scale
    codes, scale = encode(hp.detach().to(torch.float32), per_tensor_scale)
    if swizzled:
        lead = hp.shape[:-2]
        shape = scale_shape(hp.shape[-2], hp.shape[-1], swizzled=True)
        scale = swizzle_scale(scale.flatten(0, -2)).view(*lead, *shape)
    return pack_codes(codes), scale


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
