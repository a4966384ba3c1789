"""Graphs of fused sparse attention: changing sizes, owned inputs, installation."""

import operator

import pytest
import torch

from piper_kernels.fusions.convrot_int8_sparse_piper import (
    _compile,
    convrot_int8_sparse_piper_compile_options,
)

NAME = "convrot_int8_sparse_piper"
OUTPUT = f"{NAME}_projected_query_attention_output"
PROJECTED = [
    "convrot_int8_prepare_input",
    f"{NAME}_project_key",
    "convrot_int8_dequantized_input_mean",
    f"{NAME}_project_value",
    OUTPUT,
]
TOLERANCE = 0.025


@pytest.fixture(autouse=True)
def every_target(monkeypatch):
    monkeypatch.setattr(_compile, "supports_target", lambda _device, _head_dim: (True, ""))


@pytest.fixture
def fuse(projected_attention):
    def run(model=None, **given):
        if model is None:
            model = projected_attention.Model(**given)
        options = convrot_int8_sparse_piper_compile_options()
        return model, projected_attention.trace(model, options)

    return run


@pytest.mark.parametrize("changing", ["rows", "block lengths"])
def test_one_graph_serves_changing_lengths_and_routes(projected_attention, graph_capture, changing):
    class Module(projected_attention.Module):
        def forward(self, x, cos, sin, gate, lengths, key_blocks):
            self.model.key_blocks = key_blocks
            return self.model(x, cos, sin, gate, lengths)

    given = {"outputs": 40, "coarse": True}
    torch._dynamo.reset()
    module = Module(projected_attention.Model(**given))
    capture = graph_capture.GraphCapture(convrot_int8_sparse_piper_compile_options())
    compiled = torch.compile(module, backend=capture, fullgraph=True)
    if changing == "rows":
        cases = [(rows, blocks, None) for rows, blocks in ((192, 2), (257, 3), (321, 5), (193, 3))]
    else:
        cases = [(192, 2, (64, 17, 51)), (192, 2, (33, 64, 11)), (192, 2, (1, 1, 1))]
    for index, (rows, blocks, lengths) in enumerate(cases):
        model = projected_attention.Model(rows=rows, lengths=lengths, **given)
        if changing == "rows":
            for dim, tensor in zip((1, 0, 0, 1), model.args, strict=False):
                torch._dynamo.mark_dynamic(tensor, dim)
        with torch.no_grad():
            actual, expected = (run(*model.args, blocks) for run in (compiled, module))
        if index == 1:
            graphs = len(capture.graph_modules)  # the number of blocks is symbolic by now
        assert projected_attention.relative_error(actual, expected, model.valid_rows) < TOLERANCE
    assert len(capture.graph_modules) == graphs
    assert graphs == (2 if changing == "rows" else 1)
    assert capture.targets[-1] == OUTPUT


def test_distributed_projections_are_fused(projected_attention, fuse):
    """Row views around linears, as distributed tensors make them, do not hide a region."""

    class Flat(projected_attention.Model):
        def linear(self, name, x):
            rows = super().linear(name, x.reshape(-1, x.shape[-1]))
            return rows.view(*x.shape[:-1], rows.shape[-1])

    model, graph = fuse(Flat(outputs=40, batch=2))
    assert graph.targets == PROJECTED
    assert projected_attention.relative_error(graph(), model.eager()) < TOLERANCE


def test_installation():
    from torch._inductor.custom_graph_pass import CustomGraphPass

    from piper_kernels.linear.convrot import convrot_int8_compile_options

    option = "post_grad_custom_pre_pass"

    class Other(CustomGraphPass):
        def __call__(self, graph):
            pass

        def uuid(self):
            return b"other"

    before, after = Other(), Other()
    base = convrot_int8_compile_options()[option]
    options = {"max_autotune": True, option: [before, base, after]}
    once = convrot_int8_sparse_piper_compile_options(options)
    assert options[option] == [before, base, after]
    assert once["max_autotune"] is True
    first, fusion, second, last = once[option]
    assert (first, second, last) == (before, base, after)
    assert isinstance(fusion, _compile.ConvRotInt8SparsePiperPass)
    assert convrot_int8_sparse_piper_compile_options(once) == once
    assert tuple(convrot_int8_sparse_piper_compile_options()[option]) == (fusion, base)
    identity = fusion.uuid()
    assert isinstance(identity, bytes)
    assert identity
    assert identity == _compile.ConvRotInt8SparsePiperPass().uuid()
    assert identity != base.uuid()


