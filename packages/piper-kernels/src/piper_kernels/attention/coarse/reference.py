"""Portable coarse attention over 64-row blocks, in FP32 and differentiable."""

import torch
from torch import Tensor

from piper_kernels._autocast import product
from piper_kernels.attention.sparse_piper_attention._blocks import (
    BLOCK,
    block_means,
    to_blocks,
    valid_rows,
)
from piper_kernels.attention.sparse_piper_attention._routing import (
    SCORE_CHUNK,
    RoutingMode,
    RoutingSummaries,
    block_scores,
    summarize,
)


def pool_values(value: Tensor, block_lengths: Tensor | None) -> Tensor:
    """Return the mean of each block of values ``[B, S, H, D]``, FP32 ``[B, H, blocks, D]``."""
    valid = valid_rows(value.shape[1], block_lengths, value.device)
    return block_means(to_blocks(value, valid), valid)


def attend_blocks(scores: Tensor, pooled_value: Tensor) -> Tensor:
    """Return ``softmax(scores) @ pooled_value``, FP32 ``[B, H, query blocks, D]``."""
    return product(scores.softmax(dim=-1), pooled_value)


def gated_residual(coarse_output: Tensor, gate: Tensor) -> Tensor:
    """Return each coarse row times the gate of its 64 rows, in the dtype of the gate.

    Args:
        coarse_output: FP32 ``[B, H, ceil(S / 64), D]``.
        gate: Floating ``[B, S, H, D]``.
    """
    expanded = coarse_output.repeat_interleave(BLOCK, dim=2)[:, :, : gate.shape[1]]
    gated = gate.to(torch.float32) * expanded.transpose(1, 2)
    return gated.to(gate.dtype).contiguous()


def coarse_output(
    summaries: RoutingSummaries,
    pooled_value: Tensor,
    mode: RoutingMode,
    coarse_key_blocks: int,
    coarse_scale: float,
) -> Tensor:
    """Return the coarse attention of all query blocks; scores of 384 of them exist at a time.

    Args:
        summaries: Of all blocks.
        pooled_value: FP32 ``[B, H, blocks, D]``.
        mode: What the summaries are.
        coarse_key_blocks: Leading key blocks that are attended to.
        coarse_scale: Positive factor of the scores.
    """
    pooled = pooled_value[:, :, :coarse_key_blocks]
    query_blocks = summaries.query.shape[2]
    chunks = []
    # A traced graph is bound to the number of chunks, not to that of the blocks.
    for index in range((query_blocks + SCORE_CHUNK - 1) // SCORE_CHUNK):
        start = index * SCORE_CHUNK
        chunk = slice(start, min(start + SCORE_CHUNK, query_blocks))
        scores = block_scores(summaries, mode, chunk, coarse_key_blocks, coarse_scale)
        chunks.append(attend_blocks(scores, pooled))
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=2)


def coarse_residual(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    coarse_key_blocks: int,
    coarse_scale: float,
    mode: RoutingMode,
    block_lengths: Tensor | None,
) -> Tensor:
    """Return the gated coarse attention of ``[B, S, H, D]`` operands, in the dtype of the gate."""
    valid = valid_rows(query.shape[1], block_lengths, query.device)
    summaries = summarize(to_blocks(query, valid), to_blocks(key, valid), valid, mode)
    pooled = block_means(to_blocks(value, valid), valid)
    output = coarse_output(summaries, pooled, mode, coarse_key_blocks, coarse_scale)
    return gated_residual(output, gate)
