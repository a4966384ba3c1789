"""Recognition of sparse Piper attention between quantized projections."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

import piper_kernels.attention.coarse._ops  # noqa: F401  # registers the operators
from piper_kernels._compile.nodes import bind_arguments, fake_value, has_values, is_call, shape_key
from piper_kernels.attention.sparse_piper_attention._blocks import BLOCK
from piper_kernels.attention.sparse_piper_attention._budget import UNITS
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

aten: Any = torch.ops.aten
ops: Any = torch.ops.piper_kernels


@dataclass(frozen=True)
class CoarseResidual:
    """The coarse attention that is added to a sparse one.

    Attributes:
        gate: ``[B, S, H, D]``.
        projection: The gate as heads of a linear that nothing else uses, where it is that.
        arguments: Arguments of the operator.
    """

    gate: Node
    projection: Projection | None
    arguments: dict[str, Any]


@dataclass(frozen=True)
class SparseRegion:
    """Projections, norms, rotations and attention that nothing else looks into.

    Attributes:
        query: The queries; keys and values are projections of the same input.
        key: The keys.
        value: The values.
        arguments: Arguments of the attention.
        coarse: The branch that is added, or ``None``.
        result: The node of the attention, or of the sum.
        output: The projection of the result, or ``None``.
    """

    query: Projection
    key: Projection
    value: Projection
    arguments: dict[str, Any]
    coarse: CoarseResidual | None
    result: Node
    output: OutputProjection | None

    @property
    def input(self) -> Node:
        """The node that is projected."""
        return self.query.call.input

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the attention."""
        return self.result.meta["val"].dtype


def match_sparse_region(
    node: Node, match: MatchLinear, match_last: MatchLinear
) -> SparseRegion | None:
    """Match the region around a call of sparse Piper attention.

    Args:
        node: Any node.
        match: Returns the linear of a node.
        match_last: Returns the linear of a node behind the attention.
    """
    if not is_call(node, ops.sparse_piper_attention.default) or not has_values(node):
        return None
    arguments = bind_arguments(node)
    query = match_normalized(arguments["query"], match, transposed=False)
    key = match_normalized(arguments["key"], match, transposed=False)
    value = match_plain(arguments["value"], match, transposed=False)
    if query is None or key is None or value is None or not _agree(query, key, value):
        return None
    if not _counts_fit(arguments, query):
        return None
    result, coarse, consumers = node, None, [node]
    residual = _match_residual(node, arguments)
    if residual is not None:
        result, branch = residual
        operands = bind_arguments(branch)
        gate = match_plain(operands["gate"], match, transposed=False)
        if gate is not None and not is_exclusive(gate.nodes, [branch]):
            gate = None
        coarse = CoarseResidual(operands["gate"], gate, operands)
        consumers.append(branch)
    if not is_exclusive(query.nodes | key.nodes | value.nodes, consumers):
        return None
    output = match_output(result, match_last, transposed=False)
    return SparseRegion(query, key, value, arguments, coarse, result, output)


def _agree(query: Projection, key: Projection, value: Projection) -> bool:
    calls = (query.call, key.call, value.call)
    return (
        all(call.input is query.call.input for call in calls)
        and query.shape == key.shape == value.shape
        and all(is_supported_input(call) for call in calls)
    )


def _counts_fit(arguments: dict[str, Any], query: Projection) -> bool:
    """Return whether what the host knows fits; the operator has checked symbolic counts."""
    units, blocks = arguments["head_keep_ratio_units"], arguments["sparse_key_blocks"]
    rows = query.shape[1]
    if len(units) != query.heads or not all(
        isinstance(unit, int) and 1 <= unit <= UNITS for unit in units
    ):
        return False
    if isinstance(rows, int) and rows < BLOCK:
        return False
    if isinstance(rows, int) and isinstance(blocks, int) and not 1 <= blocks <= rows // BLOCK:
        return False
    scale = arguments["scale"]
    return isinstance(scale, float) and scale > 0


def _match_residual(fine: Node, arguments: dict[str, Any]) -> tuple[Node, Node] | None:
    """Return the sum with a coarse residual of the same operands, and the residual."""
    users = list(fine.users)
    if len(users) != 1 or not is_call(users[0], aten.add.Tensor) or users[0].kwargs:
        return None
    left, right = users[0].args
    branch: Any = right if left is fine else left
    if not is_call(branch, ops.sparse_piper_coarse_residual.default) or len(branch.users) != 1:
        return None
    return (users[0], branch) if _branch_fits(bind_arguments(branch), arguments, fine) else None


def _branch_fits(branch: dict[str, Any], arguments: dict[str, Any], fine: Node) -> bool:
    """Return whether a coarse residual is of the operands and the routing of an attention."""
    shared = ("query", "key", "value", "block_lengths", "routing_mode")
    if any(branch[name] != arguments[name] for name in shared):
        return False
    scale, gate, value = branch["coarse_scale"], fake_value(branch["gate"]), fake_value(fine)
    if not isinstance(scale, float) or scale <= 0 or gate is None or value is None:
        return False
    blocks, lowest = branch["coarse_key_blocks"], arguments["sparse_key_blocks"]
    if isinstance(blocks, int) and isinstance(lowest, int) and blocks < lowest:
        return False
    return shape_key(gate.shape) == shape_key(value.shape) and gate.dtype == value.dtype
