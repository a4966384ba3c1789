"""Reading and replacing nodes of a functional ATen graph."""

import operator
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch.fx import Graph, Node, map_arg

aten = torch.ops.aten
CONVERSIONS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)


def is_call(node: object, *targets: Any) -> bool:
    """Return whether a value is a node that calls one of the targets."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def bind_arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a call of a custom operator by name, defaults included."""
    target: Any = node.target
    bound: dict[str, Any] = {}
    for position, argument in enumerate(target._schema.arguments):
        if position < len(node.args):
            bound[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value if argument.has_default_value() else None
    return bound


def fake_value(node: object) -> Tensor | None:
    """Return the fake tensor that stands for the result of a node, if it is known."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def dimension_key(size: Any) -> object:
    """Return a hashable key of a size: equal keys are provably equal sizes.

    A symbolic size is never turned into an integer, so comparing keys adds no guard.
    """
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_Integer else expression


def shape_key(shape: Sequence[Any]) -> tuple[object, ...]:
    """Return ``dimension_key`` of every size."""
    return tuple(dimension_key(size) for size in shape)


def is_contiguous(value: Tensor) -> bool:
    """Return whether the strides are provably those of a contiguous tensor."""
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        key = dimension_key(size)
        if key != 1 and dimension_key(stride) != dimension_key(expected):
            return False
        expected = expected * size
    return True


def insert_call(
    graph: Graph, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Node:
    """Append a call at the insertion point, with the fake value of its result.

    Custom operators compute shapes only for fake tensors.
    """
    named = dict(kwargs or {})
    node = graph.call_function(target, args, named)
    values: Any = map_arg(args, lambda item: item.meta["val"])
    mode = detect_fake_mode(values)
    with nullcontext() if mode is None else mode:
        node.meta["val"] = target(*values, **named)
    return node


def insert_named(graph: Graph, target: Any, arguments: Mapping[str, Any]) -> Node:
    """Append a call of a custom operator whose arguments are given by name; others are defaults."""
    bound = _with_defaults(target, arguments)
    named = {
        item.name: bound.pop(item.name) for item in target._schema.arguments if item.kwarg_only
    }
    return insert_call(graph, target, tuple(bound.values()), named)


def insert_mutation(graph: Graph, target: Any, mutated: str, arguments: Mapping[str, Any]) -> Node:
    """Append a call of an operator that overwrites an operand, and return what it becomes.

    The graph stays functional: Inductor writes in place where it can prove that nothing reads
    the old contents any more, and copies otherwise.

    Args:
        graph: Where to append.
        target: An operator that returns nothing.
        mutated: The operand that it overwrites.
        arguments: Operands by name; others are defaults.
    """
    named = _with_defaults(target, arguments)
    base = named.pop(mutated)
    bases = {f"_{mutated}_base_index": 0, "_all_bases": [base]}
    call = graph.call_function(auto_functionalized_v2, (target,), named | bases)
    updated = graph.call_function(operator.getitem, (call, 1))
    call.meta["val"] = (None, base.meta["val"])
    updated.meta["val"] = base.meta["val"]
    return updated


def _with_defaults(target: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of an operator by name; ``TypeError`` for a name that it lacks."""
    schema = target._schema.arguments
    unknown = sorted(set(arguments) - {item.name for item in schema})
    if unknown:
        raise TypeError(f"{target} has no arguments {', '.join(unknown)}")
    return {item.name: arguments.get(item.name, item.default_value) for item in schema}


def allocates(node: Node) -> bool:
    """Return whether an operator certainly allocates the only value that it returns."""
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    return (
        node.op == "call_function"
        and schema is not None
        and len(schema.returns) == 1
        and schema.returns[0].alias_info is None
        and not schema.is_mutable
        and target not in (aten.reshape.default, aten.contiguous.default, aten._to_copy.default)
    )


def has_values(node: Node) -> bool:
    """Return whether the values of a call and of all its operands are known."""
    return all("val" in item.meta for item in (node, *node.all_input_nodes))


def insert_reshape(graph: Graph, node: Node, like: Node) -> Node:
    """Append a reshape of ``[..., width]`` to the leading sizes of another node."""
    lead = [insert_size(graph, like, dim) for dim in range(like.meta["val"].ndim - 1)]
    width = insert_size(graph, node, node.meta["val"].ndim - 1)
    return insert_call(graph, aten.reshape.default, (node, [*lead, width]))


def insert_size(graph: Graph, node: Node, dim: int) -> Any:
    """Return a size of a value: a number, or an appended node where it is symbolic."""
    size = node.meta["val"].shape[dim]
    return size if isinstance(size, int) else insert_call(graph, aten.sym_size.int, (node, dim))


def replace_node(node: Node, replacement: Node) -> None:
    """Let a new node take the place and the metadata of a call, and erase the call.

    ``eager_input_vals`` describes operands that the new call does not have.
    """
    value = replacement.meta.get("val")
    replacement.meta = {k: v for k, v in node.meta.items() if k != "eager_input_vals"}
    if value is not None:
        replacement.meta["val"] = value
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)


def used_only_by(nodes: AbstractSet[Node], consumer: Node) -> bool:
    """Return whether no node of a set has a user outside the set and one consumer."""
    return all(user in nodes or user is consumer for node in nodes for user in node.users)
