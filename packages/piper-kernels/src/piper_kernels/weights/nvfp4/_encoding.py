"""NVFP4 arithmetic: E2M1 codes in blocks of 16 with E4M3 scales and an optional global scale.

All of it is FP32. The order of the operations is that of TorchAO 0.18, so that the bytes of
both agree on finite data.
"""

import torch
from torch import Tensor

from piper_kernels.stochastic_quantization import stochastic_codebook_indices
from piper_kernels.weights.nvfp4._layout import BLOCK_SIZE, swap_packed_pairs

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-6
MIN_PER_TENSOR_SCALE = 2.0**-120
"""Smallest global scale that keeps ``1 / scale / E4M3_MIN`` finite in FP32."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_LEVELS = _MAGNITUDES + tuple(-value for value in _MAGNITUDES)

# Smallest FP32 magnitude that rounds up to codes 1 to 7. A midpoint goes to the even code,
# so up to an odd code only values above the midpoint round.
_THRESHOLDS = (0.25 + 2**-25, 0.75, 1.25 + 2**-23, 1.75, 2.5 + 2**-22, 3.5, 5.0 + 2**-21)


def per_tensor_scale_of(amax: Tensor) -> Tensor:
    """Return the global scale ``amax / (448 * 6)`` in FP32, at least ``2**-120``."""
    scale = amax.to(torch.float32) / (E4M3_MAX * E2M1_MAX)
    return scale.clamp_min(MIN_PER_TENSOR_SCALE)


def non_finite_amax(amax: float) -> ValueError:
    """Return the error of a weight whose largest magnitude is not finite."""
    return ValueError(
        f"cannot compute per_tensor_scale of a weight with a non-finite amax ({amax})"
    )


def nearest_codes(values: Tensor) -> Tensor:
    """Return uint8 E2M1 codes of FP32 values: nearest, ties to even, saturating, sign kept."""
    thresholds = torch.tensor(_THRESHOLDS, dtype=torch.float32, device=values.device)
    magnitude = torch.bucketize(values.abs().contiguous(), thresholds, out_int32=True, right=True)
    return (magnitude | (torch.signbit(values).to(torch.int32) << 3)).to(torch.uint8)


def encode(
    values: Tensor,
    per_tensor_scale: Tensor | None = None,
    *,
    rounding_seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize FP32 values in blocks of 16 along the last axis.

    Block scale: ``clamp(amax / 6 / g, 2**-6, 448)`` rounded to E4M3, so it is never NaN
    unless the values or ``g`` are. Code: nearest E2M1 of ``value * ((1 / g) / scale)``.

    Args:
        values: FP32 ``[..., K]`` with ``K`` a multiple of 16.
        per_tensor_scale: FP32 scalar ``g``, or one that broadcasts over ``[..., K / 16]``;
            ``None`` scales by blocks only. Below ``2**-120`` that bound is used.
        rounding_seed: Seed of stochastic rounding of the codes, ``None`` for nearest.

    Returns:
        uint8 codes ``[..., K]``, one per byte, and float8_e4m3fn scales ``[..., K / 16]``.
    """
    blocks = values.unflatten(-1, (values.shape[-1] // BLOCK_SIZE, BLOCK_SIZE))
    block_scale = blocks.abs().amax(-1) / E2M1_MAX
    reciprocal = 1.0
    if per_tensor_scale is not None:
        per_tensor_scale = per_tensor_scale.clamp_min(MIN_PER_TENSOR_SCALE)
        block_scale = block_scale / per_tensor_scale
        reciprocal = 1.0 / per_tensor_scale
    scale = block_scale.clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn)
    decoded = scale.to(torch.float32)
    codes = nearest_codes(blocks * (reciprocal / decoded).unsqueeze(-1))
    if rounding_seed is not None:
        combined = decoded if per_tensor_scale is None else per_tensor_scale * decoded
        codes = _stochastic_codes(blocks, combined.unsqueeze(-1), codes, rounding_seed)
    return codes.flatten(-2), scale


def _stochastic_codes(blocks: Tensor, scale: Tensor, nearest: Tensor, seed: int) -> Tensor:
    usable = torch.isfinite(scale) & (scale > 0)
    scaled = torch.where(usable, blocks / scale, 0.0)
    levels = torch.tensor(E2M1_LEVELS, dtype=torch.float32, device=blocks.device)
    return stochastic_codebook_indices(scaled, levels, seed=seed, deterministic=nearest).to(
        torch.uint8
    )


def decode_codes(qdata: Tensor, *, high_first: bool = False) -> Tensor:
    """Return the FP32 values ``[..., K]`` of packed codes ``[..., K / 2]``, scales left out."""
    levels = torch.tensor(E2M1_LEVELS, dtype=torch.float32, device=qdata.device)
    # One entry per byte: the pair of values of its low and its high nibble.
    pairs = torch.stack((levels.repeat(16), levels.repeat_interleave(16)), dim=-1)
    ordered = swap_packed_pairs(qdata) if high_first else qdata
    return pairs[ordered.to(torch.int32)].flatten(-2)


def decode(qdata: Tensor, scale: Tensor, *, high_first: bool = False) -> Tensor:
    """Return FP32 values of packed codes under FP32 block scales.

    Args:
        qdata: uint8 ``[..., K / 2]``.
        scale: FP32 ``[..., K / 16]`` in plain order, the global scale multiplied in.
        high_first: Whether the even feature is in the high nibble.

    Returns:
        FP32 ``[..., K]``.
    """
    blocks = decode_codes(qdata, high_first=high_first).unflatten(-1, (scale.shape[-1], BLOCK_SIZE))
    return (blocks * scale.unsqueeze(-1)).flatten(-2)
