"""Recognition of decomposed activation functions.

Inductor decomposes ``gelu`` and ``silu`` into pointwise operators in FP32, with conversions
around them for narrower dtypes. A match names the node before the activation and every node
that the activation consists of, so that a rewrite can require them to be used nowhere else.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from piper_kernels._compile.nodes import CONVERSIONS, fake_value, is_call

aten = torch.ops.aten

_NARROW = (torch.float16, torch.bfloat16)
_CUBIC = 0.044715
_SQRT_2_OVER_PI = 0.7978845608028654


@dataclass(frozen=True)
class Match:
    """An activation in a graph.

    Attributes:
        source: The node that is activated, in its own dtype.
        nodes: What the activation consists of, its result included and ``source`` not.
    """

    source: Node
    nodes: frozenset[Node]


class _MismatchError(Exception):
    pass


def match_gelu_tanh(node: object) -> Match | None:
    """Match GELU with the tanh approximation, with or without conversions around it."""
    return _match(node, _gelu)


def match_silu(node: object) -> Match | None:
    """Match SiLU, with or without conversions around it."""
    return _match(node, _silu)


def peel_conversion(node: object) -> tuple[Any, frozenset[Node]]:
    """Return the node under a conversion of floating dtypes, and the conversion if any."""
    if isinstance(node, Node) and is_call(node, *CONVERSIONS) and _is_floating(node):
        source = node.args[0]
        if isinstance(source, Node) and _is_floating(source):
            return source, frozenset((node,))
    return node, frozenset()


def widened_source(node: Any) -> tuple[Any, frozenset[Node]]:
    """Return the float16 or bfloat16 node under an exact conversion to float32."""
    source, nodes = peel_conversion(node)
    value = fake_value(source)
    if nodes and value is not None and value.dtype in _NARROW and _dtype(node) == torch.float32:
        return source, nodes
    return node, frozenset()


def _match(node: object, pattern: Any) -> Match | None:
    inner, outside = peel_conversion(node)
    seen: set[Node] = set()
    try:
        operand = pattern(inner, seen)
    except _MismatchError:
        return None
    source, conversion = widened_source(operand)
    if not isinstance(source, Node):
        return None
    return Match(source, frozenset(seen | outside | conversion))


def _gelu(node: Any, seen: set[Node]) -> Any:
    if is_call(node, aten.gelu.default):
        if node.kwargs.get("approximate", "none") != "tanh":
            raise _MismatchError
        seen.add(node)
        return node.args[0]
    for half, one_plus in _factors(node, seen):
        if not (is_call(half, aten.mul.Tensor) and is_call(one_plus, aten.add.Tensor)):
            continue
        source = _other(half, aten.mul.Tensor, 0.5, seen)
        tanh = _other(one_plus, aten.add.Tensor, 1, seen)
        inner = _other(
            _unary(tanh, aten.tanh.default, seen), aten.mul.Tensor, _SQRT_2_OVER_PI, seen
        )
        if not is_call(inner, aten.add.Tensor) or inner.kwargs:
            raise _MismatchError
        seen.add(inner)
        if inner.args[0] is source:
            scaled = inner.args[1]
        elif inner.args[1] is source:
            scaled = inner.args[0]
        else:
            raise _MismatchError
        _cube(_other(scaled, aten.mul.Tensor, _CUBIC, seen), source, seen)
        return source
    raise _MismatchError


def _cube(node: Any, source: Any, seen: set[Node]) -> None:
    if is_call(node, aten.pow.Tensor_Scalar) and node.args == (source, 3):
        seen.add(node)
        return
    for square, factor in _factors(node, seen):
        if factor is not source:
            continue
        if is_call(square, aten.mul.Tensor) and square.args == (source, source):
            seen.add(square)
            return
        if is_call(square, aten.pow.Tensor_Scalar) and square.args == (source, 2):
            seen.add(square)
            return
    raise _MismatchError


def _silu(node: Any, seen: set[Node]) -> Any:
    if is_call(node, aten.silu.default):
        seen.add(node)
        return node.args[0]
    if is_call(node, aten.div.Tensor):
        source, denominator = node.args
        seen.add(node)
        exponential = _other(denominator, aten.add.Tensor, 1, seen)
        negated = _unary(_unary(exponential, aten.exp.default, seen), aten.neg.default, seen)
        if negated is source:
            return source
        raise _MismatchError
    for sigmoid, source in _factors(node, seen):
        if is_call(sigmoid, aten.sigmoid.default) and sigmoid.args[0] is source:
            seen.add(sigmoid)
            return source
    raise _MismatchError


def _factors(node: Any, seen: set[Node]) -> list[tuple[Any, Any]]:
    """Return both orders of the operands of a product."""
    if not is_call(node, aten.mul.Tensor):
        raise _MismatchError
    seen.add(node)
    left, right = node.args
    return [(left, right), (right, left)]


def _other(node: Any, target: Any, constant: float, seen: set[Node]) -> Any:
    """Return the operand of a sum or product beside a constant."""
    if not is_call(node, target) or node.kwargs:
        raise _MismatchError
    left, right = node.args
    seen.add(node)
    if _is_constant(right, constant):
        return left
    if _is_constant(left, constant):
        return right
    raise _MismatchError


def _unary(node: Any, target: Any, seen: set[Node]) -> Any:
    if not is_call(node, target):
        raise _MismatchError
    seen.add(node)
    return node.args[0]


def _is_constant(value: object, constant: float) -> bool:
    return isinstance(value, int | float) and math.isclose(value, constant, rel_tol=1e-12)


def _dtype(node: object) -> torch.dtype | None:
    value = fake_value(node)
    return None if value is None else value.dtype


def _is_floating(node: object) -> bool:
    dtype = _dtype(node)
    return dtype is not None and dtype.is_floating_point
