"""Every operator of attention and of its fusions against its schema, with operands of graphs."""

from collections import defaultdict

import pytest
import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2

from piper_kernels.fusions.convrot_int8_piper import _compile as dense_pass
from piper_kernels.fusions.convrot_int8_piper import convrot_int8_piper_compile_options
from piper_kernels.fusions.convrot_int8_sparse_piper import _compile as sparse_pass
from piper_kernels.fusions.convrot_int8_sparse_piper import (
    convrot_int8_sparse_piper_compile_options,
)
from piper_kernels.fusions.convrot_nvfp4_sparse_piper import (
    convrot_nvfp4_sparse_piper_compile_options,
)
from piper_kernels.fusions.nvfp4_sparse_piper import _compile as nvfp4_pass
from piper_kernels.fusions.nvfp4_sparse_piper import nvfp4_sparse_piper_compile_options

NAMESPACE = "piper_kernels"
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
SPARSE = {
    "convrot_int8": convrot_int8_sparse_piper_compile_options,
    "nvfp4": nvfp4_sparse_piper_compile_options,
    "convrot_nvfp4": convrot_nvfp4_sparse_piper_compile_options,
}
RESIDUAL = {"coarse": True, "coarse_key_blocks": 3, "projected_gate": True}
LENGTHS = {"lengths": (64, 17, 51), "routing": "mean", "query_blocks": 2}
VARIANTS = (
    {},
    {"outputs": 48},
    {**RESIDUAL, "outputs": 48},
    {**RESIDUAL, **LENGTHS},
    {**RESIDUAL, **LENGTHS, "outputs": 64, "query_norm": False},
)
DENSE = ({}, {"is_causal": True, "kv_heads": 1}, {"outputs": 40})
# Called by users, not made by passes; they are checked beside their other tests.
PUBLIC = {
    "convrot_int8_sparse_piper_attention_output",
    "piper_attention",
    "piper_attention_from_quantized_query",
    "sage_attention_2pp",
    "sparse_piper_attention",
    "sparse_piper_coarse_residual",
}


def operator_names():
    """Return the operators that the passes above put into graphs."""
    prefix = f"{NAMESPACE}::"
    names = torch._C._dispatch_get_all_op_names()
    found = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    return sorted(name for name in found - PUBLIC if "attention" in name or "piper" in name)


OPERATORS = operator_names()


class Recorder(torch.fx.Interpreter):
    """Runs a graph and keeps the operands of every operator of this library."""

    def __init__(self, module):
        super().__init__(module)
        self.calls = defaultdict(list)

    def run_node(self, node):
        target = node.target
        if getattr(target, "namespace", "") == NAMESPACE:
            self.calls[target].append(self.fetch_args_kwargs_from_env(node))
        elif target is auto_functionalized_v2:
            self._record_mutation(node)
        return super().run_node(node)

    def _record_mutation(self, node):
        (operator,), kwargs = self.fetch_args_kwargs_from_env(node)
        args, named = [], {}
        for argument in operator._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            value = kwargs["_all_bases"][0] if written else kwargs[argument.name]
            if argument.kwarg_only:
                named[argument.name] = value
            else:
                args.append(value)
        self.calls[operator].append((tuple(args), named))


def calls_of(graph):
    recorder = Recorder(graph.module)
    with torch.no_grad():
        recorder.run(graph.args, graph.flat)
    return recorder.calls


def graphs(module):
    """Yield the fused graphs of models, which have the calls to check."""
    for fmt, options in SPARSE.items():
        for given in VARIANTS:
            yield module.trace(module.Model(fmt=fmt, **given), options())
    for given in DENSE:
        fused = convrot_int8_piper_compile_options(fuse_output="outputs" in given)
        yield module.trace(module.Model(dense=True, rows=70, **given), fused)

    class Owned(module.Model):
        def __call__(self, x, *rest):
            return super().__call__(x * 2, *rest)

    yield module.trace(Owned(outputs=64), SPARSE["convrot_int8"]())


@pytest.fixture(scope="module")
def recorded(projected_attention):
    """Operands of every call of all graphs, by the name of the operator."""
    found = defaultdict(list)
    patched = pytest.MonkeyPatch()
    for module in (dense_pass, sparse_pass, nvfp4_pass):
        patched.setattr(module, "supports_target", lambda *_: (True, ""))
    try:
        for graph in graphs(projected_attention):
            for operator, calls in calls_of(graph).items():
                found[operator._schema.name.removeprefix(f"{NAMESPACE}::")] += calls
    finally:
        patched.undo()
    return found


def given(call):
    """Return which optional operands a call has, to tell kinds of calls apart."""
    args, named = call
    return tuple(value is None for value in (*args, *named.values()))


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(recorded, name):
    operator = getattr(torch.ops.piper_kernels, name).default
    kinds = {given(call): call for call in recorded[name]}
    assert kinds, "no graph calls it"
    for args, named in kinds.values():
        checks = list(CHECKS)
        if any(isinstance(x, torch.Tensor) and x.dtype == torch.float8_e4m3fn for x in args):
            checks.remove("test_schema")  # compares arguments with allclose, which FP8 has not
        with torch.no_grad():
            torch.library.opcheck(operator, args, named, test_utils=checks)
