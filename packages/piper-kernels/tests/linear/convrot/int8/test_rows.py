"""Rows prepared by what stands in front of a product equal separate operations."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from piper_kernels.linear.convrot import convrot_int8_linear
from piper_kernels.linear.convrot.int8 import _ops
from piper_kernels.linear.convrot.int8.rows import (
    gated_rows,
    joined_rows,
    multiply_rows,
    normed_rows,
)
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

CHECKS = Path(__file__).with_name("row_checks.py")
GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
DEVICES = ["cpu", GPU]


def test_numerics_in_the_interpreter(run_kernel_checks):
    pytest.importorskip("triton", reason="Triton is not installed")
    run_kernel_checks(CHECKS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_numerics_on_the_gpu(run_kernel_checks):
    run_kernel_checks(CHECKS, "cuda")


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_same(found, expected):
    """Codes may differ where the last bit of a normalized or activated value does."""
    assert (found[0].shape, found[0].dtype) == (expected[0].shape, torch.int8)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-2, atol=0)
    apart = (found[0].int() - expected[0].int()).abs()
    assert apart.numel() == 0 or (apart.max() <= 1 and apart.double().mean() < 0.02)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (5, 320), (3, 4096), (2, 12_288)])
def test_norms(device, rows, width):
    x, residual = draw(rows, width).to(device), draw(rows, width, seed=1).to(device)
    weight = torch.rand(width).to(device) + 0.5
    for gemma in (False, True):
        for added in (None, residual):
            total = x if added is None else x + added
            normed = functional.rms_norm(total.float(), (width,), weight + gemma, 1e-6)
            expected = _ops.prepare_input(normed.bfloat16(), 64)
            codes, scale, stored = normed_rows(x, added, weight, 1e-6, 64, gemma=gemma)
            assert_same((codes, scale), expected)
            assert torch.equal(stored, total)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [1, 4, 32, 96])
def test_attention_in_several_tensors(device, heads):
    parts = [draw(heads, rows, 128, seed=rows).to(device).transpose(0, 1) for rows in (3, 0, 2)]
    expected = _ops.prepare_input(torch.cat(parts).flatten(1), 64)
    assert_same(joined_rows(parts, 64), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (3, 320), (2, 12_288)])
def test_gates_come_first(device, rows, width):
    gate, up = draw(rows, width).to(device), draw(rows, width, seed=1).to(device)
    expected = _ops.prepare_input(torch.cat((up, gate), 1), 64, "swiglu")
    assert_same(gated_rows(torch.cat((gate, up), 1), 64), expected)
    if rows:
        assert not torch.equal(gated_rows(torch.cat((up, gate), 1), 64)[0], expected[0])


@pytest.mark.parametrize("device", DEVICES)
def test_the_rest_of_the_product(device):
    weight = ConvRotInt8Tensor.from_hp(draw(40, 128), group_size=64).to(device)
    x, bias = draw(5, 128, seed=2).to(device), draw(40, seed=3).to(device)
    prepared = _ops.prepare_input(x, 64)
    for added in (None, bias):
        found = multiply_rows(*prepared, weight, added, x.dtype)
        assert torch.equal(found, convrot_int8_linear(x, weight, added))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_everything_is_captured():
    x, weight = draw(37, 4096).cuda(), torch.ones(4096, device="cuda")
    heads = draw(32, 37, 128, seed=1).cuda().transpose(0, 1)

    def run():
        gates = gated_rows(torch.cat((x, x), 1), 64)
        return *normed_rows(x, x, weight, 1e-6, 64), *joined_rows([heads, heads], 64), *gates

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    x.copy_(draw(37, 4096, seed=7))
    graph.replay()
    for ours, theirs in zip(captured, run(), strict=True):
        assert torch.equal(ours, theirs)
