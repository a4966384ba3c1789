"""The graph pass that gives linears of the decoder their schedules."""

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from piper_kernels._compile.linears import insert_results
from piper_kernels._compile.nodes import bind_arguments, fake_value, insert_call, replace_node
from piper_kernels._compile.passes import GraphRewritePass, install_passes
from piper_kernels._triton.targets import accelerator_target
from piper_kernels.linear.convrot.int8._compile import ConvRotInt8LinearPass
from piper_kernels.specializations.minimax_h3_vae import _ops  # noqa: F401  # registers the operator
from piper_kernels.specializations.minimax_h3_vae._schedules import Schedule, find_schedule

ops = torch.ops.piper_kernels


def schedule_of(node: Node, source: Node, weight: Node) -> Schedule | None:
    """Return the schedule of a linear of a source and a weight, ``None`` if it has none."""
    values = [fake_value(item) for item in (node, source, weight)]
    if any(value is None for value in values):
        return None
    _, x, codes = values
    assert x is not None  # for the type checker
    assert codes is not None
    sizes = (*x.shape[:-1], *codes.shape)
    if not all(isinstance(size, int) for size in sizes):
        return None
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return find_schedule(accelerator_target(x.device), (rows, codes.shape[0], codes.shape[1]))


class MiniMaxH3VaeLinearPass(GraphRewritePass):
    """Replaces linears of exact shapes by ones with a schedule."""

    sources = ("specializations/minimax_h3_vae", "linear/convrot/int8/_compile.py")

    def rewrite(self, graph: Graph) -> bool:
        changed = False
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            if node.target is ops.convrot_int8_linear_prepared.default:
                changed |= _schedule_prepared(graph, node)
            elif node.target is ops.convrot_int8_linear.default:
                changed |= _schedule_linear(graph, node)
        return changed


def _schedule_prepared(graph: Graph, node: Node) -> bool:
    arguments = bind_arguments(node)
    schedule = schedule_of(node, arguments["input_qdata"], arguments["weight_qdata"])
    if schedule is None:
        return False
    with graph.inserting_before(node):
        operands = (*arguments.values(), list(schedule))
        target = ops.minimax_h3_vae_convrot_int8_linear_prepared.default
        replace_node(node, insert_call(graph, target, operands))
    return True


def _schedule_linear(graph: Graph, node: Node) -> bool:
    arguments = bind_arguments(node)
    source, value = arguments["input"], fake_value(node)
    if arguments["activation_fn"] is not None or value is None:
        return False
    schedule = schedule_of(node, source, arguments["weight_qdata"])
    if schedule is None:
        return False
    with graph.inserting_before(node):
        prepared = insert_results(
            graph,
            ops.convrot_int8_prepare_input.default,
            (source, arguments["group_size"], None, arguments["input_scale"]),
        )
        weight = tuple(arguments[name] for name in ("weight_qdata", "weight_scale", "bias"))
        operands = (*prepared, *weight, value.dtype, list(schedule))
        target = ops.minimax_h3_vae_convrot_int8_linear_prepared.default
        replace_node(node, insert_call(graph, target, operands))
    return True


def compile_options(options: Mapping[str, object] | None = None) -> dict[str, object]:
    """See ``minimax_h3_vae_convrot_int8_compile_options``."""
    return install_passes(
        install_passes(options, ConvRotInt8LinearPass()), MiniMaxH3VaeLinearPass()
    )
