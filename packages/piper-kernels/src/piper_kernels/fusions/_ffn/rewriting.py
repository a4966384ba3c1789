"""The graph pass that replaces matched feed-forward networks."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node

from piper_kernels._compile.linears import LinearFormat
from piper_kernels._compile.nodes import has_values, insert_call, replace_node
from piper_kernels._compile.passes import GraphRewritePass
from piper_kernels._compile.views import normalize_projection_views
from piper_kernels.fusions._ffn.gated_matching import (
    GatedUpdateMatch,
    match_gated_update,
    replace_gated_update,
)
from piper_kernels.fusions._ffn.matching import FeedForward


class NetworkPass(GraphRewritePass):
    """Replaces networks by one operator, with the gated update behind them where there is one.

    Attributes:
        formats: Of the linears.
        operator: Returns the result of a network.
        gated_operator: Overwrites an operand by the gated update.
    """

    formats: Sequence[LinearFormat]
    operator: Any
    gated_operator: Any

    @abstractmethod
    def match(self, node: Node) -> FeedForward | None:
        """Return the network that ends in a linear."""

    @abstractmethod
    def arguments(self, network: FeedForward, update: GatedUpdateMatch | None) -> tuple[Any, ...]:
        """Return the operands of either operator."""

    def rewrite(self, graph: Graph) -> bool:
        changed = False
        for fmt in self.formats:
            changed |= normalize_projection_views(graph, fmt.targets)
        for node in list(graph.nodes):
            if node.op != "call_function" or not has_values(node):
                continue
            network = self.match(node)
            if network is not None:
                self._replace(graph, node, network)
                changed = True
        return changed

    def _replace(self, graph: Graph, node: Node, network: FeedForward) -> None:
        update = match_gated_update(network.down.node)
        arguments = self.arguments(network, update)
        if update is not None:
            replace_gated_update(graph, update, self.gated_operator, arguments)
            return
        with graph.inserting_before(node):
            replace_node(node, insert_call(graph, self.operator, arguments))
