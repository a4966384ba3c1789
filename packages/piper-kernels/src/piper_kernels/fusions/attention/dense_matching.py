"""Recognition of dense Piper attention between quantized projections."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

import piper_kernels.attention.piper_attention._ops  # noqa: F401  # registers the operators
from piper_kernels._compile.nodes import bind_arguments, has_values, is_call
from piper_kernels.fusions.attention.matching import (
    MatchLinear,
    OutputProjection,
    Projection,
    is_exclusive,
    is_supported_input,
    match_normalized,
    match_output,
    match_plain,
)

ops: Any = torch.ops.piper_kernels


@dataclass(frozen=True)
class DenseRegion:
    """Projections, norms, rotations and attention that nothing else looks into.

    Attributes:
        query: The queries.
        key: The keys; ``None`` where keys and values stay as they are.
        value: The values, given with ``key``.
        arguments: Arguments of the attention.
        node: The attention.
        output: The projection of the result, or ``None``.
    """

    query: Projection
    key: Projection | None
    value: Projection | None
    arguments: dict[str, Any]
    node: Node
    output: OutputProjection | None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the attention."""
        return self.node.meta["val"].dtype


def match_dense_region(node: Node, match: MatchLinear) -> DenseRegion | None:
    """Match the region around a call of dense Piper attention.

    Keys and values may have fewer heads and come from another input; where they do not match,
    the region is that of the queries alone.

    Args:
        node: Any node.
        match: Returns the linear of a node.
    """
    if not is_call(node, ops.piper_attention.default) or not has_values(node):
        return None
    arguments = bind_arguments(node)
    scale = arguments["scale"]
    query = match_normalized(arguments["query"], match, transposed=True)
    if query is None or not is_supported_input(query.call) or not isinstance(scale, float):
        return None
    if not is_exclusive(query.nodes, [node]):
        return None
    key = match_normalized(arguments["key"], match, transposed=True)
    value = match_plain(arguments["value"], match, transposed=True)
    if key is None or value is None or not _fit(query, key, value, node):
        return DenseRegion(query, None, None, arguments, node, None)
    output = match_output(node, match, transposed=True)
    return DenseRegion(query, key, value, arguments, node, output)


def _fit(query: Projection, key: Projection, value: Projection, node: Node) -> bool:
    return (
        key.shape == value.shape
        and key.call.input is value.call.input
        and query.shape[0] == key.shape[0]
        and query.head_dim == key.head_dim
        and is_supported_input(key.call)
        and is_supported_input(value.call)
        and is_exclusive(key.nodes | value.nodes, [node])
    )
