"""What the pass makes of graphs with ConvRot INT8 linears."""

import pytest
import torch
from torch.nn import functional

from piper_kernels.linear.convrot import convrot_int8_compile_options
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

OPTIONS = convrot_int8_compile_options()
PREPARE, PREPARED, LINEAR = (
    "convrot_int8_prepare_input",
    "convrot_int8_linear_prepared",
    "convrot_int8_linear",
)


def make(rows, features=32, act=None, group_size=16, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + rows)
    dense = torch.randn(rows, features, generator=generator).to(dtype)
    return ConvRotInt8Tensor.from_hp(dense, group_size=group_size, act_per_tensor_scale=act)


def rand(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5)).to(dtype)


def check(graph_capture, function, *args, exact=True, **given):
    tolerance = 0.0 if exact else 0.02
    return graph_capture.check(function, *args, options=OPTIONS, tolerance=tolerance, **given)


def two(x, a, b):
    return functional.linear(x, a), functional.linear(x, b, x.new_ones(b.shape[0]))


def test_linears_of_one_input_share_its_preparation(graph_capture):
    check(
        graph_capture, two, rand(2, 5, 32), make(7), make(9), targets=[PREPARE, PREPARED, PREPARED]
    )


@pytest.mark.parametrize("lead", [(), (31,), (2, 3), (0,), (2, 0, 3)])
def test_any_leading_sizes(graph_capture, lead):
    check(graph_capture, two, rand(*lead, 32), make(7), make(9), targets=[PREPARE, *[PREPARED] * 2])


def test_a_single_linear_is_left_alone(graph_capture):
    check(graph_capture, functional.linear, rand(5, 32), make(7), targets=[LINEAR])


def test_other_group_sizes_and_inputs_are_not_shared(graph_capture):
    other_group = make(9, 64, group_size=64)
    check(graph_capture, two, rand(5, 64), make(7, 64), other_group, targets=[LINEAR, LINEAR])

    def apart(x, a, b):
        return functional.linear(x, a), functional.linear(torch.relu(x), b)

    check(graph_capture, apart, rand(5, 32), make(7), make(9), targets=[LINEAR, LINEAR])


def test_chains_of_shared_inputs(graph_capture):
    def chain(x, a, b, c, d):
        first = functional.linear(x, a)
        return functional.linear(x, b), functional.linear(first, c), functional.linear(first, d)

    weights = (make(32), make(7), make(8), make(9))
    capture = check(
        graph_capture,
        chain,
        rand(5, 32),
        *weights,
        targets=[PREPARE, PREPARED, PREPARED, PREPARE, PREPARED, PREPARED],
    )
    capture.graph_modules[-1].graph.lint()


def test_static_dynamic_and_mixed_scales(graph_capture):
    scale = torch.tensor(0.03)

    def three(x, a, b, c):
        return functional.linear(x, a), functional.linear(x, b), functional.linear(x, c)

    static = (make(7, act=scale), make(8, act=scale))
    check(graph_capture, two, rand(5, 32), *static, targets=[PREPARE, PREPARED, PREPARED])
    independent = (make(7, act=scale), make(8, act=scale.clone()))
    check(
        graph_capture,
        two,
        rand(5, 32),
        *independent,
        targets=[PREPARE, PREPARED, PREPARE, PREPARED],
    )
    check(
        graph_capture,
        three,
        rand(5, 32),
        make(7),
        static[1],
        make(9),
        targets=[PREPARE, PREPARED, PREPARE, PREPARED, PREPARED],
    )

    def twice(x, a):
        return functional.linear(x, a), functional.linear(x, a, x.new_ones(7))

    check(graph_capture, twice, rand(5, 32), static[0], targets=[PREPARE, PREPARED, PREPARED])


def gelu_block(x, up, down, bias=None):
    hidden = functional.gelu(functional.linear(x, up), approximate="tanh")
    return functional.linear(hidden, down, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gelu_is_computed_by_the_preparation(graph_capture, dtype):
    check(
        graph_capture,
        gelu_block,
        rand(2, 5, 32, dtype=dtype),
        make(48, dtype=dtype),
        make(9, 48, dtype=dtype),
        rand(9),
        targets=[LINEAR, PREPARE, PREPARED],
        exact=False,
    )


def test_an_explicit_promotion_before_gelu_is_folded(graph_capture):
    def block(x, up, down):
        hidden = functional.gelu(functional.linear(x, up).float(), approximate="tanh")
        return functional.linear(hidden.to(x.dtype), down)

    args = (rand(5, 32, dtype=torch.bfloat16), make(48, dtype=torch.bfloat16))
    down = make(9, 48, dtype=torch.bfloat16)
    capture = check(
        graph_capture, block, *args, down, targets=[LINEAR, PREPARE, PREPARED], exact=False
    )
    prepare = next(
        node for node in capture.graph_modules[-1].graph.nodes if PREPARE in str(node.target)
    )
    assert prepare.args[0].meta["val"].dtype == torch.bfloat16
    assert prepare.args[2] == "gelu_tanh"


def test_the_folded_gelu_equals_the_operator_bit_for_bit(graph_capture):
    from piper_kernels.linear.convrot import convrot_int8_linear

    args = (rand(5, 32, dtype=torch.bfloat16), make(48, dtype=torch.bfloat16))
    down = make(9, 48, dtype=torch.bfloat16)
    actual, _ = graph_capture.run(gelu_block, *args, down, options=OPTIONS)
    expected = convrot_int8_linear(functional.linear(*args), down, activation_fn="gelu_tanh")
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(lambda x, d: functional.linear(functional.gelu(x), d), id="gelu without tanh"),
        pytest.param(lambda x, d: functional.linear(functional.silu(x), d), id="silu"),
        pytest.param(
            lambda x, d: functional.linear(
                0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3))), d
            ),
            id="other constants",
        ),
    ],
)
def test_other_activations_are_left_alone(graph_capture, block):
    check(graph_capture, block, rand(5, 32), make(7), targets=[LINEAR], exact=False)


