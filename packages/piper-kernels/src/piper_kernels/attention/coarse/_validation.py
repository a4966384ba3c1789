"""Checks of coarse attention: host metadata only."""

import torch
from torch import Tensor

from piper_kernels.attention.sparse_piper_attention._blocks import block_count
from piper_kernels.attention.sparse_piper_attention._validation import (
    check_block_lengths,
    check_count,
    check_operands,
    check_scale,
)

LABEL = "sparse Piper coarse residual"


def check_coarse_scale(scale: float) -> float:
    """Return the scale as a number; ``ValueError`` when it is not finite and positive."""
    return check_scale("coarse attention scale", scale)


def check_residual(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    coarse_key_blocks: int,
    coarse_scale: float,
    block_lengths: Tensor | None,
) -> None:
    """Check everything about a coarse residual that the host knows."""
    operands = {"query": query, "key": key, "value": value, "coarse_gate": gate}
    check_operands(LABEL, operands)
    for name, operand in operands.items():
        if operand.shape != query.shape:
            raise ValueError(
                f"{LABEL}: query, key, value and coarse_gate must have matching shapes and head "
                f"counts, {name} is {tuple(operand.shape)}, query {tuple(query.shape)}"
            )
    check_block_lengths(LABEL, block_lengths, query.shape[1], query.device)
    check_coarse_scale(coarse_scale)
    check_count(LABEL, "coarse_key_blocks", coarse_key_blocks, 1, block_count(query.shape[1]))


def check_blocks(name: str, tensor: Tensor) -> None:
    """Check that a tensor of blocks is FP32 of rank 4; ``ValueError`` otherwise."""
    if tensor.ndim != 4 or tensor.dtype != torch.float32:
        raise ValueError(
            f"coarse attention: {name} must be rank-4 float32, "
            f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )


def check_scores(scores: Tensor, pooled_value: Tensor) -> None:
    """Check that scores ``[B, H, Q, K]`` fit pooled values ``[B, H, K, D]``."""
    check_blocks("block_scores", scores)
    check_blocks("pooled_value", pooled_value)
    if scores.device != pooled_value.device or (
        (*scores.shape[:2], scores.shape[3]) != pooled_value.shape[:3]
    ):
        raise ValueError(
            f"coarse attention: block_scores {tuple(scores.shape)} on {scores.device} do not fit "
            f"pooled_value {tuple(pooled_value.shape)} on {pooled_value.device}"
        )


def check_gate(coarse_output: Tensor, gate: Tensor) -> None:
    """Check that coarse rows ``[B, H, ceil(S / 64), D]`` fit a gate ``[B, S, H, D]``."""
    check_blocks("coarse_output", coarse_output)
    if gate.ndim != 4 or not gate.is_floating_point() or gate.device != coarse_output.device:
        raise ValueError(
            f"coarse attention: gate must be floating [batch,sequence,heads,features] on "
            f"{coarse_output.device}, got {gate.dtype} {tuple(gate.shape)} on {gate.device}"
        )
    batch, rows, heads, features = gate.shape
    if coarse_output.shape != (batch, heads, block_count(rows), features):
        raise ValueError(
            f"coarse attention: coarse_output needs one row for each 64 rows of the gate "
            f"{tuple(gate.shape)}, got {tuple(coarse_output.shape)}"
        )
