"""Fused projections and attention on a GPU: windows, streams, graphs, memory and Inductor."""

import pytest
import torch
from process_state import no_synchronization

from piper_kernels.fusions.convrot_int8_piper import convrot_int8_piper_compile_options
from piper_kernels.fusions.convrot_int8_sparse_piper import (
    _compile,
    convrot_int8_sparse_piper_compile_options,
)
from piper_kernels.fusions.convrot_nvfp4_sparse_piper import (
    convrot_nvfp4_sparse_piper_compile_options,
)
from piper_kernels.fusions.nvfp4_sparse_piper import nvfp4_sparse_piper_compile_options


def _reason():
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    return _compile.supports_target(torch.device("cuda"), 64)[1]


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_reason()), reason=_reason())]
ops = torch.ops.piper_kernels
GIVEN = ops.convrot_int8_sparse_piper_attention_output
PROJECTED = ops.convrot_int8_sparse_piper_projected_query_attention_output
# The portable operators are 0.021 to 0.023 away from exact results here; probabilities of kernels
# that multiply with signed codes have fewer levels, which adds about a tenth.
TOLERANCE, SUM_TOLERANCE = 0.028, 0.01


def arguments(parts, *, given, coarse, **changes):
    found = parts["keys"] | parts["output"] | (parts["queries"] if given else parts["query"])
    if coarse:
        found |= {"block_mean": parts["block_mean"], **parts["coarse"], **parts["gates"]}
    return found | changes


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(("batch", "rows"), [(1, 193), (1, 4097), (2, 1001)])
def test_windows_on_streams_do_not_change_the_result(
    attention_operators, head_dim, given, coarse, batch, rows
):
    parts = attention_operators.projected(
        "cuda", batch=batch, rows=rows, heads=4, head_dim=head_dim
    )
    expected = attention_operators.chain(parts, coarse=coarse)
    operator = GIVEN if given else PROJECTED
    for chunk in (64, 512, 8192):
        found = arguments(parts, given=given, coarse=coarse, query_chunk_rows=chunk)
        actual = attention_operators.call(operator, found)
        assert torch.equal(actual, expected)


def test_block_lengths_and_routed_query_blocks(attention_operators):
    lengths = (64, 17, 51, 1, 64, 64, 33, 8, 64)
    parts = attention_operators.projected("cuda", rows=576, routing=1, lengths=lengths)
    parts["keys"]["sparse_query_blocks"] = 5
    valid = torch.cat([torch.arange(n) + 64 * i for i, n in enumerate(lengths)])
    expected = attention_operators.chain(parts, coarse=True)[:, valid]
    for chunk in (64, 128, 8192):
        found = arguments(parts, given=False, coarse=True, query_chunk_rows=chunk)
        assert torch.equal(attention_operators.call(PROJECTED, found)[:, valid], expected)


