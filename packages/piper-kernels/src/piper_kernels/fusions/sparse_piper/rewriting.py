"""Replacement of sparse Piper attention between projections, whatever the weight format."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from piper_kernels._compile.linears import result_items
from piper_kernels._compile.nodes import insert_named, insert_size, replace_node
from piper_kernels.fusions.attention.matching import MatchLinear, Projection
from piper_kernels.fusions.attention.rewriting import has_supported_norm, transform_arguments
from piper_kernels.fusions.sparse_piper.matching import SparseRegion, match_sparse_region

ops: Any = torch.ops.piper_kernels


class RegionRewrite(ABC):
    """The replacement of one region.

    Attributes:
        operators: Prefix of the names of the operators that project.
        graph: Rewritten in place.
        region: What is replaced.
    """

    operators: str

    def __init__(self, graph: Graph, region: SparseRegion) -> None:
        self.graph = graph
        self.region = region

    @abstractmethod
    def inputs(self, projection: Projection) -> dict[str, Any]:
        """Return the prepared input and the weight of a projection by their names."""

    @abstractmethod
    def gate(self) -> Node:
        """Return the gates of a coarse branch without an output projection."""

    @abstractmethod
    def output(self, keys: dict[str, Any]) -> Node:
        """Append the attention with its output projection."""

    def value_inputs(self) -> dict[str, Any]:
        """Return what values are projected from by the names in the operators."""
        return self.inputs(self.region.value)

    def apply(self) -> None:
        """Replace the region, together with its output projection where it has one."""
        region = self.region
        end = region.result if region.output is None else region.output.call.node
        with self.graph.inserting_before(end):
            keys = self._keys_and_values()
            result = self._attention(keys) if region.output is None else self.output(keys)
        replace_node(end, result)

    def queries(self) -> dict[str, Any]:
        """Append the projection of all queries and return them by their names."""
        region = self.region
        arguments = self.inputs(region.query) | transform_arguments(self.graph, region.query)
        arguments |= {
            "routing_mode": region.arguments["routing_mode"],
            "block_lengths": region.arguments["block_lengths"],
            "softmax_scale": region.arguments["scale"],
        }
        names = ("query", "query_scale", "query_summary")
        return dict(zip(names, self._project("query", arguments), strict=True))

    def _project(self, operand: str, arguments: dict[str, Any]) -> tuple[Node, ...]:
        operator = getattr(ops, f"{self.operators}_project_{operand}").default
        return result_items(self.graph, insert_named(self.graph, operator, arguments))

    def _keys_and_values(self) -> dict[str, Any]:
        """Return keys, values and what is known of the routing by the names in the operators."""
        region, graph = self.region, self.graph
        known = {name: region.arguments[name] for name in ("routing_mode", "block_lengths")}
        arguments = self.inputs(region.key) | transform_arguments(graph, region.key) | known
        names = ("key", "key_scale", "key_summary", "key_aux")
        found = dict(zip(names, self._project("key", arguments), strict=True))
        arguments = {
            **self.value_inputs(),
            "block_lengths": known["block_lengths"],
            "head_dim": region.value.head_dim,
        }
        operand = "value" if region.coarse is None else "value_with_block_means"
        names = ("value", "value_scale_multiplier", "value_mean", "block_mean")
        found |= dict(zip(names, self._project(operand, arguments), strict=False))
        counts = ("head_keep_ratio_units", "sparse_key_blocks", "sparse_query_blocks")
        found |= {name: region.arguments[name] for name in counts}
        if region.coarse is not None:
            branch = region.coarse.arguments
            found |= {name: branch[name] for name in ("coarse_scale", "coarse_key_blocks")}
        return {
            **found,
            **known,
            "logical_sequence_length": insert_size(graph, region.input, 1),
            "output_dtype": region.dtype,
        }

    def _attention(self, keys: dict[str, Any]) -> Node:
        arguments = keys | self.queries()
        if self.region.coarse is None:
            operator = ops.sparse_piper_attention_from_quantized.default
        else:
            operator = ops.sparse_piper_attention_with_coarse_residual_from_quantized.default
            arguments["coarse_gate"] = self.gate()
        return insert_named(self.graph, operator, arguments)


def rewrite_regions(
    graph: Graph,
    match: MatchLinear,
    match_last: MatchLinear,
    supports: Callable[[SparseRegion], bool],
    rewrite: type[RegionRewrite],
) -> bool:
    """Replace all regions that a target supports.

    Args:
        graph: Rewritten in place.
        match: Returns the linear of a node in front of an attention.
        match_last: Returns the linear of a node behind it.
        supports: Whether a region can be replaced.
        rewrite: How it is replaced.

    Returns:
        Whether anything changed.
    """
    changed = False
    for node in list(graph.nodes):
        region = match_sparse_region(node, match, match_last)
        if region is None or not supports(region):
            continue
        if has_supported_norm(region.query) and has_supported_norm(region.key):
            rewrite(graph, region).apply()
            changed = True
    return changed
