"""Custom operators of sparse Piper attention.

They keep eager calls, traced graphs and compiler rewrites on one set of graph nodes, on every
device. Operands are checked by their metadata, in fakes too; the backend is resolved when an
operator executes.
"""

import torch
from torch import Tensor

from piper_kernels.attention.sparse_piper_attention._backend import select_backend
from piper_kernels.attention.sparse_piper_attention._budget import LABEL
from piper_kernels.attention.sparse_piper_attention._preparation import PreparedOperands
from piper_kernels.attention.sparse_piper_attention._quantized import check_quantized
from piper_kernels.attention.sparse_piper_attention._routing import (
    RoutingMode,
    RoutingRequest,
    RoutingSummaries,
)
from piper_kernels.attention.sparse_piper_attention._validation import (
    check_block_lengths,
    check_heads,
    check_operands,
    check_routing_counts,
    check_scale,
)


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_keep_ratio_units: list[int],
    sparse_key_blocks: int,
    scale: float | None,
    block_lengths: Tensor | None,
    sparse_query_blocks: int | None,
) -> float:
    """Check everything about a call that the host knows and return its effective scale."""
    check_operands(LABEL, {"query": query, "key": key, "value": value})
    check_heads(LABEL, query.shape[2], key.shape[2], value.shape[2])
    if len(head_keep_ratio_units) != query.shape[2]:
        raise ValueError(
            f"{LABEL}: head_keep_ratios needs one value per head, got "
            f"{len(head_keep_ratio_units)} for {query.shape[2]} query heads"
        )
    check_block_lengths(LABEL, block_lengths, query.shape[1], query.device)
    default: float = query.shape[3] ** -0.5
    factor = check_scale(f"{LABEL}: scale", default if scale is None else scale)
    check_routing_counts(LABEL, sparse_key_blocks, sparse_query_blocks, query.shape[1])
    return factor


@torch.library.custom_op("piper_kernels::sparse_piper_attention", mutates_args=())
def sparse_piper_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_keep_ratio_units: list[int],
    sparse_key_blocks: int,
    scale: float,
    routing_mode: int,
    block_lengths: Tensor | None = None,
    sparse_query_blocks: int | None = None,
) -> Tensor:
    """Return the attention of ``[B, S, H, D]`` operands in their dtype, contiguous."""
    counts = (head_keep_ratio_units, sparse_key_blocks)
    check_attention(query, key, value, *counts, scale, block_lengths, sparse_query_blocks)
    request = RoutingRequest.of(*counts, routing_mode, sparse_query_blocks)
    backend = select_backend(query.device, query.shape[3])
    return backend.attention(query, key, value, request, scale, block_lengths)


@sparse_piper_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_keep_ratio_units: list[int],
    sparse_key_blocks: int,
    scale: float,
    routing_mode: int,
    block_lengths: Tensor | None = None,
    sparse_query_blocks: int | None = None,
) -> Tensor:
    RoutingMode(routing_mode)
    counts = (head_keep_ratio_units, sparse_key_blocks)
    check_attention(query, key, value, *counts, scale, block_lengths, sparse_query_blocks)
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@torch.library.custom_op("piper_kernels::sparse_piper_attention_from_quantized", mutates_args=())
def sparse_piper_attention_from_quantized(
    query: Tensor,
    query_scale: Tensor,
    query_summary: Tensor,
    key: Tensor,
    key_scale: Tensor,
    key_summary: Tensor,
    key_aux: Tensor,
    value: Tensor,
    value_scale_multiplier: Tensor,
    value_mean: Tensor,
    head_keep_ratio_units: list[int],
    sparse_key_blocks: int,
    logical_sequence_length: int,
    routing_mode: int,
    block_lengths: Tensor | None = None,
    sparse_query_blocks: int | None = None,
    *,
    output_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return the attention of prepared operands, ``[B, rows, Hq, D]``, contiguous.

    The rows are the ``logical_sequence_length``, or all with ``block_lengths``.
    """
    operands = PreparedOperands(
        query, query_scale, key, key_scale, value, value_scale_multiplier, value_mean
    )
    summaries = RoutingSummaries(query_summary, key_summary, key_aux)
    counts = (head_keep_ratio_units, sparse_key_blocks)
    request = RoutingRequest.of(*counts, routing_mode, sparse_query_blocks)
    rows = check_quantized(
        operands, summaries, request, logical_sequence_length, block_lengths, output_dtype
    )
    backend = select_backend(query.device, query.shape[3])
    return backend.attention_from_quantized(
        operands, summaries, request, rows, block_lengths, output_dtype
    )


@sparse_piper_attention_from_quantized.register_fake
def _(
    query: Tensor,
    query_scale: Tensor,
    query_summary: Tensor,
    key: Tensor,
    key_scale: Tensor,
    key_summary: Tensor,
    key_aux: Tensor,
    value: Tensor,
    value_scale_multiplier: Tensor,
    value_mean: Tensor,
    head_keep_ratio_units: list[int],
    sparse_key_blocks: int,
    logical_sequence_length: int,
    routing_mode: int,
    block_lengths: Tensor | None = None,
    sparse_query_blocks: int | None = None,
    *,
    output_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    operands = PreparedOperands(
        query, query_scale, key, key_scale, value, value_scale_multiplier, value_mean
    )
    summaries = RoutingSummaries(query_summary, key_summary, key_aux)
    counts = (head_keep_ratio_units, sparse_key_blocks)
    request = RoutingRequest.of(*counts, routing_mode, sparse_query_blocks)
    rows = check_quantized(
        operands, summaries, request, logical_sequence_length, block_lengths, output_dtype
    )
    return query.new_empty((query.shape[0], rows, *query.shape[1::2]), dtype=output_dtype)
