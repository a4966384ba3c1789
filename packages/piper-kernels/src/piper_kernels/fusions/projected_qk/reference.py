"""Portable quantization of projected query and key heads: the contract of the kernels."""

import torch
from torch import Tensor

from piper_kernels.attention._quantization import Granularity, RowGroups, quantize_groups
from piper_kernels.attention._signed_hadamard import rotate
from piper_kernels.attention.sparse_piper_attention._blocks import to_blocks
from piper_kernels.attention.sparse_piper_attention._preparation import LOG2_E
from piper_kernels.attention.sparse_piper_attention._routing import (
    RoutingMode,
    key_summary,
    query_summary,
)
from piper_kernels.fusions.projected_qk.transform import HeadTransform, normalize_and_rotate

# Keys wait in this dtype for their mean.
KEY_DTYPE = torch.bfloat16


def encode_query(
    heads: Tensor,
    transform: HeadTransform,
    valid: Tensor | None,
    softmax_scale: float,
    mode: RoutingMode | None,
    granularity: Granularity = Granularity.PER_WARP,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize, rotate, summarize and quantize query heads.

    Args:
        heads: FP32 ``[B, S, H, D]`` as projected.
        transform: Normalization and rotary embedding.
        valid: Which rows exist, bool ``[blocks, 64]``; ``None``: all.
        softmax_scale: Factor of the logits.
        mode: How blocks are summarized; ``None``: not at all.
        granularity: Which rows share a scale.

    Returns:
        int8 codes ``[B, H, S', D]`` with ``S'`` rounded up to 64 and rows that do not exist zero,
        FP32 scales with the factor of the logits and ``log2(e)``, and FP32 summaries
        ``[B, H, S' / 64, D]``, without blocks unless there is a mode.
    """
    blocks = to_blocks(normalize_and_rotate(heads, transform), valid)
    codes, scale = _quantize(blocks, granularity.query)
    summary = blocks[:, :, :0, 0] if mode is None else query_summary(blocks, valid, mode)
    return codes, scale * (softmax_scale * LOG2_E), summary.contiguous()


def encode_key(
    heads: Tensor,
    transform: HeadTransform,
    valid: Tensor | None,
    mode: RoutingMode | None,
    granularity: Granularity = Granularity.PER_WARP,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize, rotate, summarize, center and quantize key heads.

    Summaries are those of FP32 keys. Keys are rounded to bfloat16 before their mean over the rows
    that exist is taken and subtracted. Arguments are those of :func:`encode_query`.

    Returns:
        int8 codes ``[B, H, S', D]``, FP32 scales, and both summaries of
        ``_routing.RoutingSummaries``.
    """
    blocks = to_blocks(normalize_and_rotate(heads, transform), valid)
    empty = blocks[:, :, :0, 0].contiguous()
    summaries = (empty, empty.clone()) if mode is None else key_summary(blocks, valid, mode)
    stored = blocks.to(KEY_DTYPE).float()
    count = heads.shape[1] if valid is None else valid.sum(dtype=torch.float32)
    centered = stored - (stored.sum((2, 3)) / count)[:, :, None, None]
    if valid is not None:
        centered = torch.where(valid[:, :, None], centered, 0.0)
    return *_quantize(centered, granularity.key), *summaries


def _quantize(blocks: Tensor, groups: RowGroups) -> tuple[Tensor, Tensor]:
    """Return codes ``[B, H, S', D]`` and scales, one per block of one group, else one per row."""
    codes, scale = quantize_groups(rotate(blocks.flatten(2, 3)), groups)
    return codes, scale[..., :: groups.block].contiguous() if groups.groups == 1 else scale
