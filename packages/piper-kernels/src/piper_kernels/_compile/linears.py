"""What the rewrites need to know about a family of quantized linear operators."""

import operator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Graph, Node

from piper_kernels._compile.nodes import insert_call


@dataclass(frozen=True)
class LinearCall:
    """A linear of a floating input in a graph.

    Attributes:
        node: The call.
        input: Its floating input.
        family: Equal for linears that may use one preparation of one input; a repeated family
            is worth preparing separately.
        preparation: ``family`` and the static input scale: equal for one and the same
            prepared input.
        arguments: The operands by the name in the operator's schema.
    """

    node: Node
    input: Node
    family: tuple[object, ...]
    preparation: tuple[object, ...]
    arguments: dict[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the result."""
        return self.node.meta["val"].dtype


class LinearFormat(Protocol):
    """How the linears of a weight format are split into preparation and projection."""

    targets: tuple[Any, ...]

    def match(self, node: Node) -> LinearCall | None:
        """Return the call of a linear without activation whose metadata is complete."""
        ...

    def prepare(
        self, graph: Graph, call: LinearCall, source: Node, activation_fn: str | None
    ) -> tuple[Node, ...]:
        """Append the preparation of a source, which the activation turns into the input."""
        ...

    def project(self, graph: Graph, call: LinearCall, prepared: tuple[Node, ...]) -> Node:
        """Append the linear of a prepared input, with the shape of the call's result."""
        ...


def insert_results(graph: Graph, target: Any, args: tuple[Any, ...]) -> tuple[Node, ...]:
    """Append a call that returns a tuple, and one node for each of its results."""
    return result_items(graph, insert_call(graph, target, args))


def result_items(graph: Graph, call: Node) -> tuple[Node, ...]:
    """Append one node for each result of a call that returns a tuple."""
    results = []
    for index, value in enumerate(call.meta["val"]):
        item = graph.call_function(operator.getitem, (call, index))
        item.meta["val"] = value
        results.append(item)
    return tuple(results)
