"""The fusion of the encoder: what is absorbed, what is not, and that results are kept."""

import pytest
import torch
from tiny_encoder import CHANNELS, FramewiseGroupNorm, reflect
from torch.nn import functional

from piper_kernels.conv3d.convrot.int8 import (
    ConvRotInt8Conv3d,
    conv3d,
    group_norm_silu_conv3d,
)
from piper_kernels.specializations.minimax_h3_vae import (
    minimax_h3_vae_convrot_int8_conv3d_compile_options as compile_options,
)
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

OPTION = "pre_grad_custom_pass"
C = CHANNELS[0]
PLAIN, NORMALIZED = "convrot_int8_conv3d", "convrot_int8_group_norm_silu_conv3d"


class Capture:
    """Runs the passes of options over the graph before autograd, then the graph as it is."""

    def __init__(self, options):
        passes = options[OPTION]
        self.passes = list(passes) if isinstance(passes, (list, tuple)) else [passes]
        self.nodes = []

    def __call__(self, graph_module, _inputs):
        for graph_pass in self.passes:
            graph_pass(graph_module.graph)
        graph_module.recompile()
        self.nodes = [n for n in graph_module.graph.nodes if n.op.startswith("call_")]
        return graph_module.forward

    @property
    def operators(self):
        targets = (node.target for node in self.nodes)
        found = [t for t in targets if getattr(t, "namespace", "") == "piper_kernels"]
        return [t._schema.name.removeprefix("piper_kernels::") for t in found]


def run(function, *inputs, dynamic=None):
    torch._dynamo.reset()
    capture = Capture(compile_options())
    with torch.no_grad():
        result = torch.compile(function, backend=capture, fullgraph=True, dynamic=dynamic)(*inputs)
    return result, capture


def make_conv(padding="none", stride=(1, 1, 1)):
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn((C, C, 3, 3, 3), generator=generator).half() * 0.05
    weight = ConvRotInt8Tensor.from_hp(
        dense, group_size=64, act_per_tensor_scale=torch.tensor(0.03)
    )
    bias = torch.randn(C, generator=generator).half()
    return ConvRotInt8Conv3d(weight, bias, stride=stride, padding=padding)


def make_norm():
    norm = FramewiseGroupNorm(8, C, eps=1e-6).half().requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    norm.weight.uniform_(0.5, 1.5, generator=generator)
    norm.bias.uniform_(-0.5, 0.5, generator=generator)
    return norm


