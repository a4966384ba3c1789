"""The graph pass over ConvRot INT8 linears."""

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
    is_call,
)
from piper_kernels._compile.passes import GraphRewritePass, install_passes
from piper_kernels._compile.sharing import fold_gelu, share_preparations
from piper_kernels._compile.views import normalize_projection_views
from piper_kernels.linear.convrot.int8 import _ops  # noqa: F401  # registers the operators

ops = torch.ops.piper_kernels


class ConvRotInt8Format:
    """Splits ``convrot_int8_linear`` into preparation and projection."""

    targets = (ops.convrot_int8_linear.default,)

    def match(self, node: Node) -> LinearCall | None:
        """Return the call of a linear without activation whose metadata is complete."""
        if not is_call(node, *self.targets) or not has_values(node):
            return None
        arguments = bind_arguments(node)
        source = arguments["input"]
        value = fake_value(source)
        if value is None or value.ndim == 0 or arguments["activation_fn"] is not None:
            return None
        family = (
            source,
            arguments["group_size"],
            dimension_key(value.shape[-1]),
            value.dtype,
        )
        return LinearCall(node, source, family, (*family, arguments["input_scale"]), arguments)

    def prepare(
        self, graph: Graph, call: LinearCall, source: Node, activation_fn: str | None
    ) -> tuple[Node, ...]:
        """Append the codes and row scales of a source."""
        return insert_results(
            graph,
            ops.convrot_int8_prepare_input.default,
            (
                source,
                call.arguments["group_size"],
                activation_fn,
                call.arguments["input_scale"],
            ),
        )

    def project(self, graph: Graph, call: LinearCall, prepared: tuple[Node, ...]) -> Node:
        """Append the linear of a prepared input."""
        weight: tuple[Any, ...] = tuple(
            call.arguments[name] for name in ("weight_qdata", "weight_scale", "bias")
        )
        return insert_call(
            graph, ops.convrot_int8_linear_prepared.default, (*prepared, *weight, call.dtype)
        )


FORMAT = ConvRotInt8Format()


class ConvRotInt8LinearPass(GraphRewritePass):
    """Shares preparations, folds GELU and removes row views around ConvRot INT8 linears."""

    sources = ("linear/convrot/int8/_compile.py",)

    def rewrite(self, graph: Graph) -> bool:
        changed = normalize_projection_views(graph, FORMAT.targets)
        changed |= fold_gelu(graph, FORMAT)
        return share_preparations(graph, FORMAT) or changed


def compile_options(options: Mapping[str, object] | None = None) -> dict[str, object]:
    """See ``piper_kernels.linear.convrot.convrot_int8_compile_options``."""
    return install_passes(options, ConvRotInt8LinearPass())
