"""Arguments of the operators of attention with an output projection, and their checks."""

from typing import Any

import torch
from torch import Tensor

from piper_kernels.attention.coarse._validation import check_coarse_scale
from piper_kernels.attention.sparse_piper_attention._blocks import BLOCK, block_count
from piper_kernels.attention.sparse_piper_attention._budget import LABEL
from piper_kernels.attention.sparse_piper_attention._quantized import (
    check_keys_and_values,
    check_prepared_queries,
)
from piper_kernels.attention.sparse_piper_attention._routing import RoutingRequest
from piper_kernels.attention.sparse_piper_attention._validation import check_count
from piper_kernels.fusions.attention.operators import Argument, optional
from piper_kernels.fusions.attention.output import Gates
from piper_kernels.fusions.sparse_piper.output import (
    CoarseBranch,
    KeysAndValues,
    PreparedQueries,
    Queries,
    SparseOutput,
)

QUERY_ARGUMENTS = tuple(
    Argument("Tensor", name) for name in ("query", "query_scale", "query_summary")
)
KEY_VALUE_ARGUMENTS = (
    *(
        Argument("Tensor", name)
        for name in (
            "key",
            "key_scale",
            "key_summary",
            "key_aux",
            "value",
            "value_scale_multiplier",
            "value_mean",
        )
    ),
    Argument("SymInt[]", "head_keep_ratio_units"),
    Argument("SymInt", "sparse_key_blocks"),
    Argument("SymInt", "logical_sequence_length"),
    Argument("SymInt", "routing_mode"),
)
BRANCH_ARGUMENTS = (
    optional("Tensor", "block_lengths"),
    optional("Tensor", "block_mean"),
    optional("Tensor", "coarse_gate"),
    optional("float", "coarse_scale"),
    optional("SymInt", "coarse_key_blocks"),
    optional("SymInt", "sparse_query_blocks"),
)


def keys_of(bound: dict[str, Any]) -> KeysAndValues:
    """Return the keys and values among the arguments of an operator."""
    return KeysAndValues(*(bound[argument.name] for argument in KEY_VALUE_ARGUMENTS[:7]))


def request_of(bound: dict[str, Any]) -> RoutingRequest:
    """Return the routing among the arguments of an operator."""
    return RoutingRequest.of(
        bound["head_keep_ratio_units"],
        bound["sparse_key_blocks"],
        bound["routing_mode"],
        bound["sparse_query_blocks"],
    )


def check_attention(bound: dict[str, Any]) -> tuple[int, int, int, int]:
    """Check keys, values, routing and the coarse branch; return ``(B, rows, H, D)``.

    Raises:
        ValueError: Something does not fit the rest.
    """
    keys, request = keys_of(bound), request_of(bound)
    if keys.key.ndim != 4:
        raise ValueError(f"{LABEL}: prepared key must be [batch,heads,rows,features]")
    heads = len(request.units)
    operands, summaries = keys.with_queries(keys.key, keys.key_scale, keys.key_summary)
    rows = check_keys_and_values(
        operands,
        summaries,
        request,
        heads,
        bound["logical_sequence_length"],
        bound["block_lengths"],
        bound["output_dtype"],
    )
    shape = (keys.key.shape[0], rows, heads, keys.key.shape[3])
    _check_branch(bound, keys.key, request)
    return shape


def check_queries(bound: dict[str, Any], shape: tuple[int, int, int, int]) -> None:
    """Check prepared queries against the shape of the attention."""
    batch, rows, heads, features = shape
    stored = (batch, heads, block_count(rows) * BLOCK, features)
    query = bound["query"]
    if query.device != bound["key"].device:
        raise ValueError(f"{LABEL}: query must be on {bound['key'].device}, got {query.device}")
    check_prepared_queries(query, bound["query_scale"], bound["query_summary"], stored)


def check_gate(gate: Tensor, shape: tuple[int, int, int, int], device: torch.device) -> None:
    """Check the gates of the whole sequence; ``ValueError`` if they do not fit."""
    if gate.shape != shape or not gate.is_floating_point() or gate.device != device:
        raise ValueError(
            f"{LABEL}: coarse_gate must be floating {shape} on {device}, "
            f"got {gate.dtype} {tuple(gate.shape)} on {gate.device}"
        )


def prepared_queries(bound: dict[str, Any]) -> PreparedQueries:
    """Return the prepared queries among the arguments of an operator."""
    return PreparedQueries(bound["query"], bound["query_scale"], bound["query_summary"])


def sparse_output(bound: dict[str, Any], queries: Queries, gates: Gates | None) -> SparseOutput:
    """Return the attention that the arguments of an operator stand for."""
    keys = keys_of(bound)
    coarse = None
    if gates is not None:
        blocks = bound["coarse_key_blocks"]
        count = keys.key.shape[2] // BLOCK if blocks is None else blocks
        coarse = CoarseBranch(bound["block_mean"], bound["coarse_scale"], count, gates)
    lengths = bound["block_lengths"]
    rows = bound["logical_sequence_length"] if lengths is None else keys.key.shape[2]
    dtype = bound["output_dtype"]
    return SparseOutput(queries, keys, request_of(bound), rows, lengths, coarse, dtype)


def _check_branch(bound: dict[str, Any], key: Tensor, request: RoutingRequest) -> None:
    mean, scale = bound["block_mean"], bound["coarse_scale"]
    blocks = bound["coarse_key_blocks"]
    if mean is None:
        if scale is not None or blocks is not None or has_gates(bound):
            raise ValueError(f"{LABEL}: coarse arguments need block_mean")
        return
    if scale is None or not has_gates(bound):
        raise ValueError(f"{LABEL}: block_mean needs coarse_scale and one source of gates")
    check_coarse_scale(scale)
    batch, kv_heads, physical, features = key.shape
    shape = (batch, kv_heads, physical // BLOCK, features)
    if kv_heads != len(request.units):
        raise ValueError(
            f"{LABEL}: a coarse branch needs equal query and key head counts, "
            f"got {len(request.units)} and {kv_heads}"
        )
    if mean.shape != shape or mean.dtype != torch.float32 or mean.device != key.device:
        raise ValueError(
            f"{LABEL}: block_mean must be float32 {shape} on {key.device}, "
            f"got {mean.dtype} {tuple(mean.shape)} on {mean.device}"
        )
    if blocks is not None:
        lowest = request.sparse_key_blocks
        check_count(LABEL, "coarse_key_blocks", blocks, lowest, physical // BLOCK)


def has_gates(bound: dict[str, Any]) -> bool:
    """Return whether an operator has gates, given or projected; ``ValueError`` if both."""
    projected = bound.get("gate_weight_qdata") is not None
    if projected and bound["coarse_gate"] is not None:
        raise ValueError(f"{LABEL}: coarse_gate excludes a projected gate")
    return projected or bound["coarse_gate"] is not None