def test_a_gelu_with_another_use_is_left_alone(graph_capture):
    def block(x, d):
        hidden = functional.gelu(x, approximate="tanh")
        return functional.linear(hidden, d), hidden

    check(graph_capture, block, rand(5, 32), make(7), targets=[LINEAR], exact=False)

    def inside(x, d):
        hidden = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return functional.linear(0.5 * x * (1 + torch.tanh(hidden)), d), hidden

    check(graph_capture, inside, rand(5, 32), make(7), targets=[LINEAR], exact=False)


def test_gelu_in_front_of_two_linears_is_shared_but_not_folded(graph_capture):
    def block(x, a, b):
        hidden = functional.gelu(x, approximate="tanh")
        return functional.linear(hidden, a), functional.linear(hidden, b)

    weights = (make(7), make(9))
    targets = [PREPARE, PREPARED, PREPARED]
    check(graph_capture, block, rand(5, 32), *weights, targets=targets, exact=False)


def test_packed_swiglu_stays_an_explicit_operator(graph_capture):
    def block(x, d):
        up, gate = x.chunk(2, -1)
        return functional.linear(up * functional.silu(gate), d)

    check(graph_capture, block, rand(5, 64), make(7), targets=[LINEAR], exact=False)


def flattened(x, a, b):
    rows = x.reshape(-1, x.shape[-1])
    return (
        functional.linear(rows, a).view(*x.shape[:-1], a.shape[0]),
        functional.linear(x, b),
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_row_views_around_a_linear_are_removed(graph_capture, dynamic):
    capture = check(
        graph_capture,
        flattened,
        rand(2, 5, 32),
        make(7),
        make(9),
        targets=[PREPARE, PREPARED, PREPARED],
        dynamic=dynamic,
    )
    names = [str(node.target) for node in capture.graph_modules[-1].graph.nodes]
    assert not any("view" in name or "reshape" in name for name in names)


def test_other_users_of_flat_values_keep_them(graph_capture):
    def block(x, a):
        rows = x.reshape(-1, 32)
        flat = functional.linear(rows, a)
        return flat.view(2, 5, 7), flat.sum(0), rows.sum(0)

    capture = check(graph_capture, block, rand(2, 5, 32), make(7), targets=[LINEAR])
    call = next(n for n in capture.graph_modules[-1].graph.nodes if LINEAR in str(n.target))
    assert tuple(call.args[0].meta["val"].shape) == (2, 5, 32)


def test_views_that_change_the_features_are_left_alone(graph_capture):
    def block(x, a):
        return functional.linear(x.reshape(-1, 32), a).view(2, 5, 14)

    capture = check(graph_capture, block, rand(2, 5, 64), make(7), targets=[LINEAR])
    call = next(n for n in capture.graph_modules[-1].graph.nodes if LINEAR in str(n.target))
    assert tuple(call.args[0].meta["val"].shape) == (20, 32)


def test_one_graph_serves_changing_sizes(graph_capture):
    torch._dynamo.reset()
    capture = graph_capture.GraphCapture(OPTIONS)
    compiled = torch.compile(two, backend=capture, fullgraph=True, dynamic=True)
    weights = (make(7), make(9))
    with torch.no_grad():
        for rows in (3, 31, 127):
            x = rand(2, rows, 32)
            for one, other in zip(compiled(x, *weights), two(x, *weights), strict=True):
                assert torch.equal(one, other)
    assert len(capture.graph_modules) == 1


def test_missing_metadata_leaves_the_graph_unchanged(graph_capture):
    def traced(x, q, s):
        linear = torch.ops.piper_kernels.convrot_int8_linear
        return linear(x, q, s, None, 16), linear(x, q, s, None, 16)

    weight = make(7)
    graph = torch.fx.symbolic_trace(traced).graph
    before = [node.target for node in graph.nodes]
    for graph_pass in graph_capture.passes_of(OPTIONS):
        graph_pass(graph, is_inference=True)
    assert [node.target for node in graph.nodes] == before
    assert weight.qdata.shape == (7, 32)


def test_training_graphs_are_left_alone(graph_capture):
    args = (rand(5, 32), make(7), make(9))
    _, capture = graph_capture.run(two, *args, options=OPTIONS, is_inference=False)
    assert capture.targets == [LINEAR, LINEAR]


def test_inputs_of_the_eager_operator_are_not_described_by_new_nodes(graph_capture):
    _, capture = graph_capture.run(two, rand(5, 32), make(7), make(9), options=OPTIONS)
    for node in capture.graph_modules[-1].graph.nodes:
        if PREPARE in str(node.target) or PREPARED in str(node.target):
            assert "eager_input_vals" not in node.meta
            assert "val" in node.meta
