"""Recognition of SwiGLU, ``up * silu(gate)``."""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from piper_kernels._compile.activations import Match, match_silu, peel_conversion, widened_source
from piper_kernels._compile.nodes import dimension_key, fake_value, is_call

aten = torch.ops.aten


@dataclass(frozen=True)
class GatedProduct:
    """``value * silu(gate)`` in a graph.

    Attributes:
        value: The factor without activation, in its own dtype.
        gate: The node that SiLU activates, in its own dtype.
        nodes: What the product consists of, its result included and its factors not.
    """

    value: Node
    gate: Node
    nodes: frozenset[Node]


def match_gated_products(node: object) -> list[GatedProduct]:
    """Return the ways to read a node as ``value * silu(gate)``, in either order of factors."""
    product, outside = peel_conversion(node)
    if not is_call(product, aten.mul.Tensor):
        return []
    found = []
    left, right = product.args
    for activated, other in ((left, right), (right, left)):
        match = match_silu(activated)
        value, conversion = widened_source(other)
        if match is not None and isinstance(value, Node):
            nodes = match.nodes | {product} | outside | conversion
            found.append(GatedProduct(value, match.source, nodes))
    return found


def match_packed_swiglu(node: object) -> Match | None:
    """Match ``up * silu(gate)`` of the halves of one ``[..., up | gate]``."""
    for product in match_gated_products(node):
        up, gate = _half(product.value), _half(product.gate)
        if up is None or gate is None:
            continue
        (packed, up_index, up_nodes), (source, gate_index, gate_nodes) = up, gate
        if packed is source and (up_index, gate_index) == (0, 1):
            return Match(packed, product.nodes | up_nodes | gate_nodes)
    return None


def _half(node: Node) -> tuple[Node, int, frozenset[Node]] | None:
    """Return what a node is a half of on its last axis, and which one."""
    if is_call(node, operator.getitem) and is_call(node.args[0], aten.split.Tensor):
        split: Any = node.args[0]
        index: Any = node.args[1]
        if _halves(node, split.args[0], _argument(split, 2, "dim", 0)):
            return split.args[0], index, frozenset((node, split))
    elif is_call(node, aten.slice.Tensor):
        source: Any = node.args[0]
        width = fake_value(node)
        start = _argument(node, 2, "start", None) or 0
        if (
            _halves(node, source, _argument(node, 1, "dim", 0))
            and _argument(node, 4, "step", 1) == 1
            and width is not None
            and start in (0, dimension_key(width.shape[-1]))
        ):
            return source, int(start != 0), frozenset((node,))
    return None


def _halves(part: Node, source: object, dim: int) -> bool:
    """Return whether a part has half of the integer width of the last axis of a source."""
    value, whole = fake_value(part), fake_value(source)
    if value is None or whole is None or dim not in (-1, whole.ndim - 1):
        return False
    width, total = dimension_key(value.shape[-1]), dimension_key(whole.shape[-1])
    return isinstance(width, int) and isinstance(total, int) and total == 2 * width


def _argument(node: Node, position: int, name: str, default: Any) -> Any:
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default)
