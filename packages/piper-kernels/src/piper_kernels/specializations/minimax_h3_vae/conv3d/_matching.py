"""Recognition of what surrounds a convolution in a graph before autograd.

Such graphs call PyTorch's functions and methods and may mutate tensors, so an operation is only
moved where nothing between its old and its new place can change what it reads.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional

_ORDER = (0, 2, 1, 3, 4)
_ADDITIONS = (operator.add, torch.add)
_PAD = (functional.pad, torch._C._nn.pad)  # pyright: ignore[reportAttributeAccessIssue]
_PADDINGS = {
    (1, 1, 1, 1): (True, False),
    (1, 1, 1, 1, 0, 0): (True, False),
    (0, 1, 0, 1): (False, True),
    (0, 1, 0, 1, 0, 0): (False, True),
}
_IN_PLACE = {
    getattr(operator, name)
    for name in (
        *("iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow"),
        *("iand", "ior", "ixor", "ilshift", "irshift", "iconcat", "setitem", "delitem"),
    )
}


@dataclass(frozen=True)
class Region:
    """A convolution and what it absorbs.

    Attributes:
        source: What the fused operator reads.
        norm: Weight, bias, groups and epsilon of a normalization, or ``None``.
        flags: Padding as ``symmetric`` and ``right``.
        residual: What is added, or ``None``.
        absorbed: All nodes that disappear, in the order of the graph.
    """

    source: Node
    norm: tuple[Any, ...] | None
    flags: tuple[bool, bool]
    residual: Any
    absorbed: tuple[Node, ...]


def value_of(node: object) -> Tensor | None:
    """Return the fake tensor of a node whose sizes are all integers."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return value


def match_region(conv: Node) -> Region | None:
    """Return what an explicit convolution with all its arguments absorbs, ``None`` for nothing."""
    arguments: tuple[Any, ...] = conv.args
    source, *_, symmetric, right, residual = arguments
    absorbed, flags = [conv], (symmetric, right)
    if value_of(source) is None or value_of(conv) is None:
        return None
    if not symmetric and not right:
        padded = _match_padding(source)
        if padded is not None:
            absorbed.insert(0, source)
            source, flags = padded
    parameters = None
    norm = _match_norm(source)
    if norm is not None:
        source, parameters, nodes = norm
        absorbed[:0] = nodes
    addition = None if residual is not None else _match_addition(conv)
    if addition is not None:
        absorbed.append(addition[0])
        residual = addition[1]
    if len(absorbed) == 1 or not isinstance(source, Node) or residual in absorbed:
        return None
    if not _may_move(absorbed):
        return None
    return Region(source, parameters, flags, residual, tuple(absorbed))


def _only_user(node: Any) -> Node | None:
    return next(iter(node.users)) if isinstance(node, Node) and len(node.users) == 1 else None


def _match_padding(node: Any) -> tuple[Any, tuple[bool, bool]] | None:
    if not _calls(node, *_PAD) or _only_user(node) is None:
        return None
    names = ("input", "pad", "mode", "value")
    arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
    sizes = tuple(arguments.get("pad", ()))
    source = arguments.get("input")
    value = value_of(source)
    if arguments.get("mode") != "reflect" or sizes not in _PADDINGS or value is None:
        return None
    return (source, _PADDINGS[sizes]) if value.ndim == 5 else None


def _match_norm(node: Any) -> tuple[Node, tuple[Any, ...], list[Node]] | None:
    """Match ``silu`` of a group norm over single frames.

    Frames become samples for it: ``permute``, ``contiguous``, ``view [N * T, C, 1, H, W]``,
    ``group_norm``, ``view [N, T, C, H, W]``, ``permute``, ``contiguous``.
    """
    chain = _norm_chain(node)
    if chain is None:
        return None
    there, _, before, norm, after, back, *_ = chain
    source, parameters = there.args[0], _norm_parameters(norm)
    value = value_of(source)
    if parameters is None or value is None or value.ndim != 5:
        return None
    batch, channels, frames, height, width = value.shape
    shapes = (
        (before, (batch * frames, channels, 1, height, width)),
        (after, (batch, frames, channels, height, width)),
        (node, (batch, channels, frames, height, width)),
    )
    fits = _order(there) == _ORDER and _order(back) == _ORDER
    for item, shape in shapes:
        found = value_of(item)
        fits = fits and found is not None and tuple(found.shape) == shape
    fits = fits and value.dtype in (torch.float16, torch.float32)
    return (source, parameters, chain) if fits and isinstance(source, Node) else None


