"""What happens to a projected head before it is quantized, and its portable maths in FP32."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from piper_kernels.attention._signed_hadamard import HEAD_DIMS

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class HeadTransform:
    """RMS normalization and rotary embedding of heads of width ``D``.

    Attributes:
        weight: Floating ``[D]``, contiguous, factor after the normalization; ``None``: one.
        cos: FP32 ``[S, R]``, contiguous, shared by batches and heads.
        sin: Like ``cos``.
        eps: Added to the mean square.
    """

    weight: Tensor | None
    cos: Tensor
    sin: Tensor
    eps: float

    def rows(self, first: int, last: int) -> "HeadTransform":
        """Return the transform of a range of positions, as views."""
        return HeadTransform(self.weight, self.cos[first:last], self.sin[first:last], self.eps)


def normalize_and_rotate(heads: Tensor, transform: HeadTransform) -> Tensor:
    """Return ``rope(heads * rsqrt(mean(heads ** 2) + eps) * weight)``; nothing is rounded.

    The first ``R`` features are rotated in pairs ``(i, i + R / 2)``, later ones pass through.

    Args:
        heads: FP32 ``[B, S, H, D]``.
        transform: With ``R <= D``.

    Returns:
        FP32 ``[B, S, H, D]``.
    """
    normalized = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + transform.eps)
    if transform.weight is not None:
        normalized = normalized * transform.weight.float()
    width = transform.cos.shape[1]
    turned, passed = normalized[..., :width], normalized[..., width:]
    low, high = turned.chunk(2, -1)
    partner = torch.cat((-high, low), -1)
    turned = turned * transform.cos[:, None] + partner * transform.sin[:, None]
    return torch.cat((turned, passed), -1)


def resolve_head_dim(label: str, weight: Tensor | None, head_dim: int | None) -> int:
    """Return the width of heads, given by the norm weight or by ``head_dim``.

    Raises:
        ValueError: Neither gives it, they disagree, or it is neither 64 nor 128.
    """
    if weight is not None:
        if weight.ndim != 1 or weight.dtype not in _DTYPES or not weight.is_contiguous():
            raise ValueError(
                f"{label}: norm_weight must be contiguous float16, bfloat16 or float32 "
                f"[head_dim], got {weight.dtype} {tuple(weight.shape)}"
            )
        if head_dim is not None and head_dim != weight.shape[0]:
            raise ValueError(
                f"{label}: head_dim {head_dim} does not fit norm_weight of {weight.shape[0]}"
            )
        head_dim = weight.shape[0]
    if head_dim not in HEAD_DIMS:
        hint = "; pass head_dim where norm_weight is None" if head_dim is None else ""
        raise ValueError(f"{label}: head_dim must be 64 or 128, got {head_dim}{hint}")
    return head_dim


def check_transform(
    label: str, transform: HeadTransform, head_dim: int, rows: int, device: torch.device
) -> None:
    """Check the metadata of a transform for heads ``[B, rows, H, head_dim]``.

    Raises:
        ValueError: A shape, dtype, device, layout or the epsilon does not fit.
    """
    if not 0 < transform.eps < math.inf:
        raise ValueError(f"{label}: eps must be finite and positive, got {transform.eps}")
    if transform.weight is not None and transform.weight.device != device:
        raise ValueError(f"{label}: norm_weight must be on {device}, got {transform.weight.device}")
    cos = transform.cos
    for name, table in (("cos", cos), ("sin", transform.sin)):
        fits = table.ndim == 2 and table.dtype == torch.float32 and table.is_contiguous()
        if not fits or table.device != device:
            raise ValueError(
                f"{label}: {name} must be contiguous float32 [sequence, rotary features] on "
                f"{device}, got {table.dtype} {tuple(table.shape)} on {table.device}"
            )
        if table.shape[0] != rows or table.shape[1] != cos.shape[1]:
            raise ValueError(
                f"{label}: cos and sin must have one row for each of {rows} positions and equal "
                f"widths, got {tuple(cos.shape)} and {tuple(transform.sin.shape)}"
            )
    width = cos.shape[1]
    if width % 2 or not 2 <= width <= head_dim:
        raise ValueError(
            f"{label}: the rotary width must be even and in [2, {head_dim}], got {width}"
        )
