"""The options in Inductor itself: results, caches, changing sizes and changing weights."""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import functional

from piper_kernels.fusions.convrot_int8_gelu_ffn import convrot_int8_gelu_ffn_compile_options
from piper_kernels.fusions.convrot_int8_swiglu_ffn import convrot_int8_swiglu_ffn_compile_options
from piper_kernels.linear.convrot import convrot_int8_compile_options
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler"),
]
OPTIONS = convrot_int8_swiglu_ffn_compile_options(convrot_int8_gelu_ffn_compile_options())


@pytest.fixture(autouse=True)
def fresh_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    counters.clear()


def rand(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def make(rows, features, act=None, dtype=torch.bfloat16):
    dense = (rand(rows, features, dtype=torch.float32) / features**0.5).to(dtype)
    return ConvRotInt8Tensor.from_hp(dense, group_size=16, act_per_tensor_scale=act)


class Block(torch.nn.Module):
    """Attention and a SwiGLU network, both with residuals."""

    def __init__(self, width=32, inner=64):
        super().__init__()
        shapes = dict.fromkeys(("q", "k", "v", "out"), (width, width))
        shapes |= {"gate": (inner, width), "value": (inner, width), "down": (width, inner)}
        for name, shape in shapes.items():
            weight = torch.nn.Parameter(make(*shape), requires_grad=False)
            self.register_parameter(name, weight)

    def forward(self, x):
        heads = [functional.linear(x, w).unflatten(-1, (2, -1)).transpose(1, 2)
                 for w in (self.q, self.k, self.v)]  # fmt: skip
        attended = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2)
        x = x + functional.linear(attended, self.out)
        hidden = functional.silu(functional.linear(x, self.gate)) * functional.linear(x, self.value)
        return x + functional.linear(hidden, self.down)


def test_a_block_runs_with_its_fused_nodes_for_changing_sizes(graph_capture):
    block = Block()
    _, capture = graph_capture.run(block, rand(2, 9, 32), options=OPTIONS)
    assert capture.targets.count("convrot_int8_swiglu_ffn") == 1
    assert capture.targets.count("convrot_int8_prepare_input") == 1
    assert capture.targets.count("convrot_int8_linear_prepared") == 3
    compiled = torch.compile(block, fullgraph=True, dynamic=True, options=OPTIONS)
    with torch.no_grad():
        for rows in (9, 31, 64):
            x = rand(2, rows, 32)
            assert graph_capture.relative_error(compiled(x), block(x)) < 0.02


def test_gated_updates_do_not_change_their_operands(graph_capture):
    def block(x, attention, first, second, index, up, down):
        update = torch.tanh(attention)
        hidden = functional.gelu(functional.linear(x, up), approximate="tanh")
        return x + first[index] * update + second[index] * functional.linear(hidden, down)

    args = [rand(18, 32), rand(18, 32), rand(3, 32), rand(4, 32)[:3], torch.arange(18) % 3]
    before = [arg.clone() for arg in args]
    weights = (make(64, 32), make(32, 64))
    with torch.no_grad():
        actual = torch.compile(block, fullgraph=True, options=OPTIONS)(*args, *weights)
        expected = block(*args, *weights)
    assert graph_capture.relative_error(actual, expected) < 0.02
    assert all(torch.equal(old, new) for old, new in zip(before, args, strict=True))


def two(x, a, b):
    return functional.linear(x, a), functional.linear(x, b)


def check_two(compiled, x, *weights):
    with torch.no_grad():
        for one, other in zip(compiled(x, *weights), two(x, *weights), strict=True):
            assert torch.equal(one, other)


def test_shared_and_independent_scales_never_meet_a_stale_graph():
    x, scale = rand(5, 32), torch.tensor(0.03)
    shared = (make(7, 32, scale), make(9, 32, scale))
    independent = (make(7, 32, torch.tensor(0.03)), make(9, 32, torch.tensor(0.2)))
    for order in ((shared, independent, shared), (independent, shared)):
        torch._dynamo.reset()
        compiled = torch.compile(two, fullgraph=True, options=convrot_int8_compile_options())
        for weights in order:
            check_two(compiled, x, *weights)


def test_shared_and_independent_storage_never_meet_a_stale_graph():
    """The key of the disk cache is made of each weight alone, so such graphs stay out of it."""
    x = rand(5, 32)
    weight = make(7, 32)
    wrapper = ConvRotInt8Tensor(weight.qdata, weight.scale, 16, torch.bfloat16)
    other = ConvRotInt8Tensor.from_hp(-2 * weight.dequantize(), group_size=16)
    for pairs in (((weight, wrapper), (weight, other)), ((weight, other), (weight, wrapper))):
        for options in (None, convrot_int8_compile_options()):
            torch._dynamo.reset()
            compiled = torch.compile(two, fullgraph=True, options=options)
            for pair in pairs:
                check_two(compiled, x, *pair)
    assert counters["aot_autograd"]["autograd_cache_bypass"] > 0


def test_a_mutated_static_scale_is_observed():
    x, scale = rand(5, 32), torch.tensor(0.03)
    weights = (make(7, 32, scale), make(9, 32, scale))
    compiled = torch.compile(two, fullgraph=True, options=convrot_int8_compile_options())
    check_two(compiled, x, *weights)
    scale.fill_(0.2)
    check_two(compiled, x, *weights)


def test_graphs_with_passes_use_the_disk_cache():
    args = (rand(5, 32), make(7, 32), make(9, 32))
    for state in ("autograd_cache_miss", "autograd_cache_hit"):
        torch._dynamo.reset()
        counters.clear()
        check_two(torch.compile(two, fullgraph=True, options=OPTIONS), *args)
        assert counters["aot_autograd"][state] == 1


@pytest.mark.gpu
def test_a_captured_block_equals_the_eager_one(graph_capture):
    block, x = Block(128, 256).cuda(), rand(2, 64, 128).cuda()
    options = {**OPTIONS, "triton.cudagraphs": True}
    compiled = torch.compile(block, fullgraph=True, options=options)
    with torch.no_grad():
        for scale in (1.0, 0.5, 2.0, 0.25):
            torch.compiler.cudagraph_mark_step_begin()
            moved = x * scale
            assert graph_capture.relative_error(compiled(moved), block(moved)) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 129, 9000])
def test_memory_of_a_network_is_bounded(rows):
    from piper_kernels.fusions.convrot_int8_swiglu_ffn import _ops

    features, inner, chunk_rows = 512, 2048, 1024
    weights = [make(inner, features).cuda(), make(inner, features).cuda()]
    weights.append(make(features, inner).cuda())
    operands = [item for w in weights for item in (w.qdata, w.scale, None, 16)]
    x = rand(rows, features).cuda()
    _ops.swiglu_ffn(x, *operands, chunk_rows)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = _ops.swiglu_ffn(x, *operands, chunk_rows)
    used = torch.cuda.max_memory_allocated() - before - result.nbytes
    cap = min(rows, chunk_rows)
    assert used <= cap * (2 * inner * 2 + inner + 4) + (1 << 20)
