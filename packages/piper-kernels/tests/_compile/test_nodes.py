"""Calls that rewrites append to a graph by the names of their arguments."""

import pytest
import torch
from torch.fx import Graph

from piper_kernels._compile.nodes import insert_mutation, insert_named

aten = torch.ops.aten


@pytest.fixture
def operand():
    node = Graph().placeholder("x")
    node.meta["val"] = torch.tensor([1.0, 2.0])
    return node


def test_arguments_that_are_not_given_are_defaults(operand):
    graph = operand.graph
    node = insert_named(graph, aten.add.Tensor, {"other": operand, "self": operand})
    assert node.args == (operand, operand)
    assert node.kwargs == {"alpha": 1}
    assert torch.equal(node.meta["val"], torch.tensor([2.0, 4.0]))


def test_names_that_an_operator_lacks_are_refused(operand):
    arguments = {"self": operand, "size": 3, "axis": 1}
    with pytest.raises(TypeError, match=r"aten\.relu\.default has no arguments axis, size"):
        insert_named(operand.graph, aten.relu.default, arguments)
    with pytest.raises(TypeError, match=r"aten\.relu_\.default has no arguments axis, size"):
        insert_mutation(operand.graph, aten.relu_.default, "self", arguments)
