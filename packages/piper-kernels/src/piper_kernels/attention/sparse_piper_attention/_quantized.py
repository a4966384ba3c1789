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
    query, key = operands.query, operands.key
    if query.ndim != 4 or key.ndim != 4:
        raise ValueError(f"{LABEL}: prepared query and key must be [batch,heads,rows,features]")
    batch, heads, physical, features = query.shape
    check_heads(LABEL, heads, key.shape[1], operands.value.shape[1])
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
    check_block_lengths(LABEL, block_lengths, physical, query.device)
    rows = logical_sequence_length if block_lengths is None else physical
    check_routing_counts(LABEL, request.sparse_key_blocks, request.sparse_query_blocks, rows)
    kv = (batch, key.shape[1])
    blocks = physical // BLOCK
    aux_blocks = 0 if request.mode is RoutingMode.MEAN else blocks
    scales = (torch.float32, query.device)
    codes = (torch.int8, query.device)
    _require("query", query, (batch, heads, physical, features), *codes)
    _require(
        "query_scale", operands.query_scale, (*query.shape[:2], physical // QUERY_GROUP), *scales
    )
    _require("query_summary", summaries.query, (batch, heads, blocks, features), *scales)
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
