"""The graph pass that fuses ConvRot INT8 projections with sparse Piper attention."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from piper_kernels._compile.linears import LinearCall, result_items
from piper_kernels._compile.nodes import (
    insert_call,
    insert_named,
    insert_size,
    replace_node,
)
from piper_kernels._compile.passes import GraphRewritePass, install_passes
from piper_kernels._compile.views import normalize_projection_views
from piper_kernels.fusions.attention import targets
from piper_kernels.fusions.attention.matching import Projection
from piper_kernels.fusions.attention.rewriting import has_supported_norm, transform_arguments
from piper_kernels.fusions.convrot_int8_sparse_piper import (  # noqa: F401  # registers
    _ops,
    _ops_value,
    _output_ops,
)
from piper_kernels.fusions.sparse_piper.matching import SparseRegion, match_sparse_region
from piper_kernels.linear.convrot.int8._compile import FORMAT, ConvRotInt8LinearPass

aten = torch.ops.aten
ops = torch.ops.piper_kernels


class ConvRotInt8SparsePiperPass(GraphRewritePass):
    """Projects to the operands of sparse Piper attention, and from its windows."""

    sources = (
        "fusions/attention",
        "fusions/sparse_piper",
        "fusions/convrot_int8_sparse_piper",
        "linear/convrot/int8/_compile.py",
    )

    def rewrite(self, graph: Graph) -> bool:
        changed = normalize_projection_views(graph, FORMAT.targets)
        for node in list(graph.nodes):
            region = match_sparse_region(node, FORMAT.match)
            if region is not None and _is_supported(region):
                _Rewrite(graph, region).apply()
                changed = True
        return changed


def compile_options(options: Mapping[str, object] | None) -> dict[str, object]:
    """See ``convrot_int8_sparse_piper_compile_options``."""
    return install_passes(options, ConvRotInt8LinearPass(), ConvRotInt8SparsePiperPass())


def supports_target(device: torch.device, head_dim: int) -> tuple[bool, str]:
    """Return whether a device executes the fused operators in kernels, or why not."""
    usable, reason = targets.supports_sparse_attention(device, head_dim)
    return targets.supports_int8_projections(device) if usable else (usable, reason)


def _is_supported(region: SparseRegion) -> bool:
    calls = [item.call for item in (region.query, region.key, region.value)]
    return (
        all(call.family == calls[0].family for call in calls)
        and has_supported_norm(region.query)
        and has_supported_norm(region.key)
        and supports_target(region.input.meta["val"].device, region.query.head_dim)[0]
    )


class _Rewrite:
    """The replacement of one region; prepared inputs are made once for each scale."""

    def __init__(self, graph: Graph, region: SparseRegion) -> None:
        self.graph, self.region = graph, region
        self.prepared: dict[object, tuple[Node, ...]] = {}

    def apply(self) -> None:
        """Replace the region, together with its output projection where it has one."""
        region = self.region
        end = region.result if region.output is None else region.output.call.node
        with self.graph.inserting_before(end):
            keys = self._keys_and_values()
            result = self._attention(keys) if region.output is None else self._output(keys)
        replace_node(end, result)

    def _prepare(self, call: LinearCall) -> tuple[Node, ...]:
        if call.preparation not in self.prepared:
            self.prepared[call.preparation] = FORMAT.prepare(self.graph, call, call.input, None)
        return self.prepared[call.preparation]

    def _weight(self, call: LinearCall) -> dict[str, Any]:
        names = ("weight_qdata", "weight_scale", "bias")
        return {name: call.arguments[name] for name in names}

    def _inputs(self, projection: Projection) -> dict[str, Any]:
        """Return what the operators that project read besides norms and rotations."""
        prepared = dict(
            zip(("input_qdata", "input_scale"), self._prepare(projection.call), strict=True)
        )
        lengths = self.region.arguments["block_lengths"]
        return {**prepared, **self._weight(projection.call), "block_lengths": lengths}

    def _project(self, name: str, arguments: dict[str, Any]) -> tuple[Node, ...]:
        operator = getattr(ops, f"convrot_int8_sparse_piper_project_{name}").default
        return result_items(self.graph, insert_named(self.graph, operator, arguments))

    def _keys_and_values(self) -> dict[str, Any]:
        """Return keys, values and what is known of the routing by the names in the operators."""
        region, graph = self.region, self.graph
        mode = {"routing_mode": region.arguments["routing_mode"]}
        transform = transform_arguments(graph, region.key)
        key = self._project("key", self._inputs(region.key) | transform | mode)
        inputs = self._inputs(region.value)
        prepared = (inputs["input_qdata"], inputs["input_scale"], inputs["block_lengths"])
        mean = insert_call(graph, ops.convrot_int8_dequantized_input_mean.default, prepared)
        arguments = {**inputs, "input_mean": mean, "head_dim": region.value.head_dim}
        name = "value" if region.coarse is None else "value_with_block_means"
        value = self._project(name, arguments)
        names = ("key", "key_scale", "key_summary", "key_aux")
        found = dict(zip(names, key, strict=True))
        names = ("value", "value_scale_multiplier", "value_mean", "block_mean")
        found |= dict(zip(names, value, strict=False))
        counts = ("head_keep_ratio_units", "sparse_key_blocks", "sparse_query_blocks")
        found |= {name: region.arguments[name] for name in (*counts, "block_lengths")} | mode
        if region.coarse is not None:
            branch = region.coarse.arguments
            found |= {name: branch[name] for name in ("coarse_scale", "coarse_key_blocks")}
        return {
            **found,
            "logical_sequence_length": insert_size(graph, region.input, 1),
            "output_dtype": region.dtype,
        }

    def _attention(self, keys: dict[str, Any]) -> Node:
        region = self.region
        arguments = self._inputs(region.query) | transform_arguments(self.graph, region.query)
        arguments |= {name: region.arguments[name] for name in ("routing_mode",)}
        arguments["softmax_scale"] = region.arguments["scale"]
        query = self._project("query", arguments)
        arguments = keys | dict(zip(("query", "query_scale", "query_summary"), query, strict=True))
        if region.coarse is None:
            operator = ops.sparse_piper_attention_from_quantized.default
        else:
            operator = ops.sparse_piper_attention_with_coarse_residual_from_quantized.default
            arguments["coarse_gate"] = self._gate()
        return insert_named(self.graph, operator, arguments)

    def _gate(self) -> Node:
        """Return the gates, from the shared prepared input where they are projected from it."""
        coarse, region = self.region.coarse, self.region
        assert coarse is not None, "a region without a coarse branch has no gates"
        projected = coarse.projection
        if projected is None or projected.call.family != region.query.call.family:
            return coarse.gate
        rows = FORMAT.project(self.graph, projected.call, self._prepare(projected.call))
        shape = [insert_size(self.graph, rows, dim) for dim in (0, 1)]
        shape += [projected.heads, projected.head_dim]
        return insert_call(self.graph, aten.reshape.default, (rows, shape))

    def _output(self, keys: dict[str, Any]) -> Node:
        region = self.region
        assert region.output is not None, "the region has an output projection"
        call = region.output.call
        arguments = keys | self._weight(call) | transform_arguments(self.graph, region.query)
        arguments |= {
            "group_size": call.arguments["group_size"],
            "output_input_scale": call.arguments["input_scale"],
            "input_group_size": region.query.call.arguments["group_size"],
            "softmax_scale": region.arguments["scale"],
        }
        arguments |= self._windowed("query", region.query.call)
        coarse = region.coarse
        if coarse is not None:
            projected = coarse.projection
            if projected is None or projected.call.family != region.query.call.family:
                arguments["coarse_gate"] = coarse.gate
            else:
                arguments |= self._windowed("gate", projected.call)
        operator = ops.convrot_int8_sparse_piper_projected_query_attention_output.default
        return insert_named(self.graph, operator, arguments)

    def _windowed(self, prefix: str, call: LinearCall) -> dict[str, Any]:
        """Return a linear that is computed by windows, with the input that it is made from.

        An input that nothing else needs in this form is prepared by windows too.
        """
        inputs = self.prepared.get(call.preparation)
        if inputs is None:
            inputs = (call.input, call.arguments["input_scale"])
        names = ("input_qdata", "input_scale", "weight_qdata", "weight_scale", "bias")
        values = (*inputs, *self._weight(call).values())
        return {f"{prefix}_{name}": value for name, value in zip(names, values, strict=True)}
