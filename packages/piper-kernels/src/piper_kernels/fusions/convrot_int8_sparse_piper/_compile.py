"""The graph pass that fuses ConvRot INT8 projections with sparse Piper attention."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from piper_kernels._compile.linears import LinearCall
from piper_kernels._compile.nodes import (
    allocates,
    insert_call,
    insert_mutation,
    insert_named,
    insert_size,
    is_call,
    is_contiguous,
    shape_key,
)
from piper_kernels._compile.passes import GraphRewritePass, install_passes
from piper_kernels._compile.views import normalize_projection_views
from piper_kernels.fusions.attention import targets
from piper_kernels.fusions.attention.matching import Projection
from piper_kernels.fusions.attention.rewriting import transform_arguments
from piper_kernels.fusions.attention.windows import COMPILED_WINDOW_ROWS
from piper_kernels.fusions.convrot_int8_sparse_piper import (  # noqa: F401  # registers
    _ops,
    _ops_value,
    _output_ops,
)
from piper_kernels.fusions.sparse_piper.matching import SparseRegion
from piper_kernels.fusions.sparse_piper.rewriting import RegionRewrite, rewrite_regions
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
        match = FORMAT.match
        return rewrite_regions(graph, match, match, _is_supported, _Rewrite) or changed


def compile_options(options: Mapping[str, object] | None) -> dict[str, object]:
    """See ``convrot_int8_sparse_piper_compile_options``."""
    return install_passes(options, ConvRotInt8LinearPass(), ConvRotInt8SparsePiperPass())


def supports_target(device: torch.device, head_dim: int) -> tuple[bool, str]:
    """Return whether a device executes the fused operators in kernels, or why not."""
    usable, reason = targets.supports_sparse_attention(device, head_dim)
    return targets.supports_int8_projections(device) if usable else (usable, reason)


def _is_supported(region: SparseRegion) -> bool:
    calls = [item.call for item in (region.query, region.key, region.value)]
    device = region.input.meta["val"].device
    return (
        all(call.family == calls[0].family for call in calls)
        and supports_target(device, region.query.head_dim)[0]
    )


class _Rewrite(RegionRewrite):
    """Inputs are prepared once for each scale."""

    operators = "convrot_int8_sparse_piper"

    def __init__(self, graph: Graph, region: SparseRegion) -> None:
        super().__init__(graph, region)
        self.prepared: dict[object, tuple[Node, ...]] = {}

    def inputs(self, projection: Projection) -> dict[str, Any]:
        prepared = self._prepare(projection.call)
        named = dict(zip(("input_qdata", "input_scale"), prepared, strict=True))
        return named | _weight(projection.call)

    def value_inputs(self) -> dict[str, Any]:
        inputs = self.inputs(self.region.value)
        lengths = self.region.arguments["block_lengths"]
        prepared = (inputs["input_qdata"], inputs["input_scale"], lengths)
        operator = ops.convrot_int8_dequantized_input_mean.default
        return {**inputs, "input_mean": insert_call(self.graph, operator, prepared)}

    def gate(self) -> Node:
        """Return the gates, from the shared prepared input where they are projected from it."""
        projected = self._projected_gate()
        if projected is None:
            assert self.region.coarse is not None, "the region has a coarse branch"
            return self.region.coarse.gate
        rows = FORMAT.project(self.graph, projected.call, self._prepare(projected.call))
        shape = [insert_size(self.graph, rows, dim) for dim in (0, 1)]
        shape += [projected.heads, projected.head_dim]
        return insert_call(self.graph, aten.reshape.default, (rows, shape))

    def output(self, keys: dict[str, Any]) -> Node:
        region = self.region
        assert region.output is not None, "the region has an output projection"
        call = region.output.call
        arguments = keys | _weight(call) | transform_arguments(self.graph, region.query)
        arguments |= {
            "group_size": call.arguments["group_size"],
            "output_input_scale": call.arguments["input_scale"],
            "input_group_size": region.query.call.arguments["group_size"],
            "softmax_scale": region.arguments["scale"],
            "query_chunk_rows": COMPILED_WINDOW_ROWS,
        }
        arguments |= self._windowed("query", region.query.call)
        projected = self._projected_gate()
        if projected is not None:
            arguments |= self._windowed("gate", projected.call)
        elif region.coarse is not None:
            arguments["coarse_gate"] = region.coarse.gate
        if region.input not in arguments.values() and self._owns_source():
            arguments["reusable_source"] = region.input
            operator = ops.convrot_int8_sparse_piper_projected_query_attention_output_.default
            return insert_mutation(self.graph, operator, "reusable_source", arguments)
        operator = ops.convrot_int8_sparse_piper_projected_query_attention_output.default
        return insert_named(self.graph, operator, arguments)

    def _owns_source(self) -> bool:
        """Return whether the result may take the place of the input of the region.

        It may where an operator has allocated a value of the same shape that nothing but the
        region and preparations in front of its end have read.
        """
        region = self.region
        assert region.output is not None, "the region has an output projection"
        source, end = region.input, region.output.call.node
        value, result = source.meta["val"], end.meta["val"]
        if not allocates(source) or not is_contiguous(value):
            return False
        if shape_key(value.shape) != shape_key(result.shape) or value.dtype != result.dtype:
            return False
        linears = [item.call.node for item in (region.query, region.key, region.value)]
        projected = self._projected_gate()
        linears += [] if projected is None else [projected.call.node]
        operators = (aten.sym_size.int, ops.convrot_int8_prepare_input.default)
        return all(
            user in linears or (is_call(user, *operators) and user < end) for user in source.users
        )

    def _prepare(self, call: LinearCall) -> tuple[Node, ...]:
        if call.preparation not in self.prepared:
            self.prepared[call.preparation] = FORMAT.prepare(self.graph, call, call.input, None)
        return self.prepared[call.preparation]

    def _projected_gate(self) -> Projection | None:
        """Return the gates where they are a linear of the input of the region."""
        coarse = self.region.coarse
        projected = None if coarse is None else coarse.projection
        if projected is None or projected.call.family != self.region.query.call.family:
            return None
        return projected

    def _windowed(self, prefix: str, call: LinearCall) -> dict[str, Any]:
        """Return a linear that is computed by windows, with the input that it is made from.

        An input that nothing else needs in this form is prepared by windows too.
        """
        inputs = self.prepared.get(call.preparation)
        if inputs is None:
            inputs = (call.input, call.arguments["input_scale"])
        names = ("input_qdata", "input_scale", "weight_qdata", "weight_scale", "bias")
        values = (*inputs, *_weight(call).values())
        return {f"{prefix}_{name}": value for name, value in zip(names, values, strict=True)}


def _weight(call: LinearCall) -> dict[str, Any]:
    return {name: call.arguments[name] for name in ("weight_qdata", "weight_scale", "bias")}
