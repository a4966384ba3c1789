"""Recognition of the gated residual update behind a feed-forward network.

``(base + update_gate[index] * update) + ffn_gate[index] * ffn`` with one index for both gates.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from piper_kernels._compile.nodes import (
    allocates,
    fake_value,
    insert_mutation,
    is_call,
    is_contiguous,
    replace_node,
    shape_key,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class GatedUpdateMatch:
    """A gated update in a graph; see ``GatedUpdates``.

    Attributes:
        result: The node of the whole update.
        base: The residual before both updates.
        update: The first update, a fresh value that nothing else uses.
        update_gate: Table of gates of the first update.
        ffn_gate: Table of gates of the network.
        index: Row of both tables for each row.
        python_indexing: Whether negative indices count from the end.
    """

    result: Node
    base: Node
    update: Node
    update_gate: Node
    ffn_gate: Node
    index: Node
    python_indexing: bool


def match_gated_update(ffn: Node) -> GatedUpdateMatch | None:
    """Match the update that consumes the result of a network and nothing else does."""
    scaled = _only_user(ffn, aten.mul.Tensor)
    result = None if scaled is None else _only_user(scaled, aten.add.Tensor)
    if scaled is None or result is None or result.kwargs:
        return None
    ffn_gate = _chosen_rows(_other(scaled, ffn))
    residual = _other(result, scaled)
    if ffn_gate is None or not is_call(residual, aten.add.Tensor) or residual.kwargs:
        return None
    left, right = residual.args
    for base, product in ((left, right), (right, left)):
        match = _match_residual(result, base, product, ffn_gate)
        if match is not None:
            return match
    return None


def replace_gated_update(
    graph: Graph, match: GatedUpdateMatch, operator: Any, arguments: tuple[Any, ...]
) -> None:
    """Replace the update by an operator that overwrites ``reusable_update``."""
    names = [argument.name for argument in operator._schema.arguments]
    with graph.inserting_before(match.result):
        updated = insert_mutation(
            graph, operator, "reusable_update", dict(zip(names, arguments, strict=True))
        )
    replace_node(match.result, updated)


def _match_residual(
    result: Node, base: Any, product: Any, ffn_gate: tuple[Node, Node, bool]
) -> GatedUpdateMatch | None:
    if not is_call(product, aten.mul.Tensor) or not isinstance(base, Node):
        return None
    left, right = product.args
    for gate, update in ((left, right), (right, left)):
        update_gate = _chosen_rows(gate)
        if update_gate is None or update_gate[1:] != ffn_gate[1:]:
            continue
        if isinstance(update, Node) and _is_fresh(update, product):
            tables = (update_gate[0], ffn_gate[0])
            found = GatedUpdateMatch(result, base, update, *tables, *ffn_gate[1:])
            return found if _fits(found) else None
    return None


def _chosen_rows(node: Any) -> tuple[Node, Node, bool] | None:
    """Return table, index and index rule of rows that are chosen from a table."""
    if is_call(node, aten.index.Tensor):
        table, indices = node.args
        if len(indices) == 1 and isinstance(indices[0], Node):
            return table, indices[0], True
    elif is_call(node, aten.embedding.default):
        return node.args[0], node.args[1], False
    elif is_call(node, aten.index_select.default) and node.args[1] == 0:
        return node.args[0], node.args[2], False
    return None


def _fits(match: GatedUpdateMatch) -> bool:
    """Return whether the metadata provably satisfies the checks of the operators."""
    result, base, update = (fake_value(n) for n in (match.result, match.base, match.update))
    index = fake_value(match.index)
    tables = [fake_value(table) for table in (match.update_gate, match.ffn_gate)]
    if result is None or base is None or update is None or index is None:
        return False
    shape = shape_key(result.shape)
    for value in (base, update):
        if shape_key(value.shape) != shape or value.dtype != result.dtype:
            return False
        if not is_contiguous(value):
            return False
    rows = shape[-2:-1]
    if any(size != 1 for size in shape[:-2]) or shape_key(index.shape) != rows:
        return False
    if index.dtype not in (torch.int32, torch.int64) or not is_contiguous(index):
        return False
    return all(
        table is not None
        and table.ndim == 2
        and table.dtype == result.dtype
        and shape_key(table.shape[1:]) == shape[-1:]
        and table.stride(1) == 1
        for table in tables
    )


def _is_fresh(node: Node, user: Node) -> bool:
    """Return whether an operator allocates the value and one node alone uses it."""
    return allocates(node) and set(node.users) == {user}


def _only_user(node: Node, target: Any) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and is_call(users[0], target) else None


def _other(node: Node, operand: Node) -> Any:
    left, right = node.args
    return right if left is operand else left


def gated_arguments(match: GatedUpdateMatch | None) -> tuple[Any, ...]:
    """Return the operands of an operator that describe the update, none without one."""
    if match is None:
        return ()
    tables = (match.update_gate, match.ffn_gate)
    return (match.base, match.update, *tables, match.index, match.python_indexing)
