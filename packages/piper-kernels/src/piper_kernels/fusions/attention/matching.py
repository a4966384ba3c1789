"""Recognition of projections in front of an attention and behind it.

Every weight format brings a ``match`` that returns the linear of a node.
"""

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from piper_kernels._compile.activations import peel_conversion
from piper_kernels._compile.heads import RMSNorm, Rotary, match_rms_norm, match_rotary
from piper_kernels._compile.linears import LinearCall
from piper_kernels._compile.nodes import (
    dimension_key,
    fake_value,
    is_call,
    is_contiguous,
    shape_key,
)
from piper_kernels._compile.views import VIEWS

aten: Any = torch.ops.aten
HEAD_DIMS = (64, 128)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

MatchLinear = Callable[[Node], LinearCall | None]


@dataclass(frozen=True)
class Projection:
    """The heads of one operand of an attention.

    Attributes:
        call: The linear.
        shape: Keys of ``(B, S, H, D)``; heads and features are numbers.
        norm: RMSNorm of the heads of queries and keys.
        rotary: RoPE of the normalized heads.
        nodes: All nodes between the input of the linear and the attention, the linear included.
    """

    call: LinearCall
    shape: tuple[object, ...]
    norm: RMSNorm | None
    rotary: Rotary | None
    nodes: frozenset[Node]

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.shape[2]  # type: ignore[return-value]

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.shape[3]  # type: ignore[return-value]


@dataclass(frozen=True)
class OutputProjection:
    """A linear of the merged heads of an attention that nothing else uses.

    Attributes:
        call: The linear.
        nodes: The views between the attention and the linear.
    """

    call: LinearCall
    nodes: frozenset[Node]


def match_normalized(node: Any, match: MatchLinear, *, transposed: bool) -> Projection | None:
    """Match queries or keys: ``rope(rms_norm(linear(x)))`` by heads.

    Args:
        node: The operand of the attention.
        match: Returns the linear of a node.
        transposed: Whether the attention takes ``[B, H, S, D]`` instead of ``[B, S, H, D]``.
    """
    rotated, nodes, sequence_dim = node, frozenset(), 1
    if transposed:
        inner, permuted = _peel_transposition(node)
        rotated, nodes, sequence_dim = (inner, permuted, 1) if permuted else (node, nodes, 2)
    rotated, conversion = peel_conversion(rotated)
    rotary = match_rotary(rotated, sequence_dim) if isinstance(rotated, Node) else None
    norm = None if rotary is None else match_rms_norm(rotary.source)
    if rotary is None or norm is None:
        return None
    nodes |= conversion | rotary.nodes | norm.nodes
    source = norm.source
    if sequence_dim == 2:
        source, permuted = _peel_transposition(source)
        if not permuted:
            return None
        nodes |= permuted
    heads = _match_heads(source, match)
    if heads is None or not _tables_fit(rotary, heads.shape):
        return None
    return Projection(heads.call, heads.shape, norm, rotary, heads.nodes | nodes)


def match_plain(node: Any, match: MatchLinear, *, transposed: bool) -> Projection | None:
    """Match values: ``linear(x)`` by heads; arguments are those of ``match_normalized``."""
    nodes: frozenset[Node] = frozenset()
    if transposed:
        node, nodes = _peel_transposition(node)
        if not nodes:
            return None
    heads = _match_heads(node, match)
    if heads is None:
        return None
    return Projection(heads.call, heads.shape, None, None, heads.nodes | nodes)


def match_output(result: Node, match: MatchLinear, *, transposed: bool) -> OutputProjection | None:
    """Match the linear of merged heads behind an attention."""
    merged = _merged_shape(result, transposed=transposed)
    nodes: set[Node] = set()
    node, user = result, _only_user(result)
    while user is not None and _merges(user, transposed=transposed):
        nodes.add(user)
        node, user = user, _only_user(user)
    call, value = None if user is None else match(user), fake_value(node)
    if call is None or call.input is not node or value is None or merged is None:
        return None
    fits = shape_key(value.shape) == merged and call.dtype == value.dtype
    return OutputProjection(call, frozenset(nodes)) if fits else None


def _merged_shape(result: Node, *, transposed: bool) -> tuple[object, ...] | None:
    """Return keys of ``(B, S, H * D)`` of an attention, whose heads and features are numbers."""
    value = fake_value(result)
    if value is None or value.ndim != 4:
        return None
    batch, rows, heads, features = shape_key(value.shape)
    if transposed:
        rows, heads = heads, rows
    if not isinstance(heads, int) or not isinstance(features, int):
        return None
    return batch, rows, heads * features


def _merges(node: Node, *, transposed: bool) -> bool:
    if is_call(node, *VIEWS):
        return True
    if not transposed:
        return False
    return is_call(node, aten.clone.default) or bool(_peel_transposition(node)[1])


def is_exclusive(nodes: AbstractSet[Node], consumers: Iterable[Node]) -> bool:
    """Return whether no node of a set has a user outside the set and the consumers."""
    allowed = {*nodes, *consumers}
    return all(user in allowed for node in nodes for user in node.users)


def is_supported_input(call: LinearCall) -> bool:
    """Return whether the input of a linear is ``[B, S, F]``, contiguous and floating."""
    value = call.input.meta["val"]
    return (
        value.ndim == 3
        and value.dtype in DTYPES
        and value.dtype == call.dtype
        and is_contiguous(value)
        and 0 not in shape_key(value.shape)
    )


def _match_heads(node: Any, match: MatchLinear) -> Projection | None:
    """Match a linear whose features are viewed as heads."""
    value = fake_value(node)
    if value is None or value.ndim != 4 or not is_call(node, *VIEWS):
        return None
    shape = shape_key(value.shape)
    nodes = set()
    while is_call(node, *VIEWS):
        nodes.add(node)
        node = node.args[0]
    call = match(node)
    if call is None or not isinstance(shape[2], int) or shape[3] not in HEAD_DIMS:
        return None
    width = dimension_key(call.node.meta["val"].shape[-1])
    rows = fake_value(call.node)
    if rows is None or width != shape[2] * int(shape[3]):  # type: ignore[call-overload]
        return None
    lead = shape_key(rows.shape[:-1])
    # Formats whose prepared rows have one axis can be told apart by batches of one alone.
    if lead != shape[:2] and not (shape[0] == 1 and lead == shape[1:2]):
        return None
    return Projection(call, shape, None, None, frozenset({*nodes, call.node}))


def _tables_fit(rotary: Rotary, shape: tuple[object, ...]) -> bool:
    """Return whether both tables are ``[S, R]`` but for axes of size one."""
    tables = (rotary.cos.meta["val"], rotary.sin.meta["val"])
    sizes = [[size for size in shape_key(table.shape) if size != 1] for table in tables]
    rotated = sizes[0][-1] if len(sizes[0]) == 2 else None
    return (
        sizes[0] == sizes[1]
        and isinstance(rotated, int)
        and sizes[0][0] == shape[1]
        and rotated % 2 == 0
        and 2 <= rotated <= shape[3]  # type: ignore[operator]
    )


def _peel_transposition(node: Any) -> tuple[Any, frozenset[Node]]:
    """Return the node under an exchange of the second and third axis, and the exchange if any."""
    if is_call(node, aten.permute.default) and list(node.args[1]) == [0, 2, 1, 3]:
        return node.args[0], frozenset((node,))
    if is_call(node, aten.transpose.int) and sorted(d % 4 for d in node.args[1:]) == [1, 2]:
        return node.args[0], frozenset((node,))
    return node, frozenset()


def _only_user(node: Node) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None
