"""Portable quantization of dense weights to NVFP4, in FP32 and in the basis of the codes."""

import torch
from torch import Tensor

from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.nvfp4._encoding import encode, non_finite_amax, per_tensor_scale_of
from piper_kernels.weights.nvfp4._layout import pack_codes, stacked_scale_shape, swizzle_scale


def quantize(
    source: Tensor, per_tensor_scale: Tensor | None, group_size: int, swizzled: bool
) -> tuple[Tensor, Tensor]:
    """Quantize with a given global scale or none.

    Args:
        source: float16, bfloat16 or float32 ``[..., out, in]``, any strides.
        per_tensor_scale: FP32 scalar, or one that broadcasts over ``[experts, out, in]``;
            ``None`` scales by blocks only.
        group_size: Rotation group along ``in``, 0 for none.
        swizzled: Whether the block scales take the 128x4 layout.

    Returns:
        uint8 codes ``[..., out, in / 2]`` and float8_e4m3fn block scales in their canonical
        shape, both contiguous.
    """
    return _encoded(rotated(source, group_size), per_tensor_scale, swizzled)


def quantize_two_level(
    source: Tensor, group_size: int, swizzled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize with the global scale ``amax / 2688`` of the rotated source.

    Args:
        source: See ``quantize``.
        group_size: See ``quantize``.
        swizzled: See ``quantize``.

    Returns:
        What ``quantize`` returns, and the FP32 scalar global scale.

    Raises:
        ValueError: ``amax`` is not finite.
    """
    values = rotated(source, group_size)
    level = computed_scale(values)
    return *_encoded(values, level, swizzled), level


def rotated(source: Tensor, group_size: int) -> Tensor:
    """Return the FP32 values that are encoded: rotated by a group other than 0."""
    dense = source.to(torch.float32)
    return rotate_groups(dense, group_size) if group_size else dense


def computed_scale(values: Tensor) -> Tensor:
    """Return the global scale of FP32 values that are already rotated.

    Raises:
        ValueError: ``amax`` is not finite.
    """
    amax = values.abs().amax() if values.numel() else values.new_zeros(())
    if not torch.isfinite(amax):
        raise non_finite_amax(amax.item())
    return per_tensor_scale_of(amax)


def _encoded(values: Tensor, level: Tensor | None, swizzled: bool) -> tuple[Tensor, Tensor]:
    codes, scale = encode(values, level)
    if swizzled:
        shape = stacked_scale_shape(tuple(values.shape), swizzled=True)
        scale = swizzle_scale(scale.flatten(0, -2)).view(shape)
    return pack_codes(codes), scale
