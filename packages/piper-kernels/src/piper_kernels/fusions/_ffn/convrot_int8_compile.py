"""The graph passes that fuse networks of ConvRot INT8 linears."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph

from piper_kernels._compile.linears import LinearCall
from piper_kernels._compile.passes import GraphRewritePass, install_passes
from piper_kernels._compile.views import normalize_projection_views
from piper_kernels.fusions._ffn.chunks import int8_chunk_rows
from piper_kernels.fusions._ffn.gated_matching import GatedUpdateMatch, gated_arguments
from piper_kernels.fusions._ffn.matching import FeedForward, match_gelu_ffn, match_swiglu_ffn
from piper_kernels.fusions._ffn.rewriting import fuse_networks
from piper_kernels.fusions.convrot_int8_gelu_ffn import _ops as _gelu_ops  # noqa: F401  # registers
from piper_kernels.fusions.convrot_int8_swiglu_ffn import _ops as _swiglu_ops  # noqa: F401
from piper_kernels.linear.convrot.int8._compile import FORMAT, ConvRotInt8LinearPass

ops = torch.ops.piper_kernels
_SOURCES = ("fusions/_ffn", "linear/convrot/int8/_compile.py")


class ConvRotInt8SwiGLUPass(GraphRewritePass):
    """Replaces ``down(silu(gate(x)) * value(x))`` by one operator."""

    sources = _SOURCES

    def rewrite(self, graph: Graph) -> bool:
        changed = normalize_projection_views(graph, FORMAT.targets)
        return (
            fuse_networks(
                graph,
                lambda node: match_swiglu_ffn(node, (FORMAT,)),
                ops.convrot_int8_swiglu_ffn.default,
                ops.convrot_int8_swiglu_ffn_gated_updates_.default,
                _arguments,
            )
            or changed
        )


class ConvRotInt8GELUPass(GraphRewritePass):
    """Replaces ``down(gelu(up(x), approximate="tanh"))`` by one operator."""

    sources = _SOURCES

    def rewrite(self, graph: Graph) -> bool:
        changed = normalize_projection_views(graph, FORMAT.targets)
        return (
            fuse_networks(
                graph,
                lambda node: match_gelu_ffn(node, (FORMAT,)),
                ops.convrot_int8_gelu_ffn.default,
                ops.convrot_int8_gelu_ffn_gated_updates_.default,
                _arguments,
            )
            or changed
        )


def swiglu_compile_options(options: Mapping[str, object] | None) -> dict[str, object]:
    """See ``convrot_int8_swiglu_ffn_compile_options``."""
    return install_passes(options, ConvRotInt8LinearPass(), ConvRotInt8SwiGLUPass())


def gelu_compile_options(options: Mapping[str, object] | None) -> dict[str, object]:
    """See ``convrot_int8_gelu_ffn_compile_options``."""
    return install_passes(options, ConvRotInt8LinearPass(), ConvRotInt8GELUPass())


def _weight(call: LinearCall) -> tuple[Any, ...]:
    names = ("weight_qdata", "weight_scale", "bias", "group_size")
    return tuple(call.arguments[name] for name in names)


def _arguments(network: FeedForward, update: GatedUpdateMatch | None) -> tuple[Any, ...]:
    calls = (*network.sources, network.down)
    weights = [item for call in calls for item in _weight(call)]
    scales = [call.arguments["input_scale"] for call in calls]
    rows = int8_chunk_rows(
        len(network.sources),
        *network.widths,
        network.element_size,
        gated_updates=update is not None,
    )
    return (network.input, *weights, *gated_arguments(update), rows, *scales)
