"""What the passes make of graphs with NVFP4 and ConvRot NVFP4 linears."""

import pytest
import torch
from torch.nn import functional
from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs

from piper_kernels.linear.convrot.nvfp4 import convrot_nvfp4_compile_options
from piper_kernels.linear.nvfp4 import nvfp4_compile_options
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

OPTIONS = {"nvfp4": nvfp4_compile_options(), "convrot_nvfp4": convrot_nvfp4_compile_options()}
PREPARED = "nvfp4_linear_prepared"


def rand(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def make(fmt, rows, features=32, act=None, quantize_input=True):
    kwargs = QuantizeTensorToNVFP4Kwargs(
        is_swizzled_scales=True, use_dynamic_per_tensor_scale=act is None
    )
    options = {
        "is_swizzled_scales": True,
        "act_per_tensor_scale": act,
        "act_quant_kwargs": kwargs if quantize_input else None,
    }
    dense = rand(rows, features, seed=rows)
    if fmt == "nvfp4":
        return PiperNVFP4Tensor.from_hp(dense, **options)
    return ConvRotNVFP4Tensor.from_hp(dense, group_size=16, **options)


def check(graph_capture, fmt, function, *args, **given):
    graph_capture.check(function, *args, options=OPTIONS[fmt], **given)


def two(x, a, b):
    return functional.linear(x, a), functional.linear(x, b, x.new_ones(b.shape[0]))


@pytest.mark.parametrize("fmt", OPTIONS)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("lead", [(), (31,), (2, 5), (2, 0, 3)])
def test_linears_of_one_input_share_its_preparation(graph_capture, fmt, lead, dynamic):
    targets = [f"{fmt}_prepare_input", PREPARED, PREPARED]
    args = (rand(*lead, 32), make(fmt, 7), make(fmt, 9))
    check(graph_capture, fmt, two, *args, targets=targets, dynamic=dynamic)


@pytest.mark.parametrize("fmt", OPTIONS)
def test_static_scales(graph_capture, fmt):
    scale, prepare = torch.tensor(0.002), f"{fmt}_prepare_input"
    shared = (make(fmt, 7, act=scale), make(fmt, 9, act=scale))
    check(graph_capture, fmt, two, rand(5, 32), *shared, targets=[prepare, PREPARED, PREPARED])
    for other in (scale.clone(), None):
        mixed = (shared[0], make(fmt, 9, act=other))
        targets = [prepare, PREPARED] * 2
        check(graph_capture, fmt, two, rand(5, 32), *mixed, targets=targets)


@pytest.mark.parametrize("fmt", OPTIONS)
def test_single_and_weight_only_linears_are_left_alone(graph_capture, fmt):
    x = rand(5, 32)
    check(graph_capture, fmt, functional.linear, x, make(fmt, 7), targets=[f"{fmt}_linear"])
    plain = (make(fmt, 7, quantize_input=False), make(fmt, 9, quantize_input=False))
    check(graph_capture, fmt, two, x, *plain, targets=[], tolerance=1e-3)


def test_rotated_and_plain_linears_do_not_share(graph_capture):
    args = (rand(5, 32), make("nvfp4", 7), make("convrot_nvfp4", 9))
    targets = ["nvfp4_linear", "convrot_nvfp4_linear"]
    for fmt in OPTIONS:
        check(graph_capture, fmt, two, *args, targets=targets)


@pytest.mark.parametrize("fmt", OPTIONS)
def test_gelu_is_folded(graph_capture, fmt):
    def block(x, down):
        return functional.linear(functional.gelu(x, approximate="tanh"), down)

    targets = [f"{fmt}_prepare_input", PREPARED]
    check(graph_capture, fmt, block, rand(2, 5, 32), make(fmt, 7), targets=targets, tolerance=0.05)


def chunked(x, down):
    up, gate = x.chunk(2, -1)
    return functional.linear(up * functional.silu(gate), down)


def sliced(x, down):
    return functional.linear(functional.silu(x[..., 32:]) * x[..., :32], down)


def promoted(x, down):
    up, gate = x.split(32, -1)
    return functional.linear((up * functional.silu(gate.float())).to(x.dtype), down)


@pytest.mark.parametrize("fmt", OPTIONS)
@pytest.mark.parametrize("function", [chunked, sliced, promoted])
def test_packed_swiglu_is_folded(graph_capture, fmt, function):
    targets = [f"{fmt}_prepare_input", PREPARED]
    args = (rand(2, 5, 64), make(fmt, 7))
    check(graph_capture, fmt, function, *args, targets=targets, tolerance=0.05)


def gate_first(x, down):
    gate, up = x.chunk(2, -1)
    return functional.linear(up * functional.silu(gate), down)


def overlapping(x, down):
    return functional.linear(x[..., 16:48] * functional.silu(x[..., 32:]), down)


def escaping(x, down):
    up, gate = x.chunk(2, -1)
    hidden = up * functional.silu(gate)
    return functional.linear(hidden, down), hidden


@pytest.mark.parametrize("function", [gate_first, overlapping, escaping])
def test_other_products_are_left_alone(graph_capture, function):
    args = (rand(2, 5, 64), make("nvfp4", 7))
    check(graph_capture, "nvfp4", function, *args, targets=["nvfp4_linear"], tolerance=0.05)
