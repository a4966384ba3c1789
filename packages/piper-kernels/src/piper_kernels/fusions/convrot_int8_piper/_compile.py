"""The graph passes that fuse ConvRot INT8 projections with dense Piper attention."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from piper_kernels._compile.linears import LinearCall, result_items
from piper_kernels._compile.nodes import insert_call, insert_named, insert_size, replace_node
from piper_kernels._compile.passes import GraphRewritePass, install_passes
from piper_kernels._compile.views import normalize_projection_views
from piper_kernels.fusions.attention import targets
from piper_kernels.fusions.attention.dense_matching import DenseRegion, match_dense_region
from piper_kernels.fusions.attention.matching import Projection
from piper_kernels.fusions.attention.rewriting import has_supported_norm, transform_arguments
from piper_kernels.fusions.attention.windows import COMPILED_WINDOW_ROWS
from piper_kernels.fusions.convrot_int8_piper import _ops, _output_ops  # noqa: F401  # registers
from piper_kernels.linear.convrot.int8._compile import FORMAT, ConvRotInt8LinearPass

ops = torch.ops.piper_kernels


class ConvRotInt8PiperPass(GraphRewritePass):
    """Projects to the operands of dense Piper attention."""

    sources = (
        "fusions/attention",
        "fusions/convrot_int8_piper",
        "linear/convrot/int8/_compile.py",
    )
    fuse_output = False

    def rewrite(self, graph: Graph) -> bool:
        changed = normalize_projection_views(graph, FORMAT.targets)
        for node in list(graph.nodes):
            region = match_dense_region(node, FORMAT.match)
            if region is not None and _is_supported(region):
                _Rewrite(graph, region, fuse_output=self.fuse_output).apply()
                changed = True
        return changed


class ConvRotInt8PiperOutputPass(ConvRotInt8PiperPass):
    """Does the same, and projects from windows of the attention."""

    fuse_output = True


def compile_options(
    options: Mapping[str, object] | None, *, fuse_output: bool
) -> dict[str, object]:
    """See ``convrot_int8_piper_compile_options``."""
    fusion = ConvRotInt8PiperOutputPass() if fuse_output else ConvRotInt8PiperPass()
    return install_passes(options, ConvRotInt8LinearPass(), fusion)


def supports_target(device: torch.device, head_dim: int, is_causal: bool) -> tuple[bool, str]:
    """Return whether a device executes the fused operators in kernels, or why not."""
    usable, reason = targets.supports_dense_attention(device, head_dim, is_causal)
    return targets.supports_int8_projections(device) if usable else (usable, reason)


def _is_supported(region: DenseRegion) -> bool:
    query, key = region.query, region.key
    device = query.call.input.meta["val"].device
    return (
        has_supported_norm(query)
        and (key is None or has_supported_norm(key))
        and supports_target(device, query.head_dim, region.arguments["is_causal"])[0]
    )


class _Rewrite:
    """The replacement of one region; inputs are prepared once for each scale."""

    def __init__(self, graph: Graph, region: DenseRegion, *, fuse_output: bool) -> None:
        self.graph, self.region = graph, region
        self.output = region.output if fuse_output else None
        self.prepared: dict[object, tuple[Node, ...]] = {}

    def apply(self) -> None:
        """Replace the region, together with its output projection where that is wanted."""
        end = self.region.node if self.output is None else self.output.call.node
        with self.graph.inserting_before(end):
            if self.region.key is None:
                result = self._from_queries()
            elif self.output is None:
                result = self._from_all()
            else:
                result = self._projected()
        replace_node(end, result)

    def _inputs(self, projection: Projection) -> dict[str, Any]:
        call = projection.call
        if call.preparation not in self.prepared:
            self.prepared[call.preparation] = FORMAT.prepare(self.graph, call, call.input, None)
        qdata, scale = self.prepared[call.preparation]
        return {"input_qdata": qdata, "input_scale": scale, **_weight(call)}

    def _project(self, operand: str, arguments: dict[str, Any]) -> tuple[Node, ...]:
        operator = getattr(ops, f"convrot_int8_piper_project_{operand}").default
        return result_items(self.graph, insert_named(self.graph, operator, arguments))

    def _queries(self) -> dict[str, Any]:
        query = self.region.query
        arguments = self._inputs(query) | transform_arguments(self.graph, query)
        arguments["softmax_scale"] = self.region.arguments["scale"]
        codes, scale = self._project("query", arguments)
        length = insert_size(self.graph, query.call.input, 1)
        return {"query": codes, "query_scale": scale, "query_length": length, **self._mask()}

    def _mask(self) -> dict[str, Any]:
        return {"is_causal": self.region.arguments["is_causal"]}

    def _keys_and_values(self) -> dict[str, Any]:
        key, value = self.region.key, self.region.value
        assert key is not None, "keys are projected"
        assert value is not None, "values are projected"
        arguments = self._inputs(key) | transform_arguments(self.graph, key)
        found = dict(zip(("key", "key_scale"), self._project("key", arguments), strict=True))
        inputs = self._inputs(value)
        mean = None
        if not self.region.arguments["is_causal"]:
            operator = ops.convrot_int8_dequantized_input_mean.default
            prepared = (inputs["input_qdata"], inputs["input_scale"], None)
            mean = insert_call(self.graph, operator, prepared)
        arguments = {**inputs, "input_mean": mean, "head_dim": value.head_dim}
        names = ("value", "multiplier", "log_scale", "value_mean")
        found |= dict(zip(names, self._project("value", arguments), strict=True))
        length = insert_size(self.graph, key.call.input, 1)
        return {**found, "key_length": length, "output_dtype": self.region.dtype}

    def _from_queries(self) -> Node:
        """Append the attention from projected queries to keys and values as they are."""
        given = {name: self.region.arguments[name] for name in ("key", "value")}
        operator = ops.piper_attention_from_quantized_query.default
        return insert_named(self.graph, operator, self._queries() | given)

    def _from_all(self) -> Node:
        arguments = self._keys_and_values() | self._queries()
        return insert_named(self.graph, ops.piper_attention_from_quantized.default, arguments)

    def _projected(self) -> Node:
        assert self.output is not None, "the region has an output projection"
        query, call = self.region.query, self.output.call
        arguments = self._keys_and_values() | self._mask() | _weight(call)
        inputs = self._inputs(query)
        arguments |= {name: inputs[name] for name in ("input_qdata", "input_scale")}
        arguments |= transform_arguments(self.graph, query)
        arguments |= {
            "query_weight_qdata": inputs["weight_qdata"],
            "query_weight_scale": inputs["weight_scale"],
            "query_bias": inputs["bias"],
            "softmax_scale": self.region.arguments["scale"],
            "group_size": call.arguments["group_size"],
            "output_input_scale": call.arguments["input_scale"],
            "query_chunk_rows": COMPILED_WINDOW_ROWS,
        }
        operator = ops.convrot_int8_piper_projected_query_attention_output.default
        return insert_named(self.graph, operator, arguments)


def _weight(call: LinearCall) -> dict[str, Any]:
    return {name: call.arguments[name] for name in ("weight_qdata", "weight_scale", "bias")}
