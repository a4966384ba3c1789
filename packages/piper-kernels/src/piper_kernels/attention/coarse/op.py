"""Public functions of coarse attention. All are differentiable; the maths is in the README."""

import torch
from torch import Tensor

from piper_kernels.attention.coarse import _ops, reference
from piper_kernels.attention.coarse._validation import (
    LABEL,
    check_gate,
    check_residual,
    check_scores,
)
from piper_kernels.attention.sparse_piper_attention._blocks import block_count
from piper_kernels.attention.sparse_piper_attention._routing import routing_mode
from piper_kernels.attention.sparse_piper_attention._validation import check_block_lengths


def mean_pool_block_values(value: Tensor, block_lengths: Tensor | None = None) -> Tensor:
    """Return the mean of every 64-row block over the rows that exist.

    Args:
        value: Floating ``[B, S, H, D]``.
        block_lengths: Contiguous int32 ``[S / 64]`` in [1, 64]: valid rows at the front of each
            block; ``None``: all ``S`` rows exist.

    Returns:
        FP32 ``[B, H, ceil(S / 64), D]``.

    Raises:
        ValueError: The rank, dtype or the block lengths do not fit.
    """
    if value.ndim != 4 or not value.is_floating_point():
        raise ValueError(
            f"coarse attention: value must be floating [batch,sequence,heads,features], "
            f"got {value.dtype} {tuple(value.shape)}"
        )
    check_block_lengths("coarse attention", block_lengths, value.shape[1], value.device)
    return reference.pool_values(value, block_lengths)


def coarse_attention(block_scores: Tensor, pooled_value: Tensor) -> Tensor:
    """Return ``softmax(block_scores) @ pooled_value``.

    Args:
        block_scores: FP32 ``[B, H, query blocks, key blocks]``.
        pooled_value: FP32 ``[B, H, key blocks, D]``.

    Returns:
        FP32 ``[B, H, query blocks, D]``.

    Raises:
        ValueError: A rank, dtype, device or shape does not fit.
    """
    check_scores(block_scores, pooled_value)
    return reference.attend_blocks(block_scores, pooled_value)


def apply_coarse_attention_residual(coarse_output: Tensor, gate: Tensor) -> Tensor:
    """Return the residual alone: each coarse row times the gate of its 64 rows.

    The gate has no activation; the caller adds the result to the fine attention.

    Args:
        coarse_output: FP32 ``[B, H, ceil(S / 64), D]``.
        gate: Floating ``[B, S, H, D]``.

    Returns:
        Contiguous ``[B, S, H, D]`` in the dtype of the gate.

    Raises:
        ValueError: A rank, dtype, device or shape does not fit.
    """
    check_gate(coarse_output, gate)
    return reference.gated_residual(coarse_output, gate)


def coarse_attention_residual(block_scores: Tensor, pooled_value: Tensor, gate: Tensor) -> Tensor:
    """Return the gated residual of given block scores, learned ones for example.

    Arguments, result and errors are those of :func:`coarse_attention` and
    :func:`apply_coarse_attention_residual`.
    """
    return apply_coarse_attention_residual(coarse_attention(block_scores, pooled_value), gate)


def sparse_piper_coarse_residual(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    coarse_gate: Tensor,
    *,
    routing: str,
    coarse_key_blocks: int | None = None,
    coarse_scale: float,
    block_lengths: Tensor | None = None,
) -> Tensor:
    """Return the gated attention of query blocks to mean-pooled value blocks.

    It is one operator in graphs unless an operand needs a gradient.

    Args:
        query: float16, bfloat16 or float32 ``[B, S, H, D]`` with contiguous features, D 64 or
            128, S at least 64.
        key: As the query; no grouped heads.
        value: As the query.
        coarse_gate: As the query.
        routing: ``"minmax"`` or ``"mean"``: how blocks are scored.
        coarse_key_blocks: Leading key blocks to attend to, in ``[1, ceil(S / 64)]``, a partial
            last one included; ``None``: all.
        coarse_scale: Factor of the scores, finite and positive.
        block_lengths: As for :class:`SparsePiperAttention`.

    Returns:
        Contiguous ``[B, S, H, D]``, to be added to the output of the sparse attention.

    Raises:
        TypeError: ``coarse_key_blocks`` is not an integer.
        ValueError: A shape, dtype, device, layout, count, the scale or the routing does not fit.
    """
    mode = routing_mode(routing, LABEL)
    operands = (query, key, value, coarse_gate)
    if coarse_key_blocks is None:
        if query.ndim != 4:
            raise ValueError(f"{LABEL}: query must be [batch,sequence,heads,features]")
        coarse_key_blocks = block_count(query.shape[1])
    coarse_scale = float(coarse_scale)
    check_residual(*operands, coarse_key_blocks, coarse_scale, block_lengths)
    options = (coarse_key_blocks, coarse_scale)
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        return reference.coarse_residual(*operands, *options, mode, block_lengths)
    return _ops.sparse_piper_coarse_residual(*operands, *options, int(mode), block_lengths)
