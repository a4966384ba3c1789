"""Recognition of feed-forward networks in graphs of quantized linears."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from piper_kernels._compile.activations import match_gelu_tanh
from piper_kernels._compile.linears import LinearCall, LinearFormat
from piper_kernels._compile.nodes import dimension_key, is_contiguous, shape_key, used_only_by
from piper_kernels._compile.swiglu import match_gated_products

_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class FeedForward:
    """A network whose intermediate values are used nowhere else.

    Attributes:
        sources: ``(gate, value)`` of SwiGLU, ``(up,)`` of GELU: linears of one input.
        down: The linear of the activated product.
    """

    sources: tuple[LinearCall, ...]
    down: LinearCall

    @property
    def input(self) -> Node:
        """The input of the network."""
        return self.sources[0].input

    @property
    def widths(self) -> tuple[Any, Any, Any]:
        """Input, intermediate and output features, symbolic ones as they are."""
        return (
            dimension_key(self.input.meta["val"].shape[-1]),
            dimension_key(self.sources[0].node.meta["val"].shape[-1]),
            dimension_key(self.down.node.meta["val"].shape[-1]),
        )

    @property
    def element_size(self) -> int:
        """Bytes of an element of the input."""
        return self.input.meta["val"].element_size()


def match_gelu_ffn(node: Node, formats: Sequence[LinearFormat]) -> FeedForward | None:
    """Match ``down(gelu(up(x), approximate="tanh"))`` at its last linear."""
    down = find_call(node, formats)
    match = None if down is None else match_gelu_tanh(down.input)
    if down is None or match is None:
        return None
    up = find_call(match.source, formats)
    if up is None or not used_only_by(match.nodes | {up.node}, node):
        return None
    return _accept(FeedForward((up,), down))


def match_swiglu_ffn(node: Node, formats: Sequence[LinearFormat]) -> FeedForward | None:
    """Match ``down(silu(gate(x)) * value(x))`` at its last linear."""
    down = find_call(node, formats)
    if down is None:
        return None
    for product in match_gated_products(down.input):
        gate = find_call(product.gate, formats)
        value = find_call(product.value, formats)
        if gate is None or value is None or gate.node is value.node:
            continue
        if gate.input is not value.input or _weight_shape(gate) != _weight_shape(value):
            continue
        if gate.arguments.get("group_size") != value.arguments.get("group_size"):
            continue
        if used_only_by(product.nodes | {gate.node, value.node}, node):
            return _accept(FeedForward((gate, value), down))
    return None


def find_call(node: Node, formats: Sequence[LinearFormat]) -> LinearCall | None:
    """Return the linear of a node in the first format that has it."""
    return next((call for fmt in formats if (call := fmt.match(node)) is not None), None)


def _weight_shape(call: LinearCall) -> tuple[object, ...]:
    return shape_key(call.arguments["weight_qdata"].meta["val"].shape)


def _accept(network: FeedForward) -> FeedForward | None:
    value = network.input.meta["val"]
    calls = (*network.sources, network.down)
    if value.dtype not in _DTYPES or any(call.dtype != value.dtype for call in calls):
        return None
    if not is_contiguous(value) or 0 in shape_key(value.shape):
        return None
    return network