def _norm_chain(node: Any) -> list[Node] | None:
    """Return the nodes of the chain, each with one user; sizes and orders are not looked at."""
    if not _calls(node, functional.silu) or node.kwargs.get("inplace") or len(node.args) != 1:
        return None
    chain = [node]

    def step(method: str) -> bool:
        source = chain[0].args[0]
        fits = _is_method(source, method) and _only_user(source) is not None
        if fits:
            chain.insert(0, source)
        return fits

    if _only_user(node) is None:
        return None
    if not (step("contiguous") and step("permute") and step("view")):
        return None
    norm = chain[0].args[0]
    if not _calls(norm, functional.group_norm) or _only_user(norm) is None:
        return None
    chain.insert(0, norm)
    return chain if step("view") and step("contiguous") and step("permute") else None


def _norm_parameters(norm: Node) -> tuple[Any, ...] | None:
    names = ("input", "num_groups", "weight", "bias", "eps")
    arguments = {"weight": None, "bias": None, "eps": 1e-5}
    arguments |= dict(zip(names, norm.args, strict=False)) | norm.kwargs
    weight, bias, epsilon = arguments["weight"], arguments["bias"], arguments["eps"]
    for parameter in (weight, bias):
        value = value_of(parameter)
        if value is None or value.dtype not in (torch.float16, torch.float32):
            return None
    groups = arguments["num_groups"]
    if not isinstance(epsilon, float) or epsilon <= 0 or not isinstance(groups, int):
        return None
    return weight, bias, groups, epsilon


def _match_addition(conv: Node) -> tuple[Node, Node] | None:
    node = _only_user(conv)
    if node is None or not (_calls(node, *_ADDITIONS) or _is_method(node, "add")):
        return None
    if len(node.args) != 2 or any(name != "alpha" for name in node.kwargs):
        return None
    if node.kwargs.get("alpha", 1) != 1:
        return None
    first, second = node.args
    other = second if first is conv else first
    mine, theirs, result = value_of(conv), value_of(other), value_of(node)
    if mine is None or theirs is None or result is None or other is conv:
        return None
    same = all(
        (value.shape, value.dtype, value.device) == (mine.shape, mine.dtype, mine.device)
        for value in (theirs, result)
    )
    return (node, other) if same and isinstance(other, Node) else None


def _calls(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def _is_method(node: Any, name: str) -> bool:
    return isinstance(node, Node) and node.op == "call_method" and node.target == name


def _order(node: Node) -> tuple[Any, ...]:
    dims: Sequence[Any] = node.args[1:]
    if len(dims) == 1 and isinstance(dims[0], list | tuple):
        dims = dims[0]
    return tuple(dims)


def _may_move(absorbed: Sequence[Node]) -> bool:
    """Return whether nothing from the first to the last absorbed node may mutate a tensor."""
    node = absorbed[0]
    while node is not absorbed[-1]:
        if _may_mutate(node):
            return False
        node = node.next
    return True


def _may_mutate(node: Node) -> bool:
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.op == "call_module":
        return True
    if node.op != "call_function":
        return False
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    named = getattr(target, "__name__", "").endswith("_")
    flagged = node.kwargs.get("inplace") or node.kwargs.get("out") is not None
    flagged = flagged or any(argument is True for argument in node.args)
    return bool(target in _IN_PLACE or named or flagged)
