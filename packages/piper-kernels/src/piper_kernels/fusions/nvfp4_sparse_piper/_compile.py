"""The graph passes that fuse NVFP4 projections with sparse Piper attention.

They run behind the passes over linears, because they look for prepared inputs.
"""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from piper_kernels._compile.linears import LinearCall
from piper_kernels._compile.nodes import bind_arguments, has_values, insert_named, is_call
from piper_kernels._compile.passes import GraphRewritePass, install_passes
from piper_kernels.fusions.attention import targets
from piper_kernels.fusions.attention.matching import Projection
from piper_kernels.fusions.attention.windows import NVFP4_DYNAMIC_CHUNK_ROWS, NVFP4_WINDOW_ROWS
from piper_kernels.fusions.nvfp4_sparse_piper import _ops, _output_ops  # noqa: F401  # registers
from piper_kernels.fusions.sparse_piper.matching import SparseRegion
from piper_kernels.fusions.sparse_piper.rewriting import RegionRewrite, rewrite_regions
from piper_kernels.linear.nvfp4._compile import (
    CONVROT_NVFP4,
    NVFP4,
    ConvRotNVFP4LinearPass,
    NVFP4LinearPass,
)

ops = torch.ops.piper_kernels
_PREPARED = ("input_qdata", "input_scale", "input_per_tensor_scale")
_WEIGHT = ("weight_qdata", "weight_scale", "weight_per_tensor_scale", "bias")


class _Rewrite(RegionRewrite):
    """Prepared inputs are in the graph already."""

    operators = "nvfp4_sparse_piper"
    output_operator: Any

    def inputs(self, projection: Projection) -> dict[str, Any]:
        arguments = projection.call.arguments
        return {name: arguments[name] for name in (*_PREPARED, *_WEIGHT)}

    def gate(self) -> Node:
        assert self.region.coarse is not None, "the region has a coarse branch"
        return self.region.coarse.gate

    def output(self, keys: dict[str, Any]) -> Node:
        region = self.region
        assert region.output is not None, "the region has an output projection"
        given = region.output.call.arguments
        dynamic = given["dynamic_activation_scale"]
        arguments = keys | self.queries()
        arguments |= {name: given[name] for name in (*_WEIGHT, "high_first")}
        arguments |= {
            "activation_per_tensor_scale": given["activation_per_tensor_scale"],
            "dynamic_activation_scale": dynamic,
            "query_chunk_rows": NVFP4_DYNAMIC_CHUNK_ROWS if dynamic else NVFP4_WINDOW_ROWS,
        }
        coarse = region.coarse
        if coarse is not None and coarse.projection is not None:
            gate = self.inputs(coarse.projection)
            arguments |= {f"gate_{name}": value for name, value in gate.items()}
        elif coarse is not None:
            arguments["coarse_gate"] = coarse.gate
        return insert_named(self.graph, self.output_operator, arguments | self.rotation(given))

    def rotation(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the rotation of the input of the linear behind the attention."""
        raise NotImplementedError


class _PlainRewrite(_Rewrite):
    output_operator = ops.nvfp4_sparse_piper_attention_output.default

    def rotation(self, given: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        return {}


class _RotatedRewrite(_Rewrite):
    output_operator = ops.convrot_nvfp4_sparse_piper_attention_output.default

    def rotation(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"group_size": given.get("group_size", 0)}


class _SparsePiperPass(GraphRewritePass):
    sources = (
        "fusions/attention",
        "fusions/sparse_piper",
        "fusions/nvfp4_sparse_piper",
        "linear/nvfp4/_compile.py",
    )
    prepare: Any
    rewriting: type[RegionRewrite]

    def rewrite(self, graph: Graph) -> bool:
        return rewrite_regions(
            graph, self.match_prepared, self.match_last, _is_supported, self.rewriting
        )

    def match_prepared(self, node: Node) -> LinearCall | None:
        """Return the linear of an input that an operator of this format has prepared."""
        if not is_call(node, ops.nvfp4_linear_prepared.default) or not has_values(node):
            return None
        arguments = bind_arguments(node)
        items = [arguments[name] for name in _PREPARED]
        if not all(is_call(item, operator.getitem) for item in items):
            return None
        prepared = items[0].args[0]
        if [(item.args[0], item.args[1]) for item in items] != [(prepared, i) for i in range(3)]:
            return None
        if not is_call(prepared, self.prepare) or not has_values(prepared):
            return None
        source = bind_arguments(prepared)
        if source["activation_fn"] is not None:
            return None
        return LinearCall(node, source["input"], (prepared,), (prepared,), arguments)

    def match_last(self, node: Node) -> LinearCall | None:
        """Return the linear behind an attention."""
        raise NotImplementedError


class NVFP4SparsePiperPass(_SparsePiperPass):
    """Projects to the operands of sparse Piper attention, and from its result."""

    prepare = ops.nvfp4_prepare_input.default
    rewriting = _PlainRewrite

    def match_last(self, node: Node) -> LinearCall | None:
        return NVFP4.match(node)


class ConvRotNVFP4SparsePiperPass(_SparsePiperPass):
    """Does the same for ConvRot NVFP4 projections; the one behind may be a plain one."""

    prepare = ops.convrot_nvfp4_prepare_input.default
    rewriting = _RotatedRewrite

    def match_last(self, node: Node) -> LinearCall | None:
        return CONVROT_NVFP4.match(node) or NVFP4.match(node)


def compile_options(options: Mapping[str, object] | None) -> dict[str, object]:
    """See ``nvfp4_sparse_piper_compile_options``."""
    return install_passes(options, NVFP4LinearPass(), NVFP4SparsePiperPass(), fusion_first=False)


def convrot_compile_options(options: Mapping[str, object] | None) -> dict[str, object]:
    """See ``convrot_nvfp4_sparse_piper_compile_options``."""
    passes = (ConvRotNVFP4LinearPass(), ConvRotNVFP4SparsePiperPass())
    return install_passes(options, *passes, fusion_first=False)


def supports_target(device: torch.device, head_dim: int) -> tuple[bool, str]:
    """Return whether a device executes the fused operators in kernels, or why not."""
    usable, reason = targets.supports_sparse_attention(device, head_dim)
    return targets.supports_nvfp4_projections(device) if usable else (usable, reason)


def _is_supported(region: SparseRegion) -> bool:
    value = region.input.meta["val"]
    return supports_target(value.device, region.query.head_dim)[0]
