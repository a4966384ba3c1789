"""The graph passes that fuse networks of ConvRot INT8 linears."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from piper_kernels._compile.passes import install_passes
from piper_kernels.fusions._ffn.chunks import int8_chunk_rows
from piper_kernels.fusions._ffn.gated_matching import GatedUpdateMatch, gated_arguments
from piper_kernels.fusions._ffn.matching import FeedForward, match_gelu_ffn, match_swiglu_ffn
from piper_kernels.fusions._ffn.rewriting import NetworkPass
from piper_kernels.fusions.convrot_int8_gelu_ffn import _ops as _gelu_ops  # noqa: F401  # registers
from piper_kernels.fusions.convrot_int8_swiglu_ffn import _ops as _swiglu_ops  # noqa: F401
from piper_kernels.linear.convrot.int8._compile import FORMAT, ConvRotInt8LinearPass

ops = torch.ops.piper_kernels


class _ConvRotInt8Pass(NetworkPass):
    sources = ("fusions/_ffn", "linear/convrot/int8/_compile.py")
    formats = (FORMAT,)

    def arguments(self, network: FeedForward, update: GatedUpdateMatch | None) -> tuple[Any, ...]:
        calls = (*network.sources, network.down)
        names = ("weight_qdata", "weight_scale", "bias", "group_size")
        weights = [call.arguments[name] for call in calls for name in names]
        scales = [call.arguments["input_scale"] for call in calls]
        rows = int8_chunk_rows(
            len(network.sources),
            *network.widths,
            network.element_size,
            gated_updates=update is not None,
        )
        return (network.input, *weights, *gated_arguments(update), rows, *scales)


class ConvRotInt8SwiGLUPass(_ConvRotInt8Pass):
    """Replaces ``down(silu(gate(x)) * value(x))`` by one operator."""

    operator = ops.convrot_int8_swiglu_ffn.default
    gated_operator = ops.convrot_int8_swiglu_ffn_gated_updates_.default

    def match(self, node: Node) -> FeedForward | None:
        return match_swiglu_ffn(node, self.formats)


class ConvRotInt8GELUPass(_ConvRotInt8Pass):
    """Replaces ``down(gelu(up(x), approximate="tanh"))`` by one operator."""

    operator = ops.convrot_int8_gelu_ffn.default
    gated_operator = ops.convrot_int8_gelu_ffn_gated_updates_.default

    def match(self, node: Node) -> FeedForward | None:
        return match_gelu_ffn(node, self.formats)


def swiglu_compile_options(options: Mapping[str, object] | None) -> dict[str, object]:
    """See ``convrot_int8_swiglu_ffn_compile_options``."""
    return install_passes(options, ConvRotInt8LinearPass(), ConvRotInt8SwiGLUPass())


def gelu_compile_options(options: Mapping[str, object] | None) -> dict[str, object]:
    """See ``convrot_int8_gelu_ffn_compile_options``."""
    return install_passes(options, ConvRotInt8LinearPass(), ConvRotInt8GELUPass())