def random(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


X = random(2, C, 3, 4, 5)
RESIDUAL = random(2, C, 3, 4, 5, seed=2)


@pytest.mark.parametrize(
    ("pad", "padding"),
    [((1, 1, 1, 1, 0, 0), "reflect"), ((0, 1, 0, 1, 0, 0), "reflect_right")],
)
def test_padding_is_absorbed(pad, padding):
    conv = make_conv(stride=(1, 2, 2))
    result, capture = run(lambda x: conv(functional.pad(x, pad, mode="reflect")), X)
    assert capture.operators == [PLAIN]
    assert len(capture.nodes) == 1
    expected = conv3d(X, conv.weight, conv.bias, stride=(1, 2, 2), padding=padding)
    assert torch.equal(result, expected)


def test_norm_padding_and_residual_are_absorbed():
    norm, conv = make_norm(), make_conv()
    result, capture = run(lambda x, r: r + conv(reflect(functional.silu(norm(x)))), X, RESIDUAL)
    assert capture.operators == [NORMALIZED]
    assert len(capture.nodes) == 1
    expected = group_norm_silu_conv3d(
        X, norm.weight, norm.bias, 8, 1e-6, conv.weight, conv.bias, padding="reflect",
        residual=RESIDUAL,
    )  # fmt: skip
    assert torch.equal(result, expected)
    unfused = RESIDUAL + conv(reflect(functional.silu(norm(X))))
    assert (result.float() - unfused.float()).norm() / unfused.float().norm() < 5e-3


def test_a_norm_without_padding_is_absorbed():
    norm, conv = make_norm(), make_conv(padding="reflect")
    result, capture = run(lambda x: conv(functional.silu(norm(x))), X)
    assert (capture.operators, len(capture.nodes)) == ([NORMALIZED], 1)
    expected = group_norm_silu_conv3d(
        X, norm.weight, norm.bias, 8, 1e-6, conv.weight, conv.bias, padding="reflect"
    )
    assert torch.equal(result, expected)


@pytest.mark.parametrize(
    "add",
    [
        lambda y, r: y + r,
        lambda y, r: torch.add(r, y),
        lambda y, r: y.add(r),
        lambda y, r: torch.add(y, r, alpha=1),
    ],
)
def test_additions(add):
    conv = make_conv(padding="reflect")
    result, capture = run(lambda x, r: add(conv(x), r), X, RESIDUAL)
    assert (capture.operators, len(capture.nodes)) == ([PLAIN], 1)
    assert torch.equal(result, conv(X, RESIDUAL))


def test_a_residual_computed_after_the_convolution():
    conv, norm = make_conv(), make_norm()

    def block(x, r):
        y = conv(reflect(functional.silu(norm(x))))
        return y + torch.cos(r)

    result, capture = run(block, X, RESIDUAL)
    assert capture.operators == [NORMALIZED]
    assert [node.op for node in capture.nodes] == ["call_function"] * 2
    expected = group_norm_silu_conv3d(
        X, norm.weight, norm.bias, 8, 1e-6, conv.weight, conv.bias, padding="reflect",
        residual=torch.cos(RESIDUAL),
    )  # fmt: skip
    assert torch.equal(result, expected)


NORM, CONV, PADDED = make_norm(), make_conv(), make_conv(padding="reflect")


def escaping_padding(x, r):
    padded = reflect(x)
    return CONV(padded), padded.sum()


def escaping_norm(x, r):
    y = functional.silu(NORM(x))
    return PADDED(y), y * 2


def escaping_convolution(x, r):
    y = PADDED(x)
    return y + r, y * 2


def mutated_source(x, r):
    x = x * 1
    y = CONV(reflect(functional.silu(NORM(x))))
    x.mul_(2)
    return y + x


def another_mutation(x, r):
    x = x * 1
    padded = reflect(x)
    x[:, 0] = 7
    return CONV(padded)


REFUSED = {
    "constant padding": lambda x, r: CONV(functional.pad(x, (1, 1, 1, 1, 0, 0))),
    "replicated padding": lambda x, r: CONV(functional.pad(x, (1, 1, 1, 1, 0, 0), "replicate")),
    "wider padding": lambda x, r: CONV(functional.pad(x, (2, 2, 2, 2, 0, 0), mode="reflect")),
    "time padding": lambda x, r: CONV(functional.pad(x, (1, 1, 1, 1, 1, 0), mode="reflect")),
    "padded twice": lambda x, r: PADDED(reflect(x)),
    "no silu": lambda x, r: PADDED(NORM(x)),
    "gelu": lambda x, r: PADDED(functional.gelu(NORM(x))),
    "norm of all frames": lambda x, r: PADDED(
        functional.silu(functional.group_norm(x, 8, NORM.weight, NORM.bias))
    ),
    "norm without weights": lambda x, r: PADDED(
        functional.silu(
            functional.group_norm(
                x.permute(0, 2, 1, 3, 4).contiguous().view(6, C, 1, 4, 5), 8
            ).view(2, 3, C, 4, 5).permute(0, 2, 1, 3, 4).contiguous()
        )
    ),
    "subtraction": lambda x, r: PADDED(x) - r,
    "alpha": lambda x, r: torch.add(PADDED(x), r, alpha=2),
    "broadcast": lambda x, r: PADDED(x) + r[:, :, :1],
    "scalar": lambda x, r: PADDED(x) + 1.0,
    "float32 residual": lambda x, r: PADDED(x) + r.float(),
    "in place": lambda x, r: PADDED(x).add_(r),
    "escaping padding": escaping_padding,
    "escaping norm": escaping_norm,
    "escaping convolution": escaping_convolution,
    "mutated source": mutated_source,
    "mutation between": another_mutation,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function = REFUSED[name]
    result, capture = run(function, X, RESIDUAL)
    assert set(capture.operators) == {PLAIN}
    assert len(capture.nodes) > 1
    with torch.no_grad():
        expected = function(X, RESIDUAL)
    pairs = (
        zip(result, expected, strict=True) if isinstance(result, tuple) else [(result, expected)]
    )
    for left, right in pairs:
        assert torch.equal(left, right)


def test_two_convolutions_of_one_sum():
    result, capture = run(lambda x, r: PADDED(x) + CONV(reflect(r)), X, RESIDUAL)
    assert capture.operators == [PLAIN, PLAIN]
    assert len(capture.nodes) == 2
    reflected = conv3d(RESIDUAL, CONV.weight, CONV.bias, padding="reflect")
    assert torch.equal(result, PADDED(X, reflected))


def test_a_residual_is_kept_and_shared_sources_stay():
    result, capture = run(lambda x, r: PADDED(x, r) + r, X, RESIDUAL)
    assert len(capture.nodes) == 2
    assert torch.equal(result, PADDED(X, RESIDUAL) + RESIDUAL)


def source_as_residual(x):
    y = functional.silu(NORM(x))
    return PADDED(y, y)


def test_a_source_that_is_the_residual_too():
    result, capture = run(source_as_residual, X)
    assert capture.operators == [PLAIN]
    assert torch.equal(result, source_as_residual(X))


def test_dynamic_shapes_and_training_graphs_are_left_alone():
    def block(x, r):
        return CONV(reflect(x)) + r

    result, capture = run(block, X, RESIDUAL, dynamic=True)
    assert len(capture.nodes) >= 3
    assert torch.equal(result, block(X, RESIDUAL))
    torch._dynamo.reset()
    capture = Capture(compile_options())
    torch.compile(block, backend=capture, fullgraph=True)(X, RESIDUAL)
    assert len(capture.nodes) == 3


def test_options():
    before, after = (lambda graph: None), (lambda graph: None)
    alone = compile_options()
    assert compile_options(alone) == alone
    fused = alone[OPTION]
    assert isinstance(fused.uuid(), bytes)
    given = {"max_autotune": True, OPTION: (before, after)}
    options = compile_options(given)
    assert options["max_autotune"] is True
    assert tuple(options[OPTION]) == (before, after, fused)
    assert given[OPTION] == (before, after)
    again = compile_options(options)
    assert tuple(again[OPTION]) == (before, after, fused)
    assert tuple(compile_options({OPTION: before})[OPTION]) == (before, fused)


def normalized_block(norm, conv):
    return lambda x, r: conv(reflect(functional.silu(norm(x)))) + r


def test_inductor_runs_the_pass():
    """Its passes before autograd, with the options as its configuration."""
    from torch._inductor import config
    from torch._inductor.fx_passes.pre_grad import pre_grad_passes

    graphs = []

    def backend(graph_module, inputs):
        with config.patch(compile_options()):
            graphs.append(pre_grad_passes(graph_module, inputs))
        return graphs[-1].forward

    torch._dynamo.reset()
    block = normalized_block(make_norm(), make_conv())
    with torch.no_grad():
        torch.compile(block, backend=backend, fullgraph=True)(X, RESIDUAL)
    calls = [node for node in graphs[0].graph.nodes if node.op.startswith("call_")]
    assert [str(node.target) for node in calls] == [f"piper_kernels.{NORMALIZED}.default"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_on_the_gpu():
    norm, conv = make_norm().cuda(), make_conv().cuda()
    block, x, residual = normalized_block(norm, conv), X.cuda(), RESIDUAL.cuda()
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(block, options=compile_options(), fullgraph=True)(x, residual)
    expected = group_norm_silu_conv3d(
        x, norm.weight, norm.bias, 8, 1e-6, conv.weight, conv.bias, padding="reflect",
        residual=residual,
    )  # fmt: skip
    assert torch.equal(compiled, expected)
