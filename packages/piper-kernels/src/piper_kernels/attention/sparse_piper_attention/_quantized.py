"""The contract of operands that a producer has quantized already."""

import torch
from torch import Tensor

from piper_kernels.attention.sparse_piper_attention._blocks import BLOCK, block_count
from piper_kernels.attention.sparse_piper_attention._budget import LABEL
from piper_kernels.attention.sparse_piper_attention._preparation import (
    QUERY_GROUP,
    PreparedOperands,
)
from piper_kernels.attention.sparse_piper_attention._routing import (
    RoutingMode,
    RoutingRequest,
    RoutingSummaries,
)
from piper_kernels.attention.sparse_piper_attention._validation import (
    DTYPES,
    check_block_lengths,
    check_heads,
    check_routing_counts,
)


def check_quantized(
    operands: PreparedOperands,
    summaries: RoutingSummaries,
    request: RoutingRequest,
    logical_sequence_length: int,
    block_lengths: Tensor | None,
    output_dtype: torch.dtype,
) -> int:
    """Check the metadata of prepared operands and return the rows of the output.

    Raises:
        ValueError: A shape, dtype, device or layout does not fit the others.
    """
    query = operands.query
    if query.ndim != 4 or operands.key.ndim != 4:
        raise ValueError(f"{LABEL}: prepared query and key must be [batch,heads,rows,features]")
    batch, heads, physical, features = query.shape
    rows = check_keys_and_values(
        operands, summaries, request, heads, logical_sequence_length, block_lengths, output_dtype
    )
    check_prepared_queries(
        query, operands.query_scale, summaries.query, (batch, heads, physical, features)
    )
    return rows


def check_prepared_queries(
    query: Tensor, scale: Tensor, summary: Tensor, shape: tuple[int, int, int, int]
) -> None:
    """Check queries of ``shape`` ``(B, Hq, R, D)``; ``ValueError`` names what does not fit."""
    batch, heads, physical, features = shape
    device, lead = query.device, (batch, heads)
    _require("query", query, shape, torch.int8, device)
    _require("query_scale", scale, (*lead, physical // QUERY_GROUP), torch.float32, device)
    _require("query_summary", summary, (*lead, physical // BLOCK, features), torch.float32, device)


def check_keys_and_values(
    operands: PreparedOperands,
    summaries: RoutingSummaries,
    request: RoutingRequest,
    heads: int,
    logical_sequence_length: int,
    block_lengths: Tensor | None,
    output_dtype: torch.dtype,
) -> int:
    """Check everything but the queries of ``heads`` heads and return the rows of the output.

    Raises:
        ValueError: A shape, dtype, device or layout does not fit the others.
    """
    key = operands.key
    batch, kv_heads, physical, features = key.shape
    check_heads(LABEL, heads, kv_heads, operands.value.shape[1])
    if len(request.units) != heads:
        raise ValueError(f"{LABEL}: head_keep_ratio_units needs one value per head of {heads}")
    if features not in (64, 128):
        raise ValueError(f"{LABEL} requires head_dim=64 or 128, got {features}")
    if output_dtype not in DTYPES:
        raise ValueError(f"{LABEL}: output_dtype must be floating, got {output_dtype}")
    if block_count(logical_sequence_length) * BLOCK != physical:
        raise ValueError(
            f"{LABEL}: {logical_sequence_length} rows do not fill {physical} prepared rows"
        )
    check_block_lengths(LABEL, block_lengths, physical, key.device)
    rows = logical_sequence_length if block_lengths is None else physical
    check_routing_counts(LABEL, request.sparse_key_blocks, request.sparse_query_blocks, rows)
    kv = (batch, kv_heads)
    blocks = physical // BLOCK
    aux_blocks = 0 if request.mode is RoutingMode.MEAN else blocks
    scales = (torch.float32, key.device)
    codes = (torch.int8, key.device)
    _require("key", key, (*kv, physical, features), *codes)
    _require("key_scale", operands.key_scale, (*kv, blocks), *scales)
    _require("key_summary", summaries.key, (*kv, blocks, features), *scales)
    _require("key_aux", summaries.key_aux, (*kv, aux_blocks, features), *scales)
    _require("value", operands.value, (*kv, features, physical), *codes)
    _require("value_scale_multiplier", operands.value_multiplier, (*kv, blocks, 1), *scales)
    _require("value_mean", operands.value_mean, (*kv, features), *scales)
    return rows


def _require(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
        raise ValueError(
            f"{LABEL}: {name} must be {dtype} {shape} on {device}, "
            f"got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{LABEL}: {name} must be contiguous, got strides {tensor.stride()}")
