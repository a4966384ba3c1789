"""The graph pass that fuses the encoder around its INT8 convolutions."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from piper_kernels._compile.passes import GraphRewritePass, install_pass
from piper_kernels.conv3d.convrot.int8 import _ops  # noqa: F401  # registers the operators
from piper_kernels.specializations.minimax_h3_vae.conv3d._matching import Region, match_region

OPTION = "pre_grad_custom_pass"
ops = torch.ops.piper_kernels
_ARGUMENTS = 10


class MiniMaxH3VaeConv3dPass(GraphRewritePass):
    """Absorbs reflections, framewise norms with SiLU and residuals into convolutions."""

    sources = ("specializations/minimax_h3_vae/conv3d", "conv3d/convrot/int8/_ops.py")

    def __call__(self, graph: Graph, is_inference: bool | None = None) -> None:  # noqa: ARG002
        # Before autograd a graph is one of inference where gradients are disabled. It is not
        # functional, so unused nodes may have effects: only what was matched is erased.
        if not torch.is_grad_enabled() and self.rewrite(graph):
            graph.lint()

    def rewrite(self, graph: Graph) -> bool:
        changed = False
        for node in list(graph.nodes):
            if _is_convolution(node):
                region = match_region(node)
                if region is not None:
                    _fuse(graph, node, region)
                    changed = True
        return changed


def _is_convolution(node: Node) -> bool:
    target = ops.convrot_int8_conv3d.default
    return node.op == "call_function" and node.target is target and len(node.args) == _ARGUMENTS


def _fuse(graph: Graph, conv: Node, region: Region) -> None:
    last = region.absorbed[-1]
    weight: tuple[Any, ...] = tuple(conv.args[1:7])
    rest = (*weight, *region.flags, region.residual)
    with graph.inserting_before(last):
        if region.norm is None:
            target = ops.convrot_int8_conv3d.default
            fused = graph.call_function(target, (region.source, *rest))
        else:
            target = ops.convrot_int8_group_norm_silu_conv3d.default
            fused = graph.call_function(target, (region.source, *region.norm, *rest))
    fused.meta = dict(last.meta)
    last.replace_all_uses_with(fused)
    for node in reversed(region.absorbed):
        graph.erase_node(node)


def compile_options(options: Mapping[str, object] | None = None) -> dict[str, object]:
    """See ``minimax_h3_vae_convrot_int8_conv3d_compile_options``."""
    return install_pass(options, OPTION, MiniMaxH3VaeConv3dPass())
