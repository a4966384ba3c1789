"""The graph passes that fuse networks of NVFP4 and ConvRot NVFP4 linears."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from piper_kernels._compile.linears import LinearCall, LinearFormat
from piper_kernels._compile.passes import install_passes
from piper_kernels.fusions._ffn.chunks import NVFP4_CHUNK_ROWS, nvfp4_gelu_chunk_rows
from piper_kernels.fusions._ffn.gated_matching import GatedUpdateMatch, gated_arguments
from piper_kernels.fusions._ffn.matching import FeedForward, match_gelu_ffn, match_swiglu_ffn
from piper_kernels.fusions._ffn.rewriting import NetworkPass
from piper_kernels.fusions.convrot_nvfp4_gelu_ffn import _ops as _convrot_gelu  # noqa: F401
from piper_kernels.fusions.convrot_nvfp4_swiglu_ffn import _ops as _convrot_swiglu  # noqa: F401
from piper_kernels.fusions.nvfp4_gelu_ffn import _ops as _gelu  # noqa: F401  # registers
from piper_kernels.fusions.nvfp4_swiglu_ffn import _ops as _swiglu  # noqa: F401
from piper_kernels.linear.nvfp4._compile import (
    CONVROT_NVFP4,
    NVFP4,
    ConvRotNVFP4LinearPass,
    NVFP4LinearPass,
)

ops = torch.ops.piper_kernels


class _NVFP4Pass(NetworkPass):
    sources = ("fusions/_ffn", "linear/nvfp4/_compile.py")
    formats: Sequence[LinearFormat] = (NVFP4,)

    @abstractmethod
    def chunk_rows(self, network: FeedForward, gated_updates: bool) -> int:
        """Return how many rows are computed at a time."""

    def arguments(self, network: FeedForward, update: GatedUpdateMatch | None) -> tuple[Any, ...]:
        calls = (*network.sources, network.down)
        weights = [item for call in calls for item in self._weight(call)]
        rows = self.chunk_rows(network, update is not None)
        return (network.input, *weights, *gated_arguments(update), rows)

    def _weight(self, call: LinearCall) -> tuple[Any, ...]:
        names = (
            "weight_qdata",
            "weight_scale",
            "weight_per_tensor_scale",
            "activation_per_tensor_scale",
            "bias",
            "dynamic_activation_scale",
        )
        operands = tuple(call.arguments[name] for name in names)
        if CONVROT_NVFP4 in self.formats:
            operands += (call.arguments.get("group_size", 0),)
        return (*operands, call.arguments["high_first"])


class NVFP4SwiGLUPass(_NVFP4Pass):
    """Replaces ``down(silu(gate(x)) * value(x))`` of NVFP4 linears by one operator."""

    operator = ops.nvfp4_swiglu_ffn.default
    gated_operator = ops.nvfp4_swiglu_ffn_gated_updates_.default

    def match(self, node: Node) -> FeedForward | None:
        return match_swiglu_ffn(node, self.formats)

    def chunk_rows(self, network: FeedForward, gated_updates: bool) -> int:  # noqa: ARG002
        return NVFP4_CHUNK_ROWS


class NVFP4GELUPass(_NVFP4Pass):
    """Replaces ``down(gelu(up(x), approximate="tanh"))`` of NVFP4 linears by one operator."""

    operator = ops.nvfp4_gelu_ffn.default
    gated_operator = ops.nvfp4_gelu_ffn_gated_updates_.default

    def match(self, node: Node) -> FeedForward | None:
        return match_gelu_ffn(node, self.formats)

    def chunk_rows(self, network: FeedForward, gated_updates: bool) -> int:
        return nvfp4_gelu_chunk_rows(
            *network.widths, network.element_size, gated_updates=gated_updates
        )


class ConvRotNVFP4SwiGLUPass(NVFP4SwiGLUPass):
    """Replaces SwiGLU networks with ConvRot NVFP4 linears by one operator."""

    formats = (CONVROT_NVFP4, NVFP4)
    operator = ops.convrot_nvfp4_swiglu_ffn.default
    gated_operator = ops.convrot_nvfp4_swiglu_ffn_gated_updates_.default

    def match(self, node: Node) -> FeedForward | None:
        return _with_rotation(super().match(node))


class ConvRotNVFP4GELUPass(NVFP4GELUPass):
    """Replaces GELU networks with ConvRot NVFP4 linears by one operator."""

    formats = (CONVROT_NVFP4, NVFP4)
    operator = ops.convrot_nvfp4_gelu_ffn.default
    gated_operator = ops.convrot_nvfp4_gelu_ffn_gated_updates_.default

    def match(self, node: Node) -> FeedForward | None:
        return _with_rotation(super().match(node))


def _with_rotation(network: FeedForward | None) -> FeedForward | None:
    """Return a network only if one of its linears at least is a ConvRot linear."""
    if network is None:
        return None
    calls = (*network.sources, network.down)
    return network if any(call.node.target in CONVROT_NVFP4.targets for call in calls) else None


def swiglu_compile_options(options: Mapping[str, object] | None) -> dict[str, object]:
    """See ``nvfp4_swiglu_ffn_compile_options``."""
    return install_passes(options, NVFP4LinearPass(), NVFP4SwiGLUPass())


def gelu_compile_options(options: Mapping[str, object] | None) -> dict[str, object]:
    """See ``nvfp4_gelu_ffn_compile_options``."""
    return install_passes(options, NVFP4LinearPass(), NVFP4GELUPass())


def convrot_swiglu_compile_options(options: Mapping[str, object] | None) -> dict[str, object]:
    """See ``convrot_nvfp4_swiglu_ffn_compile_options``."""
    return install_passes(options, ConvRotNVFP4LinearPass(), ConvRotNVFP4SwiGLUPass())


def convrot_gelu_compile_options(options: Mapping[str, object] | None) -> dict[str, object]:
    """See ``convrot_nvfp4_gelu_ffn_compile_options``."""
    return install_passes(options, ConvRotNVFP4LinearPass(), ConvRotNVFP4GELUPass())
