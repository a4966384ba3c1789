"""Recognition of RMSNorm and split-half RoPE of attention heads.

Inductor decomposes both into pointwise operators and a mean, with conversions between FP32 and
narrower dtypes in between. A match names every node that it consists of, so that a rewrite can
require them to be used nowhere else.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from piper_kernels._compile.activations import peel_conversion
from piper_kernels._compile.nodes import dimension_key, fake_value, is_call, shape_key
from piper_kernels._compile.views import VIEWS

aten = torch.ops.aten


@dataclass(frozen=True)
class RMSNorm:
    """``x * rsqrt(mean(x ** 2) + eps) * weight`` over the last axis.

    Attributes:
        source: The node that is normalized.
        weight: ``[D]``, or ``None``.
        eps: A positive number.
        nodes: What the norm consists of, its result included and ``source`` not.
    """

    source: Node
    weight: Node | None
    eps: float
    nodes: frozenset[Node]


@dataclass(frozen=True)
class Rotary:
    """``x * cos + rotate_half(x) * sin`` of the leading features of the last axis.

    Attributes:
        source: The node that is rotated, all features.
        cos: FP32 ``[S, R]``, or that with more axes of size one.
        sin: Like ``cos``.
        nodes: What the rotation consists of, its result included, ``source`` and tables not.
    """

    source: Node
    cos: Node
    sin: Node
    nodes: frozenset[Node]


def match_rms_norm(node: Node) -> RMSNorm | None:
    """Match RMSNorm with or without a weight, with or without conversions around its parts."""
    product, outside = peel_conversion(node)
    found = _match_normalized(product, None, outside)
    if found is not None:
        return found
    for scaled, factor in _factors(product):
        weight, _ = peel_conversion(factor)
        if not _is_vector_of(weight, node):
            continue
        normalized, conversion = peel_conversion(scaled)
        found = _match_normalized(normalized, weight, outside | conversion | {product})
        if found is not None:
            return found
    return None


def _match_normalized(node: Any, weight: Node | None, nodes: frozenset[Node]) -> RMSNorm | None:
    for wide, inverse in _factors(node):
        source, conversion = peel_conversion(wide)
        seen = {node, inverse, *conversion}
        if not isinstance(source, Node) or not is_call(inverse, aten.rsqrt.default):
            continue
        shifted: Any = inverse.args[0]
        if not is_call(shifted, aten.add.Tensor, aten.add.Scalar) or shifted.kwargs:
            continue
        mean, eps = shifted.args
        if not isinstance(eps, float) or eps <= 0 or not _is_row_mean(mean):
            continue
        square: Any = mean.args[0]
        is_square = is_call(square, aten.pow.Tensor_Scalar) and square.args == (wide, 2)
        if not is_square and not (is_call(square, aten.mul.Tensor) and square.args == (wide, wide)):
            continue
        if (value := fake_value(wide)) is None or value.dtype != torch.float32:
            continue
        return RMSNorm(source, weight, eps, nodes | seen | {shifted, mean, square})
    return None


def _is_row_mean(node: Any) -> bool:
    if not is_call(node, aten.mean.dim) or node.kwargs or len(node.args) != 3:
        return False
    value = fake_value(node.args[0])
    _, dims, keep = node.args
    return value is not None and keep and list(dims) in ([-1], [value.ndim - 1])


def _is_vector_of(weight: Any, node: Node) -> bool:
    value, output = fake_value(weight), fake_value(node)
    if value is None or output is None or value.ndim != 1:
        return False
    return shape_key(value.shape) == shape_key(output.shape[-1:])


def match_rotary(node: Node, sequence_dim: int) -> Rotary | None:
    """Match split-half RoPE of ``[..., D]`` with four axes.

    Args:
        node: The result.
        sequence_dim: Which axis the tables run along, 1 or 2.
    """
    joined, outside = peel_conversion(node)
    rotated, rest, nodes = joined, None, outside
    if is_call(joined, aten.cat.default) and len(joined.args[0]) == 2:
        if not _is_last(joined, 1):
            return None
        rotated, rest = joined.args[0]
        nodes |= {joined}
    rotated, conversion = peel_conversion(rotated)
    nodes |= conversion
    if not is_call(rotated, aten.add.Tensor) or rotated.kwargs:
        return None
    for straight, turned in (rotated.args, reversed(rotated.args)):
        found = _match_turn(straight, turned, sequence_dim)
        if found is None:
            continue
        turn = Rotary(found.source, found.cos, found.sin, nodes | found.nodes | {rotated})
        return turn if rest is None else _with_rest(turn, rest, node)
    return None


def _match_turn(straight: Any, turned: Any, sequence_dim: int) -> Rotary | None:
    """Match ``x * cos`` and ``cat((-right(x), left(x))) * sin`` of all features of a node."""
    for plain, cosine in _factors(straight):
        for swapped, sine in _factors(turned):
            source, nodes = peel_conversion(plain)
            value = fake_value(source)
            if value is None or value.ndim != 4:
                continue
            halves = _match_swapped(swapped, source)
            cos, sin = (_table(table, value, sequence_dim) for table in (cosine, sine))
            if halves is None or cos is None or sin is None:
                continue
            return Rotary(source, cos, sin, nodes | halves | {straight, turned})
    return None


def _match_swapped(node: Any, source: Node) -> frozenset[Node] | None:
    """Return what ``cat((-right, left))`` of the halves of a source consists of."""
    joined, nodes = peel_conversion(node)
    if not is_call(joined, aten.cat.default) or not _is_last(joined, 1):
        return None
    if len(joined.args[0]) != 2:
        return None
    negated, left = joined.args[0]
    negated, conversion = peel_conversion(negated)
    if not is_call(negated, aten.neg.default):
        return None
    nodes |= {joined, negated} | conversion
    width = fake_value(source)
    size = None if width is None else dimension_key(width.shape[-1])
    if not isinstance(size, int) or size % 2:
        return None
    for part, start in ((left, 0), (negated.args[0], size // 2)):
        inner = _match_part(part, source, start, size // 2)
        if inner is None:
            return None
        nodes |= inner
    return nodes


def _match_part(node: Any, source: Node, start: int, width: int) -> frozenset[Node] | None:
    """Return the nodes that select features of a source, with conversions around them."""
    part, nodes = peel_conversion(node)
    value = fake_value(part)
    if value is None or dimension_key(value.shape[-1]) != width or _part_start(part) != start:
        return None
    nodes |= {part}
    if is_call(part, operator.getitem):
        part = part.args[0]
        nodes |= {part}
    whole, conversion = peel_conversion(part.args[0])
    bare, _ = peel_conversion(source)
    return nodes | conversion if whole is source or whole is bare else None


def _part_start(part: Any) -> int | None:
    """Return the first feature of a slice or an item of a split, where it is a number."""
    if is_call(part, aten.slice.Tensor):
        if not _is_last(part, 1) or _argument(part, 4, 1) != 1:
            return None
        return _argument(part, 2, None) or 0
    if not is_call(part, operator.getitem):
        return None
    split: Any = part.args[0]
    if not is_call(split, aten.split.Tensor, aten.split_with_sizes.default):
        return None
    return _item_start(part) if _is_last(split, 2) else None


def _item_start(item: Node) -> int | None:
    split: Any = item.args[0]
    start = 0
    for index in range(int(item.args[1])):  # type: ignore[arg-type]
        size = dimension_key(split.meta["val"][index].shape[-1])
        if not isinstance(size, int):
            return None
        start += size
    return start


def _with_rest(turn: Rotary, rest: Any, node: Node) -> Rotary | None:
    """Return the rotation of leading features when the others pass through."""
    output = fake_value(node)
    first, conversion = peel_conversion(turn.source)
    value = fake_value(first)
    if output is None or value is None:
        return None
    rotary, width = (dimension_key(item.shape[-1]) for item in (value, output))
    if not isinstance(rotary, int) or not isinstance(width, int):
        return None
    if is_call(first, aten.slice.Tensor, operator.getitem):
        source: Any = first.args[0]
        source = source.args[0] if is_call(first, operator.getitem) else source
        bare, widened = peel_conversion(source)
        for whole, between in ((source, frozenset()), (bare, widened)):
            lead = _match_part(first, whole, 0, rotary)
            tail = _match_part(rest, whole, rotary, width - rotary)
            if lead is not None and tail is not None:
                nodes = turn.nodes | lead | tail | conversion | between
                return Rotary(whole, turn.cos, turn.sin, nodes)
    return None


def _table(node: Any, rotated: Any, sequence_dim: int) -> Node | None:
    """Return the FP32 table under broadcasts and conversions of a factor ``[1, S, 1, R]``."""
    value = fake_value(node)
    if value is None or value.ndim > rotated.ndim:
        return None
    wanted = [1] * rotated.ndim
    for dim in (sequence_dim, rotated.ndim - 1):
        wanted[dim] = dimension_key(rotated.shape[dim])  # type: ignore[call-overload]
    if [1] * (rotated.ndim - value.ndim) + list(shape_key(value.shape)) != wanted:
        return None
    while True:
        inner, conversion = peel_conversion(node)
        if not conversion and _adds_axes(node):
            inner = node.args[0]
        if inner is node:
            break
        node = inner
    value = fake_value(node)
    return node if value is not None and value.dtype == torch.float32 else None


def _adds_axes(node: Node) -> bool:
    """Return whether a view changes nothing but axes of size one."""
    if not is_call(node, aten.unsqueeze.default, aten.slice.Tensor, aten.alias.default, *VIEWS):
        return False
    before, after = fake_value(node.args[0]), fake_value(node)
    if before is None or after is None:
        return False
    kept = [[size for size in shape_key(v.shape) if size != 1] for v in (before, after)]
    return kept[0] == kept[1]


def _factors(node: Any) -> list[tuple[Any, Any]]:
    """Return both orders of the operands of a product of two nodes, none for anything else."""
    if not is_call(node, aten.mul.Tensor) or not all(isinstance(a, Node) for a in node.args):
        return []
    left, right = node.args
    return [(left, right), (right, left)]


def _is_last(node: Node, position: int) -> bool:
    """Return whether an operator works along the last axis."""
    source: Any = node.args[0]
    value = fake_value(source[0] if isinstance(source, list | tuple) else source)
    dim = node.args[position] if position < len(node.args) else node.kwargs.get("dim", 0)
    return value is not None and dim in (-1, value.ndim - 1)


def _argument(node: Node, position: int, default: Any) -> Any:
    return node.args[position] if position < len(node.args) else default