def test_streams_are_captured(attention_operators):
    parts = attention_operators.projected("cuda", rows=1024)
    found = arguments(parts, given=False, coarse=True, query_chunk_rows=64)
    expected = attention_operators.call(PROJECTED, found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention_operators.call(PROJECTED, found)
    captured.fill_(float("nan"))
    graph.replay()
    assert torch.equal(captured, expected)


def test_memory_is_that_of_windows(attention_operators):
    """Neither queries nor the attention exist as a whole."""
    rows, chunk, width = 16384, 1024, 512
    parts = attention_operators.projected(
        "cuda", rows=rows, features=512, heads=4, head_dim=128, outputs=64
    )
    del parts["queries"]
    found = arguments(parts, given=False, coarse=False, query_chunk_rows=chunk)
    attention_operators.call(PROJECTED, found)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = attention_operators.call(PROJECTED, found)
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before - result.nbytes
    window = 2 * width * 2 + width + width * 4 + 3 * width  # two attentions, codes, FP32, queries
    routes = (rows // 64) * 4 * 2 * 2  # of a block of queries, and the sums of value codes below
    sums = (rows // 64) * width * 4
    assert used <= 2 * (chunk * window + chunk // 64 * routes) + sums + (4 << 20)
    assert used < rows * width * 2


OPTIONS = {
    "convrot_int8": convrot_int8_sparse_piper_compile_options,
    "nvfp4": nvfp4_sparse_piper_compile_options,
    "convrot_nvfp4": convrot_nvfp4_sparse_piper_compile_options,
}
CASES = {
    "plain": {"rows": 320},
    "coarse": {"rows": 193, "coarse": True, "projected_gate": True, "head_dim": 128, "rotary": 96},
    "lengths": {"rows": 192, "lengths": (64, 17, 51), "coarse": True, "routing": "mean"},
    "weightless": {"rows": 1001, "query_norm": False, "key_norm": False, "query_blocks": 7},
}


def assert_near_exact(actual, unfused, exact):
    """Check that a fused result is as good as one of operators that round in between."""
    found, allowed = (
        ((x.double() - exact).norm() / exact.norm()).item() for x in (actual, unfused)
    )
    assert found < TOLERANCE
    assert found < 1.1 * allowed


@pytest.mark.parametrize("fmt", OPTIONS)
@pytest.mark.parametrize("case", CASES)
def test_targets_fuse_and_are_exact(projected_attention, projected_exact, fmt, case):
    """Every key block is kept: routes of random tokens depend on the last bits of queries."""
    given = CASES[case] | {"ratios": (1.0, 1.0)}
    model = projected_attention.Model(fmt=fmt, features=128, **given).to("cuda")
    graph = projected_attention.trace(model, OPTIONS[fmt]())
    assert "sparse_piper_attention" not in graph.targets
    results = graph(), model.eager(), projected_exact.exact(model).double()
    assert_near_exact(*(result[:, model.valid_rows] for result in results))


@pytest.mark.parametrize("fmt", OPTIONS)
@pytest.mark.parametrize("case", CASES)
def test_targets_fuse_and_agree_with_the_operators_apart(projected_attention, fmt, case):
    model = projected_attention.Model(fmt=fmt, features=128, **CASES[case]).to("cuda")
    graph = projected_attention.trace(model, OPTIONS[fmt]())
    assert "sparse_piper_attention" not in graph.targets
    rows, actual = model.valid_rows, graph()
    assert actual[:, rows].isfinite().all()
    whole = projected_attention.Model(fmt=fmt, features=128, outputs=48, **CASES[case]).to("cuda")
    graph = projected_attention.trace(whole, OPTIONS[fmt]())
    assert graph.targets[-1].endswith("attention_output")
    if model.lengths is None or fmt == "convrot_int8":
        with torch.no_grad():
            chained = whole.linear("out", actual)
        if fmt == "convrot_int8":
            assert torch.equal(graph()[:, rows], chained[:, rows])
        else:  # sums in FP32, in an order that may depend on the schedule
            assert projected_attention.relative_error(graph(), chained) < SUM_TOLERANCE


@pytest.mark.parametrize("fmt", ["nvfp4", "convrot_nvfp4"])
@pytest.mark.parametrize("static", [False, True])
def test_chunks_of_nvfp4_outputs(projected_attention, fmt, static):
    scales = (None, None, None, torch.tensor(0.0005) if static else None, None)
    model = projected_attention.Model(fmt=fmt, rows=5000, features=128, outputs=96, scales=scales)
    graph = projected_attention.trace(model.to("cuda"), OPTIONS[fmt]())
    whole = graph()
    graph.change_chunk_rows(1024)
    # Sums in FP32 may have another order. A maximum of rotated values may differ by a rounding.
    assert projected_attention.relative_error(graph(), whole) < SUM_TOLERANCE


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_windows_of_dense_attention(
    projected_attention, projected_exact, is_causal, head_dim, kv_heads
):
    model = projected_attention.Model(
        dense=True, rows=950, outputs=40, is_causal=is_causal, batch=2, heads=4, kv_heads=kv_heads,
        head_dim=head_dim, features=128,
    ).to("cuda")  # fmt: skip
    options = convrot_int8_piper_compile_options(fuse_output=True)
    graph = projected_attention.trace(model, options)
    name = "convrot_int8_piper_projected_query_attention_output"
    assert graph.targets[-1] == name
    assert_near_exact(graph(), model.eager(), projected_exact.exact(model).double())
    apart = projected_attention.trace(model, convrot_int8_piper_compile_options())
    whole = apart()
    assert torch.equal(graph(), whole)
    for rows in (128, 256):
        graph.change_chunk_rows(rows)
        assert torch.equal(graph(), whole)


@pytest.mark.parametrize("fmt", [*OPTIONS, "dense"])
def test_fused_graphs_neither_synchronize_nor_resist_capture(projected_attention, fmt):
    given = {"rows": 321, "features": 128, "outputs": 48}
    if fmt == "dense":
        model = projected_attention.Model(dense=True, **given).to("cuda")
        options = convrot_int8_piper_compile_options(fuse_output=True)
    else:
        given |= {"coarse": True, "projected_gate": True}
        model = projected_attention.Model(fmt=fmt, **given).to("cuda")
        options = OPTIONS[fmt]()
    graph = projected_attention.trace(model, options)
    assert graph.targets[-1].endswith("attention_output")
    eager = graph()
    with no_synchronization():
        again = graph()
    assert torch.equal(again, eager)
    captured_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured_graph):
        captured = graph()
    captured.fill_(torch.nan)
    captured_graph.replay()
    assert torch.equal(captured, eager)


def test_inductor_runs_one_graph_for_changing_lengths(projected_attention, projected_exact):
    class Module(projected_attention.Module):
        def forward(self, x, cos, sin, gate):
            return self.model(torch.tanh(x), cos, sin, gate, None)

    given = {"outputs": 128, "coarse": True, "projected_gate": True, "features": 128}
    given["ratios"] = (1.0, 1.0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = Module(projected_attention.Model(**given).to("cuda"))
    options = convrot_int8_sparse_piper_compile_options()
    compiled = torch.compile(module, fullgraph=True, options=options)
    for rows in (192, 321, 1000):
        model = projected_attention.Model(rows=rows, **given).to("cuda")
        args = model.args[:4]
        for dim, tensor in zip((1, 0, 0, 1), args, strict=True):
            torch._dynamo.mark_dynamic(tensor, dim)
        with torch.no_grad():
            actual, unfused = compiled(*args), module(*args)
        exact = projected_exact.exact(model, (torch.tanh(model.x), *model.args[1:]))
        assert_near_exact(actual, unfused, exact.double())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
