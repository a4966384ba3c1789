"""The graph pass over NVFP4 and ConvRot NVFP4 linears."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from piper_kernels._compile.linears import LinearCall, insert_results
from piper_kernels._compile.nodes import (
    bind_arguments,
    dimension_key,
    fake_value,
    has_values,
    insert_call,
    insert_reshape,
    is_call,
)
from piper_kernels._compile.passes import GraphRewritePass, install_passes
from piper_kernels._compile.sharing import fold_gelu, fold_swiglu, share_preparations
from piper_kernels._compile.views import VIEWS, normalize_projection_views
from piper_kernels.linear.convrot.nvfp4 import _ops as _convrot_ops  # noqa: F401  # registers
from piper_kernels.linear.nvfp4 import _ops  # noqa: F401  # registers the operators

ops = torch.ops.piper_kernels
_SCALE = "activation_per_tensor_scale"


class NVFP4Format:
    """Splits ``nvfp4_linear`` into preparation and projection."""

    targets: tuple[Any, ...] = (ops.nvfp4_linear.default,)

    def match(self, node: Node) -> LinearCall | None:
        """Return the call of a linear whose metadata is complete."""
        if not is_call(node, *self.targets) or not has_values(node):
            return None
        arguments = bind_arguments(node)
        source = arguments["input"]
        value = fake_value(source)
        if value is None or value.ndim == 0:
            return None
        preparation = (
            source,
            arguments.get("group_size", 0),
            dimension_key(value.shape[-1]),
            value.dtype,
            _scalar_source(arguments[_SCALE]),
            arguments["dynamic_activation_scale"],
            arguments["high_first"],
        )
        return LinearCall(node, source, preparation[:4], preparation, arguments)

    def prepare(
        self, graph: Graph, call: LinearCall, source: Node, activation_fn: str | None
    ) -> tuple[Node, ...]:
        """Append the codes, block scales and second level of a source."""
        return insert_results(
            graph,
            ops.nvfp4_prepare_input.default,
            (
                source,
                call.arguments[_SCALE],
                call.arguments["dynamic_activation_scale"],
                activation_fn,
                call.arguments["high_first"],
            ),
        )

    def project(self, graph: Graph, call: LinearCall, prepared: tuple[Node, ...]) -> Node:
        """Append the linear of a prepared input in the shape of the call's result."""
        names = ("weight_qdata", "weight_scale", "weight_per_tensor_scale", "bias")
        weight: tuple[Any, ...] = tuple(call.arguments[name] for name in names)
        rows = insert_call(
            graph, ops.nvfp4_linear_prepared.default, (*prepared, *weight, call.dtype)
        )
        if call.node.meta["val"].ndim == 2:
            return rows
        return insert_reshape(graph, rows, call.input)


def _scalar_source(scale: Any) -> Any:
    """Return the scale under views, of which every linear has its own."""
    while is_call(scale, *VIEWS):
        scale = scale.args[0]
    return scale


class ConvRotNVFP4Format(NVFP4Format):
    """Splits ``convrot_nvfp4_linear`` into preparation and projection."""

    targets = (ops.convrot_nvfp4_linear.default,)

    def prepare(
        self, graph: Graph, call: LinearCall, source: Node, activation_fn: str | None
    ) -> tuple[Node, ...]:
        """Append the codes, block scales and second level of a rotated source."""
        return insert_results(
            graph,
            ops.convrot_nvfp4_prepare_input.default,
            (
                source,
                call.arguments[_SCALE],
                call.arguments["dynamic_activation_scale"],
                call.arguments["group_size"],
                activation_fn,
                call.arguments["high_first"],
            ),
        )


NVFP4 = NVFP4Format()
CONVROT_NVFP4 = ConvRotNVFP4Format()


class _NVFP4Pass(GraphRewritePass):
    sources = ("linear/nvfp4/_compile.py",)
    fmt: NVFP4Format

    def rewrite(self, graph: Graph) -> bool:
        changed = normalize_projection_views(graph, self.fmt.targets)
        changed |= fold_gelu(graph, self.fmt)
        changed |= fold_swiglu(graph, self.fmt)
        return share_preparations(graph, self.fmt) or changed


class NVFP4LinearPass(_NVFP4Pass):
    """Shares preparations, folds activations and removes row views around NVFP4 linears."""

    fmt = NVFP4


class ConvRotNVFP4LinearPass(_NVFP4Pass):
    """Does the same for ConvRot NVFP4 linears."""

    fmt = CONVROT_NVFP4


def compile_options(options: Mapping[str, object] | None = None) -> dict[str, object]:
    """See ``piper_kernels.linear.nvfp4.nvfp4_compile_options``."""
    return install_passes(options, NVFP4LinearPass())


def convrot_compile_options(options: Mapping[str, object] | None = None) -> dict[str, object]:
    """See ``piper_kernels.linear.convrot.nvfp4.convrot_nvfp4_compile_options``."""
    return install_passes(options, ConvRotNVFP4LinearPass())
