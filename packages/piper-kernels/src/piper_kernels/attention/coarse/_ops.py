"""Custom operators of coarse attention: the residual alone, and added to sparse attention."""

import torch
from torch import Tensor

from piper_kernels._triton.runtime import supports_device
from piper_kernels.attention.coarse import _dispatch, reference
from piper_kernels.attention.coarse._validation import (
    LABEL,
    check_coarse_scale,
    check_residual,
)
from piper_kernels.attention.sparse_piper_attention._backend import select_backend
from piper_kernels.attention.sparse_piper_attention._blocks import BLOCK
from piper_kernels.attention.sparse_piper_attention._preparation import PreparedOperands
from piper_kernels.attention.sparse_piper_attention._quantized import check_quantized
from piper_kernels.attention.sparse_piper_attention._routing import (
    RoutingMode,
    RoutingRequest,
    RoutingSummaries,
)
from piper_kernels.attention.sparse_piper_attention._validation import check_count


@torch.library.custom_op("piper_kernels::sparse_piper_coarse_residual", mutates_args=())
def sparse_piper_coarse_residual(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    coarse_key_blocks: int,
    coarse_scale: float,
    routing_mode: int,
    block_lengths: Tensor | None = None,
) -> Tensor:
    """Return the gated coarse attention of ``[B, S, H, D]`` operands in their dtype."""
    check_residual(query, key, value, gate, coarse_key_blocks, coarse_scale, block_lengths)
    operands = (query, key, value, gate)
    options = (coarse_key_blocks, coarse_scale, RoutingMode(routing_mode), block_lengths)
    if supports_device(query.device):
        from piper_kernels.attention.coarse import _triton_backend

        return _triton_backend.coarse_residual(*operands, *options)
    return reference.coarse_residual(*operands, *options)


@sparse_piper_coarse_residual.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    coarse_key_blocks: int,
    coarse_scale: float,
    routing_mode: int,
    block_lengths: Tensor | None = None,
) -> Tensor:
    RoutingMode(routing_mode)
    check_residual(query, key, value, gate, coarse_key_blocks, coarse_scale, block_lengths)
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def _check_branch(
    operands: PreparedOperands,
    request: RoutingRequest,
    block_mean: Tensor,
    gate: Tensor,
    rows: int,
    coarse_scale: float,
    coarse_key_blocks: int | None,
) -> int:
    """Check the coarse operands of the fused operator and return its coarse key blocks."""
    batch, heads, physical, features = operands.query.shape
    device, blocks = operands.query.device, physical // BLOCK
    if operands.key.shape[1] != heads:
        raise ValueError(f"{LABEL} needs equal query and key head counts, got {heads} and "
                         f"{operands.key.shape[1]}")  # fmt: skip
    mean_shape = (batch, heads, blocks, features)
    if block_mean.shape != mean_shape or block_mean.dtype != torch.float32:
        raise ValueError(
            f"{LABEL}: block_mean must be float32 {mean_shape}, "
            f"got {block_mean.dtype} {tuple(block_mean.shape)}"
        )
    if gate.shape != (batch, rows, heads, features) or not gate.is_floating_point():
        raise ValueError(
            f"{LABEL}: coarse_gate must be floating {(batch, rows, heads, features)}, "
            f"got {gate.dtype} {tuple(gate.shape)}"
        )
    if not block_mean.device == gate.device == device:
        raise ValueError(f"{LABEL}: block_mean and coarse_gate must be on {device}")
    check_coarse_scale(coarse_scale)
    if coarse_key_blocks is None:
        return blocks
    lowest = request.sparse_key_blocks
    check_count(LABEL, "coarse_key_blocks", coarse_key_blocks, lowest, blocks)
    return coarse_key_blocks


_FUSED = "piper_kernels::sparse_piper_attention_with_coarse_residual_from_quantized"


@torch.library.custom_op(_FUSED, mutates_args=())
def sparse_piper_attention_with_coarse_residual_from_quantized(
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
    block_mean: Tensor,
    coarse_gate: Tensor,
    head_keep_ratio_units: list[int],
    sparse_key_blocks: int,
    logical_sequence_length: int,
    routing_mode: int,
    coarse_scale: float,
    block_lengths: Tensor | None = None,
    coarse_key_blocks: int | None = None,
    sparse_query_blocks: int | None = None,
    *,
    output_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return sparse attention plus the gated coarse attention, summed in FP32 and rounded once."""
    operands = PreparedOperands(
        query, query_scale, key, key_scale, value, value_scale_multiplier, value_mean
    )
    summaries = RoutingSummaries(query_summary, key_summary, key_aux)
    counts = (head_keep_ratio_units, sparse_key_blocks)
    request = RoutingRequest.of(*counts, routing_mode, sparse_query_blocks)
    rows = check_quantized(
        operands, summaries, request, logical_sequence_length, block_lengths, output_dtype
    )
    blocks = _check_branch(
        operands, request, block_mean, coarse_gate, rows, coarse_scale, coarse_key_blocks
    )
    coarse = _dispatch.coarse_output(summaries, block_mean, request.mode, blocks, coarse_scale)
    backend = select_backend(query.device, query.shape[3])
    return backend.attention_from_quantized(
        operands,
        summaries,
        request,
        rows,
        block_lengths,
        output_dtype,
        coarse_output=coarse,
        coarse_gate=coarse_gate,
    )


@sparse_piper_attention_with_coarse_residual_from_quantized.register_fake
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
    block_mean: Tensor,
    coarse_gate: Tensor,
    head_keep_ratio_units: list[int],
    sparse_key_blocks: int,
    logical_sequence_length: int,
    routing_mode: int,
    coarse_scale: float,
    block_lengths: Tensor | None = None,
    coarse_key_blocks: int | None = None,
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
    _check_branch(operands, request, block_mean, coarse_gate, rows, coarse_scale, coarse_key_blocks)
    return query.new_empty((query.shape[0], rows, *query.shape[1::2]), dtype=output_dtype)
