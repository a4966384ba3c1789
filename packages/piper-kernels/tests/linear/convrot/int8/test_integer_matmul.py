import pytest
import torch

from piper_kernels.linear.convrot.int8 import _integer_matmul
from piper_kernels.linear.convrot.int8._integer_matmul import integer_matmul

SHAPES = [(1, 16, 1), (3, 64, 7), (17, 1040, 5), (33, 2048, 31), (0, 16, 4), (4, 16, 0), (2, 0, 3)]


def codes(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8)


@pytest.mark.parametrize(("rows", "depth", "columns"), SHAPES)
@pytest.mark.parametrize("exact", [True, False])
def test_exact_int32(rows, depth, columns, exact, monkeypatch):
    monkeypatch.setattr(_integer_matmul, "_cpu_int_mm_is_exact", lambda: exact)
    left, right = codes(rows, depth), codes(columns, depth)
    result = integer_matmul(left, right)
    assert result.dtype == torch.int32
    assert torch.equal(result.long(), left.long() @ right.long().t())


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("a", "b"), [(-128, -128), (-128, 127), (127, 127)])
def test_full_range_sums(a, b, exact, monkeypatch):
    monkeypatch.setattr(_integer_matmul, "_cpu_int_mm_is_exact", lambda: exact)
    left = torch.full((3, 4097), a, dtype=torch.int8)
    right = torch.full((2, 4097), b, dtype=torch.int8)
    assert integer_matmul(left, right).unique().tolist() == [a * b * 4097]


def test_float_fallback_ignores_autocast(monkeypatch):
    monkeypatch.setattr(_integer_matmul, "_cpu_int_mm_is_exact", lambda: False)
    left, right = codes(3, 96), codes(5, 96)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = integer_matmul(left, right)
    assert torch.equal(result.long(), left.long() @ right.long().t())


def test_strided_input():
    left, right = codes(64, 10).t()[::2], codes(7, 64)
    assert torch.equal(integer_matmul(left, right), integer_matmul(left.contiguous(), right))


@pytest.mark.parametrize("enabled", [True, False])
def test_with_and_without_mkldnn(enabled):
    left, right = codes(5, 96), codes(3, 96)
    with torch.backends.mkldnn.flags(enabled=enabled):
        result = integer_matmul(left, right)
    assert torch.equal(result.long(), left.long() @ right.long().t())


def test_probe_reports_saturation(monkeypatch):
    def saturating(left, right):
        return (left.double() @ right.double()).clamp(-(2**20), 2**20).to(torch.int32)

    _integer_matmul._cpu_int_mm_is_exact.cache_clear()
    try:
        monkeypatch.setattr(_integer_matmul, "_int_mm", saturating)
        assert not _integer_matmul._cpu_int_mm_is_exact()
    finally:
        _integer_matmul._cpu_int_mm_is_exact.cache_clear()


def test_compiled_graph_uses_int_mm():
    targets = []

    def capture(module, _inputs):
        targets.extend(node.target for node in module.graph.nodes)
        return module.forward

    from torch._dynamo.backends.common import aot_autograd

    compiled = torch.compile(integer_matmul, backend=aot_autograd(fw_compiler=capture))
    left, right = codes(5, 64), codes(3, 64)
    assert torch.equal(compiled(left, right), integer_matmul(left, right))
    assert torch.ops.aten._int_mm.default in targets
