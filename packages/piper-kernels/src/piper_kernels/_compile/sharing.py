"""Rewrites of linears into a preparation of the input and projections of it.

Prepared tensors are ordinary values of the graph, so nothing is cached between calls.
"""

from collections import defaultdict
from collections.abc import Callable

from torch.fx import Graph, Node

from piper_kernels._compile.activations import Match, match_gelu_tanh
from piper_kernels._compile.linears import LinearCall, LinearFormat
from piper_kernels._compile.nodes import replace_node, used_only_by
from piper_kernels._compile.swiglu import match_packed_swiglu


def share_preparations(graph: Graph, fmt: LinearFormat) -> bool:
    """Prepare an input once for all linears that would prepare it in the same way.

    Linears that differ in a static input scale alone belong to one family: once a family has
    two members, every distinct preparation of it becomes a node of its own, in front of its
    first use.

    Returns:
        Whether anything changed.
    """
    families: dict[tuple[object, ...], list[LinearCall]] = defaultdict(list)
    for node in graph.nodes:
        call = fmt.match(node)
        if call is not None:
            families[call.family].append(call)
    repeated = [calls for calls in families.values() if len(calls) > 1]
    for calls in repeated:
        prepared: dict[tuple[object, ...], tuple[Node, ...]] = {}
        for found in calls:
            # An operand may have been a linear that is rewritten by now.
            call = fmt.match(found.node)
            if call is None:
                continue
            with graph.inserting_before(call.node):
                if found.preparation not in prepared:
                    prepared[found.preparation] = fmt.prepare(graph, call, call.input, None)
                replace_node(call.node, fmt.project(graph, call, prepared[found.preparation]))
    return bool(repeated)


def fold_gelu(graph: Graph, fmt: LinearFormat) -> bool:
    """Let preparations apply a GELU that nothing but one linear uses.

    Returns:
        Whether anything changed.
    """
    return _fold(graph, fmt, match_gelu_tanh, "gelu_tanh")


def fold_swiglu(graph: Graph, fmt: LinearFormat) -> bool:
    """Let preparations apply a SwiGLU of packed ``[up | gate]`` that one linear alone uses.

    Returns:
        Whether anything changed.
    """
    return _fold(graph, fmt, match_packed_swiglu, "swiglu")


def _fold(
    graph: Graph, fmt: LinearFormat, find: Callable[[object], Match | None], activation_fn: str
) -> bool:
    changed = False
    for node in list(graph.nodes):
        call = fmt.match(node)
        match = None if call is None else find(call.input)
        if call is not None and match is not None and used_only_by(match.nodes, node):
            fold_activation(graph, fmt, call, match, activation_fn)
            changed = True
    return changed


def fold_activation(
    graph: Graph, fmt: LinearFormat, call: LinearCall, match: Match, activation_fn: str
) -> None:
    """Replace a linear by a preparation that activates its source, and a projection."""
    with graph.inserting_before(call.node):
        prepared = fmt.prepare(graph, call, match.source, activation_fn)
        replace_node(call.node, fmt.project(graph, call, prepared))