def test_training_graphs_keep_their_nodes(projected_attention):
    class Training:
        def __init__(self, graph_pass):
            self.graph_pass = graph_pass

        def __call__(self, graph, is_inference=None):
            self.graph_pass(graph, is_inference=False)

    fusion = _compile.ConvRotInt8SparsePiperPass()
    model = projected_attention.Model(outputs=40)
    graph = projected_attention.trace(model, {projected_attention.OPTION: Training(fusion)})
    assert graph.targets == ["convrot_int8_linear"] * 3 + [
        "sparse_piper_attention",
        "convrot_int8_linear",
    ]


def test_new_nodes_have_values_and_no_eager_inputs(fuse):
    _, graph = fuse(outputs=40)
    graph.module.graph.lint()
    for node in graph.nodes:
        if node.op == "call_function":
            assert "val" in node.meta
            assert "eager_input_vals" not in node.meta


@pytest.mark.parametrize(
    ("case", "reused"),
    [
        ("fresh", True),
        ("a view", False),
        ("an input", False),
        ("escapes", False),
        ("read later", False),
        ("another width", False),
        ("prepared by windows", False),
    ],
)
def test_only_an_owned_input_makes_room_for_the_result(fuse, projected_attention, case, reused):
    scales = [None] * 5
    if case == "prepared by windows":
        scales[0] = torch.tensor(0.03)

    class Owned(projected_attention.Model):
        def __call__(self, x, *rest):
            made = {"an input": x, "a view": (x * 2)[None][0]}.get(case, x * 2)
            result = super().__call__(made, *rest)
            if case == "escapes":
                return result, made
            return result + made if case == "read later" else result

    outputs = 48 if case == "another width" else 64
    model, graph = fuse(Owned(outputs=outputs, scales=tuple(scales)))
    calls = [node for node in graph.nodes if "auto_functionalized" in str(node.target)]
    assert len(calls) == reused
    assert (OUTPUT in graph.targets) != reused
    actual, expected = graph(), model.eager()
    if case == "escapes":
        assert torch.equal(actual[1], expected[1])
        actual, expected = actual[0], expected[0]
    assert projected_attention.relative_error(actual, expected) < TOLERANCE
    if reused:
        (call,) = calls
        assert call.kwargs["_all_bases"][0].target is torch.ops.aten.mul.Tensor
        (item,) = call.users
        assert item.target is operator.getitem
        plain = projected_attention.Model(outputs=outputs)
        plain.x = model.x * 2
        assert torch.equal(fuse(plain)[1](), actual)


def test_a_reused_input_is_overwritten_and_checked(fuse, projected_attention):
    model = projected_attention.Model(outputs=64)
    _, graph = fuse(model)
    call = graph.find(OUTPUT)
    seen = {}

    class Recorder(torch.fx.Interpreter):
        def run_node(self, node):
            if node is call:
                seen["args"], seen["kwargs"] = self.fetch_args_kwargs_from_env(node)
            return super().run_node(node)

    with torch.no_grad():
        expected = graph()
        Recorder(graph.module).run(graph.args, graph.flat)
    overwrite = getattr(torch.ops.piper_kernels, f"{OUTPUT}_")
    room = torch.full_like(model.x, float("nan"))
    assert overwrite(room, *seen["args"], **seen["kwargs"]) is None
    assert torch.equal(room, expected)
    for wrong in (room[:, 1:], room.float(), room.mT.contiguous().mT):
        with pytest.raises(ValueError, match="reusable_source must be contiguous"):
            overwrite(wrong, *seen["args"], **seen["kwargs"])
