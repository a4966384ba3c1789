"""Replacement of matched feed-forward networks in a graph."""

from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

from piper_kernels._compile.nodes import has_values, insert_call, replace_node
from piper_kernels.fusions._ffn.gated_matching import (
    GatedUpdateMatch,
    match_gated_update,
    replace_gated_update,
)
from piper_kernels.fusions._ffn.matching import FeedForward

Matcher = Callable[[Node], FeedForward | None]
Arguments = Callable[[FeedForward, GatedUpdateMatch | None], tuple[Any, ...]]


def fuse_networks(
    graph: Graph, match: Matcher, operator: Any, gated_operator: Any, arguments: Arguments
) -> bool:
    """Replace networks by an operator, with the gated update that follows where there is one.

    Args:
        graph: Rewritten in place.
        match: Returns the network that ends in a linear.
        operator: Returns the result of a network.
        gated_operator: Overwrites an operand by the gated update.
        arguments: Returns the operands of either operator.

    Returns:
        Whether anything changed.
    """
    changed = False
    for node in list(graph.nodes):
        if node.op != "call_function" or not has_values(node):
            continue
        network = match(node)
        if network is None:
            continue
        update = match_gated_update(network.down.node)
        if update is not None:
            replace_gated_update(graph, update, gated_operator, arguments(network, update))
        else:
            with graph.inserting_before(node):
                replace_node(node, insert_call(graph, operator, arguments(network, None)))
        changed = True
    return changed
