"""A ``torch.compile`` backend that stops after the graph passes and runs what they return."""

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._inductor.decomposition import select_decomp_table

OPTION = "post_grad_custom_pre_pass"


def passes_of(options):
    """Return the passes of compile options in order."""
    passes = options[OPTION]
    return list(passes) if isinstance(passes, (list, tuple)) else [passes]


class GraphCapture:
    """Decomposes as Inductor does, applies the passes of options and interprets the graph.

    Attributes:
        graph_modules: What was compiled, after the passes.
    """

    def __init__(self, options, is_inference=True):
        self.passes = passes_of(options)
        self.is_inference = is_inference
        self.graph_modules = []

    def __call__(self, graph_module, example_inputs):
        def compiler(functional_module, _inputs):
            for graph_pass in self.passes:
                graph_pass(functional_module.graph, is_inference=self.is_inference)
            functional_module.recompile()
            self.graph_modules.append(functional_module)
            return make_boxed_func(functional_module.forward)

        backend = aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table())
        return backend(graph_module, example_inputs)

    @property
    def targets(self):
        """Names of the operators of this library in the last graph, in order."""
        found = []
        for node in self.graph_modules[-1].graph.nodes:
            target = node.target
            if target is auto_functionalized_v2:
                target = node.args[0]
            if node.op == "call_function" and getattr(target, "namespace", "") == "piper_kernels":
                found.append(target._schema.name.removeprefix("piper_kernels::"))
        return found


def run(function, *args, options, dynamic=None, is_inference=True):
    """Return the compiled result and the capture of its graph."""
    torch._dynamo.reset()
    capture = GraphCapture(options, is_inference)
    with torch.no_grad():
        result = torch.compile(function, backend=capture, fullgraph=True, dynamic=dynamic)(*args)
    return result, capture


def check(function, *args, options, targets, tolerance=0.0, dynamic=None):
    """Check which operators a compiled function calls, and its results against the eager ones.

    Args:
        function: Returns a tensor or several.
        args: Its arguments.
        options: Compile options with the passes.
        targets: Names of the operators of this library, in order.
        tolerance: Relative L2 distance of a result; 0 asks for equal values.
        dynamic: As ``torch.compile`` takes it.

    Returns:
        The capture of the graph.
    """
    actual, capture = run(function, *args, options=options, dynamic=dynamic)
    with torch.no_grad():
        expected = function(*args)
    assert capture.targets == targets
    actual, expected = (v if isinstance(v, tuple) else (v,) for v in (actual, expected))
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        if tolerance:
            assert relative_error(one, other) <= tolerance
        else:
            assert torch.equal(one, other)
    return capture


def relative_error(actual, expected):
    """Return the relative L2 distance."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
