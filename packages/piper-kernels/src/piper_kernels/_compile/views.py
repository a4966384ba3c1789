"""Removal of row views around linears, and of repeated conversions in front of them.

A distributed tensor flattens its rows before a linear and restores them after it. The linears
here take any leading sizes, so ``restore(linear(flatten(x)))`` is ``linear(x)``. An autocast
region converts the input of every linear anew, so linears of one value have different inputs.
"""

from typing import Any

import torch
from torch.fx import Graph, Node

from piper_kernels._compile.nodes import (
    CONVERSIONS,
    bind_arguments,
    fake_value,
    has_values,
    insert_call,
    insert_reshape,
    is_call,
    replace_node,
    shape_key,
)

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def normalize_projection_views(graph: Graph, targets: tuple[Any, ...]) -> bool:
    """Remove pairs of row views around linears and repeated conversions in front of them.

    Args:
        graph: Rewritten in place.
        targets: Operators whose first argument is ``[..., in]`` and result ``[..., out]``.

    Returns:
        Whether anything changed. Other users of a flattened input keep it; other users of a
        flattened result get a view of the new one.
    """
    changed = _merge_conversions(graph, targets)
    for node in list(graph.nodes):
        if is_call(node, *targets):
            changed |= _normalize(graph, node)
    return changed


def _merge_conversions(graph: Graph, targets: tuple[Any, ...]) -> bool:
    """Let linears read the first of equal conversions; one that others read too stays."""
    changed = False
    found: dict[tuple[Any, ...], Node] = {}
    for node in list(graph.nodes):
        if not is_call(node, *CONVERSIONS) or not any(is_call(u, *targets) for u in node.users):
            continue
        first = found.setdefault((node.target, node.args, *sorted(node.kwargs.items())), node)
        if first is not node and all(is_call(user, *targets) for user in node.users):
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            changed = True
    return changed


def _normalize(graph: Graph, node: Node) -> bool:
    flat: Any = node.args[0]
    if not is_call(flat, *VIEWS):
        return False
    source: Any = flat.args[0]
    before, after, output = fake_value(source), fake_value(flat), fake_value(node)
    if before is None or after is None or output is None or not has_values(node):
        return False
    if before.ndim == 0 or shape_key(before.shape[-1:]) != shape_key(after.shape[-1:]):
        return False
    restored = (*shape_key(before.shape[:-1]), *shape_key(output.shape[-1:]))
    pairs = [
        user
        for user in node.users
        if is_call(user, *VIEWS)
        and (value := fake_value(user)) is not None
        and shape_key(value.shape) == restored
    ]
    if not pairs:
        return False
    arguments = bind_arguments(node)
    with graph.inserting_before(node):
        direct = insert_call(graph, node.target, (source, *list(arguments.values())[1:]))
        flat_result = None
        if len(pairs) < len(node.users):
            flat_result = insert_reshape(graph, direct, flat)
    for view in pairs:
        view.replace_all_uses_with(direct)
        graph.erase_node(view)
    kept = {k: v for k, v in node.meta.items() if k not in ("eager_input_vals", "val")}
    direct.meta.update(kept)
    if flat_result is not None:
        replace_node(node, flat_result)
    else:
        graph.erase_node(node)
    if not flat.users:
        graph.erase_node(flat)
    return True
