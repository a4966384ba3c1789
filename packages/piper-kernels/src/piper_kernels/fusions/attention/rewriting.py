"""Nodes that the rewrites of attention and its projections append."""

from typing import Any

import torch
from torch.fx import Graph, Node

from piper_kernels._compile.nodes import (
    fake_value,
    insert_call,
    insert_size,
    is_contiguous,
    shape_key,
)
from piper_kernels.fusions.attention.matching import DTYPES, Projection

aten: Any = torch.ops.aten


def insert_table(graph: Graph, table: Node) -> Node:
    """Append what makes a table ``[S, R]`` contiguous, nothing where it is that already."""
    value = table.meta["val"]
    if value.ndim != 2:
        dims = [dim for dim, size in enumerate(shape_key(value.shape)) if size != 1]
        sizes = [insert_size(graph, table, dim) for dim in dims]
        table = insert_call(graph, aten.reshape.default, (table, sizes))
    if not is_contiguous(table.meta["val"]):
        layout = {"memory_format": torch.contiguous_format}
        table = insert_call(graph, aten.clone.default, (table,), layout)
    return table


def transform_arguments(graph: Graph, projection: Projection) -> dict[str, Any]:
    """Return norm and rotation of queries or keys by the names in the operators."""
    norm, rotary = projection.norm, projection.rotary
    assert norm is not None, "queries and keys are normalized"
    assert rotary is not None, "queries and keys are rotated"
    return {
        "norm_weight": norm.weight,
        "cos": insert_table(graph, rotary.cos),
        "sin": insert_table(graph, rotary.sin),
        "eps": norm.eps,
        "head_dim": projection.head_dim,
    }


def has_supported_norm(projection: Projection) -> bool:
    """Return whether the weight of a norm, if any, is what the operators take."""
    norm = projection.norm
    value = None if norm is None or norm.weight is None else fake_value(norm.weight)
    if norm is None or norm.weight is None:
        return True
    return value is not None and value.dtype in DTYPES and is_contiguous(value)
