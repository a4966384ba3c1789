"""A transformer block, attention and SwiGLU, compiled with the options of this package."""

import copy

import _ffn_providers
import benchmark_ffn
import pytest
import torch
from _ffn_models import BLOCKS, FULL, FeedForwardCase, build, quantized
from _quality import quality

from piper_kernels._compile.passes import install_passes
from piper_kernels.fusions._ffn.chunks import int8_chunk_rows, int8_rows_of

GROUP = 16
CASE = FeedForwardCase("block", 24, 64, 96, 2)
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EXPECTED = {
    "convrot_int8_prepare_input": 1,  # query, key and value share it
    "convrot_int8_linear_prepared": 3,
    "convrot_int8_linear": 1,  # the output projection
    "convrot_int8_swiglu_ffn": 1,
}


def recorder():
    """Return a pass that counts the operators of this package, and its counts."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Recorder(CustomGraphPass):
        def __init__(self):
            self.graphs = []

        def __call__(self, graph):
            counts = {}
            for node in graph.nodes:
                if getattr(node.target, "namespace", None) == "piper_kernels":
                    name = node.target._opname
                    counts[name] = counts.get(name, 0) + 1
            self.graphs.append(counts)

        def uuid(self):
            return None  # never cached: a cached graph would not be counted

    return Recorder()


def compiled(model, record, **arguments):
    # Not every supported Inductor takes a tuple of passes.
    options = install_passes(_ffn_providers.compile_options("swiglu"), record)
    return torch.compile(model, fullgraph=True, options=options, **arguments)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_the_graph_is_fused_and_its_result_is_that_of_eager(device, graph_capture):
    torch._dynamo.reset()
    with torch.no_grad():
        model = build(CASE, torch.device(device))
        packed = quantized(model, GROUP)
        record = recorder()
        if device == "cpu":  # the same passes, without a C++ compiler
            capture = graph_capture.GraphCapture(_ffn_providers.compile_options("swiglu"))
            capture.passes.append(lambda graph, is_inference: record(graph))
            run = torch.compile(packed, backend=capture, fullgraph=True, dynamic=True)
        else:
            run = compiled(packed, record, dynamic=True)
        exact = copy.deepcopy(model).float()
        for rows in (24, 40):
            x = torch.randn(1, rows, CASE.width, dtype=torch.bfloat16, device=device)
            found, eager = run(x), packed(x)
            assert found.shape == eager.shape
            assert found.dtype == torch.bfloat16
            expected = exact(x.float())
            # Fused, the inner activation is not rounded to bf16 before it is quantized.
            assert quality(found, eager)["sqnr_db"] > 33
            fused, unfused = (quality(y, expected)["sqnr_db"] for y in (found, eager))
            assert fused > unfused - 1
            assert fused > 25
    assert record.graphs == [EXPECTED]


@pytest.mark.parametrize("case", [*BLOCKS, *FULL], ids=lambda case: case.name)
def test_a_network_needs_less_than_the_intermediate_values_of_bf16(case):
    """The result and the workspace of a chunk, beside what bf16 keeps before its last product."""
    sources = 1 if case.kind == "gelu" else 2
    limit = int8_chunk_rows(sources, case.width, case.inner, case.width, 2)
    row = sources * case.inner * 2 + max(case.width, case.inner) + 4
    ours = case.rows * case.width * 2 + int8_rows_of(case.rows, limit, row) * row
    assert ours < case.rows * sources * case.inner * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_large_block_is_faster_and_smaller_than_compiled_bf16():
    torch._dynamo.reset()
    with torch.no_grad():
        rows = benchmark_ffn.measure(BLOCKS[0], ["bf16_compiled", "piper_int8_compiled"])
    baseline, ours = rows
    assert "error" not in baseline, baseline["error"]
    assert "error" not in ours, ours["error"]
    assert ours["ms"] < baseline["ms"]
    assert ours["peak_bytes"] < baseline["peak_bytes"]
    assert ours["sqnr_db"] > 25


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_block_replays():
    torch._dynamo.reset()
    with torch.no_grad():
        run = compiled(quantized(build(CASE, torch.device("cuda")), GROUP), recorder())
        x = torch.randn(1, 24, CASE.width, dtype=torch.bfloat16, device="cuda")
        for _ in range(2):
            run(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(x)
        x.copy_(torch.randn_like(x))
        expected = run(x).clone()
        graph.replay()
        assert torch.equal(captured, expected)
