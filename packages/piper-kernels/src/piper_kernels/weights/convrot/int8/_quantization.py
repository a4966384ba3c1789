"""Symmetric INT8 quantization of rows that are already rotated."""

import torch
from torch import Tensor

from piper_kernels.stochastic_quantization import stochastic_round_to_int

QUANT_MIN = -128
QUANT_MAX = 127
MIN_SCALE = 1e-30


def row_scale(rows: Tensor) -> Tensor:
    """Return ``max(amax(|row|) / 127, 1e-30)`` as FP32 ``[..., 1]`` for FP32 ``[..., K]``.

    The floor keeps the scale of a zero row finite and positive: its codes become zero.
    """
    if rows.shape[-1] == 0:
        return rows.new_full((*rows.shape[:-1], 1), MIN_SCALE)
    amax = rows.abs().amax(-1, keepdim=True)
    if amax.is_cuda and torch.version.hip is None:
        # CUDA divides by a Python number with a rounded reciprocal; a tensor is exact.
        return amax.div_(amax.new_full((), QUANT_MAX)).clamp_(min=MIN_SCALE)
    return amax.div_(QUANT_MAX).clamp_(min=MIN_SCALE)


def round_to_codes(scaled: Tensor) -> Tensor:
    """Round FP32 values half to even, clamp to ``[-128, 127]`` and return int8 codes.

    ``scaled`` is overwritten.
    """
    return scaled.round_().clamp_(QUANT_MIN, QUANT_MAX).to(torch.int8)


def dynamic_quantize_rows(
    rows: Tensor, *, rounding_seed: int | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize every row by its own absolute maximum.

    Args:
        rows: FP32 ``[..., K]`` in the rotated basis. NaN and infinities are not guarded.
        rounding_seed: Seed of stochastic rounding; ``None`` rounds half to even. The row
            maximum is hit exactly either way, so the scale does not depend on the seed.

    Returns:
        int8 codes ``[..., K]`` and FP32 scales ``[..., 1]``.
    """
    scale = row_scale(rows)
    scaled = rows / scale
    if rounding_seed is None:
        return round_to_codes(scaled), scale
    nearest = round_to_codes(scaled.clone())
    codes = stochastic_round_to_int(
        scaled,
        seed=rounding_seed,
        quant_min=QUANT_MIN,
        quant_max=QUANT_MAX,
        deterministic=nearest,
    )
    return codes.to(torch.int8), scale
